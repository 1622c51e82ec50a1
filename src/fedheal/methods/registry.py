"""The table of methods: a name is local training and server stages, put together; never a class.

    <local>[:key=value,...]{+<stage>[:key=value,...]}         fedavg+fedheal:tau=0.4,variant=released

A stage alone is short for `fedavg+` it. Keys given beside a name go to the part that has them. Either part may be a
function of your own, `package.module:function`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from fedheal.aggregate import Aggregator, chain, presets
from fedheal.aggregate.presets import reducer
from fedheal.aggregate.registry import REPORTING, STAGES
from fedheal.aggregate.stage import Stage
from fedheal.aggregate.whole import fedce as contribution
from fedheal.aggregate.whole import fedga as adjustment
from fedheal.core.checks import check_not_negative, check_positive, check_switch
from fedheal.core.errors import suggestion
from fedheal.core.parameter import Parameter, described
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
from fedheal.local.term import Term
from fedheal.methods.grammar import Part, parts_of

PROTO_WEIGHTS = ("uniform", "count", "p")
Preset = Annotated[
    str,
    Parameter("ours, or group: what the code of the FedHEAL paper's group amounts to", "ours: the method as published"),
]
FairControls = Annotated[
    str, Parameter("what weighs the controls: uniform, or p, the average's weights", "the original rules")
]
ProtoWeights = Annotated[
    str,
    Parameter(
        "what averages prototypes: uniform, count (samples of the class) or p (the average's weights)",
        "released code of Tan et al. 2022, whose text says count; MarsFL",
    ),
]


@dataclass(frozen=True)
class Local:
    """Local training: its terms, who counts how much where no stage says, and what it asks of the optimiser."""

    terms: tuple[Term, ...] = ()
    uniform: bool = False
    aggregator: Aggregator | None = None  # a method of its own may bring one
    training: Mapping[str, float] = field(default_factory=dict)


def fedavg() -> Local:
    """McMahan et al. 2017: every client minimises its own loss from the global model."""
    return Local()


def fedprox(
    mu: Annotated[
        float,
        Parameter("pull towards the received model", "MarsFL and RethinkFL, nominal; Li et al. 2020 tune 0.001 to 1"),
    ] = 0.01,
    preset: Preset = "ours",
) -> Local:
    """Li et al. 2020: CE + mu/2 |w - W|^2. preset=group: mu = 1e-4, the effective value of the paper's group's code."""
    _preset(preset, mu=(mu, 0.01))
    check_not_negative("mu", mu)
    return Local((FedProx(1e-4 if preset == "group" else mu),))


def scaffold(
    option: Annotated[
        int,
        Parameter(
            "2: controls from the path taken; 1: from a full gradient", "Karimireddy et al. 2020; A_K for K: ours"
        ),
    ] = 2,
    eta_g: Annotated[float, Parameter("the server's step", "Karimireddy et al. 2020; MarsFL: 0.25")] = 1.0,
    fair_controls: FairControls = "uniform",
    clip: Annotated[
        float, Parameter("largest gradient norm; 0: none", "Karimireddy et al. 2020: none; MarsFL: 100")
    ] = 0.0,
    preset: Preset = "ours",
) -> Local:
    """Karimireddy et al. 2020: control variates, aware of momentum. preset=group: no momentum, eta_g 0.25, clip 100."""
    _choice("option", option, 1, 2)
    _choice("fair_controls", fair_controls, "uniform", "p")
    _preset(preset, eta_g=(eta_g, 1.0), clip=(clip, 0.0))
    check_not_negative("clip", clip)
    check_positive("eta_g", eta_g)
    if preset == "group":
        term = Scaffold(option, 0.25, fair_controls, 100.0)
        return Local((term,), uniform=True, training={"momentum": 0.0, "weight_decay": 0.0})
    return Local((Scaffold(option, eta_g, fair_controls, clip or None),), uniform=True)


def moon(
    mu: Annotated[
        float, Parameter("weight of the contrast", "Li, He and Song 2021, CIFAR-10 example; RethinkFL; MarsFL: 1")
    ] = 5.0,
    temperature: Annotated[float, Parameter("of the contrast", "Li, He and Song 2021; RethinkFL, MarsFL")] = 0.5,
) -> Local:
    """Li, He and Song 2021: features near the global net's, far from the client's previous net's."""
    check_not_negative("mu", mu)
    check_positive("temperature", temperature)
    return Local((Moon(mu, temperature),))


