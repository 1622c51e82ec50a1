"""One validated description of a run, in and out as TOML, and the parts it is made of."""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import tomli_w
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import nn

from fedheal import data as datasets
from fedheal import methods, models
from fedheal.aggregate.server_optimizer import USUAL, Server, check_plain
from fedheal.core.errors import suggestion
from fedheal.core.layout import Layout
from fedheal.core.rng import derive
from fedheal.data.augment import normalise_images
from fedheal.data.domains import Domain, Domains, Split
from fedheal.data.on_disk import multiply_fraction
from fedheal.data.partition import Client, partition_samples
from fedheal.engine.precision import precision_of
from fedheal.engine.serial import LocalTraining, Training, seeded, smallest_batch
from fedheal.methods import Method
from fedheal.methods.grammar import parts_of, without
from fedheal.runs.folder import read_toml
from fedheal.runs.schema import FREE
from fedheal.simulate.model_checks import check_judges, check_model, check_trains
from fedheal.simulate.round import Federation

# Fields that may have one value for each domain.
PER_DOMAIN: dict[str, type[int] | type[float]] = {
    "clients_per_domain": int,
    "samples_per_client": int,
    "fraction": float,
}


class Experiment(BaseModel):
    """A run, completely described. Keys that are not fields are parameters of the method: `Experiment(tau=0.4)`.

    >>> Experiment(method="fedheal", tau=0.4, rounds=3).method_name
    'fedavg+fedheal:tau=0.4'
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)

    name: str = ""
    method: str | Method = "fedheal"
    data: str = "embedded"
    model: str = "resnet10"
    width: int | None = Field(None, ge=1)
    rounds: int = Field(200, ge=1, le=1_000_000)
    seed: int = Field(0, ge=0, lt=2**63)
    data_root: str | None = None  # where the data lie, if not where FEDHEAL_DATA says
    allow_missing: bool = False  # go on without the domains that are not on disk
    classes: Literal["intersection", "union"] = "intersection"  # of the domains' folders, where no list is fixed
    image_size: int | None = Field(None, ge=8, le=1024)  # instead of the data set's own
    clients_per_domain: int | dict[str, int] | None = None  # a number, or one for each domain
    samples_per_client: int | dict[str, int] | None = None
    fraction: float | dict[str, float] | None = None  # of the whole training set, that each client holds
    dirichlet: float | None = Field(None, gt=0, le=1e6)  # label skew within a domain: the smaller, the stronger
    class_filling: bool = False  # every client gets every class, as in the code released with the paper
    only: tuple[str, ...] = ()  # these domains or clients train, no others
    without: tuple[str, ...] = ()  # these do not; the model is judged on their domains all the same
    pool: bool = False  # one machine that holds the data of all who train
    validation: float = Field(0.0, ge=0, lt=1)  # share of each client's training data that it only judges with
    participation: float = Field(1.0, gt=0, le=1)
    dropout: float = Field(0.0, ge=0, lt=1)
    epochs: int = Field(10, ge=1)
    steps: int | None = Field(None, ge=1)
    batch_size: int = Field(64, ge=1)
    lr: float = Field(0.001, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(1e-5, ge=0)
    augment: Literal["none", "crop", "flip", "crop-flip"] = "none"
    server_optimizer: Literal["sgd", "adam"] = "sgd"
    server_lr: float = Field(1.0, gt=0)
    server_momentum: float = Field(0.0, ge=0, lt=1)
    eval_every: int = Field(1, ge=1)
    on_bad_update: Literal["raise", "skip"] = "raise"
    device: str = "auto"
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"  # tf32 on a GPU, fp32 elsewhere
    deterministic: bool = False  # the same bits again on a GPU, at the cost of speed
    engine: Literal["auto", "serial", "lanes"] = "auto"  # lanes on a GPU
    lanes: int | None = Field(None, ge=1)  # clients trained side by side; chosen by the size of batches
    threads: int = Field(1, ge=1)
    workers: int = Field(1, ge=1)
    save_seconds: float = Field(60.0, ge=0)

    def __init__(self, **values: Any) -> None:
        """A `ValueError` says what is wrong in one sentence."""
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ValueError(_sentence(error)) from None

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, given: Any) -> Any:
        """Send the method's parameters to it, and take what is not said from the data set's protocol."""
        if not isinstance(given, dict):
            return given
        own = {key: value for key, value in given.items() if key in cls.model_fields}
        rest = {key: value for key, value in given.items() if key not in cls.model_fields}
        for key, value in own.items():
            if isinstance(value, bool) and cls.model_fields[key].annotation is not bool:
                raise ValueError(f"{key} = {value}: {key} is not a switch")
        for key in ("only", "without"):
            if isinstance(own.get(key), str):
                own[key] = tuple(name.strip() for name in own[key].split(","))
        for key, kind in PER_DOMAIN.items():
            if own.get(key) is not None:
                own[key] = per_domain(key, own[key], kind)
        _refuse_contradictions(own)
        protocol = datasets.get_protocol(str(own.get("data", "embedded")))
        method = own.get("method", cls.model_fields["method"].default)
        if isinstance(method, str):
            usual = {key: protocol[key] for key in protocol.keys() - cls.model_fields.keys()}
            own["method"] = _with_parameters(method, _unsaid(method, usual) | rest).spelled
        elif rest:
            raise ValueError(
                f"unknown field '{next(iter(rest))}'{suggestion(next(iter(rest)), list(cls.model_fields))}"
            )
        elif isinstance(method, Method) and not method.spelled and methods.known(method.name):
            raise ValueError(f"method '{method.name}' is another one here: give yours a name of its own")
        server = USUAL.get(str(own.get("server_optimizer", "sgd")), {})
        usual = {f"server_{name}": value for name, value in server.items()}
        return usual | {key: value for key, value in protocol.items() if key in cls.model_fields} | own

    @property
    def method_name(self) -> str:
        """The method's canonical name."""
        return self.resolved_method.name

    @property
    def resolved_method(self) -> Method:
        return self.method if isinstance(self.method, Method) else methods.get(self.method)

    @property
    def folder_name(self) -> str:
        text = self.name or f"{self.method_name}-{Path(self.data).name}-seed{self.seed}"
        return re.sub(r"[^A-Za-z0-9.+=_-]+", "_", text).lstrip(".") or "run"

    @property
    def identity(self) -> str:
        """A fingerprint of everything that decides the result."""
        decisive = {key: value for key, value in self.to_dict().items() if key not in FREE}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what is not set is left out, since TOML has no null."""
        values = {key: getattr(self, key) for key in type(self).model_fields}
        if isinstance(self.method, Method):
            values["method"] = self.method.spelled or self.method.name
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if v is not None}

    def to_toml(self) -> str:
        return tomli_w.dumps(self.to_dict())

    @staticmethod
    def read(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Experiment:
        """From a TOML file and `key=value` words, which win. A `ValueError` says what is wrong in one sentence."""
        said = overridden(overrides)
        return Experiment(**_yielding({} if path is None else read_toml(Path(path)), said) | said)

    @staticmethod
    def of(values: Mapping[str, Any]) -> Experiment:
        """From a dictionary."""
        return Experiment(**values)


def _yielding(file: dict[str, Any], said: Mapping[str, Any]) -> dict[str, Any]:
    """The file without the method's parameters that words say: it may have them in the method's name, and words likewise."""
    there, instead = file.get("method"), said.get("method")
    if isinstance(instead, str):
        named = {
            key for part in parts_of(instead, methods.PARTS) for key in part.given
        } - Experiment.model_fields.keys()
        return {key: value for key, value in file.items() if key not in named}
    if isinstance(there, str) and (keys := said.keys() - Experiment.model_fields.keys()):
        return file | {"method": without(there, keys, methods.PARTS)}
    return file


def wanted_of(experiment: Experiment) -> datasets.DataOptions:
    """How the experiment asks for its data."""
    return datasets.DataOptions(
        experiment.data_root, experiment.allow_missing, experiment.classes, experiment.image_size
    )


def domains_of(experiment: Experiment) -> Domains:
    """The experiment's data set, read from where it lies."""
    return datasets.load_domains(experiment.data, wanted_of(experiment))


