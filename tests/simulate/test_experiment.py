"""One description of a run: what it accepts, what it refuses and how, and that it says everything a run needs."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from pydantic import ValidationError

import fedheal
from fedheal import methods
from fedheal.core.rng import SEED_FIELDS
from fedheal.runs.schema import FREE, LATER_SETTINGS
from fedheal.simulate.build import build_server_optimizer
from fedheal.simulate.experiment import RUN_NAME_LENGTH, Experiment, format_value, parse_override
from tiny_data import QUICK, quick
from tiny_runs import get_model_bytes


def round_trip(experiment: Experiment) -> Experiment:
    return Experiment.of(tomllib.loads(experiment.to_toml()))


EXPERIMENTS: list[dict[str, Any]] = [
    {},
    {"method": "fedavg"},
    {"tau": 0.4, "beta": 0.1 + 0.2},
    {"method": "fphl+fael"},
    {"method": "fael-exact", "ridge": 1e-9},
    {"method": "fael-exact", "ridge": 1e20},
    {"method": "fedheal", "tau": 0},
    {"method": "fedheal", "tau": 1},
    {"method": "fedheal", "beta": 0},
    {"method": "fedheal", "fael": False},
    {"method": "fedheal", "fphl": False, "fael": "exact-reg"},
    {"method": "fedheal:variant=released", "tau": 0.5},
    {"data": "tiny_data:load", "model": "tiny_data:linear", "width": 3, "steps": 7, "clients_per_domain": 2},
    {"name": 'a "quoted" näme\n\\', "seed": 2**63 - 1},
    {"participation": 1e-9, "dropout": 0.999, "lr": 1e-300, "save_seconds": 0, "server_lr": 1 / 3},
    {"optimizer": "adamw", "lr_schedule": "exponential", "warmup_rounds": 3},
    {"server_optimizer": "adam", "server_momentum": 0.9, "augment": "crop-flip", "on_bad_update": "skip", "threads": 2},
]


@pytest.mark.parametrize("keys", EXPERIMENTS, ids=str)
def test_out_as_toml_and_in_again_is_the_same_experiment(keys: dict[str, Any]) -> None:
    experiment = Experiment(**keys)
    assert round_trip(experiment) == experiment
    assert round_trip(experiment).identity == experiment.identity
    assert round_trip(experiment).to_toml() == experiment.to_toml()


def test_adam_on_the_server_has_a_rate_and_momentum_of_its_own_which_the_file_says() -> None:
    assert (Experiment().server_lr, Experiment().server_momentum) == (1.0, 0.0)
    adam = Experiment(server_optimizer="adam")
    assert (adam.server_lr, adam.server_momentum) == (0.01, 0.9)
    assert "server_lr = 0.01\nserver_momentum = 0.9\n" in adam.to_toml()
    explicit = Experiment(server_optimizer="adam", server_lr=1, server_momentum=0)
    assert (explicit.server_lr, explicit.server_momentum) == (1.0, 0.0)
    assert (round_trip(explicit).server_lr, round_trip(explicit).server_momentum) == (1.0, 0.0)


def test_a_methods_server_optimiser_sets_the_fields() -> None:
    experiment = Experiment(method="fedheal+fedyogi:eta=0.1,eps=0.01")
    assert (experiment.server_optimizer, experiment.server_lr, experiment.server_momentum) == ("yogi", 0.1, 0.9)
    assert (experiment.server_beta2, experiment.server_eps) == (0.99, 0.01)
    assert round_trip(experiment) == experiment
    assert build_server_optimizer(experiment) == methods.get("fedheal+fedyogi:eta=0.1,eps=0.01").server
    with pytest.raises(
        ValueError, match=r"server_lr = 1 contradicts method 'fedavg\+fedadam', which brings server_lr = 0.01"
    ):
        Experiment(method="fedadam", server_lr=1)


def test_another_method_drops_the_server_optimiser_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text(Experiment(method="fedadam").to_toml())
    assert Experiment.read(file, ["method=fedheal"]).server_optimizer == "sgd"
    assert Experiment.read(file, ["eta=0.5"]).server_lr == 0.5
    with pytest.raises(ValueError, match=r"server_lr = 0\.5 contradicts"):
        Experiment.read(file, ["server_lr=0.5"])
    file.write_text(Experiment(method="fedheal").to_toml())
    assert Experiment.read(file, ["method=fedheal+fedyogi"]).server_optimizer == "yogi"
    file.write_text(Experiment(method="fedheal", server_optimizer="adam").to_toml())
    assert Experiment.read(file, ["method=fedavg"]).server_optimizer == "adam"


def test_epochs_and_steps_exclude_each_other(tmp_path: Path) -> None:
    """In Python, in words and in a user's file. A run's own description has both: its steps replaced the epochs."""
    refused = r"^epochs = 1 and steps = 3 exclude each other: give one of them$"
    path = tmp_path / "e.toml"
    with pytest.raises(ValueError, match=refused):
        Experiment(epochs=1, steps=3)
    with pytest.raises(ValueError, match=refused):
        fedheal.compare(["fedavg", "fedheal"], epochs=1, steps=3, out=tmp_path / "runs")
    assert Experiment(epochs=1, steps=None).epochs == 1
    with pytest.raises(ValueError, match=refused):
        Experiment.read(None, ["epochs=1", "steps=3"])
    path.write_text("epochs = 1\nsteps = 3\n")
    with pytest.raises(ValueError, match=rf"^{path}: {refused[1:]}"):
        Experiment.read(path)
    path.write_text("epochs = 1\n")
    assert Experiment.read(path, ["steps=3"]) == Experiment(steps=3)  # words win over the file
    run = Experiment.of(Experiment(steps=3).to_dict() | {"epochs": 1})
    assert (run.epochs, run.steps) == (1, 3)
    for values in (run.to_dict(), run.model_dump()):
        assert Experiment(**values) == run
    path.write_text(run.to_toml())
    assert Experiment.read(path) == run
    earlier = {key: value for key, value in run.to_dict().items() if key not in LATER_SETTINGS}
    path.write_text(tomli_w.dumps(earlier))
    assert Experiment.read(path) == run
    assert Experiment.read(path, ["steps=5"]).steps == 5
    read = Experiment.read(path, ["epochs=2"])
    assert (read.epochs, read.steps) == (2, None)


def test_another_schedule_drops_the_decay_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "experiment.toml"
    file.write_text(Experiment(lr_schedule="step", lr_decay_every=5).to_toml())
    assert Experiment.read(file).lr_decay == 0.1
    assert Experiment.read(file, ["lr_schedule=exponential"]).lr_decay == 0.99
    assert Experiment.read(file, ["lr_schedule=cosine"]).lr_decay is None


def test_fields_that_earlier_runs_lack_do_not_change_who_owns_a_checkpoint() -> None:
    """New fields have the values of those runs; otherwise they could not be resumed."""
    experiment = Experiment(method="fedavg")
    settings = experiment.to_dict()
    assert settings | LATER_SETTINGS == settings
    earlier = {key: value for key, value in settings.items() if key not in FREE | LATER_SETTINGS.keys()}
    assert experiment.identity == hashlib.sha256(json.dumps(earlier, sort_keys=True).encode()).hexdigest()
    adam = Experiment(method="fedavg", server_optimizer="adam")
    assert Experiment(method="fedavg", server_optimizer="adam", server_eps=0.01).identity != adam.identity


@pytest.mark.slow
def test_adam_on_the_server_learns_with_what_it_comes_with() -> None:
    """With a rate of 1 and no momentum, steps of up to 10 in every entry raised the loss to hundreds."""
    keys: dict[str, Any] = {"method": "fedavg", "rounds": 6, "epochs": 1, "samples_per_client": 40, "lr": 0.01}
    keys |= {"clients_per_domain": 1, "width": 4, "server_optimizer": "adam"}
    experiment = Experiment(**keys, model="small_cnn", device="cpu", eval_every=6)
    losses = [record.train_loss for record in fedheal.run(experiment, progress=False).history]
    assert max(losses) < 1.5 * losses[0]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", methods.names())
def test_every_method_goes_out_and_in(name: str) -> None:
    experiment = Experiment(method=name)
    assert round_trip(experiment) == experiment
    assert round_trip(experiment).method_name == name


def test_a_method_given_as_a_value_is_the_same_experiment_as_its_name() -> None:
    method = methods.get("fedheal", tau=0.4)
    experiment = Experiment(method=method)
    assert experiment.identity == Experiment(method="fedheal", tau=0.4).identity
    assert round_trip(experiment).identity == experiment.identity


def test_a_runs_description_reproduces_it_bit_for_bit(tmp_path: Path) -> None:
    experiment = quick(method="fedheal:variant=released", tau=0.4, steps=3, participation=0.6, augment="crop", seed=9)
    first = fedheal.run(experiment, tmp_path / "one", progress=False)
    second = fedheal.run(Experiment.read(tmp_path / "one" / "experiment.toml"), progress=False)
    assert get_model_bytes(first.model) == get_model_bytes(second.model)
    assert first.domains == second.domains


def test_the_description_is_complete(tmp_path: Path) -> None:
    """A later version with other defaults must run the same."""
    fields = {
        "width": 4,
        "steps": 2,
        "clients_per_domain": 1,
        "data_root": "x",
        "weights": "x.safetensors",
        "image_size": 32,
        "quantity": 0.5,
        "public": "embedded",
        "lanes": 3,
        "lr_schedule": "step",
        "lr_decay_every": 9,
        "engine": "ray",
        "ray_address": "auto",
        **dict.fromkeys(SEED_FIELDS, 1),
    }
    text = tomllib.loads(Experiment(**fields, samples_per_client=9, dirichlet=0.5).to_toml())
    other = tomllib.loads(Experiment(**fields, fraction=0.1, pathological=2).to_toml())  # instead of these
    assert text.keys() | other.keys() == Experiment.model_fields.keys()
    assert text.keys() ^ other.keys() == {"samples_per_client", "fraction", "dirichlet", "pathological"}
    for word in ("tau=0.3", "beta=0.4", "variant=paper", "fphl=true", "fael=momentum"):
        assert word in text["method"]


# Where values come from


def test_the_data_sets_protocol_applies_only_where_nothing_is_said() -> None:
    plain = Experiment()
    assert (plain.model, plain.rounds, plain.epochs, plain.batch_size, plain.lr) == ("small_cnn", 20, 2, 32, 0.01)
    explicit = Experiment(data="embedded", model="resnet10", rounds=200, lr=0.001)
    assert (explicit.model, explicit.rounds, explicit.lr) == ("resnet10", 200, 0.001)
    assert (explicit.epochs, explicit.batch_size) == (2, 32)


def test_data_of_your_own_have_no_protocol() -> None:
    own = Experiment(data="tiny_data:load")
    assert (own.model, own.rounds, own.epochs, own.batch_size, own.lr) == ("resnet10", 200, 10, 64, 0.001)


def test_words_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "e.toml"
    path.write_text(tomli_w.dumps({"rounds": 7, "seed": 3, "tau": 0.2, "data": "tiny_data:load"}))
    experiment = Experiment.read(path, ["rounds=9", "tau=0.4", "lr=1e-2"])
    assert (experiment.rounds, experiment.seed, experiment.lr) == (9, 3, 0.01)
    assert experiment.method_name == "fedavg+fedheal:tau=0.4"


def test_words_change_the_method_of_a_runs_own_description(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(Experiment(method="fedheal").to_toml())
    assert Experiment.read(tmp_path / "e.toml", ["method=fedavg"]).method_name == "fedavg"


def test_words_win_over_the_parameters_in_a_files_method(tmp_path: Path) -> None:
    """Words also replace parameters that a run wrote itself; all other values stay."""
    path = tmp_path / "e.toml"
    written = Experiment(method="fedprox:mu=0.5+fedheal:tau=0.2,beta=0.7", data="digits")
    path.write_text(written.to_toml())
    read = Experiment.read(path, ["tau=0.5"])
    assert read == Experiment(method="fedprox:mu=0.5+fedheal:tau=0.5,beta=0.7", data="digits")
    assert Experiment.read(path, ["mu=0.1", "tau=0.5"]).method_name == "fedprox:mu=0.1+fedheal:tau=0.5,beta=0.7"
    assert Experiment.read(path) == written
    path.write_text('method = "fedheal"\ntau = 0.2\nmomentum = 0.5\n')
    read = Experiment.read(path, ["method=fedheal:tau=0.5"])
    assert (read.method_name, read.momentum) == ("fedavg+fedheal:tau=0.5", 0.5)
    with pytest.raises(ValueError, match=r"tau = 0\.5 contradicts"):
        Experiment.read(path, ["method=fedheal:tau=0.3", "tau=0.5"])
    path.write_text('method = "fedheal:tau=0.2"\n')
    with pytest.raises(ValueError, match=r"unknown field 'taw' \(did you mean 'tau'\?\)"):
        Experiment.read(path, ["taw=0.5"])


def test_the_methods_parameters_travel() -> None:
    assert Experiment(method="fedheal", tau=0.4, beta=0.1).method_name == "fedavg+fedheal:tau=0.4,beta=0.1"
    assert Experiment(method="uniform+fphl", tau=0.9).method_name == "fedavg+uniform+fphl:tau=0.9"
    assert Experiment(tau=0.3).identity == Experiment().identity == Experiment(method="fedheal:tau=0.3").identity
    assert Experiment(tau=0.31).identity != Experiment().identity


@pytest.mark.parametrize(
    ("word", "pair"),
    [
        ("tau=0.3", ("tau", 0.3)),
        ("tau=.3", ("tau", ".3")),
        ("name=3", ("name", "3")),
        ("width=3", ("width", 3)),
        ('name="3"', ("name", "3")),
        ("fphl=false", ("fphl", False)),
        ("method=fedprox:mu=0.1", ("method", "fedprox:mu=0.1")),
        ("name=", ("name", "")),
        ("x=[1, 2]", ("x", [1, 2])),
    ],
)
def test_words_are_read_as_toml_or_else_as_text(word: str, pair: tuple[str, Any]) -> None:
    assert parse_override(word) == pair


def test_a_word_that_is_nested_too_deeply_is_text() -> None:
    assert parse_override("only=" + "[" * 5000) == ("only", "[" * 5000)


def test_a_fraction_may_be_written_without_its_zero() -> None:
    assert Experiment.read(overrides=["tau=.4", "lr=.5"]).identity == Experiment(tau=0.4, lr=0.5).identity


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("a=1 b=2", {"a": 1, "b": 2}),
        (" a=1,b=2 ", {"a": 1, "b": 2}),
        ("a=1, b=2,", {"a": 1, "b": 2}),
        ("a=1 b=2,c=3", {"a": 1, "b": 2, "c": 3}),
        ("night scan=1 sketch=2", {"night scan": 1, "sketch": 2}),
        ("night scan=1,old  sketch=2", {"night scan": 1, "old  sketch": 2}),
        ("night scan=1", {"night scan": 1}),
        ("iso=100=1,a = 2", {"iso=100": 1, "a": 2}),
    ],
)
def test_numbers_for_domains_whose_names_have_spaces(text: str, numbers: dict[str, int]) -> None:
    experiment = Experiment(clients_per_domain=text)
    assert experiment.clients_per_domain == numbers
    assert Experiment(clients_per_domain=format_value(experiment.clients_per_domain)) == experiment


@pytest.mark.parametrize("word", ["rounds", "=3", "", "a-b=3", "3=a", "a b=3", "-x=1"])
def test_what_is_no_word_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="should be key=value"):
        parse_override(word)


# What it refuses


WRONG: list[tuple[dict[str, Any], list[str]]] = [
    ({"rounds": 0}, ["rounds", "0", "1"]),
    ({"rounds": -1}, ["rounds", "-1"]),
    ({"rounds": 2.5}, ["rounds", "2.5", "a whole number"]),
    ({"rounds": "many"}, ["rounds", "many", "a whole number"]),
    ({"rounds": True}, ["rounds", "True"]),
    ({"rounds": None}, ["rounds", "None"]),
    ({"rounds": [3]}, ["rounds", "[3]"]),
    ({"threads": 10**12}, ["threads", str(10**12), "4096"]),
    ({"batch_size": 2**63}, ["batch_size", str(2**63), str(2**31)]),
    ({"lr_schedule": {}}, ["lr_schedule", "{}"]),
    ({"seed": -1}, ["seed", "-1"]),
    ({"seed": 2**63}, ["seed", str(2**63)]),
    ({"participation": 0}, ["participation", "0"]),
    ({"participation": 1.1}, ["participation", "1.1"]),
    ({"participation": float("nan")}, ["participation", "nan"]),
    ({"dropout": 1}, ["dropout", "1"]),
    ({"dropout": -0.1}, ["dropout", "-0.1"]),
    ({"lr": 0}, ["lr", "0"]),
    ({"lr": float("inf")}, ["lr", "inf"]),
    ({"lr": float("nan")}, ["lr", "nan"]),
    ({"lr": True}, ["lr", "True"]),
    ({"lr": "fast"}, ["lr", "fast", "number"]),
    ({"momentum": 1}, ["momentum", "1"]),
    ({"weight_decay": -1e-9}, ["weight_decay", "-1e-09"]),
    ({"weight_decay": float("inf")}, ["weight_decay", "inf"]),
    ({"batch_size": 0}, ["batch_size", "0"]),
    ({"epochs": 0}, ["epochs", "0"]),
    ({"steps": 0}, ["steps", "0"]),
    ({"width": 0}, ["width", "0"]),
    ({"clients_per_domain": 0}, ["clients_per_domain", "0"]),
    ({"samples_per_client": -3}, ["samples_per_client", "-3"]),
    (
        {"samples_per_client": "night scan"},
        ["samples_per_client = 'night scan': use a number", "as in 'mnist=5 usps=3'"],
    ),
    ({"clients_per_domain": "a=1 b"}, ["clients_per_domain = 'a=1 b': use a number of 1 or more"]),
    ({"clients_per_domain": "a = 2 b = 3"}, ["clients_per_domain = 'a = 2 b = 3': use a number of 1 or more"]),
    ({"clients_per_domain": "a=1 a=2"}, ["clients_per_domain = 'a=1 a=2': use a number of 1 or more"]),
    ({"clients_per_domain": "=3"}, ["clients_per_domain = '=3': use a number of 1 or more"]),
    ({"clients_per_domain": ","}, ["clients_per_domain = ',': use a number of 1 or more"]),
    ({"fraction": "a=2,b=0.1"}, ["fraction = 'a=2,b=0.1': use a fraction of at most 1", "'mnist=0.1 usps=0.2'"]),
    ({"augment": "mixup"}, ["augment", "mixup", "crop"]),
    ({"server_optimizer": "lion"}, ["server_optimizer", "lion", "adam"]),
    ({"server_lr": 0}, ["server_lr", "0"]),
    ({"optimizer": "lion"}, ["optimizer", "lion", "adamw"]),
    ({"lr_schedule": "linear"}, ["lr_schedule", "linear", "cosine"]),
    ({"lr_schedule": "step"}, ["lr_schedule", "step", "lr_decay_every"]),
    ({"lr_decay": 0.5}, ["lr_decay", "0.5", "lr_schedule", "constant"]),
    ({"lr": 1e300}, ["lr", "1e+300", "at most"]),
    ({"server_lr": 1e38}, ["server_lr = 1e+38", "at most 1e+30"]),
    ({"weight_decay": 1e16}, ["weight_decay", "1e+16", "at most"]),
    ({"method": "fedprox", "mu": 1e300}, ["mu", "1e+300", "at most 1e+30"]),
    ({"tau": float("nan")}, ["tau = nan", "from 0 to 1"]),
    ({"server_beta2": 0.9}, ["server_beta2", "0.9", "server_optimizer=adam", "sgd"]),
    ({"server_beta2": 0.9, "server_optimizer": "adagrad"}, ["server_beta2", "0.9", "adagrad"]),
    ({"server_eps": 0.1}, ["server_eps", "0.1", "server_optimizer=adam or yogi or adagrad", "sgd"]),
    ({"lr_schedule": "exponential", "lr_decay_every": 5}, ["lr_decay_every", "5", "step"]),
    ({"lr_schedule": "step", "lr_decay_every": 5, "lr_decay": 2}, ["lr_decay", "2"]),
    ({"rounds": 5, "warmup_rounds": 5}, ["warmup_rounds", "5", "fewer"]),
    ({"server_lr": float("inf")}, ["server_lr", "inf"]),
    ({"server_momentum": 1}, ["server_momentum", "1"]),
    ({"eval_every": 0}, ["eval_every", "0"]),
    ({"on_bad_update": "ignore"}, ["on_bad_update", "ignore", "skip"]),
    ({"threads": 0}, ["threads", "0"]),
    ({"workers": 0}, ["workers", "0"]),
    ({"save_seconds": -1}, ["save_seconds", "-1"]),
    ({"save_seconds": float("nan")}, ["save_seconds", "nan"]),
    ({"name": 3}, ["name", "3", "a string"]),
    ({"data": 3}, ["data", "3"]),
    ({"data": {"x": 1}}, ["data"]),
    ({"model": None}, ["model", "None"]),
    ({"device": 3}, ["device", "3"]),
    ({"method": 3}, ["method", "3"]),
    ({"method": None}, ["method", "None"]),
    ({"method": {"name": "fedheal"}}, ["method"]),
    ({"method": "fedhael"}, ["fedhael", "did you mean 'fedheal'"]),
    ({"method": "FedHEAL"}, ["FedHEAL", "did you mean 'fedheal'"]),
    ({"method": "fedheal+"}, ["method 'fedheal+' ends with '+': name the part", "as in 'fedprox+fedheal'"]),
    ({"method": "+fedheal"}, ["method '+fedheal' has a '+' without a part before it: name the part"]),
    ({"method": "fedprox++fedheal"}, ["method 'fedprox++fedheal' has a '+' without a part before it"]),
    ({"method": " "}, ["method ' ' is empty: name the part"]),
    ({"taw": 0.3}, ["taw", "did you mean 'tau'"]),
    ({"round": 3}, ["round", "did you mean 'rounds'"]),
    ({"bogus": 3}, ["bogus", "tau", "beta"]),
    ({"experiment": {"rounds": 3}}, ["unknown field 'experiment'", "at the top level, without [experiment]"]),
    ({"tau": 1.5}, ["tau", "1.5"]),
    ({"tau": None}, ["tau", "None"]),
    ({"tau": [0.3]}, ["tau", "0.3"]),
    ({"tau": True}, ["tau", "True"]),
    ({"variant": "mine"}, ["variant", "mine", "paper"]),
    ({"fphl": 1}, ["fphl", "1"]),
    ({"fael": "x"}, ["fael", "x", "momentum"]),
    ({"method": "fedavg", "tau": 0.3}, ["tau", "fedavg"]),
    ({"method": "fedheal:tau=0.2", "tau": 0.3}, ["tau", "0.2", "0.3"]),
    (
        {"method": methods.get("fedheal"), "tau": 0.3},
        ["a Method brings its own", "methods.get('fedavg+fedheal', tau=0.3)"],
    ),
    ({"method": methods.get("fedprox:mu=0.5"), "mu": 2}, ["methods.get('fedprox', mu=2)"]),
    ({"method": methods.get("fedavg"), "roundz": 2}, ["did you mean 'rounds'", "set them where you make it"]),
    ({"data": Path("photos")}, ["data is a path, 'photos': give your image folders as 'folder:photos'"]),
]


@pytest.mark.parametrize(("keys", "words"), WRONG, ids=[f"{i} {' '.join(keys)}" for i, (keys, _) in enumerate(WRONG)])
def test_what_is_wrong_is_one_sentence_with_field_and_value(keys: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  (looked at below)
        Experiment(**keys)
    sentence = str(error.value)
    assert not isinstance(error.value, ValidationError)
    assert "\n" not in sentence
    for word in words:
        assert word in sentence, sentence


def test_a_value_of_several_lines_is_still_one_sentence() -> None:
    with pytest.raises(ValueError, match="rounds") as error:
        Experiment(rounds="a\nb")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "content",
    [b"rounds = ", b"\xff\xfe", b'name = "\xe9"', b"a = 1\na = 2\n", b"a = " + b"[" * 5000, b"a = " + b"9" * 5000],
)
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"bad\.toml is not TOML"):
        Experiment.read(path)


def test_a_file_with_a_wrong_value_is_named_unless_a_word_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("lr = 'abc'\n")
    with pytest.raises(ValueError, match=rf"^{path}: lr = 'abc': use a number"):
        Experiment.read(path, ["rounds=3"])
    assert Experiment.read(path, ["lr=0.1"]).lr == 0.1
    path.write_text("seed = 1\n")
    with pytest.raises(ValueError, match=r"^lr = 'x': use a number"):
        Experiment.read(path, ["lr=x"])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.toml cannot be read: No such file"):
        Experiment.read(tmp_path / "none.toml")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        Experiment.read(tmp_path)


def test_a_key_given_twice_is_refused_with_both_values() -> None:
    with pytest.raises(ValueError, match=r"^'tau' is given twice: tau=0\.3 and tau=0\.4$"):
        Experiment.read(None, ["tau=0.3", "rounds=3", "tau=0.4"])


# A value


def test_an_experiment_cannot_be_changed() -> None:
    experiment = quick()
    with pytest.raises(ValidationError, match="frozen"):
        experiment.rounds = 4  # type: ignore[misc]
    assert experiment.rounds == QUICK["rounds"]


def test_equal_descriptions_are_equal() -> None:
    assert quick() == quick()
    assert quick() != quick(seed=1)


@pytest.mark.parametrize(
    "keys",
    [{k: v} for k, v in {"name": "x", "workers": 2, "save_seconds": 1.0, "data_root": "y", "lanes": 3}.items()],
    ids=lambda k: next(iter(k)),
)
def test_what_does_not_change_a_result_does_not_change_the_identity(keys: dict[str, Any]) -> None:
    assert keys.keys() <= FREE
    assert quick(**keys).identity == quick().identity


@pytest.mark.parametrize("field", sorted(Experiment.model_fields.keys() - FREE - {"device"}))
def test_everything_else_changes_the_identity(field: str) -> None:
    other: dict[str, Any] = {
        "method": "fedavg", "data": "embedded", "model": "resnet18", "augment": "flip", "server_optimizer": "adam",
        "on_bad_update": "skip", "classes": "union", "fraction": 0.5, "image_size": 64, "engine": "serial", "precision": "fp32",
        "optimizer": "adam", "lr_schedule": "cosine", "warmup_rounds": 2, "lr_decay": 0.5, "lr_decay_every": 3,
        "evaluate": "unseen",
        "public": "embedded",
    }  # fmt: skip
    needed: dict[str, dict[str, Any]] = {
        "lr_decay": {"lr_schedule": "exponential"}, "lr_decay_every": {"lr_schedule": "step", "lr_decay_every": 1},
        "server_beta2": {"server_optimizer": "adam"}, "server_eps": {"server_optimizer": "adam"},
    }  # fmt: skip
    fixed = needed.get(field, {})
    before = quick(**fixed)
    now = getattr(before, field)
    by_type: dict[type, Any] = {bool: not now, float: 0.123, tuple: ("plain",), int: 11, type(None): 2}
    value = other[field] if field in other else by_type[type(now)]
    assert quick(**fixed | {field: value}).identity != before.identity


def test_a_run_may_be_resumed_with_other_workers_and_saving(tmp_path: Path) -> None:
    fedheal.run(quick(), tmp_path / "run", progress=False)
    fedheal.run(quick(save_seconds=5, name="other"), tmp_path / "run", resume=True, progress=False)


@pytest.mark.parametrize("name", ["..", ".", "a/../../b", "/etc", "a\nb", "x" * 10])
def test_a_folder_name_is_one_name(name: str) -> None:
    folder = quick(name=name).folder_name
    assert Path(folder).name == folder
    assert folder not in ("", ".", "..")
    assert "\n" not in folder


def test_names_of_folders_tell_experiments_apart() -> None:
    keys = [{"tau": 0.4}, {"tau": 0.5}, {"seed": 1}, {"method": "fedavg"}, {"method": "fedavg+uniform"}, {}]
    assert len({quick(**k).folder_name for k in keys}) == len(keys)


def test_a_run_is_named_by_what_differs_from_the_protocol() -> None:
    names = {
        "fedavg+fedheal-embedded-seed0": {},
        "fedavg+fedheal-embedded-seed0_lr=0.02": {"lr": 0.02},
        "fedavg+fedheal_tau=0.4-embedded-seed1": {"tau": 0.4, "seed": 1},
        "fedavg-digits-seed0_clients_per_domain=mnist=5_usps=3_deterministic=true": {
            "method": "fedavg", "data": "digits", "clients_per_domain": {"mnist": 5, "usps": 3}, "deterministic": True,
        },
        "mine": {"name": "mine", "lr": 0.02},
    }  # fmt: skip
    assert {Experiment(**fields).run_name: fields for fields in names.values()} == names
    assert Experiment(workers=2, save_seconds=5, data_root="there").run_name == Experiment().run_name  # no other result
    assert Experiment(data="folder:a/photos").run_name != Experiment(data="folder:b/photos").run_name


def test_a_long_name_is_cut_and_told_apart_by_a_hash() -> None:
    names = [
        Experiment(only=[f"client-{i}" for i in range(30)], seed=s, lr=lr).run_name for s in (0, 1) for lr in (1, 2)
    ]
    assert len(set(names)) == 4
    assert all(len(name) == RUN_NAME_LENGTH for name in names)
    assert names[0].startswith("fedavg+fedheal-embedded-seed0_only=client-0_client-1_")


def test_names_among_runs_of_the_same_settings_stay_as_they_were() -> None:
    """Comparisons, `fedheal reproduce` and results/ use these names for folders."""
    assert Experiment(lr=0.02, rounds=5).folder_name == "fedavg+fedheal-embedded-seed0"
    for path in (Path(__file__).parents[2] / "results").glob("*/*/experiment.toml"):
        assert Experiment.read(path).folder_name == path.parent.name


@pytest.mark.parametrize(("field", "prefix"), [("data", "folder:"), ("data_root", "")])
def test_paths_of_a_description_work_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, prefix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    experiment = Experiment(**{field: f"{prefix}some/../photos"})
    assert getattr(experiment, field) == f"{prefix}{tmp_path}/photos"
    assert getattr(Experiment(**{field: f"{prefix}~/photos"}), field) == f"{prefix}/home/somebody/photos"
    (tmp_path / "experiment.toml").write_text(experiment.to_toml())
    monkeypatch.chdir("/")
    again = Experiment.read(tmp_path / "experiment.toml")
    assert (again.identity, again.to_toml()) == (experiment.identity, experiment.to_toml())


def test_other_data_are_no_paths() -> None:
    assert Experiment(data="tiny_data:load").data == "tiny_data:load"
    assert Experiment(data="folder:").data == "folder:"