def feddyn(
    alpha: Annotated[
        float,
        Parameter("strength of the dynamic regulariser", "Acar et al. 2021, CIFAR-10 example (0.001 to 0.1); MarsFL"),
    ] = 0.01,
    eval_model: Annotated[
        str, Parameter("which model is judged: average or broadcast", "Acar et al. 2021, released code")
    ] = "average",
    fair_controls: FairControls = "uniform",
    clip: Annotated[float, Parameter("largest gradient norm; 0: none", "Acar et al. 2021, released code")] = 10.0,
    preset: Preset = "ours",
) -> Local:
    """Acar et al. 2021: dynamic regularisation. preset=group: FedAvg, to which the group's code amounts."""
    _choice("eval_model", eval_model, "average", "broadcast")
    _choice("fair_controls", fair_controls, "uniform", "p")
    _preset(preset, alpha=(alpha, 0.01))
    check_positive("alpha", alpha)
    check_not_negative("clip", clip)
    if preset == "group":
        return Local()
    return Local((FedDyn(alpha, eval_model, fair_controls, clip or None),), uniform=True)


def fedproc(
    temperature: Annotated[float, Parameter("of the contrast", "MarsFL, which has none")] = 1.0,
    first_round_ce: Annotated[
        bool, Parameter("train on cross-entropy until there are prototypes", "ours: published, nothing is learnt then")
    ] = True,
    proto_weights: ProtoWeights = "uniform",
) -> Local:
    """Mu et al. 2023: prototypical contrast that hands over to cross-entropy."""
    check_positive("temperature", temperature)
    check_switch("first_round_ce", first_round_ce)
    _choice("proto_weights", proto_weights, *PROTO_WEIGHTS)
    return Local((FedProc(proto_weights, temperature=temperature, first_round_ce=first_round_ce),))


def fedproto(
    lam: Annotated[
        float,
        Parameter("pull towards the prototypes", "Tan et al. 2022 for MNIST and FEMNIST; CIFAR-10: 0.1; MarsFL: 2"),
    ] = 1.0,
    proto_weights: ProtoWeights = "uniform",
) -> Local:
    """Tan et al. 2022, with a shared model: features pulled to the global class prototypes."""
    check_not_negative("lam", lam)
    _choice("proto_weights", proto_weights, *PROTO_WEIGHTS)
    return Local((FedProto(proto_weights, lam=lam),))


def ditto(
    lam: Annotated[
        float, Parameter("pull of the personal model towards the received one", "Li et al. 2021, released script")
    ] = 1.0,
    feedback: Annotated[
        bool,
        Parameter("broadcast the personal models' average", "ours: W stays FedAvg's; the FedHEAL paper leaves it open"),
    ] = False,
) -> Local:
    """Li et al. 2021: a personal model per client; their average is judged (feedback: and broadcast)."""
    check_not_negative("lam", lam)
    check_switch("feedback", feedback)
    return Local((Ditto(lam, feedback),))


def fedbn() -> Local:
    """Li et al. 2021: normalisation layers stay with the client (a personalised row)."""
    return Local((FedBN(),))


def fpl(
    temperature: Annotated[float, Parameter("of the contrast", "Huang et al. 2023, released code; MarsFL: 0.2")] = 0.02,
) -> Local:
    """Huang et al. 2023: cluster prototypes by FINCH for contrast, their mean for consistency."""
    check_positive("temperature", temperature)
    return Local((FPL(temperature=temperature),))


def fedga(
    s0: Annotated[float, Parameter("first step of the weights; it falls linearly", "Zhang et al. 2023")] = 0.2,
) -> Local:
    """Zhang et al. 2023: weight to clients whose validation loss rises most by averaging. Needs validation data."""
    return Local((FedGA(),), aggregator=Aggregator(adjustment.fedga(s0)))


def fedce(
    mode: Annotated[str, Parameter("times or plus: how both contributions combine", "Jiang et al. 2023")] = "times",
) -> Local:
    """Jiang et al. 2023: weight by estimated contribution. Needs validation data."""
    return Local((FedCE(),), aggregator=Aggregator(contribution.fedce(mode)))


