"""The description of a run: validated, and read from and written to TOML."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from fedheal import data as datasets
from fedheal import methods
from fedheal.aggregate.server_optimizer import BETA2, EPS, SERVER_DEFAULTS
from fedheal.core.errors import describe_allowed, name_value, suggest
from fedheal.core.nested_text import parse_toml
from fedheal.core.parameter import LARGEST
from fedheal.core.rng import SEED_FIELDS, SOURCES
from fedheal.data.on_disk import FOLDER_PREFIX
from fedheal.data.partition import Skew
from fedheal.engine.local_optimizer import DECAYS
from fedheal.methods import Method
from fedheal.methods.registry import METHOD_REMEDY
from fedheal.runs.folder import read_toml
from fedheal.runs.schema import FREE, LATER_SETTINGS
from fedheal.simulate.objects import DataObject, ModelObject, wrap_objects

RUN_NAME_LENGTH = 120
SERVER_FIELDS = {f"server_{name}": name for name in ("optimizer", "lr", "momentum", "beta2", "eps")}
# Fields that may have one value for each domain.
PER_DOMAIN: dict[str, type] = {"clients_per_domain": int, "samples_per_client": int, "fraction": float}
PER_DOMAIN_WORD = re.compile(r"\S.*?=\S+(?=\s|$)|\S.*")  # `night scan=5`, or what is none
# Fields that have an effect only with some values of another field.
USED_WITH = {
    "lr_decay": ("lr_schedule", ("step", "exponential")),
    "lr_decay_every": ("lr_schedule", ("step",)),
    "server_beta2": ("server_optimizer", ("adam", "yogi")),
    "server_eps": ("server_optimizer", ("adam", "yogi", "adagrad")),
}


class Experiment(BaseModel):
    """A complete description of a run. Keys that are not fields are parameters of the method: `Experiment(tau=0.4)`.

    `data` and `model` are names or objects. `data` may be a `Domains` or a function that returns one. `model` may be a
    module, whose values every run starts from whatever the seed, or a function `(num_classes[, input_shape])` that
    builds one, seeded. For objects the fields `data` and `model` hold descriptions, `name@fingerprint`.

    >>> Experiment(method="fedheal", tau=0.4, rounds=3).method_name
    'fedavg+fedheal:tau=0.4'
    """

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True, allow_inf_nan=False)

    name: str = ""
    method: str | Method = "fedheal"
    data: str = "embedded"
    model: str = "resnet10"
    width: int | None = Field(None, ge=1)
    weights: str | None = None  # a safetensors file of the model's initial values
    rounds: int = Field(200, ge=1, le=1_000_000)
    seed: int = Field(0, ge=0, lt=2**63)
    split_seed: int | None = Field(None, ge=0, lt=2**63)  # each instead of `seed`
    init_seed: int | None = Field(None, ge=0, lt=2**63)
    batch_seed: int | None = Field(None, ge=0, lt=2**63)
    data_root: str | None = None  # the data directory, if not that of FEDHEAL_DATA
    allow_missing: bool = False  # leave out the domains that are not on disk
    classes: Literal["intersection", "union"] = "intersection"  # of the domains' folders, where no list is fixed
    image_size: int | None = Field(None, ge=8, le=1024)  # instead of the data set's own
    clients_per_domain: int | dict[str, int] | None = None  # a number, or one for each domain
    samples_per_client: int | dict[str, int] | None = None
    fraction: float | dict[str, float] | None = None  # of the whole training set, that each client holds
    dirichlet: float | None = Field(None, gt=0, le=1e6)  # label skew within a domain: the smaller, the stronger
    pathological: int | None = Field(None, ge=1)  # label skew within a domain: classes that each client holds
    quantity: float | None = Field(None, gt=0, le=1e6)  # skew of the clients' sizes: the smaller, the stronger
    class_filling: bool = False  # every client gets every class, as in the code released with the paper
    only: tuple[str, ...] = ()  # these domains or clients train, no others
    without: tuple[str, ...] = ()  # these do not; the model is still evaluated on their domains
    pool: bool = False  # one client that holds the data of all that train
    validation: float = Field(0.0, ge=0, lt=1)  # share of each client's training data that it holds out
    public: str | None = None  # the data set of the public images; if not given, training images that no client holds
    participation: float = Field(1.0, gt=0, le=1)
    dropout: float = Field(0.0, ge=0, lt=1)
    epochs: int = Field(10, ge=1)
    steps: int | None = Field(None, ge=1)
    batch_size: int = Field(64, ge=1, le=2**31)
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    lr: float = Field(0.001, gt=0, le=LARGEST)
    lr_schedule: Literal["constant", "cosine", "step", "exponential"] = "constant"  # over the rounds
    lr_decay: float | None = Field(None, gt=0, le=1)  # the factor of step and exponential
    lr_decay_every: int | None = Field(None, ge=1)  # rounds from one decay of step to the next
    warmup_rounds: int = Field(0, ge=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(1e-5, ge=0, le=1e6)  # AdamW multiplies it by lr, and torch raises beyond float32
    augment: Literal["none", "crop", "flip", "crop-flip"] = "none"
    server_optimizer: Literal["sgd", "adam", "yogi", "adagrad"] = "sgd"
    server_lr: float = Field(1.0, gt=0, le=LARGEST)
    server_momentum: float = Field(0.0, ge=0, lt=1)
    server_beta2: float = Field(BETA2.default, ge=0, lt=1)  # of adam and yogi
    server_eps: float = Field(EPS.default, gt=0, le=LARGEST)  # of adam, yogi and adagrad
    evaluate: Literal["all", "unseen"] = "all"  # unseen: each domain with a model that was trained without it
    eval_every: int = Field(1, ge=1)
    on_bad_update: Literal["raise", "skip"] = "raise"
    device: str = "auto"
    precision: Literal["auto", "fp32", "tf32", "bf16"] = "auto"  # tf32 on a GPU, fp32 elsewhere
    deterministic: bool = False  # the same bits again on a GPU, at the cost of speed
    engine: Literal["auto", "serial", "lanes", "cohort", "ray"] = "auto"
    ray_address: str | None = None  # of the cluster that engine=ray uses
    lanes: int | None = Field(None, ge=1)  # clients trained side by side; chosen by the size of batches
    threads: int = Field(1, ge=1, le=4096)
    workers: int = Field(1, ge=0)  # 0: as many as a Ray cluster has room for
    save_seconds: float = Field(60.0, ge=0)

    _objects: dict[str, DataObject | ModelObject] = PrivateAttr(default_factory=dict)

    def __init__(self, *positional: Any, **values: Any) -> None:
        """Validate; raise ValueError with one sentence about the first problem."""
        if positional:
            raise TypeError("Experiment takes its fields by name, such as Experiment(method='fedheal', rounds=10)")
        if not _is_description_of_run(values):  # which has the epochs that its steps replaced
            check_epochs_or_steps(values)
        objects = wrap_objects(values)
        try:
            super().__init__(**values | {key: given.description for key, given in objects.items()})
        except ValidationError as error:
            raise ValueError(_describe_error(error)) from None
        self._objects = objects

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Give the method its parameters, and take what is not set from the data set's protocol."""
        if not isinstance(values, dict):
            return values
        fields = {key: value for key, value in values.items() if key in cls.model_fields}
        parameters = {key: value for key, value in values.items() if key not in cls.model_fields}
        for key, value in fields.items():
            if isinstance(value, bool) and (wanted := _describe_kind(cls.model_fields[key].annotation)):
                raise ValueError(f"{key} = {value}: use {wanted}")  # pydantic takes True for 1
        for key in ("only", "without"):
            if isinstance(fields.get(key), str):
                names = tuple(name.strip() for name in fields[key].split(","))
                if not all(names):
                    remedy = "leave out the comma" if any(names) else "name a domain or client, or leave it out"
                    raise ValueError(f"{key} = {fields[key]!r} has an empty name: {remedy}")
                fields[key] = names
        for key, kind in PER_DOMAIN.items():
            if fields.get(key) is not None:
                fields[key] = parse_per_domain(key, fields[key], kind)
        samples, fraction = fields.get("samples_per_client"), fields.get("fraction")
        if samples and fraction:
            both = f"samples_per_client = {samples} and fraction = {fraction}"
            raise ValueError(f"{both} exclude each other: give one of them")
        fields |= _make_paths_absolute(fields)
        protocol = datasets.get_protocol(str(fields.get("data", "embedded")))
        if "epochs" in fields:
            protocol.pop("steps", None)  # they would win
        method = fields.get("method", cls.model_fields["method"].default)
        if isinstance(method, str):
            defaults = {key: protocol[key] for key in protocol.keys() - cls.model_fields.keys()}
            fields["method"] = _complete_method(method, defaults, parameters).full_name
        elif not isinstance(method, Method):
            raise ValueError(f"{name_value('method', method)}: {METHOD_REMEDY}")
        elif parameters:
            raise ValueError(_describe_field_beside_method(method, *next(iter(parameters.items()))))
        elif not method.parts and methods.is_known(method.name):
            raise ValueError(f"method '{method.name}' exists already: give yours another name")
        fields |= _take_server(fields)
        if fields.get("lr_decay") is None and str(fields.get("lr_schedule")) in DECAYS:
            fields["lr_decay"] = DECAYS[fields["lr_schedule"]]
        engine = fields.get("engine")
        if engine == "ray":
            fields.setdefault("workers", 0)
        elif fields.get("workers") == 0:
            raise ValueError(
                "workers = 0: use a number of at least 1; 0 is for engine=ray, as many as its cluster has room for"
            )
        elif fields.get("ray_address") is not None:
            raise ValueError(f"ray_address = {fields['ray_address']!r} needs engine=ray: give both, or neither")
        server = SERVER_DEFAULTS.get(str(fields.get("server_optimizer", "sgd")), {})
        defaults = {f"server_{name}": value for name, value in server.items()}
        return defaults | {key: value for key, value in protocol.items() if key in cls.model_fields} | fields

    @model_validator(mode="after")
    def _check_skew(self) -> Experiment:
        assert self.skew  # raises if fields exclude each other
        return self

    @property
    def skew(self) -> Skew:
        """How the clients of a domain differ in labels and size."""
        return Skew(self.dirichlet, self.pathological, self.quantity, self.class_filling)

    @model_validator(mode="after")
    def _check_combinations(self) -> Experiment:
        """Raise ValueError if a field has no effect with the others, or needs another."""
        if self.evaluate == "unseen" and self.only:
            raise ValueError(
                f"only = {list(self.only)} cannot be combined with evaluate=unseen: all domains but one train"
            )
        for field, (chosen_by, kinds) in USED_WITH.items():
            choice, value = getattr(self, chosen_by), getattr(self, field)
            if value != Experiment.model_fields[field].default and choice not in kinds:
                used = " or ".join(kinds)
                raise ValueError(f"{field} = {value} is for {chosen_by}={used}, not for {chosen_by} = '{choice}'")
        if self.lr_schedule == "step" and self.lr_decay_every is None:
            raise ValueError("lr_schedule = 'step' needs the rounds from one decay to the next: give lr_decay_every=50")
        if self.warmup_rounds >= self.rounds:
            raise ValueError(f"warmup_rounds = {self.warmup_rounds}: use fewer than rounds = {self.rounds}")
        return self

    @property
    def data_object(self) -> DataObject | None:
        """The data, if they were given as an object."""
        return self._objects.get("data")  # type: ignore[return-value]

    @property
    def model_object(self) -> ModelObject | None:
        """The model, if it was given as an object."""
        return self._objects.get("model")  # type: ignore[return-value]

    @property
    def method_name(self) -> str:
        """The method's canonical name."""
        return self.resolved_method.name

    @property
    def resolved_method(self) -> Method:
        """The method itself. `methods.get` keeps it, so that a run parses the name once."""
        return self.method if isinstance(self.method, Method) else methods.get(self.method)

    @property
    def folder_name(self) -> str:
        """The name of the run's folder among runs of the same settings: method, data and seeds."""
        return make_folder_name(self.name or f"{self.method_name}-{Path(self.data).name}-{self.seed_name}")

    @property
    def seed_name(self) -> str:
        """The seeds that are set, as part of a name.

        >>> Experiment(seed=1).seed_name, Experiment(split_seed=3, init_seed=0).seed_name
        ('seed1', 'seed0-split3-init0')
        """
        own = {source: getattr(self, f"{source}_seed") for source in SOURCES}
        return "-".join([f"seed{self.seed}", *(f"{source}{seed}" for source, seed in own.items() if seed is not None)])

    def get_seed(self, source: str) -> int:
        """Return the seed of a source of chance, `split`, `init` or `batch`: its own if that is set, else `seed`."""
        own: int | None = getattr(self, f"{source}_seed")
        return self.seed if own is None else own

    @property
    def run_name(self) -> str:
        """The name of the run's folder among any runs: `folder_name`, then what differs from the data set's protocol.

        >>> Experiment(method="fedavg", lr=0.02).run_name, Experiment(method="fedavg").run_name
        ('fedavg-embedded-seed0_lr=0.02', 'fedavg-embedded-seed0')
        """
        if self.name:
            return self.folder_name
        usual = Experiment(method=self.method, data=self.data)
        in_name = FREE | {"seed", *SEED_FIELDS}
        fields = [key for key, value in self if key not in in_name and value != getattr(usual, key)]
        words = [f"{key}={format_value(getattr(self, key))}" for key in fields]
        if str(self.data).startswith(FOLDER_PREFIX):  # other folders may have the same last name
            words.insert(0, f"folder={hashlib.sha256(self.data.encode()).hexdigest()[:6]}")
        return make_folder_name("_".join([self.folder_name, *words]), RUN_NAME_LENGTH)

    @property
    def identity(self) -> str:
        """A hash of everything that can change the result."""
        fields = self.to_dict().items()
        decisive = {key: value for key, value in fields if key not in FREE and LATER_SETTINGS.get(key) != value}
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values without the fields that are not set, since TOML has no null."""
        values = {key: getattr(self, key) for key in type(self).model_fields}
        if isinstance(self.method, Method):
            values["method"] = self.method.full_name
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if v is not None}

    def to_toml(self) -> str:
        """Return the description as TOML, which `read` accepts."""
        return tomli_w.dumps(self.to_dict())

    @staticmethod
    def read(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Experiment:
        """Read a TOML file; `key=value` overrides win.

        Raises:
            ValueError: The file cannot be read, or the description is invalid.
        """
        changes = parse_overrides(overrides)
        values = {} if path is None else read_toml(Path(path))
        try:
            if not _is_description_of_run(values):
                check_epochs_or_steps(values)
            values = _drop_overridden(values, changes)
            return Experiment(**values | changes)
        except ValueError as error:
            if path is None or _is_valid(values):  # then the overrides are wrong
                raise
            raise ValueError(f"{path}: {error}") from None

    @staticmethod
    def of(values: Mapping[str, Any]) -> Experiment:
        """Make an experiment from a dictionary."""
        return Experiment(**values)


def make_folder_name(text: str, length: int = 250) -> str:
    """Return a text as the name of a folder; of one that is too long, the beginning and a hash.

    Letters and digits of any script stay, other characters become an underscore. A file system counts bytes.

    >>> make_folder_name("a/b: 实验"), make_folder_name("x" * 30, length=20)
    ('a_b_实验', 'xxxxxxxxxxx-666a596d')
    """
    name = re.sub(r"[^\w.+=-]+", "_", text).lstrip(".") or "run"
    if len(name.encode()) <= length:
        return name
    beginning = name.encode()[: length - 9].decode(errors="ignore")
    return f"{beginning}-{hashlib.sha256(text.encode(errors='surrogatepass')).hexdigest()[:8]}"


def format_value(value: Any) -> str:
    """Return a field's value as it is written on a command line.

    >>> format_value(True), format_value(("plain", "noisy")), format_value({"mnist": 5, "usps": 3}), format_value(0.02)
    ('true', 'plain,noisy', 'mnist=5,usps=3', '0.02')
    """
    if isinstance(value, Mapping):
        return ",".join(f"{key}={number}" for key, number in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` words; refuse a key that is given twice."""
    values: dict[str, Any] = {}
    for word in words:
        key, value = parse_override(word)
        if key in values:
            raise ValueError(f"'{key}' is given twice: {' and '.join(w for w in words if w.partition('=')[0] == key)}")
        values[key] = value
    check_epochs_or_steps(values)
    return values


