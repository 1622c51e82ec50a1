"""A controller for NVFLARE: rounds of training and evaluation that survive failing sites and a dead server."""

from collections.abc import Mapping
from typing import Any

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.model_controller import ModelController

from fedheal.core.checks import check_count, check_share
from fedheal.core.parameter import Parameter
from fedheal.core.rng import generator
from fedheal.federation.node_sampling import sample_nodes
from fedheal.federation.reply_limits import MAX_ERROR, escape_text
from fedheal.nvflare.exchange import CLIENT, params_to_state_dict
from fedheal.nvflare.site_rounds import FederationSettings, SiteRounds, resolve_module

TIMEOUT = 1800  # seconds a round waits for replies


class FairController(ModelController):  # type: ignore[misc]
    """Any method without local terms, as an NVFLARE workflow.

    A site whose reply is bad is skipped, counted and logged by name, and the job continues. A reply is bad if the
    script raised an exception, or if its names or shapes are wrong. So is a reply with NaN, with a number of examples
    that is not positive or above `max_examples`, with an update longer than `max_norm`, or of a training that has
    diverged.

    Args:
        method: The method's name, such as "fedheal:tau=0.4".
        model: `"module:function"`, where the function makes the initial torch module. Without it, the model comes from
            `persistor_id`, and torch's names tell float buffers from parameters.
        num_rounds: The number of the last round.
        folder: The run folder, written after every round; an absolute path outside NVFLARE's workspace survives the job.
        resume: Whether to continue the run in `folder`.
        timeout: How many seconds a round waits for replies, once for training and once for evaluation.
        min_replies: A round with fewer usable replies leaves the model as it was.
        max_empty_rounds: After so many rounds in a row that leave the model as it was, the job ends; None: never.
        fraction: The share of the connected sites that trains in a round, drawn by seed and round.
        evaluate_every: Send a task `validate` with the new model every so many rounds, and in the last; 0: never.
        data: The name of the data in reports.
        seed: The seed of the cohorts.
        server: The server optimiser, such as `{"optimizer": "adam", "lr": 0.01}`; by default that of the method, as in
            "fedheal+fedadam".
        max_examples: The largest number of examples that a reply may give.
        max_norm: The largest norm of an update; "auto" is ten times the round's median. Without a number, updates of
            diverged training are skipped.
        budget: Bytes of updates held in memory; more goes to a temporary file.
        persistor_id, task_check_period: As in NVFLARE.

    Raises:
        ValueError: A setting is out of range, or the method has local terms.
    """

    def __init__(
        self, method: str, *, model: str | None = None, num_rounds: int = 3,
        folder: str | None = None, resume: bool = False,
        timeout: int = TIMEOUT, min_replies: int = 1, max_empty_rounds: int | None = 3,
        fraction: float = 1.0, evaluate_every: int = 1,
        data: str = "federation", seed: int = 0, server: Mapping[str, Any] | None = None,
        max_examples: float = 1e9, max_norm: float | str | None = None, budget: int | None = None,
        persistor_id: str = "persistor", task_check_period: float = 0.5,
    ) -> None:  # fmt: skip
        # An error of a site must never abort the job: the rounds decide what counts.
        super().__init__(
            persistor_id=persistor_id if model is None else "",
            ignore_result_error=True,
            task_check_period=task_check_period,
        )
        # A job is written from the attributes that have the names of the arguments.
        self.method, self.model, self.num_rounds, self.folder, self.resume = method, model, num_rounds, folder, resume
        self.timeout, self.min_replies, self.max_empty_rounds = timeout, min_replies, max_empty_rounds
        self.fraction, self.evaluate_every, self.data = fraction, evaluate_every, data
        self.seed, self.server, self.max_examples = seed, server, max_examples
        self.max_norm, self.budget, self.task_check_period = max_norm, budget, task_check_period
        Parameter("num_rounds", 1, ge=1).check(num_rounds)
        Parameter("timeout", 1, ge=1).check(timeout)
        check_share("fraction", fraction)
        check_count("evaluate_every", evaluate_every)
        self._settings = FederationSettings(
            **{key: getattr(self, key) for key in FederationSettings.__dataclass_fields__}
        )
        self._rounds: SiteRounds | None = None
        self._return_codes: dict[str, str] = {}  # of the sites that replied to the open task

    def run(self) -> None:
        """Run rounds up to `num_rounds`, from the folder's checkpoint if there is one."""
        module = resolve_module(self.model)
        initial = params_to_state_dict(self.load_model().params) if module is None else module.state_dict()
        rounds = self._rounds = SiteRounds(self._settings, self.num_rounds, module)
        rounds.start(initial)
        first = rounds.state.round
        for number in range(first + 1, self.num_rounds + 1):
            self.event(AppEventType.ROUND_STARTED)
            sites = self._sample_sites(number)
            rounds.ask(sites, len(self._list_sites()))
            answers = self._ask("train", sites, number, first)
            if self.abort_signal.triggered:  # a round that was cut short must not count
                return
            rounds.aggregate(*answers)
            if self.evaluate_every and (number % self.evaluate_every == 0 or number == self.num_rounds):
                connected = self._list_sites()
                rounds.evaluate(connected, *self._ask("validate", connected, number, first))
                if self.abort_signal.triggered:
                    return
            rounds.end_round()
            self.event(AppEventType.ROUND_DONE)
        rounds.finish()
        if self.persistor is not None:
            self.save_model(FLModel(params=rounds.get_params(), params_type=ParamsType.FULL))

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Unlock the run folder."""
        if self._rounds is not None:
            self._rounds.release()
        super().stop_controller(fl_ctx)

    def _ask(self, task: str, sites: list[str], number: int, first: int) -> tuple[list[FLModel], dict[str, str]]:
        """Send the model, wait for replies, and return them and the sites whose reply is an error."""
        assert self._rounds is not None
        self._return_codes = {}
        # NVFLARE counts rounds from 0.
        data = FLModel(
            params=self._rounds.get_params(),
            params_type=ParamsType.FULL,
            start_round=first,
            current_round=number - 1,
            total_rounds=self.num_rounds,
        )
        # Without NVFLARE's `min_responses` it waits for every site until the timeout: none is left out for being slow.
        results = self.send_model_and_wait(task_name=task, data=data, targets=sites, timeout=self.timeout)
        read = {result.meta[CLIENT] for result in results}
        return results, {site: why for site, why in self._return_codes.items() if site not in read}

    def _accept_train_result(
        self, client_name: str, result: Shareable, fl_ctx: FLContext, is_unknown_task: bool = False
    ) -> bool:
        code = result.get_return_code()
        if not is_unknown_task:
            is_error = code and code != ReturnCode.OK
            problem = (
                f"its reply is an error: {escape_text(code, MAX_ERROR)}" if is_error else "its reply cannot be read"
            )
            self._return_codes[client_name] = problem
        return bool(super()._accept_train_result(client_name, result, fl_ctx, is_unknown_task))

    def _list_sites(self) -> list[str]:
        return sorted(client.name for client in self.engine.get_clients())

    def _sample_sites(self, number: int) -> list[str]:
        names = dict(enumerate(self._list_sites()))
        rng = generator(self.seed, "cohort", number)
        return [names[i] for i in sample_nodes(names, self.fraction, 1, rng, names)]
