"""The rounds of an NVFLARE federation: what controller and aggregator share. They bring the messages."""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import nvflare
from nvflare.app_common.abstract.fl_model import FLModel
from torch import Tensor, nn

from fedheal import methods
from fedheal.aggregate.server_optimizer import Server
from fedheal.core.errors import add_article
from fedheal.core.import_path import import_function
from fedheal.core.layout import Layout, Packed
from fedheal.federation.model_arrays import infer_tensor_layout, match_bfloat16
from fedheal.federation.open_round import OpenRound
from fedheal.federation.replies import EvaluateReply, ReplyRequirements
from fedheal.federation.round_server import RoundServer, ServerSettings
from fedheal.federation.round_summary import summarise_evaluations
from fedheal.federation.run_folder import Framework, KnownClients, RunFolder, check_folder_settings
from fedheal.methods import Method
from fedheal.methods.server_step import resolve_server
from fedheal.nvflare.exchange import (
    CLIENT,
    EXAMPLES,
    SiteReply,
    read_site_evaluation,
    read_site_reply,
    state_dict_to_params,
)

log = logging.getLogger("fedheal.nvflare")
NVFLARE = Framework("nvflare", {"nvflare": nvflare.__version__}, KnownClients, log)


@dataclass(frozen=True, kw_only=True)
class FederationSettings(ServerSettings):
    """The settings that controller and aggregator share; see `FairController`."""

    method: str
    folder: str | None = None
    resume: bool = False
    server: Mapping[str, Any] | None = None
    max_examples: float = 1e9
    max_norm: float | str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_folder_settings(self.folder, self.resume)
        server: object = self.server  # a caller may not check types
        if not isinstance(server, Mapping | None):
            remedy = "use a dictionary such as {'optimizer': 'adam'}, which a job can carry"
            raise ValueError(f"server = {server!r}: {remedy}")
        method = self.resolve_method()
        self.resolve_server(method)
        self.to_requirements(method)

    def resolve_method(self) -> Method:
        """Return the method. Raise ValueError if it does not work here."""
        given: object = self.method
        if not isinstance(given, str):
            raise ValueError(f"method = {given!r}: use a name such as 'fedheal:tau=0.4', which a job can carry")
        method = methods.get(given)
        if method.local:
            stages = given.partition("+")[2] or "fedheal"
            remedy = f"use its server part, such as '{stages}', and train as you like; fedheal.flower runs local terms"
            raise ValueError(
                f"method = '{given}' has local terms, which fedheal.nvflare does not send to sites: {remedy}"
            )
        return method

    def resolve_server(self, method: Method) -> Server:
        """Return the server optimiser of the settings or of the method."""
        return resolve_server(method, None if self.server is None else Server(**self.server))

    def to_requirements(self, method: Method) -> ReplyRequirements:
        """Return what a reply must hold."""
        # Every site has a domain, if only its own name.
        needs = tuple(sorted(method.aggregator.stage.needs - {"domain"}))
        return ReplyRequirements(
            examples_key=EXAMPLES, max_examples=self.max_examples, max_norm=self.max_norm, needs=needs
        )