def check_epochs_or_steps(values: Mapping[str, Any]) -> None:
    """Raise ValueError if a user gives both, since steps replace epochs."""
    if "epochs" in values and values.get("steps") is not None:
        both = f"epochs = {values['epochs']} and steps = {values['steps']}"
        raise ValueError(f"{both} exclude each other: give one of them")


def _is_description_of_run(values: Mapping[str, Any]) -> bool:
    """Return whether a file's values are those that a run wrote: every field that is set, also by default."""
    always = {key for key, field in Experiment.model_fields.items() if field.default is not None}
    return values.keys() >= always - LATER_SETTINGS.keys()


def _is_valid(values: Mapping[str, Any]) -> bool:
    try:
        Experiment(**values)
    except ValueError:
        return False
    return True


def parse_override(word: str) -> tuple[str, Any]:
    """Parse `key=value`; the value is read as TOML if it is valid TOML, else as text.

    >>> parse_override("tau=0.3"), parse_override("method=fedprox:mu=0.1"), parse_override("width=8")
    (('tau', 0.3), ('method', 'fedprox:mu=0.1'), ('width', 8))
    """
    key, equals, text = word.partition("=")
    if not equals or not key.isidentifier():
        raise ValueError(f"'{word}' should be key=value")
    try:
        value = parse_toml(f"x = {text}")["x"]
    except ValueError:
        return key, text
    return key, value if key != "name" or isinstance(value, str) else text  # 5 and 2024-01-01 are names, too


