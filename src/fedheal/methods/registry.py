"""The table of methods: a name stands for local training and server stages, never for a class of its own.

    <local>[:key=value,...]{+<stage>[:key=value,...]}[+<server>[:...]]      fedavg+fedheal:tau=0.4+fedadam

A stage or a server optimiser named alone is added to FedAvg: `fedheal` is short for `fedavg+fedheal`. A part may be a
function of your own, `package.module:function`.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fedheal.aggregate import Aggregator, Stage, chain
from fedheal.aggregate.presets import get_reducer
from fedheal.aggregate.registry import REPORTING, STAGES
from fedheal.aggregate.server_optimizer import SERVERS, Server
from fedheal.aggregate.whole.fedce import fedce_stage
from fedheal.aggregate.whole.fedfv import fedfv_stage
from fedheal.aggregate.whole.fedga import fedga_stage
from fedheal.aggregate.whole.fedism import FEDISM_BETA, FEDISM_Q, fedism_stage
from fedheal.aggregate.whole.fedpw import fedpw_stage
from fedheal.core.checks import check_type
from fedheal.core.errors import add_article
from fedheal.core.parameter import Parameter, declare_parameters, get_parameters
from fedheal.local.client_weights import FAIR_CONTROLS
from fedheal.local.ditto import Ditto
from fedheal.local.fccl import FCCL
from fedheal.local.fcclplus import FCCLPlus
from fedheal.local.fedbn import FedBN
from fedheal.local.fedce import FedCE
from fedheal.local.feddg import FedDG
from fedheal.local.feddyn import FEDDYN_ALPHA, FEDDYN_CLIP, FEDDYN_EVAL_MODEL, FedDyn
from fedheal.local.fedga import FedGA
from fedheal.local.fedism import FEDISM_ALPHA, FEDISM_RHO, FedISM
from fedheal.local.fedlesam import FedLESAM
from fedheal.local.fedproc import FedProc
from fedheal.local.fedproto import FedProto
from fedheal.local.fedprox import FEDPROX_MU, FedProx
from fedheal.local.fedsam import FedSAM
from fedheal.local.fpl import FPL
from fedheal.local.moon import Moon
from fedheal.local.scaffold import SCAFFOLD_CLIP, SCAFFOLD_ETA_G, SCAFFOLD_OPTION, Scaffold
from fedheal.local.term import Term
from fedheal.methods.grammar import Part, describe_unknown_parameter, parse_parts

CACHED_METHODS = 256
METHOD_REMEDY = "give a method's name, such as 'fedheal', or a Method, such as Method(aggregator=..., name='mine')"
PRESETS = ("ours", "group")
GROUP = "ours, or group: what the code of the FedHEAL paper's group amounts to"
PRESET = Parameter("preset", "ours", GROUP, "ours: the method as published", choices=PRESETS)


@dataclass(frozen=True)
class Local:
    """Local training, as terms that add up.

    Attributes:
        terms: The terms.
        uniform: Whether all clients count alike where no stage gives weights.
        aggregator: The aggregator of a whole method, which takes no stage.
        training: The fields of the experiment that the method sets, such as `momentum`.
        server: The server optimiser, if the method brings one.
    """

    terms: tuple[Term, ...] = ()
    uniform: bool = False
    aggregator: Aggregator | None = None
    training: Mapping[str, float] = field(default_factory=dict)
    server: Server | None = None


def _make_fedavg() -> Local:
    """McMahan et al. 2017: every client minimises its own loss from the global model."""
    return Local()


@declare_parameters(FEDPROX_MU, PRESET)
def _make_fedprox(mu: float = FEDPROX_MU.default, preset: str = PRESET.default) -> Local:
    """Li et al. 2020: CE + mu/2 |w - W|^2. preset=group: mu = 1e-4, the effective value of the paper's group's code."""
    if preset == "group":
        _check_default(FEDPROX_MU, mu)
    return Local((FedProx(1e-4 if preset == "group" else mu),))


@declare_parameters(SCAFFOLD_OPTION, SCAFFOLD_ETA_G, FAIR_CONTROLS, SCAFFOLD_CLIP, PRESET)
def _make_scaffold(
    option: int = SCAFFOLD_OPTION.default,
    eta_g: float = SCAFFOLD_ETA_G.default,
    fair_controls: str = FAIR_CONTROLS.default,
    clip: float = SCAFFOLD_CLIP.default,
    preset: str = PRESET.default,
) -> Local:
    """Karimireddy et al. 2020: control variates, aware of momentum. preset=group: no momentum, eta_g 0.25, clip 100."""
    if preset != "group":
        return Local((Scaffold(option, eta_g, fair_controls, clip),), uniform=True)
    _check_default(SCAFFOLD_ETA_G, eta_g)
    _check_default(SCAFFOLD_CLIP, clip)
    term = Scaffold(option, 0.25, fair_controls, 100.0)
    return Local((term,), uniform=True, training={"momentum": 0.0, "weight_decay": 0.0})


@declare_parameters(FEDDYN_ALPHA, FEDDYN_EVAL_MODEL, FAIR_CONTROLS, FEDDYN_CLIP, PRESET)
def _make_feddyn(
    alpha: float = FEDDYN_ALPHA.default,
    eval_model: str = FEDDYN_EVAL_MODEL.default,
    fair_controls: str = FAIR_CONTROLS.default,
    clip: float = FEDDYN_CLIP.default,
    preset: str = PRESET.default,
) -> Local:
    """Acar et al. 2021: dynamic regularisation. preset=group: FedAvg, to which the group's code amounts."""
    if preset == "group":
        _check_default(FEDDYN_ALPHA, alpha)
        return Local()
    return Local((FedDyn(alpha, eval_model, fair_controls, clip),), uniform=True)