def build(experiment: Experiment, domains: Domains, device: torch.device) -> Federation:
    """The experiment's parts, put together on a device."""
    for domain in domains.domains:
        if not len(domain.test):
            raise ValueError(
                f"domain '{domain.name}' of '{experiment.data}' has no test examples to judge a model with"
            )
    check_method(experiment)
    clients = clients_of(experiment, domains)
    module = module_of(experiment, len(domains.classes)).to(device)
    if device.type == "cuda":
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    method = experiment.resolved_method
    if any(term.features for term in method.local) and not (hasattr(module, "features") and hasattr(module, "head")):
        raise ValueError(
            f"method '{method.name}' needs a model with `features` and `head`; '{experiment.model}' has none"
        )
    asked = {"momentum": experiment.momentum, "weight_decay": experiment.weight_decay} | dict(method.training)
    training = Training(
        experiment.lr,
        experiment.batch_size,
        experiment.epochs,
        experiment.steps,
        asked["momentum"],
        asked["weight_decay"],
        experiment.augment,
    )
    held = {c.id: _held_out(experiment, c) for c in clients}
    train = {c.id: _taken(domains[c.domain], held[c.id][0], device) for c in clients if takes_part(experiment, c)}
    _check_sizes(experiment, {c.domain: train[c.id] for c in clients if c.id in train}, device)
    if experiment.pool:
        train = {"pooled": Split(*(torch.cat([getattr(s, f) for s in train.values()]) for f in ("images", "labels")))}
    precision = precision_of(experiment.precision, device)
    _check_model(experiment, module, domains, train, training, precision)
    local_training = LocalTraining(
        module,
        Layout.of(module),
        training,
        experiment.seed,
        device,
        train,
        len(domains.classes),
        experiment.rounds,
        method.local,
        "loss" in method.aggregator.stage.needs,
        {c.id: _taken(domains[c.domain], held[c.id][1], device) for c in clients if experiment.validation},
        precision,
    )
    return Federation(
        local_training,
        tuple(train),
        replace(method.aggregator, on_bad_update=experiment.on_bad_update),
        server_of(experiment),
        {d.name: Split(d.test.images.to(device), d.test.labels.to(device)) for d in domains.domains},
        {c.id: c.domain for c in clients},
        local_training.validation,
        experiment.participation,
        experiment.dropout,
    )


