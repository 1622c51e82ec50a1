"""A method's name: its parts and their parameters, one spelling for one method, and what is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedheal
from fedheal import aggregate, methods
from fedheal.aggregate.registry import STAGES
from fedheal.aggregate.weights import exact as equidistant
from fedheal.aggregate.whole.fedce import fedce
from fedheal.aggregate.whole.fedfv import conflict_free
from fedheal.aggregate.whole.fedga import fedga
from fedheal.aggregate.whole.fedpw import parameter_wise
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
from tiny_data import quick


def bits(name: str, **keys: Any) -> dict[str, bytes]:
    result = fedheal.run(
        quick(method=name, model="tiny_data:normed", rounds=4, participation=0.8, **keys), progress=False
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
    assert methods.get(method.spelled).name == name
    assert methods.get(method.spelled).spelled == method.spelled


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
]


@pytest.mark.parametrize(("written", "name"), SAME)
def test_one_spelling_for_one_method(written: str, name: str) -> None:
    assert methods.get(written).name == name
    assert methods.get(methods.get(written).name).name == name
    assert methods.get(methods.get(written).spelled).name == name


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
        given = methods.get(name, **keys)
    except ValueError:
        assert keys == {"fael": 0}  # neither a name nor false
        return
    text = f"{name}:" + ",".join(f"{k}={str(v).replace('+', '')}" for k, v in keys.items())
    assert given.name == methods.get(text).name
    assert methods.get(given.spelled).name == given.name
    assert methods.get(given.name).spelled == given.spelled


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
    found = methods.parameters("fedheal:tau=0.4")
    wanted = {"tau": 0.4, "beta": 0.4, "variant": "paper", "fphl": True, "fael": "momentum"}
    assert found | wanted == found
    assert methods.parameters("fedavg") == {}
    assert methods.parameters("uniform+fphl") == {"tau": 0.3, "variant": "paper", "soft": False, "forget": 0.0}


def test_fphl_and_fael_together_are_fedheal_to_the_bit() -> None:
    assert bits("fphl+fael") == bits("fedheal")
    assert bits("fphl+fael") != bits("fphl")
    assert bits("fphl+fael") != bits("fael")
    assert bits("fphl:variant=released+fael:variant=released") == bits("fedheal:variant=released")


def test_the_order_of_stages_changes_nothing() -> None:
    assert bits("uniform+fphl") == bits("fphl+uniform")
    assert bits("fael-exact+fphl") == bits("fphl+fael-exact") == bits("fedheal:fael=exact")


def test_a_parameter_makes_a_difference() -> None:
    assert bits("fedheal") != bits("fedheal", tau=0.9)
    assert bits("fedheal") != bits("fedheal:variant=released")
    assert bits("fedheal:fphl=false,fael=false") == bits("fedavg")


REFUSED = [
    ("fedheal:soft=true,fphl=false", {}, "no mask to soften"),
    ("fedheal:forget=1", {}, "forget = 1.0: use a number from 0 to 1, but less than 1"),
    ("fedheal:per_domain=true,fael=exact", {}, "only fael = 'momentum' moves weight between domains"),
    ("uniform+fphl:forget=0.1", {"per_domain": True}, "no parameter 'per_domain'"),
    ("fedhael", {}, "no method part 'fedhael'.*did you mean 'fedheal'"),
    ("zzz", {}, "no method part 'zzz'"),
    ("", {}, "no method part ''"),
    ("+", {}, "no method part ''"),
    ("fedavg+", {}, "no method part ''"),
    ("fedavg++fedheal", {}, "no method part ''"),
    ("FedHEAL", {}, "no method part 'FedHEAL'"),
    ("fedheal:taw=0.3", {}, "'fedheal' has no parameter 'taw'.*did you mean 'tau'"),
    ("fedheal", {"taw": 0.3}, "no parameter 'taw'.*did you mean 'tau'"),
    ("fedavg", {"tau": 0.3}, "no parameter 'tau'.*no parameters"),
    ("uniform", {"tau": 0.3}, "no parameter 'tau'"),
    ("uniform:tau=0.3", {}, "no parameter 'tau'"),
    ("fedheal:tau", {}, "should be key=value"),
    ("fedheal:tau=0.3,", {}, "should be key=value"),
    ("fedheal:tau=0.3,tau=0.3", {}, "each key once"),
    ("fedheal:tau=x", {}, "tau = x: a number is needed"),
    ("fedheal:tau=", {}, "a number is needed"),
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
    ("fedfv", {"tau": 1.5}, "tau = 1.5: a whole number is needed"),
    ("fedfv:tau=1.5", {}, "tau = 1.5: a whole number is needed"),
    ("fedfv:tau=x", {}, "tau = x: a whole number is needed"),
    ("scaffold:option=1e400", {}, "option = 1e400: a whole number is needed"),
    ("fedprox", {"mu": [0.1]}, r"mu = \[0.1\]: a number is needed"),
    ("fedprox", {"mu": None}, "mu = None: a number is needed"),
    ("fedprox", {"mu": {"a": 0.1}}, "mu = {'a': 0.1}: a number is needed"),
    ("fael-exact", {"ridge": [1]}, r"ridge = \[1\]: a number is needed"),
    ("fael-exact", {"ridge": None}, "ridge = None: a number is needed"),
    ("directions", {"block": [2]}, r"block = \[2\]: a whole number is needed"),
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


@pytest.mark.parametrize("value", [None, [1], "1", {}, True], ids=str)
@pytest.mark.parametrize(
    ("part", "key"),
    [
        (methods.PARTS[part], key)
        for part in methods.PARTS
        for key, default in methods.parameters(part).items()
        if isinstance(default, (int, float)) and not isinstance(default, bool)
    ],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_what_is_no_number_is_refused_by_the_parts_themselves(part: Callable[..., Any], key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{key} = "):
        part(**{key: value})


def test_a_list_in_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "one.toml").write_text('method = "fedprox"\nmu = [0.1]\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"^mu = \[0.1\]: a number is needed$"):
        fedheal.Experiment.read(tmp_path / "one.toml")


def test_a_method_is_a_value() -> None:
    method = methods.get("fedheal")
    with pytest.raises(AttributeError):
        method.name = "other"  # type: ignore[misc]
    assert method.local == ()
    assert methods.get("fedprox:mu=0.1").local == (FedProx(0.1),)
    assert torch.is_tensor(method.aggregator.apply(torch.zeros(2), fedheal.Updates(["a"], torch.ones(1, 2), [1]),
                                                   method.aggregator.init(fedheal.Layout.flat(2))).model)  # fmt: skip


def defaults(part: Callable[..., Any]) -> dict[str, Any]:
    """Of what may be given by position; a preset's `on_bad_update` and `kernel` may not."""
    found = inspect.signature(part).parameters.values()
    return {one.name: one.default for one in found if one.kind is not inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    "parts",
    [
        (STAGES["uniform"], aggregate.uniform),
        (STAGES["afl"], aggregate.afl),
        (STAGES["qffl"], aggregate.qffl),
        (STAGES["fedheal"], aggregate.fedheal),
        (STAGES["fael-exact"], equidistant.exact),
        (methods.fedfv, aggregate.fedfv, conflict_free),
        (methods.fedpw, aggregate.fedpw, parameter_wise),
        (methods.fedce, fedce),
        (methods.fedga, fedga),
    ],
    ids=lambda parts: parts[0].__name__,
)
def test_a_name_a_preset_and_a_stage_have_the_same_defaults(parts: tuple[Callable[..., Any], ...]) -> None:
    for other in parts[1:]:
        assert defaults(other) == defaults(parts[0])


def test_fedheals_halves_have_its_defaults() -> None:
    whole = defaults(STAGES["fedheal"])
    halves = defaults(STAGES["fphl"]) | defaults(STAGES["fael"])
    assert halves == {name: whole[name] for name in halves}


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