@declare_parameters(FEDISM_RHO, FEDISM_ALPHA, FEDISM_Q, FEDISM_BETA)
def _make_fedism(
    rho: float = FEDISM_RHO.default,
    alpha: float = FEDISM_ALPHA.default,
    q: float = FEDISM_Q.default,
    beta: float = FEDISM_BETA.default,
) -> Local:
    """Wu et al. 2024: flat minima on clients, and weight to clients on whose data the model is sharp."""
    return Local((FedISM(rho, alpha),), aggregator=Aggregator(fedism_stage(q, beta)))


def _check_default(parameter: Parameter, value: Any) -> None:
    """Raise ValueError if a parameter that preset=group sets has another value than its default."""
    if value != parameter.default:
        raise ValueError(
            f"{parameter.name} = {value} cannot be combined with preset=group, which sets its own: leave one out"
        )


def _add_term(stage: Callable[..., Stage], term: Callable[[], Term]) -> Callable[..., Local]:
    """Return a constructor of a whole method: this term on the clients, this stage on the server."""

    @declare_parameters(*get_parameters(stage).values())
    @functools.wraps(stage)
    def make(*args: Any, **kwargs: Any) -> Local:
        return Local((term(),), aggregator=Aggregator(stage(*args, **kwargs)))

    return make


# Each row makes a Term, a Local, or (a whole method) a Stage. Parameters and description are those of the constructor.
LOCAL: dict[str, Callable[..., Local | Term]] = {
    "fedavg": _make_fedavg,
    "fedprox": _make_fedprox,
    "scaffold": _make_scaffold,
    "moon": Moon,
    "feddyn": _make_feddyn,
    "fedproc": FedProc,
    "fedproto": FedProto,
    "fccl": FCCL,
    "fcclplus": FCCLPlus,
    "feddg": FedDG,
    "fedsam": FedSAM,
    "fedlesam": FedLESAM,
}
# Whole methods, which no stage joins.
WHOLE: dict[str, Callable[..., Local | Term | Stage]] = {
    "fedfv": fedfv_stage,
    "ditto": Ditto,
    "fedbn": FedBN,
    "fpl": FPL,
    "fedce": _add_term(fedce_stage, FedCE),
    "fedga": _add_term(fedga_stage, FedGA),
    "fedpw": fedpw_stage,
    "fedism": _make_fedism,
}
PARTS: dict[str, Callable[..., Any]] = {**LOCAL, **WHOLE, **STAGES, **SERVERS}