def fedfv(
    alpha: Annotated[
        float,
        Parameter("share of the largest losses whose updates stay as they are", "Wang et al. 2021, released code"),
    ] = 0.1,
    tau: Annotated[
        int, Parameter("rounds whose absent clients' conflicts count", "Wang et al. 2021, released code")
    ] = 1,
) -> Local:
    """Wang et al. 2021: updates that conflict are projected off each other."""
    return Local(aggregator=presets.fedfv(alpha, tau))


def fedpw(
    beta: Annotated[
        float, Parameter("how fast weights follow loss and alignment", "Guan et al. 2025, released code")
    ] = 0.3,
    rho: Annotated[
        float, Parameter("mean share of entries dropped, and stressed", "Guan et al. 2025, released code")
    ] = 0.3,
) -> Local:
    """Guan et al. 2025, FedHEAL's successor: weights by loss and alignment, small entries dropped, agreed ones stressed."""
    return Local(aggregator=presets.fedpw(beta, rho))


LOCAL: dict[str, Callable[..., Local]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "scaffold": scaffold,
    "moon": moon,
    "feddyn": feddyn,
    "fedproc": fedproc,
    "fedproto": fedproto,
}
# Methods of their own, which no stage joins.
WHOLE: dict[str, Callable[..., Local]] = {
    "fedfv": fedfv,
    "ditto": ditto,
    "fedbn": fedbn,
    "fpl": fpl,
    "fedce": fedce,
    "fedga": fedga,
    "fedpw": fedpw,
}
PARTS: dict[str, Callable[..., Any]] = {**LOCAL, **WHOLE, **STAGES}


@dataclass(frozen=True)
class Method:
    """A whole algorithm as a value: the terms of local training, and the aggregator.

    `name` is canonical and leaves defaults out. One of your own needs a name of its own, and a changed
    one another: a run that is resumed knows it by its name.
    """

    local: tuple[Term, ...]
    aggregator: Aggregator
    name: str = "custom"
    training: Mapping[str, float] = field(default_factory=dict)  # what it asks of the optimiser
    spelled: str = field(default="", init=False)  # by `get` alone, with every parameter: a changed copy has none

    @property
    def personalised(self) -> bool:
        return any(term.personalised for term in self.local)

    @property
    def own(self) -> bool:
        """Whether its name says less than it does: somebody made it, or a part of it by import path."""
        return not self.spelled or any(part.own for part in parts_of(self.spelled, PARTS))


def get(name: str, **keys: Any) -> Method:
    """The method of that name, with these parameters.

    >>> get("fedheal", tau=0.4).name
    'fedavg+fedheal:tau=0.4'
    >>> get("fael+fphl").name
    'fedavg+fedheal'
    """
    local, *chosen = _parts(name)
    parts = [local, *_merged(chosen, name)]
    for key, value in keys.items():
        parts = _given(parts, key, value, name)
    local, *chosen = parts
    trained = _local(local)
    if chosen and (trained.aggregator or local.name in WHOLE):
        raise ValueError(f"method '{name}': {local.name} is a method of its own and takes no stage")
    try:
        stage = chain(*(part.made() for part in chosen))
    except ValueError as error:
        raise ValueError(f"method '{name}': {error}") from None
    variants = {part.given.get("variant", "paper") for part in chosen if "variant" in part.defaults and not part.own}
    if len(variants) > 1:
        raise ValueError(f"method '{name}': its parts follow different variants {sorted(variants)}; give both the same")
    if trained.uniform and "weights" not in stage.gives:
        stage = chain(stage, STAGES["uniform"]())
    aggregator = trained.aggregator or Aggregator(stage, reducer(*variants or {"paper"}))
    short, spelled = ("+".join(part.spelled(everything) for part in parts) for everything in (False, True))
    method = Method(trained.terms, aggregator, short, trained.training)
    object.__setattr__(method, "spelled", spelled)
    return method


def known(name: str) -> bool:
    """Whether `get` knows a method of that name."""
    try:
        get(name)
    except ValueError:
        return False
    return True


def names() -> list[str]:
    """Every local method, alone and with every stage that changes it; then the methods of their own."""
    stages = [stage for stage in STAGES if stage not in REPORTING]
    return [*(name for local in LOCAL for name in (local, *(f"{local}+{stage}" for stage in stages))), *WHOLE]


