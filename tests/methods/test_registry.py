"""A method's name: its parts and their parameters, one spelling for one method, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedheal
from fedheal import aggregate, flower, methods
from fedheal.aggregate.registry import STAGES
from fedheal.aggregate.server_optimizer import Server
from fedheal.core.parameter import get_parameters
from fedheal.local.ditto import Ditto
from fedheal.local.fedbn import FedBN
from fedheal.local.fedce import FedCE
from fedheal.local.feddyn import FedDyn
from fedheal.local.fedga import FedGA
from fedheal.local.fedproc import FedProc
from fedheal.local.fedproto import FedProto
from fedheal.local.fedprox import FedProx
from fedheal.local.fpl import FPL
from fedheal.local.moon import Moon
from fedheal.local.scaffold import Scaffold
from fedheal.methods import grammar, registry
from fedheal.methods.server_step import resolve_server
from fedheal.report import rows
from tiny_data import quick


def run_method(name: str, **keys: Any) -> dict[str, bytes]:
    result = fedheal.run(
        quick(method=name, model="tiny_data:conv_batchnorm", rounds=4, participation=0.8, **keys), progress=False
    )
    return {name: value.numpy().tobytes() for name, value in result.model.state_dict().items()}


def test_names_are_local_methods_alone_and_with_every_stage() -> None:
    names = methods.names()
    assert names[0] == "fedavg"
    assert {"fedavg+uniform", "fedavg+fedheal", "fedavg+fphl", "fedavg+fael", "fedavg+fael-exact"} <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", methods.names())
def test_every_name_is_canonical_and_its_full_spelling_means_the_same(name: str) -> None:
    method = methods.get(name)
    assert method.name == name
    assert methods.get(method.full_name).name == name
    assert methods.get(method.full_name).full_name == method.full_name


SAME = [
    ("fedheal", "fedavg+fedheal"),
    ("uniform", "fedavg+uniform"),
    ("fael-exact", "fedavg+fael-exact"),
    ("fphl+fael", "fedavg+fedheal"),
    ("fael+fphl", "fedavg+fedheal"),
    ("fedavg+fael+fphl", "fedavg+fedheal"),
    ("fphl:tau=0.4+fael", "fedavg+fedheal:tau=0.4"),
    ("fphl+fael:beta=0.1", "fedavg+fedheal:beta=0.1"),
    ("fphl:variant=released+fael:variant=released", "fedavg+fedheal:variant=released"),
    ("fedheal:tau=0.3", "fedavg+fedheal"),
    ("fedheal:tau=.4", "fedavg+fedheal:tau=0.4"),
    ("fedheal:tau=0.40", "fedavg+fedheal:tau=0.4"),
    ("fedheal:tau=4e-1", "fedavg+fedheal:tau=0.4"),
    ("fedheal:beta=0.1,tau=0.4", "fedavg+fedheal:tau=0.4,beta=0.1"),
    ("fedheal: tau = 0.4 , beta=0.1", "fedavg+fedheal:tau=0.4,beta=0.1"),
    (" fedavg + fedheal ", "fedavg+fedheal"),
    ("fedheal:fael=false", "fedavg+fedheal:fael=false"),
    ("fedheal:soft=true", "fedavg+fedheal:soft=true"),
    ("fphl:forget=0.1", "fedavg+fphl:forget=0.1"),
    ("fphl:forget=0.1,soft=true+fael:per_domain=true", "fedavg+fedheal:soft=true,forget=0.1,per_domain=true"),
    ("fedheal:per_domain=true", "fedavg+fedheal:per_domain=true"),
    ("fedheal:fael=False,fphl=TRUE", "fedavg+fedheal:fael=false"),
    ("fphl+fael+directions", "fedavg+fedheal+directions"),
    ("fphl:tau=0.4+directions+fael", "fedavg+fedheal:tau=0.4+directions"),
    ("directions+fael+fphl", "fedavg+directions+fedheal"),
    ("fedfv:tau=2.0", "fedfv:tau=2"),
    ("scaffold:option=1.0", "scaffold:option=1"),
    ("fedadam", "fedavg+fedadam"),
    ("fedadam+fedheal", "fedavg+fedheal+fedadam"),
    ("fael+fedyogi:eta=.1+fphl", "fedavg+fedheal+fedyogi:eta=0.1"),
    ("fedfv+fedavgm", "fedfv+fedavgm"),
    ("scaffold+fedadagrad:eps=0.001", "scaffold+fedadagrad"),
]


@pytest.mark.parametrize(("written", "name"), SAME)
def test_one_spelling_for_one_method(written: str, name: str) -> None:
    assert methods.get(written).name == name
    assert methods.get(methods.get(written).name).name == name
    assert methods.get(methods.get(written).full_name).name == name


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("fedheal", {"tau": 1}),
        ("fedheal", {"tau": 0}),
        ("fedheal", {"beta": 1}),
        ("fael", {"beta": 0}),
        ("fael-exact", {"ridge": 1}),
        ("fael-exact", {"ridge": 1e20}),
        ("fael-exact", {"ridge": 1e-20}),
        ("fedheal", {"tau": 0.1 + 0.2}),
        ("fedheal", {"fael": False, "fphl": False}),
        ("fedheal", {"fael": 0}),
    ],
    ids=str,
)
def test_keys_and_text_name_the_same_method(name: str, keys: dict[str, Any]) -> None:
    try:
        method = methods.get(name, **keys)
    except ValueError:
        assert keys == {"fael": 0}  # neither a name nor false
        return
    text = f"{name}:" + ",".join(f"{k}={str(v).replace('+', '')}" for k, v in keys.items())
    assert method.name == methods.get(text).name
    assert methods.get(method.full_name).name == method.name
    assert methods.get(method.name).full_name == method.full_name


def test_a_sign_in_an_exponent_is_not_a_plus_between_parts() -> None:
    assert methods.get("fael-exact:ridge=1e+2").name == methods.get("fael-exact:ridge=100").name


def test_keys_go_to_the_part_that_has_them() -> None:
    assert methods.get("fedheal", tau=0.4, beta=0.1).name == "fedavg+fedheal:tau=0.4,beta=0.1"
    assert methods.get("uniform+fphl", tau=0.4).name == "fedavg+uniform+fphl:tau=0.4"
    assert methods.get("fael+fphl", beta=0.9).name == "fedavg+fedheal:beta=0.9"
    assert methods.get("fphl+fael", variant="released").name == "fedavg+fedheal:variant=released"
    assert methods.get("fphl+fael", fael="exact").name == "fedavg+fedheal:fael=exact"
    assert methods.get("fedfv", tau=2.0).name == "fedfv:tau=2"
    assert methods.get("fael-exact+fphl", floor=0.1, tau=0.9).name == "fedavg+fael-exact:floor=0.1+fphl:tau=0.9"


def test_a_key_that_agrees_with_the_name_is_no_contradiction() -> None:
    assert methods.get("fedheal:tau=0.4", tau=0.4).name == "fedavg+fedheal:tau=0.4"
    assert methods.get("fedheal:tau=0.4", tau="0.4").name == "fedavg+fedheal:tau=0.4"


def test_keys_given_as_text_are_read_as_numbers() -> None:
    assert methods.get("fedheal", tau="0.4", fphl="false").name == "fedavg+fedheal:tau=0.4,fphl=false"


def test_parameters_are_listed_with_their_values() -> None:
    parameters = methods.get("fedheal:tau=0.4").parameters
    expected = {"tau": 0.4, "beta": 0.4, "variant": "paper", "fphl": True, "fael": "momentum"}
    assert parameters | expected == parameters
    assert methods.get("fedavg").parameters == {}
    assert methods.get("uniform+fphl").parameters == {"tau": 0.3, "variant": "paper", "soft": False, "forget": 0.0}


@pytest.mark.slow
def test_fphl_and_fael_together_are_fedheal_to_the_bit() -> None:
    assert run_method("fphl+fael") == run_method("fedheal")
    assert run_method("fphl+fael") != run_method("fphl")
    assert run_method("fphl+fael") != run_method("fael")
    assert run_method("fphl:variant=released+fael:variant=released") == run_method("fedheal:variant=released")


@pytest.mark.slow
def test_the_order_of_stages_changes_nothing() -> None:
    assert run_method("uniform+fphl") == run_method("fphl+uniform")
    assert run_method("fael-exact+fphl") == run_method("fphl+fael-exact") == run_method("fedheal:fael=exact")


def test_a_parameter_makes_a_difference() -> None:
    assert run_method("fedheal") != run_method("fedheal", tau=0.9)
    assert run_method("fedheal") != run_method("fedheal:variant=released")
    assert run_method("fedheal:fphl=false,fael=false") == run_method("fedavg")


REFUSED = [
    ("fedheal:soft=true,fphl=false", {}, "no mask to soften"),
    ("fedheal:forget=1", {}, "forget = 1.0: use a number of at least 0 and below 1"),
    ("fedheal:per_domain=true,fael=exact", {}, "only fael = 'momentum' moves weight between domains"),
    ("uniform+fphl:forget=0.1", {"per_domain": True}, "no parameter 'per_domain'"),
    ("fedhael", {}, "no method part 'fedhael'.*did you mean 'fedheal'"),
    ("zzz", {}, "no method part 'zzz'"),
    ("", {}, "method '' is empty"),
    ("+", {}, "is empty: name the part"),
    ("fedavg+", {}, "ends with '.': name the part"),
    ("fedavg++fedheal", {}, "has a '.' without a part before it"),
    ("FedHEAL", {}, "no method part 'FedHEAL'"),
    ("fedheal:taw=0.3", {}, "'fedheal' has no parameter 'taw'.*did you mean 'tau'"),
    ("fedheal", {"taw": 0.3}, "no parameter 'taw'.*did you mean 'tau'"),
    ("fedavg", {"tau": 0.3}, "no parameter 'tau'.*no parameters"),
    ("uniform", {"tau": 0.3}, "no parameter 'tau'"),
    ("uniform:tau=0.3", {}, "'uniform' has no parameter 'tau'; it has no parameters$"),
    ("fedprox:tua=0.3+fedheal", {}, "'fedprox' has no parameter 'tua'; it has mu, preset$"),
    ("fedheal:tau", {}, "should be key=value"),
    ("fedheal:tau=0.3,", {}, "should be key=value"),
    ("fedheal:tau=0.3,tau=0.3", {}, "each key once"),
    ("fedheal:tau=x", {}, "tau = x: use a number from 0 to 1"),
    ("fedheal:tau=", {}, "tau = : use a number from 0 to 1"),
    ("fedheal:tau=2", {}, "tau = 2.0: use a number from 0 to 1"),
    ("fedheal:tau=nan", {}, "tau = nan"),
    ("fedheal:tau=true", {}, "tau = true"),
    ("fedheal", {"tau": -1}, "tau = -1"),
    ("fedheal:variant=mine", {}, "variant = 'mine'"),
    ("fedheal:fael=maybe", {}, "fael = 'maybe'"),
    ("fedheal:fphl=maybe", {}, "fphl = maybe"),
    ("fael-exact:ridge=0", {}, "ridge = 0"),
    ("fael-exact:ridge=inf", {}, "ridge = inf"),
    ("fael-exact:ridge=true", {}, "ridge = true"),
    ("fael-exact:towards=me", {}, "towards = 'me'"),
    ("fael-exact:floor=2", {}, "floor = 2"),
    ("fedheal:tau=0.2", {"tau": 0.3}, "tau = 0.3 contradicts.*tau = 0.2"),
    ("afl+fael-exact", {"floor": 0.1}, "'floor' belongs to several parts.*afl, fael-exact"),
    ("fedfv", {"tau": 1.5}, "tau = 1.5: use a whole number that is not negative"),
    ("fedfv:tau=1.5", {}, "tau = 1.5: use a whole number that is not negative"),
    ("fedfv:tau=x", {}, "tau = x: use a whole number that is not negative"),
    ("scaffold:option=1e400", {}, "option = 1e400: use one of 1, 2"),
    ("fedprox", {"mu": [0.1]}, r"mu = \[0.1\]: use a finite number"),
    ("fedprox", {"mu": None}, "mu = None: use a finite number"),
    ("fedprox", {"mu": {"a": 0.1}}, "mu = {'a': 0.1}: use a finite number"),
    ("fael-exact", {"ridge": [1]}, r"ridge = \[1\]: use a finite number above 0"),
    ("fael-exact", {"ridge": None}, "ridge = None: use a finite number above 0"),
    ("directions", {"block": [2]}, r"block = \[2\]: use a whole number of at least 2"),
    ("fedheal", {"soft": [True]}, r"soft = \[True\]: use true or false"),
    ("fedheal", {"variant": ["released"]}, "variant = .*released.*use one of"),
    ("fedheal", {"fael": [False]}, "fael = .*False.*use one of"),
    ("fedheal+uniform", {}, "two of these stages give weights"),
    ("uniform+fael", {}, "two of these stages give weights"),
    ("fael+fael-exact", {}, "two of these stages give weights"),
    ("fedheal+fphl", {}, "two of these stages give"),
    ("uniform+uniform", {}, "names a part twice"),
    ("fedheal+fedheal:tau=0.2", {}, "names a part twice"),
    ("fphl+fael+fphl", {}, "names a part twice"),
    ("fedavg+fedavg", {}, "fedavg"),
    ("fedheal+fedavg", {}, "fedavg"),
    ("fphl:variant=released+fael", {}, "different variants"),
    ("fphl+fael:variant=released", {}, "different variants"),
]


@pytest.mark.parametrize(("name", "keys", "why"), REFUSED)
def test_what_is_wrong_with_a_name_is_one_sentence(name: str, keys: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why) as error:
        methods.get(name, **keys)
    assert "\n" not in str(error.value)


NUMBERS = [
    (part, key)
    for part, constructor in methods.PARTS.items()
    for key, parameter in get_parameters(constructor).items()
    if isinstance(parameter.default, (int, float)) and not isinstance(parameter.default, bool)
]


@pytest.mark.parametrize(("part", "key"), NUMBERS)
def test_constructors_refuse_what_is_no_number(part: str, key: str) -> None:
    for value in (None, [1], "1", {}, True):
        with pytest.raises(ValueError, match=f"{key} = "):
            methods.PARTS[part](**{key: value})


def test_a_list_in_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text('method = "fedprox"\nmu = [0.1]\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"one\.toml: mu = \[0.1\]: use a finite number that is not negative$"):
        fedheal.Experiment.read(tmp_path / "one.toml")


def test_a_method_is_a_value() -> None:
    method = methods.get("fedheal")
    with pytest.raises(AttributeError):
        method.name = "other"  # type: ignore[misc]
    for name in ("", " ", "two\nlines"):
        with pytest.raises(ValueError, match="give the method a name of printable characters"):
            methods.Method(name=name)
    assert method.local == ()
    assert methods.get("fedprox:mu=0.1").local == (FedProx(0.1),)
    assert torch.is_tensor(method.aggregator.apply(torch.zeros(2), fedheal.Updates(["a"], torch.ones(1, 2), [1]),
                                                   method.aggregator.init(fedheal.Layout.flat(2))).model)  # fmt: skip


PRESETS = {
    "uniform": (aggregate.uniform, flower.Uniform),
    "afl": (aggregate.afl, flower.AFL),
    "qffl": (aggregate.qffl, flower.QFFL),
    "fedheal": (aggregate.fedheal, flower.FedHEAL),
    "fedfv": (aggregate.fedfv, flower.FedFV),
    "fedpw": (aggregate.fedpw,),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_take_the_declared_parameters_in_their_order(name: str) -> None:
    declared = {key: parameter.default for key, parameter in get_parameters(methods.PARTS[name]).items()}
    for preset in PRESETS[name]:
        arguments = inspect.signature(preset).parameters.values()
        defaults = {a.name: a.default for a in arguments if a.kind is not a.VAR_KEYWORD and a.name != "placement"}
        assert list(defaults.items()) == list(declared.items())[: len(defaults)]
        assert defaults.keys() == declared.keys() or preset is flower.FedHEAL  # which has no extensions


def test_the_paper_s_defaults() -> None:
    expected = {"tau": 0.3, "beta": 0.4, "variant": "paper", "fphl": True, "fael": "momentum"}
    assert methods.get("fedheal").parameters | expected == methods.get("fedheal").parameters


def test_fedheals_halves_have_its_parameters() -> None:
    halves = get_parameters(STAGES["fphl"]) | get_parameters(STAGES["fael"])
    assert halves.items() <= get_parameters(STAGES["fedheal"]).items()


@pytest.mark.parametrize(
    ("name", "term"),
    [
        ("fedprox", FedProx),
        ("scaffold", Scaffold),
        ("moon", Moon),
        ("feddyn", FedDyn),
        ("fedproc", FedProc),
        ("fedproto", FedProto),
        ("ditto", Ditto),
        ("fedbn", FedBN),
        ("fpl", FPL),
        ("fedce", FedCE),
        ("fedga", FedGA),
    ],
)
def test_a_name_and_its_term_have_the_same_defaults(name: str, term: Callable[[], Any]) -> None:
    assert methods.get(name).local == (term(),)


def test_every_stage_has_a_docstring_and_defaults_that_it_accepts() -> None:
    for name, stage in STAGES.items():
        assert stage.__doc__, name
        assert stage() is not None


def test_no_more_methods_are_kept_than_a_long_search_needs() -> None:
    for number in range(registry.CACHED_METHODS + 10):
        methods.get("fedheal", tau=number / 1000)
    assert len(registry._CACHE) == registry.CACHED_METHODS
    newest = methods.get("fedheal", tau=(registry.CACHED_METHODS + 9) / 1000)
    assert methods.get(newest.full_name) is registry._CACHE[newest.full_name]


def test_a_server_optimiser_follows_any_method_and_leaves_the_rest_alone() -> None:
    method, plain = methods.get("fedprox+fedheal+fedyogi:eta=0.1"), methods.get("fedprox+fedheal")
    assert method.server == Server("yogi", lr=0.1)
    assert plain.server is None
    assert (method.local, method.aggregator.stage.gives) == (plain.local, plain.aggregator.stage.gives)
    assert methods.get("fedheal+fedadam", eta=0.5).server == Server("adam", lr=0.5)
    with pytest.raises(ValueError, match=r"'fedadam\+fedyogi' has two server optimisers"):
        methods.get("fedadam+fedyogi")
    with pytest.raises(ValueError, match=r"eta = 0\.0: use a finite number above 0"):
        methods.get("fedadam:eta=0")
    with pytest.raises(TypeError, match="server"):
        methods.Method(server="adam")  # type: ignore[arg-type]


def test_settings_and_method_may_not_name_two_server_optimisers() -> None:
    method = methods.get("fedheal+fedadam")
    assert resolve_server(method) == resolve_server(method, Server("adam")) == Server("adam")
    assert resolve_server(methods.get("fedheal"), Server("yogi")) == Server("yogi")
    with pytest.raises(ValueError, match="leave one of them out"):
        resolve_server(method, Server("yogi"))
    with pytest.raises(
        ValueError, match=r"method 'ditto:feedback=true\+fedavgm': .*whatever the step; leave out fedavgm$"
    ):
        resolve_server(methods.get("ditto:feedback=true+fedavgm"))


def test_bounds_are_those_of_reports() -> None:
    assert set(grammar.BOUNDS) == set(rows.BOUNDS)