def server_of(experiment: Experiment) -> Server:
    """The server's own step."""
    return Server(experiment.server_optimizer, experiment.server_lr, experiment.server_momentum)


def check_method(experiment: Experiment) -> None:
    """Refuse a method that the rest of the experiment leaves without what it needs, whatever the data."""
    method = experiment.resolved_method
    for term in method.local:
        if term.needs_plain_server:
            check_plain(server_of(experiment), term.needs_plain_server)
    if experiment.pool and method.personalised:
        raise ValueError(f"method '{method.name}' keeps a part of the model with each client: pool=true leaves none")
    if any(term.validates for term in method.local) and (not experiment.validation or experiment.pool):
        raise ValueError(
            f"method '{method.name}' needs examples held out of each client's training data: give validation=0.2"
        )


def _check_model(
    experiment: Experiment,
    module: nn.Module,
    domains: Domains,
    train: Mapping[str, Split],
    training: Training,
    precision: str,
) -> None:
    """Each shape of images through the model, as it is judged on them and, where clients train with them, trained."""
    check_model(module, experiment.model)
    features = any(term.features for term in experiment.resolved_method.local)
    device = next(module.parameters()).device
    splits = [*train.values(), *(domain.test for domain in reversed(domains.domains))]
    for shape, image in {split.images.shape[1:]: split.images[:1] for split in splits}.items():
        one, classes = normalise_images(image.to(device)), len(domains.classes)
        check_judges(module, experiment.model, one, classes)
        here = {client: len(split) for client, split in train.items() if split.images.shape[1:] == shape}
        single = next((client for client, size in here.items() if smallest_batch(size, training) == 1), None)
        if here:
            check_trains(module, experiment.model, one, classes, single, features, precision)


