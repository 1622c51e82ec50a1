"""The initial model for stock workflows, or the one that a run folder ends with. Safetensors only, no pickle."""

import logging
from pathlib import Path

from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.model import ModelLearnable, make_model_learnable
from nvflare.app_common.abstract.model_persistor import ModelPersistor

from fedheal.core.layout import Layout
from fedheal.core.state import RunState
from fedheal.nvflare.exchange import state_dict_to_params
from fedheal.nvflare.site_rounds import resolve_module
from fedheal.runs import folder as files

log = logging.getLogger("fedheal.nvflare")


class FolderPersistor(ModelPersistor):  # type: ignore[misc]
    """Starts a stock workflow from a run folder's newest checkpoint, or else from a new model.

    It saves nothing: `FairModelAggregator` saves every round in the same folder.

    Args:
        model: `"module:function"`, where the function makes the torch module.
        folder: The run folder.
    """

    def __init__(self, model: str, folder: str) -> None:
        super().__init__()
        self.model, self.folder = model, folder

    def load_model(self, fl_ctx: FLContext) -> ModelLearnable:
        """Return the model that the workflow starts from."""
        module = resolve_module(self.model)
        assert module is not None
        tensors = module.state_dict()
        if (state := load_newest_state(self.folder)) is not None:
            tensors = Layout.of(module).unpack(state.model)
        return make_model_learnable(state_dict_to_params(tensors), {})

    def save_model(self, model: ModelLearnable, fl_ctx: FLContext) -> None:
        """Do nothing: the aggregator has saved the round."""


def load_newest_state(folder: str) -> RunState | None:
    """Return the state in a run folder's newest usable checkpoint, or None if it holds no checkpoint."""
    problems = []
    for path in files.list_checkpoints(Path(folder)):
        try:
            return RunState.from_arrays(*files.load_checkpoint(path, None))
        except files.CheckpointError as error:
            problems.append(str(error))
            log.warning("%s", error)
    if problems:
        raise ValueError(f"no checkpoint in {folder} can be used: {'; '.join(problems)}")
    return None


def count_finished_rounds(folder: str) -> int:
    """Return how many rounds a run folder has finished: the `start_round` of a stock workflow that resumes it.

    Args:
        folder: The run folder; it need not exist.

    Raises:
        ValueError: There are checkpoints, and none can be used.
    """
    state = load_newest_state(folder)
    return 0 if state is None else state.round