def parse_per_domain(field: str, value: Any, kind: type) -> Any:
    """Check a number, or one number per domain, which may also be given as words: `mnist=5 usps=3` or `mnist=5,usps=3`.

    >>> parse_per_domain("clients_per_domain", "night scan=5, sketch=3", int)
    {'night scan': 5, 'sketch': 3}
    """
    given = value
    if isinstance(value, str) and value.strip(" ,"):
        words = [word for piece in value.split(",") for word in PER_DOMAIN_WORD.findall(piece)]
        pairs = [word.rpartition("=") for word in words]
        value = {name.strip(): parse_override(f"x={number}")[1] for name, _, number in pairs}
        if len(value) < len(pairs) or any(re.search(r"\s=|=\s", name) for name in value):
            value = given  # a domain twice, or `a = 2 b = 3`, which has no comma
    for name, number in value.items() if isinstance(value, dict) else [(field, value)]:
        is_number = isinstance(number, int) if kind is int else isinstance(number, (int, float))
        is_allowed = is_number and not isinstance(number, bool) and 0 < number <= (2**62 if kind is int else 1)
        if not is_allowed or not name:
            wanted, example = "a number of 1 or more", "mnist=5 usps=3"
            if kind is float:
                wanted, example = "a fraction of at most 1", "mnist=0.1 usps=0.2"
            raise ValueError(f"{field} = {given!r}: use {wanted}, or one per domain, as in '{example}'")
    return value


