"""A small NVFLARE federation for tests: the tiny data set's clients as sites in this process, without its network.

Not in `tests/nvflare`, which would be `nvflare` to an import.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask
from nvflare.apis.fl_constant import ReservedKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.app_common.workflows.fedavg import FedAvg
from torch import nn

from fedheal.data.domains import Split
from fedheal.engine.serial import SerialEngine
from fedheal.nvflare import FairController, FairModelAggregator
from fedheal.nvflare.client import evaluate_site, train_site
from fedheal.nvflare.exchange import params_to_state_dict, state_dict_to_params
from fedheal.simulate.federation import Federation
from fedheal.simulate.round import initial_state, run_rounds
from tiny_runs import make_federation as build

MODEL = "nvflare_sites:make_model"
Spoil = Callable[[str, str, FLModel], Any]  # (task, site, answer) -> what arrives instead; None: nothing


@cache
def get_federation(method: str = "fedheal", rounds: int = 3, only: tuple[str, ...] = ()) -> Federation:
    return build(method=method, rounds=rounds, model="tiny_data:flat_batchnorm", only=only)


def make_model() -> nn.Module:
    """Return the simulator's initial model."""
    return build(model="tiny_data:flat_batchnorm").local_training.module


def simulate(method: str = "fedheal", rounds: int = 3, only: tuple[str, ...] = ()) -> Any:
    """Return the simulator's last state and its records."""
    federation = build(method=method, rounds=rounds, model="tiny_data:flat_batchnorm", only=only)
    done = list(run_rounds(federation, initial_state(federation), SerialEngine(federation.local_training), rounds))
    return done[-1][0], [record for _, record in done]


def answer(task: str, site: str, received: FLModel, method: str = "fedheal", as_difference: bool = False) -> FLModel:
    """Return a site's reply as `ScriptRunner` converts it: numpy arrays, whole or as differences."""
    federation = get_federation(method)
    tensors = params_to_state_dict(received.params)
    received = FLModel(params=tensors, current_round=received.current_round, total_rounds=received.total_rounds)
    domain = federation.client_domains[site]
    if task == "validate":
        residents = sorted(name for name, home in federation.client_domains.items() if home == domain)
        share = slice(residents.index(site), None, len(residents))
        tests = federation.tests[domain]
        test = Split(tests.images[share], tests.labels[share])
        return evaluate_site(received, federation.local_training, test, domain=domain)
    reply = train_site(received, federation.local_training, site, domain=domain)
    if as_difference:
        reply.params = {name: reply.params[name] - tensors[name] for name in tensors}
        reply.params_type = ParamsType.DIFF
    reply.params = state_dict_to_params(reply.params)
    return reply


class Workflow:
    """Brings the tasks of a workflow to the sites and their answers back, through NVFLARE's own handling of results."""

    def connect(self, spoil: Spoil | None = None, method: str = "fedheal", as_difference: bool = False) -> Any:
        self.spoil, self.site_method, self.as_difference = spoil, method, as_difference
        self.fl_ctx, self.abort_signal, self.persistor = FLContext(), Signal(), getattr(self, "persistor", None)
        self.engine = self
        return self

    def get_clients(self) -> list[Client]:
        return [Client(name, name) for name in get_federation().clients]

    def event(self, event_type: str) -> None: ...

    def panic(self, reason: str) -> None:
        raise RuntimeError(f"the job is aborted: {reason}")

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None: ...

    def deliver_task(self, data: FLModel, task_name: str, targets: list[str], callback: Any = None) -> None:
        self._current_failed_clients, self._current_num_targets = set(), len(targets)
        self._current_min_responses = len(targets)  # as `broadcast_model` sets it
        task = self._prepare_task(data, task_name, 0, callback)
        for site in targets:
            self.notify_sent(task.data, site)
            reply: Any = answer(task_name, site, data, self.site_method, self.as_difference)
            reply = self.spoil(task_name, site, reply) if self.spoil else reply
            for arrived in reply if isinstance(reply, list) else [reply]:
                if arrived is not None:
                    client_task = ClientTask(Client(site, site), task)
                    client_task.result = (
                        arrived if isinstance(arrived, Shareable) else FLModelUtils.to_shareable(arrived)
                    )
                    self._process_result(client_task, FLContext())

    def notify_sent(self, task: Shareable, site: str) -> None: ...


class LocalController(Workflow, FairController):
    """A controller whose tasks are done in this process."""

    def send_model_and_wait(self, task_name: str, data: FLModel, targets: list[str], timeout: int) -> list[FLModel]:
        self._results = []
        self.deliver_task(data, task_name, targets)
        return self._results


class LocalFedAvg(Workflow, FedAvg):
    """NVFLARE's FedAvg, whose tasks are done in this process."""

    def send_model(self, task_name: str, targets: list[str], data: FLModel, callback: Any) -> None:
        self.deliver_task(data, task_name, targets, callback)

    def get_num_standing_tasks(self) -> int:
        return 0

    def fire_event_with_data(self, event_type: str, fl_ctx: FLContext, key: str, data: Any) -> None: ...

    def notify_sent(self, task: Shareable, site: str) -> None:
        context, peer = FLContext(), FLContext()
        peer.put(ReservedKey.IDENTITY_NAME, site, private=False, sticky=False)
        context.set_peer_context(peer)
        context.put(AppConstants.TRAIN_SHAREABLE, task, private=True, sticky=False)
        assert isinstance(self.aggregator, FairModelAggregator)
        self.aggregator.handle_event(AppEventType.BEFORE_TRAIN_TASK, context)


def run_controller(spoil: Spoil | None = None, as_difference: bool = False, **settings: Any) -> LocalController:
    """Run a controller to its end."""
    keys = {"model": MODEL, "num_rounds": 3} | settings
    controller = LocalController(keys.pop("method", "fedheal"), **keys)
    controller.connect(spoil, settings.get("method", "fedheal"), as_difference).run()
    return controller


def fail(task: str, site: str, reply: FLModel) -> Shareable:
    """Return the reply of a site whose script raised."""
    return make_reply(ReturnCode.EXECUTION_EXCEPTION)