class SiteRounds(RoundServer[KnownClients, SiteReply, OpenRound]):
    """A federation's state and its rounds: `start`, then `ask`, `aggregate`, `evaluate`, `end_round`, and `finish`."""

    def __init__(self, settings: FederationSettings, num_rounds: int, module: nn.Module | None) -> None:
        self.module, self.method = module, settings.resolve_method()
        folder = None if settings.folder is None else RunFolder(Path(settings.folder), settings.resume, NVFLARE)
        super().__init__(
            name=self.method.name,
            aggregator=self.method.aggregator,
            server=settings.resolve_server(self.method),
            settings=settings,
            requirements=settings.to_requirements(self.method),
            read=read_site_reply,
            clients=KnownClients(),
            log=log,
            folder=folder,
            num_rounds=num_rounds,
        )

    def start(self, initial: Mapping[str, Tensor]) -> None:
        """Start from the folder's newest checkpoint, or else from the initial model, a `state_dict`."""
        layout = infer_tensor_layout(initial) if self.module is None else Layout.of(self.module)
        self.begin(layout, layout.pack(match_bfloat16(layout, initial)), self._describe_settings())

    def get_params(self) -> dict[str, Any]:
        """Return the model as arrays to send."""
        return state_dict_to_params(self.layout.unpack(self.state.model))

    def ask(self, sites: Sequence[str], num_connected: int) -> None:
        """Begin the next round, in which these sites are asked to train."""
        self.open_round(OpenRound(number=self.state.round + 1, asked=sorted(sites), num_connected=num_connected))

    def aggregate(self, results: Sequence[FLModel], failures: Mapping[str, str]) -> None:
        """Take the server step with the usable replies. `failures`: sites whose reply is an error, with its text."""
        current = self.current
        current.clock.end_phase("train")
        replies, size = self._name_replies(results), _count_bytes(self.state.model)
        repeated = {client: n for client, n in Counter(r.client for r in replies).items() if n > 1}
        problems = {**failures, **{client: f"it replied {n} times in this round" for client, n in repeated.items()}}
        cohort = self.build_cohort([reply for reply in replies if reply.client not in problems])
        num_clients = max(len({*self.clients.accepted, *cohort.replies}), 1)
        outcome = self.take_step(self.make_step(), cohort, num_clients)
        heard = {*failures, *(reply.client for reply in replies)}
        current.replied = len(heard - failures.keys())
        current.record_step(cohort, outcome, problems, sorted({*map(str, current.asked)} - heard))
        current.log_problems(log)
        self.clients.accepted |= dict.fromkeys(outcome.accepted, current.number)
        self.clients.client_domains |= {client: cohort.replies[client].domain for client in outcome.accepted}
        self.count_bytes(size * len(current.asked), size * len(replies))
        current.clock.end_phase("aggregate")

    def read_accuracies(self, results: Sequence[FLModel]) -> tuple[list[EvaluateReply], dict[str, str]]:
        """Return the usable evaluations in these replies, and the sites whose evaluation is not, with the reason."""
        replies, most = self._name_replies(results), self.requirements.max_examples
        return self.read_evaluations(replies, lambda reply: read_site_evaluation(reply, most))

    def evaluate(self, asked: Sequence[str], results: Sequence[FLModel], failures: Mapping[str, str]) -> None:
        """Record the asked sites' accuracies of the new model."""
        evaluations, problems = self.read_accuracies(results)
        answered = {evaluation.client for evaluation in evaluations} | failures.keys() | problems.keys()
        self.record_evaluations(evaluations, {**failures, **problems}, sorted(set(asked) - answered))

    def amend_last_round(self, evaluations: Sequence[EvaluateReply]) -> None:
        """Add accuracies to the last round's record: sites evaluate its model when the next round begins."""
        if not self.history or not evaluations:
            return
        last, domains = self.history[-1], self.clients.client_domains
        clients = {*last.weights, *(evaluation.client for evaluation in evaluations)}
        client_domains = {client: domains[client] for client in sorted(clients & domains.keys())}
        update = {"client_domains": client_domains, **summarise_evaluations(evaluations)}
        assert isinstance(self.history, list)  # here records change after their round
        self.history[-1] = last.model_copy(update=update)
        if self.folder is not None:
            self.folder.replace_last_round(self.history[-1])

    def _name_replies(self, results: Sequence[FLModel]) -> list[SiteReply]:
        named = [(str((result.meta or {}).get(CLIENT, "")), result) for result in results]
        return [SiteReply(client, result, self.state.model) for client, result in named if client]

    def _describe_settings(self) -> dict[str, Any]:
        """Return what `federation.toml` holds."""
        values = asdict(self.settings) | {
            "framework": "nvflare",
            "rounds": self.num_rounds,
            "server": asdict(self.server),
        }
        values |= {"method": self.method.name, "algorithm": self.method.full_name}
        hidden = ("folder", "resume")
        return {key: value for key, value in values.items() if value is not None and key not in hidden}


def resolve_module(path: str | None) -> nn.Module | None:
    """Return the module that the function of this path makes, None without one. Raise ValueError if it makes none."""
    if path is None:
        return None
    if not isinstance(path, str) or ":" not in path:
        raise ValueError(f"model = {path!r}: use 'module:function', where the function makes the model")
    make: Callable[[], Any] = import_function("model", path)
    module = make()
    if not isinstance(module, nn.Module):
        raise ValueError(f"model = '{path}' makes {add_article(type(module).__name__)}: it must make a torch module")
    return module


def _count_bytes(model: Packed) -> int:
    return sum(vector.nbytes for vector in (model.params, model.buffers, model.counters))