@dataclass(frozen=True)
class Method:
    """A whole algorithm as a value. A run folder identifies it by its name: give a changed method another.

    Attributes:
        local: The terms of local training; none is plain training.
        aggregator: The aggregator; that of FedAvg by default.
        name: The canonical name, which leaves defaults out.
        training: The fields of the experiment that the method sets, such as `momentum`.
        server: The server optimiser; None leaves it to the experiment or the federation.
        parts: The parts of the name, if `get` made it; a changed copy has none.
    """

    local: tuple[Term, ...] = ()
    aggregator: Aggregator = field(default_factory=lambda: Aggregator(chain()))
    name: str = "custom"
    training: Mapping[str, float] = field(default_factory=dict)
    server: Server | None = None
    parts: tuple[Part, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_type("local", self.local, tuple | list, "give a tuple of terms, such as (term,)")
        for i, term in enumerate(self.local):
            if isinstance(term, type):
                raise TypeError(f"local[{i}] is the class {term.__name__}: give an instance of it")
            check_type(f"local[{i}]", term, Term, "give an instance of a Term")
        object.__setattr__(self, "local", tuple(self.local))
        check_type("aggregator", self.aggregator, Aggregator, "give an Aggregator, such as Aggregator(stage)")
        check_type("name", self.name, str, "give the method's name as a string")
        if not self.name.strip() or not self.name.isprintable():
            raise ValueError(f"name = {self.name!r}: give the method a name of printable characters")
        check_type("server", self.server, Server | None, "give a Server, such as Server('adam')")

    @property
    def full_name(self) -> str:
        """The name with every parameter; `name` itself if `get` did not make the method."""
        return "+".join(part.format(defaults=True) for part in self.parts) or self.name

    @property
    def parameters(self) -> dict[str, Any]:
        """The values of all parameters by name."""
        return {key: value for part in self.parts for key, value in part.values.items()}

    @property
    def personalised(self) -> bool:
        return any(term.personalised for term in self.local)

    @property
    def is_custom(self) -> bool:
        """Whether the name alone does not define it: a user made it, or a part of it by import path."""
        return not self.parts or any(part.is_custom for part in self.parts)


def get(name: str, **keys: Any) -> Method:
    """Return the method of that name.

    Args:
        name: `<local>[:key=value,...]{+<stage>[:key=value,...]}[+<server>[:key=value,...]]`.
        **keys: Parameters, each for the part that has it.

    Raises:
        TypeError: If the name is no string.
        ValueError: If there is no such method or parameter, or if parts or values contradict each other.

    >>> get("fedheal", tau=0.4).name
    'fedavg+fedheal:tau=0.4'
    >>> get("fael+fphl").name
    'fedavg+fedheal'
    """
    check_type("name", name, str, "give a method's name, such as 'fedheal' or 'fedprox:mu=0.1+fedheal'")
    if not keys and name in _CACHE:
        return _CACHE[name]
    parts = _merge_fedheal(parse(name), name)
    for key, value in keys.items():
        parts = _set_key(parts, key, value, name)
    built = [_name_stage(part, part.build()) for part in parts]
    parts, built, server_parts, servers = _split_servers(parts, built)
    if not built or (isinstance(built[0], Stage) and parts[0].name not in WHOLE):
        parts, built = [Part("fedavg", _make_fedavg), *parts], [Local(), *built]
    local, stages = _to_local(parts[0], built[0]), built[1:]
    for part, stage in zip(parts[1:], stages, strict=True):
        if not isinstance(stage, Stage) or part.name in WHOLE:
            raise ValueError(f"method '{name}': '{part.name}' is not a stage: name one local method, then stages")
    if stages and (local.aggregator or parts[0].name in WHOLE):
        raise ValueError(f"method '{name}': {parts[0].name} is a whole method and takes no stage: leave out the rest")
    if local.server is not None:
        servers = [local.server, *servers]
    if len(servers) > 1:
        raise ValueError(f"method '{name}' has two server optimisers, but only one can move the model: leave one out")
    aggregator = local.aggregator or _make_aggregator(parts[1:], stages, local.uniform, name)
    parts = [*parts, *server_parts]
    short_name = "+".join(part.format(defaults=False) for part in parts)
    server = servers[0] if servers else None
    method = Method(local=local.terms, aggregator=aggregator, name=short_name, training=local.training, server=server)
    object.__setattr__(method, "parts", tuple(parts))
    if not method.is_custom:  # a user's module may change
        _CACHE[method.full_name] = method
        if len(_CACHE) > CACHED_METHODS:
            del _CACHE[next(iter(_CACHE))]
    return method


_CACHE: dict[str, Method] = {}  # by full name, which is what an experiment keeps: a run parses its method's name once


def parse(name: str) -> list[Part]:
    """Return the parts of a method's name as they are written.

    Args:
        name: The method's name.
    """
    return parse_parts(name, PARTS)


def is_known(name: str) -> bool:
    """Return whether `get` has a method of that name.

    Args:
        name: The method's name.
    """
    try:
        get(name)
    except ValueError:
        return False
    return True


def names() -> list[str]:
    """Return every local method, alone and with every stage that changes it, and then the whole methods.

    Any of them may be followed by a server optimiser, such as `+fedadam` (`SERVERS`).
    """
    stages = [stage for stage in STAGES if stage not in REPORTING]
    return [*(name for local in LOCAL for name in (local, *(f"{local}+{stage}" for stage in stages))), *WHOLE]


def _split_servers(parts: list[Part], built: list[Any]) -> tuple[list[Part], list[Any], list[Part], list[Server]]:
    """Return the parts of a method without its server optimisers, what they make, and the same of the server optimisers."""
    pairs = list(zip(parts, built, strict=True))
    servers = [(part, made) for part, made in pairs if isinstance(made, Server)]
    others = [(part, made) for part, made in pairs if not isinstance(made, Server)]
    return [p for p, _ in others], [m for _, m in others], [p for p, _ in servers], [m for _, m in servers]


def _name_stage(part: Part, built: Any) -> Any:
    """Return what a part makes; a user's own stage is called by its import path in errors."""
    if isinstance(built, Aggregator) and part.is_custom:
        return replace(built, stage=_name_stage(part, built.stage))
    return replace(built, name=part.name) if isinstance(built, Stage) and part.is_custom else built


def _to_local(part: Part, built: Any) -> Local:
    """Return what the first part makes as a `Local`."""
    match built:
        case Local():
            return built
        case Aggregator():
            return Local(aggregator=built)
        case Stage():
            return Local(aggregator=Aggregator(built))
        case Term():
            return Local((built,))
        case Method():
            return Local(built.local, aggregator=built.aggregator, training=built.training, server=built.server)
    expected = "a Stage, an Aggregator, a Term, a Local, a Server or a Method"
    raise ValueError(
        f"the method's function {part.name!r} returned {add_article(type(built).__name__)}, not {expected}"
    )


def _make_aggregator(parts: list[Part], stages: list[Stage], uniform: bool, name: str) -> Aggregator:
    variants = {part.values["variant"] for part in parts if "variant" in part.parameters and not part.is_custom}
    if len(variants) > 1:
        raise ValueError(f"method '{name}': its parts follow different variants {sorted(variants)}; give both the same")
    try:
        stage = chain(*stages)
    except ValueError as error:
        raise ValueError(f"method '{name}': {error}") from None
    if "running" in stage.gives and "released" in variants:
        moved = "variant=released moves running statistics like parameters"
        raise ValueError(f"method '{name}': {moved}, so total-variance has no effect: leave one out")
    if uniform and "weights" not in stage.gives:
        stage = chain(stage, STAGES["uniform"]())
    return Aggregator(stage, get_reducer(variants.pop() if variants else "paper"))


def _set_key(parts: list[Part], key: str, value: Any, name: str) -> list[Part]:
    """Return the parts, with the parameter set in the only part that has it."""
    owners = [i for i, part in enumerate(parts) if key in part.parameters]
    if not owners:
        known = {key for part in parts for key in part.parameters}
        raise ValueError(f"method '{name}' {describe_unknown_parameter(key, known)}")
    if len(owners) > 1:
        names = ", ".join(parts[i].name for i in owners)
        raise ValueError(f"parameter '{key}' belongs to several parts of '{name}' ({names}): write it behind one")
    (i,) = owners
    part = parts[i].set(key, str(value))
    before = parts[i].explicit.get(key, part.explicit[key])
    if before is not part.explicit[key] and before != part.explicit[key]:  # NaN is not equal to itself
        raise ValueError(f"{key} = {part.explicit[key]} contradicts '{name}', which says {key} = {before}")
    return [*parts[:i], part, *parts[i + 1 :]]


def _merge_fedheal(parts: list[Part], name: str) -> list[Part]:
    """Replace `fphl` and `fael` by `fedheal`, so that one method has one name."""
    explicit = {part.name: part.explicit for part in parts}
    if len(parts) != len(explicit):
        raise ValueError(f"method '{name}' names a part twice")
    if not {"fphl", "fael"} <= set(explicit):
        return parts
    mask, weights = explicit["fphl"], explicit["fael"]
    if mask.get("variant", "paper") != weights.get("variant", "paper"):
        raise ValueError(f"method '{name}': its parts follow different variants; give both the same")
    first = next(i for i, part in enumerate(parts) if part.name in ("fphl", "fael"))
    others = [part for part in parts if part.name not in ("fphl", "fael")]
    return [*others[:first], Part("fedheal", STAGES["fedheal"], {**mask, **weights}), *others[first:]]