def takes_part(experiment: Experiment, client: Client) -> bool:
    """Whether a client trains, by `only` and `without`."""
    named = {client.id, client.domain}
    return (not experiment.only or bool(named & set(experiment.only))) and not named & set(experiment.without)


def _held_out(experiment: Experiment, client: Client) -> tuple[torch.Tensor, torch.Tensor]:
    """A client's examples for training and for validation; their order is random already."""
    number = round(experiment.validation * len(client.indices))
    if experiment.validation and not 0 < number < len(client.indices):
        raise ValueError(
            f"validation = {experiment.validation}: of the {len(client.indices)} examples of client '{client.id}' this "
            f"leaves {number} to validate and {len(client.indices) - number} to train with"
        )
    cut = len(client.indices) - number
    return client.indices[:cut], client.indices[cut:]


def clients_of(experiment: Experiment, domains: Domains) -> tuple[Client, ...]:
    """All clients of the experiment's split, whether they train or not."""
    names = [d.name for d in domains.domains]
    usual = dict(zip(names, domains.clients_per_domain, strict=True))
    sizes = {d.name: len(d.labels) for d in domains.domains}
    numbers = _chosen("clients_per_domain", experiment.clients_per_domain, usual)
    samples = {
        name: number or sizes[name] // numbers[name]
        for name, number in zip(names, domains.samples_per_client, strict=True)
    }
    clients = partition_samples(
        sizes,
        numbers,
        _chosen("samples_per_client", experiment.samples_per_client, _shares(experiment, domains, samples)),
        experiment.seed,
        {d.name: d.labels for d in domains.domains},
        experiment.dirichlet,
        experiment.class_filling,
    )
    known = {c.id for c in clients} | set(names)
    for key in ("only", "without"):
        unknown = sorted(set(getattr(experiment, key)) - known)
        if unknown:
            raise ValueError(
                f"{key} names '{unknown[0]}'{suggestion(unknown[0], sorted(known))}; the domains are {names}"
            )
    if not any(takes_part(experiment, c) for c in clients):
        raise ValueError(
            f"only = {list(experiment.only)} and without = {list(experiment.without)} leave no client to train"
        )
    return clients


def _chosen(field: str, said: int | dict[str, int] | None, usual: dict[str, int]) -> dict[str, int]:
    """A number for each domain: what was said, else the data set's own."""
    if not isinstance(said, dict):
        return {name: said or number for name, number in usual.items()}
    _refuse_unknown(field, said, usual)
    return usual | said


def _shares(experiment: Experiment, domains: Domains, usual: dict[str, int]) -> dict[str, int]:
    """Samples per client, where they were said as a fraction of the whole training set."""
    said = experiment.fraction
    if said is None:
        return usual
    if isinstance(said, dict):
        _refuse_unknown("fraction", said, usual)
    found = dict(usual)
    for domain in domains.domains:
        part = said.get(domain.name) if isinstance(said, dict) else said
        if part is not None:
            found[domain.name] = multiply_fraction(part, domain.nominal or len(domain.labels))
    return found


def _refuse_unknown(field: str, said: Mapping[str, Any], names: Mapping[str, Any]) -> None:
    for name in said:
        if name not in names:
            raise ValueError(f"{field} names '{name}'{suggestion(name, list(names))}; the domains are {list(names)}")


def per_domain(field: str, said: Any, kind: type[int] | type[float]) -> Any:
    """A number, or a table with one for each domain, also as the words `mnist=5 usps=3`.

    >>> per_domain("clients_per_domain", "mnist=5 usps=3", int)
    {'mnist': 5, 'usps': 3}
    """
    if isinstance(said, str):
        pairs = [word.partition("=") for word in said.replace(",", " ").split()]
        said = {name: override(f"x={value}")[1] for name, _, value in pairs} if pairs else said
    for number in said.values() if isinstance(said, dict) else [said]:
        fits = isinstance(number, int) if kind is int else isinstance(number, (int, float))
        if not fits or isinstance(number, bool) or not 0 < number <= (2**62 if kind is int else 1):
            wanted = "a number of 1 or more" if kind is int else "a fraction of at most 1"
            raise ValueError(f"{field} = {said!r}: {wanted} is needed, or such for domains, as 'mnist=5 usps=3'")
    return said


