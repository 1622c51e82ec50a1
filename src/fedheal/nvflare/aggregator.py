"""Fair aggregation inside NVFLARE's stock FedAvg workflow.

`FedAvg(aggregator=FairModelAggregator("fedheal"))` hands over each reply and asks for the new model once a round. The events
of the workflow have the rest: which model was sent, to which sites, in which round.
"""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from nvflare.apis.dxo import from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.aggregators.model_aggregator import ModelAggregator
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType

from fedheal.nvflare.exchange import has_accuracy, pack_params, params_to_state_dict
from fedheal.nvflare.site_rounds import FederationSettings, SiteRounds, resolve_module


class FairModelAggregator(ModelAggregator):  # type: ignore[misc]
    """Any method without local terms, as the aggregator of the stock FedAvg workflow.

    An accuracy in a training reply is that of the model the site received, which the previous round made. So the final model
    is not evaluated.

    Args:
        method, folder, resume, data, seed, server, min_replies, max_empty_rounds, max_examples, max_norm, budget: As
            for `FairController`. With `resume`, start the workflow from a `FolderPersistor`, at `count_finished_rounds`.
        model: `"module:function"`; without it, torch's names tell float buffers from parameters.

    Raises:
        ValueError: A setting is out of range, or the method has local terms.
    """

    def __init__(
        self, method: str, *, model: str | None = None, folder: str | None = None, resume: bool = False,
        data: str = "federation", seed: int = 0, server: Mapping[str, Any] | None = None,
        min_replies: int = 1, max_empty_rounds: int | None = 3,
        max_examples: float = 1e9, max_norm: float | str | None = None, budget: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        # A job is written from the attributes that have the names of the arguments.
        self.method, self.model, self.folder, self.resume, self.data = method, model, folder, resume, data
        self.seed, self.server, self.min_replies, self.max_empty_rounds = seed, server, min_replies, max_empty_rounds
        self.max_examples, self.max_norm, self.budget = max_examples, max_norm, budget
        self._settings = FederationSettings(
            **{key: getattr(self, key) for key in FederationSettings.__dataclass_fields__}
        )
        self._lock = threading.Lock()  # replies and events come from several threads
        self._rounds: SiteRounds | None = None
        self.reset_stats()

    def reset_stats(self) -> None:
        """Forget the replies: a new round begins."""
        with self._lock:
            self._task: Shareable | None = None
            self._asked: set[str] = set()
            self._results: list[FLModel] = []

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Note what is sent to which site, and end the run."""
        super().handle_event(event_type, fl_ctx)
        if event_type == AppEventType.BEFORE_TRAIN_TASK:
            with self._lock:
                self._task = fl_ctx.get_prop(AppConstants.TRAIN_SHAREABLE)
                peer = fl_ctx.get_peer_context()
                self._asked |= {peer.get_identity_name()} if peer is not None else set()
        elif event_type == EventType.END_RUN and self._rounds is not None:
            self._rounds.finish()
            self._rounds = None

    def accept_model(self, model: FLModel) -> None:
        """Take one site's reply."""
        with self._lock:
            self._results.append(model)

    def aggregate_model(self) -> FLModel:
        """Return the new model, whole. Raise ValueError if the workflow does not continue the folder's run."""
        task = self._task
        if task is None:
            raise RuntimeError("no task was sent in this round: add the aggregator to the job with the workflow")
        number = int(task.get_header(AppConstants.CURRENT_ROUND)) + 1
        if self._rounds is None:
            self._rounds = self._begin(task, number)
        rounds = self._rounds
        evaluated = [result for result in self._results if has_accuracy(result)]
        rounds.amend_last_round(rounds.read_accuracies(evaluated)[0])
        rounds.ask(sorted(self._asked), len(self._asked))
        rounds.aggregate(self._results, {})
        rounds.end_round()
        return FLModel(params=rounds.get_params(), params_type=ParamsType.FULL, current_round=number - 1)

    def _begin(self, task: Shareable, number: int) -> SiteRounds:
        """Start from the model that was sent, which must be the folder's last one if the run resumes."""
        module, params = resolve_module(self.model), from_shareable(task).data
        num_rounds = int(task.get_header(AppConstants.START_ROUND, 0)) + int(task.get_header(AppConstants.NUM_ROUNDS))
        rounds = SiteRounds(self._settings, num_rounds, module)
        rounds.start(params_to_state_dict(params))
        sent, kept = pack_params(rounds.layout, params), rounds.state.model
        if number != rounds.state.round + 1:
            rounds.release()
            problem = (
                f"the workflow starts with start_round = {number - 1}, but {rounds.state.round} rounds are finished"
            )
            raise ValueError(f"{problem}: set start_round = {rounds.state.round}")
        pairs = ((sent.params, kept.params), (sent.buffers, kept.buffers), (sent.counters, kept.counters))
        if not all(torch.equal(a, b) for a, b in pairs):
            rounds.release()
            remedy = f"give the workflow FolderPersistor(model, folder={self.folder!r})"
            raise ValueError(f"the workflow resumes from another model than that of {self.folder}: {remedy}")
        return rounds
