"""The settings of a strategy, checked when it is made, and the checks of what its start is given."""

import inspect
import logging
from dataclasses import dataclass

from flwr.app import ConfigRecord
from torch import nn

from fedheal import methods
from fedheal.aggregate import Aggregator, reduce
from fedheal.aggregate.fedheal_stages import TAU
from fedheal.core.checks import (
    check_among,
    check_count,
    check_not_negative,
    check_share,
    check_switch,
    check_text,
    check_type,
)
from fedheal.core.layout import Layout
from fedheal.core.parameter import Parameter
from fedheal.federation.round_server import ServerSettings
from fedheal.flower.messages import check_dtypes
from fedheal.local.fedce import FedCE
from fedheal.local.scaffold import Scaffold
from fedheal.methods import Method
from fedheal.methods.uneven_controls import explain_uneven_controls

PLACEMENTS = ("server", "client")
log = logging.getLogger("flwr.fedheal")


@dataclass(frozen=True, kw_only=True)
class RoundSettings(ServerSettings):
    """How rounds are run and recorded; see `FairStrategy`."""

    placement: str
    tau: float | None  # afterwards None unless the clients mask
    roll_call: bool
    evaluate_every: int
    clients: int | None
    fraction_train: float
    fraction_evaluate: float
    min_train_nodes: int
    min_evaluate_nodes: int
    min_available_nodes: int
    wait_seconds: float
    save_seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_among("placement", self.placement, PLACEMENTS)
        object.__setattr__(self, "tau", resolve_tau(self.tau, self.clients_mask))
        check_switch("roll_call", self.roll_call)
        for name in ("fraction_train", "fraction_evaluate"):
            check_share(name, getattr(self, name))
        for name in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"):
            check_count(name, getattr(self, name))
        for name in ("wait_seconds", "save_seconds"):
            check_not_negative(name, getattr(self, name))
        Parameter("evaluate_every", 1, ge=1).check(self.evaluate_every)
        if self.clients is not None:
            Parameter("clients", 1, ge=1).check(self.clients)

    @property
    def clients_mask(self) -> bool:
        return self.placement == "client"


def resolve_tau(tau: float | None, clients_mask: bool) -> float | None:
    """Return the clients' threshold, None if they do not mask. Raise ValueError if a given one would have no effect."""
    if tau is not None:
        TAU.check(tau)
    if clients_mask:
        return TAU.default if tau is None else tau
    if tau is not None:
        remedy = f"name it with a method that has it, as in FairStrategy('fedheal:tau={tau}'), or leave it out"
        raise ValueError(f"tau = {tau!r} has no effect, since only placement = 'client' uses it: {remedy}")
    return None


def resolve_method(method: Aggregator | Method | str, name: str | None, clients_mask: bool) -> Method:
    """Return the whole method. Raise ValueError if it does not work in a federation with these settings."""
    given: object = method  # a caller may not check types
    if not isinstance(given, Aggregator | Method | str):
        remedy = (
            'use a name such as "fedheal:tau=0.4", a Method or an Aggregator; FairStrategy(method, fraction_train=0.5)'
        )
        raise ValueError(f"method = {method!r}: {remedy}")
    if name is not None:
        check_text("name", name)
    resolved = methods.get(method) if isinstance(method, str) else method
    if isinstance(resolved, Aggregator):
        resolved = Method((), resolved, name or "custom")
    # Clients that mask leave the server only the weights.
    if clients_mask and ("mask" in resolved.aggregator.stage.gives or resolved.aggregator.reduce is not reduce.mean):
        advice = "use fedheal.flower.FedHEAL(placement='client'), or a method that only gives weights"
        raise ValueError(
            f"placement = 'client' with '{resolved.name}', which has a mask or a mean of its own: {advice}"
        )
    for term in resolved.local:  # two of them need, on the server, what a federation's clients keep to themselves
        if isinstance(term, Scaffold) and term.fair_controls == "p":
            raise ValueError("fair_controls = 'p' needs every client's control variate on the server: use 'uniform'")
        if isinstance(term, FedCE):
            raise ValueError("fedce sends each client its own weight, which no broadcast can carry: simulate it")
    if problem := explain_uneven_controls(resolved):
        log.warning("%s: %s; leave that stage out, since clients keep their controls", resolved.name, problem)
    return resolved


def check_record_keys(weighted_by_key: object, arrayrecord_key: object, configrecord_key: object) -> None:
    """Raise ValueError unless the keys are texts, and the two records have keys of their own."""
    check_text("weighted_by_key", weighted_by_key)
    check_text("arrayrecord_key", arrayrecord_key)
    check_text("configrecord_key", configrecord_key)
    if arrayrecord_key == configrecord_key:
        remedy = "a message holds both records, so give each a key of its own"
        raise ValueError(f"arrayrecord_key and configrecord_key are both {arrayrecord_key!r}: {remedy}")


def check_metrics_function(name: str, value: object) -> None:
    """Raise ValueError unless the value is None or can be called with the replies and the key of their examples."""
    _check_function(name, value, "the list of replies and the key of their numbers of examples")


def check_configs(train_config: object, evaluate_config: object) -> None:
    """Raise TypeError that names a config which is neither None nor a ConfigRecord; a dict does as well."""
    for name, config in (("train_config", train_config), ("evaluate_config", evaluate_config)):
        check_type(name, config, ConfigRecord | dict | None, "give a ConfigRecord such as ConfigRecord({'lr': 0.1})")


def check_evaluate_function(value: object) -> None:
    """Raise ValueError unless the value is None or can be called with the number of a round and the model's arrays."""
    _check_function("evaluate_fn", value, "the number of the round and the model's ArrayRecord")


def _check_function(name: str, value: object, arguments: str) -> None:
    """Raise ValueError unless the value is None or can be called with two arguments."""
    if value is None:
        return
    is_usable = callable(value)
    try:
        inspect.signature(value).bind(None, None)  # type: ignore[arg-type]
    except TypeError:
        is_usable = False
    except ValueError:  # some functions written in C have no signature
        pass
    if not is_usable:
        raise ValueError(f"{name} = {value!r}: give a function of two arguments, {arguments}")


def resolve_layout(model: nn.Module | Layout | None) -> Layout | None:
    """Return the layout of a module. Raise ValueError if Flower's arrays cannot hold it."""
    if not isinstance(model, nn.Module | Layout | None):
        raise ValueError(f"model = {model!r}: use the module or its Layout, or leave it out")
    layout = Layout.of(model) if isinstance(model, nn.Module) else model
    if layout is not None:
        check_dtypes(layout)
    return layout