def _refuse_contradictions(own: Mapping[str, Any]) -> None:
    for one, other in (("samples_per_client", "fraction"), ("dirichlet", "class_filling")):
        if own.get(one) and own.get(other):
            raise ValueError(f"{one} = {own[one]} and {other} = {own[other]} exclude each other: give one of them")


def _check_sizes(experiment: Experiment, train: Mapping[str, Split], device: torch.device) -> None:
    """Images to train with may have several sizes in domains of one's own, where clients train one after the other."""
    sizes = {domain: " x ".join(map(str, split.images.shape[2:])) for domain, split in train.items()}
    if len(set(sizes.values())) <= 1:
        return
    listed = ", ".join(f"{domain} {size}" for domain, size in sizes.items())
    several = f"the images of '{experiment.data}' are of several sizes ({listed})"
    if experiment.pool:
        raise ValueError(f"{several} and cannot be pooled: bring them to one size")
    if device.type == "cuda" and experiment.engine != "serial":
        raise ValueError(f"{several}, which only engine=serial takes: give that, or bring them to one size")


def module_of(experiment: Experiment, classes: int) -> nn.Module:
    keys = {} if experiment.width is None else {"width": experiment.width}
    with seeded(derive(experiment.seed, "model"), torch.device("cpu")):
        return models.build(experiment.model, classes, **keys)


def _taken(domain: Domain, indices: torch.Tensor, device: torch.device) -> Split:
    split = domain.select(indices)
    return Split(split.images.to(device), split.labels.to(device))


def _unsaid(method: str, usual: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a data set's usual parameters of FedHEAL that the method's name does not say; others may share their names."""
    known = methods.parameters(method) if usual else {}
    own = {key for key in usual if key in known and isinstance(known[key], float)}
    return {key: usual[key] for key in own if not re.search(rf"[:,]\s*{key}\s*=", method)}


def _with_parameters(method: str, rest: Mapping[str, Any]) -> Method:
    """The method with what is left of the keys; a mistyped key may have meant a field or a parameter."""
    known = [*Experiment.model_fields, *methods.parameters(method)]
    for key in rest:
        if key not in methods.parameters(method):
            takes = ", ".join(methods.parameters(method)) or "none"
            raise ValueError(
                f"unknown field '{key}'{suggestion(key, known)}; the parameters of method '{method}' are: {takes}"
            )
    return methods.get(method, **rest)


def overridden(words: Sequence[str]) -> dict[str, Any]:
    """What `key=value` words say; a key that is given twice is refused."""
    given: dict[str, Any] = {}
    for word in words:
        key, value = override(word)
        if key in given:
            raise ValueError(f"'{key}' is given twice: {' and '.join(w for w in words if w.partition('=')[0] == key)}")
        given[key] = value
    return given


def override(word: str) -> tuple[str, Any]:
    """`key=value` as a pair, the value read as TOML where it is such, else as text.

    >>> override("tau=0.3"), override("method=fedprox:mu=0.1"), override("width=8")
    (('tau', 0.3), ('method', 'fedprox:mu=0.1'), ('width', 8))
    """
    key, equals, text = word.partition("=")
    if not equals or not key.isidentifier():
        raise ValueError(f"'{word}' should be key=value")
    try:
        value = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return key, text
    return key, value if key != "name" or isinstance(value, str) else text  # 5 and 2024-01-01 are names, too


def _sentence(error: ValidationError) -> str:
    """The first thing that is wrong: the field, the value, what would do."""
    first = error.errors()[0]
    if not first["loc"]:
        return str(first["msg"]).removeprefix("Value error, ")
    field = first["loc"][0]
    return f"{field} = {first['input']!r}: {str(first['msg'])[0].lower()}{str(first['msg'])[1:]}"