def _describe_kind(annotation: Any) -> str:
    """Return which values a field takes that is no switch and no choice, or an empty string.

    >>> _describe_kind(int | None), _describe_kind(float), _describe_kind(bool)
    ('a whole number', 'a number', '')
    """
    words = {int: "a whole number", float: "a number", str: "a string"}
    return next((word for kind, word in words.items() if kind in (annotation, *get_args(annotation))), "")


def _make_paths_absolute(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields that name files or folders with absolute paths, so that a run's description works from anywhere."""
    found = {}
    for key, prefix in (("data", FOLDER_PREFIX), ("public", FOLDER_PREFIX), ("data_root", ""), ("weights", "")):
        path = str(fields.get(key) or "")
        if path.startswith(prefix) and path != prefix:
            found[key] = prefix + os.path.abspath(os.path.expanduser(path.removeprefix(prefix)))
    return found


def _drop_overridden(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what belongs to an overridden method or schedule; a file may have a method's parameters in its name."""
    method, new_method = values.get("method"), changes.get("method")
    if "epochs" in changes:
        values = {key: value for key, value in values.items() if key != "steps"}  # they would win
    if "steps" in changes and not _is_description_of_run(values):
        values = {key: value for key, value in values.items() if key != "epochs"}
    if "lr_schedule" in changes:
        values = {key: value for key, value in values.items() if key not in ("lr_decay", "lr_decay_every")}
    if new_method is not None or changes.keys() - Experiment.model_fields.keys():
        names = [name for name in (method, new_method) if isinstance(name, str) and methods.is_known(name)]
        if any(methods.get(name).server for name in names):  # the file's fields are those of its method, or overridden
            values = {key: value for key, value in values.items() if key not in SERVER_FIELDS}
    if isinstance(new_method, str):
        parameters = {key for part in methods.parse(new_method) for key in part.explicit}
        parameters -= Experiment.model_fields.keys()
        return {key: value for key, value in values.items() if key not in parameters}
    if isinstance(method, str) and (keys := changes.keys() - Experiment.model_fields.keys()):
        return values | {"method": "+".join(part.unset(keys).format_explicit() for part in methods.parse(method))}
    return values


def _take_server(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the server optimiser of the method as fields. Raise ValueError if the fields say something else."""
    method = fields["method"]
    method = method if isinstance(method, Method) else methods.get(method)
    if method.server is None:
        return {}
    brought = {field: getattr(method.server, name) for field, name in SERVER_FIELDS.items()}
    for field, value in brought.items():
        if fields.get(field, value) != value:
            problem = f"{field} = {fields[field]} contradicts method '{method.name}', which brings {field} = {value}"
            raise ValueError(f"{problem}: leave it out, or give it in the method's name, as in fedadam:eta=0.1")
    return brought


def _complete_method(name: str, defaults: Mapping[str, Any], parameters: Mapping[str, Any]) -> Method:
    """Return the method with these parameters, and with the data set's defaults of FedHEAL that its name does not set."""
    method = methods.get(name)
    known = method.parameters
    for key in parameters:
        if key not in known and isinstance(parameters[key], Mapping):
            raise ValueError(f"unknown field '{key}': fields stand at the top level, without [{key}]")
        if key not in known:
            close = suggest(key, [*Experiment.model_fields, *known])
            takes = f"the parameters {', '.join(known)}" if known else "no parameters"
            raise ValueError(
                f"unknown field '{key}'{close}; method '{name}' has {takes}, and docs/reference.md lists fields"
            )
    explicit = {key for part in method.parts for key in part.explicit}
    # Other methods' parameters may share a name: FedFV's tau is a number of rounds.
    missing = {k: v for k, v in defaults.items() if isinstance(known.get(k), float) and k not in explicit}
    return methods.get(name, **missing | dict(parameters)) if missing or parameters else method


def _describe_field_beside_method(method: Method, key: str, value: Any) -> str:
    """Say that a key is no field, and where the parameters of a method that is given as a value are set."""
    advice = "a Method brings its own parameters: set them where you make it"
    if key in method.parameters:
        name = "+".join(part.unset([key]).format_explicit() for part in method.parts)
        advice += f", as in fedheal.methods.get({name!r}, {key}={value!r})"
    return f"unknown field '{key}'{suggest(key, list(Experiment.model_fields))}; {advice}"


def _describe_error(error: ValidationError) -> str:
    """Describe the first problem: the field, its value, and what is valid."""
    first = error.errors()[0]
    if not first["loc"]:
        return str(first["msg"]).removeprefix("Value error, ")
    return f"{first['loc'][0]} = {first['input']!r}: use {describe_allowed(first)}"