def explained(name: str) -> list[tuple[str, str, Any, Any, Parameter]]:
    """Part, parameter, value in this name, default, and what is said about it: for every parameter of a method.

    >>> [(part, key, value, default) for part, key, value, default, _ in explained("fedprox:mu=0.1+uniform")]
    [('fedprox', 'mu', 0.1, 0.01), ('fedprox', 'preset', 'ours', 'ours')]
    """
    return [
        (part.name, key, part.given[key], default, about)
        for part in parts_of(get(name).spelled, PARTS)
        for key, (default, about) in described(part.make, silent=part.own).items()
    ]


def parameters(name: str) -> dict[str, Any]:
    """The parameters that a method's parts take, with their values in this name."""
    return {key: value for part in parts_of(get(name).spelled, PARTS) for key, value in part.given.items()}


def _parts(name: str) -> list[Part]:
    """How clients train, then stages."""
    parts = parts_of(name, PARTS)
    if _is_stage(parts[0]):
        parts.insert(0, Part("fedavg", fedavg))
    for part in parts[1:]:
        if not _is_stage(part):
            raise ValueError(f"method '{name}': '{part.name}' is not a stage; only one part can say how clients train")
    return parts


def _is_stage(part: Part) -> bool:
    return isinstance(part.made(), Stage) if part.own else part.name in STAGES


def _local(part: Part) -> Local:
    """What the first part makes. A user's function may also return what such a `Local` would hold alone."""
    match part.made():
        case Local() as made:
            return made
        case Aggregator() as made:
            return Local(aggregator=made)
        case Term() as made:
            return Local((made,))
        case Method() as made:
            return Local(made.local, aggregator=made.aggregator, training=made.training)
        case made:
            raise ValueError(
                f"the method's function {part.name!r} returned a {type(made).__name__}, not a Stage, an Aggregator, "
                "a Term, a Local or a Method"
            )


def _given(parts: list[Part], key: str, value: Any, name: str) -> list[Part]:
    """The parts, with the parameter at the one that has it."""
    owners = [i for i, part in enumerate(parts) if key in part.defaults]
    if not owners:
        known = sorted({k for part in parts for k in part.defaults})
        has = f"it has {known}" if known else "it has no parameters"
        raise ValueError(f"method '{name}' has no parameter '{key}'{suggestion(key, known)}; {has}")
    if len(owners) > 1:
        named = ", ".join(parts[i].name for i in owners)
        raise ValueError(f"parameter '{key}' belongs to several parts of '{name}' ({named}): write it behind one")
    (i,) = owners
    taking = parts[i].taking(key, str(value))  # a list reads as no parameter does, and is refused like any such text
    if key in parts[i].given and parts[i].given[key] != taking.given[key]:
        raise ValueError(f"{key} = {taking.given[key]} contradicts '{name}', which says {key} = {parts[i].given[key]}")
    return [*parts[:i], taking, *parts[i + 1 :]]


def _merged(stages: list[Part], name: str) -> list[Part]:
    """`fphl+fael` is `fedheal`, whatever else is there: one name for one method."""
    by_name = {stage.name: stage.given for stage in stages}
    if len(stages) != len(by_name):
        raise ValueError(f"method '{name}' names a part twice")
    if not {"fphl", "fael"} <= set(by_name):
        return stages
    mask, weights = by_name["fphl"], by_name["fael"]
    if mask.get("variant", "paper") != weights.get("variant", "paper"):
        raise ValueError(f"method '{name}': its parts follow different variants; give both the same")
    first = next(i for i, part in enumerate(stages) if part.name in ("fphl", "fael"))
    others = [stage for stage in stages if stage.name not in ("fphl", "fael")]
    return [*others[:first], Part("fedheal", STAGES["fedheal"], {**mask, **weights}), *others[first:]]


def _preset(preset: str, **fixed: tuple[Any, Any]) -> None:
    """A preset brings these parameters itself: given beside it, another value is a contradiction."""
    _choice("preset", preset, "ours", "group")
    for name, (value, default) in fixed.items():
        if preset == "group" and value != default:
            raise ValueError(f"{name} = {value} contradicts preset=group, which brings its own {name}")


def _choice(name: str, value: Any, *choices: Any) -> None:
    if isinstance(value, bool) or value not in choices:
        raise ValueError(f"{name} = {value!r}: use one of {', '.join(map(repr, choices))}")
