"""The aggregator inside NVFLARE's own FedAvg workflow, with sites in this process."""

from __future__ import annotations

import re

import pytest
import torch
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext

from fedheal import Layout
from fedheal.aggregate.server_optimizer import Server
from fedheal.nvflare import FairController, FairModelAggregator, FolderPersistor, count_finished_rounds
from fedheal.nvflare.exchange import TEST_EXAMPLES
from fedheal.runs import folder as files
from nvflare_sites import MODEL, LocalFedAvg, Spoil, fail, make_model, simulate


def run_fedavg(folder: str, spoil: Spoil | None = None, rounds: int = 3, start: int = 0, **settings):
    """Run the stock workflow to the end of the job, and return it."""
    aggregator = FairModelAggregator("fedheal", folder=folder, **{"model": MODEL} | settings)
    workflow = LocalFedAvg(
        aggregator=aggregator, num_clients=5, num_rounds=rounds, start_round=start, ignore_result_error=True
    )
    workflow.persistor = FolderPersistor(MODEL, folder)
    workflow.connect(spoil).run()
    aggregator.handle_event(EventType.END_RUN, FLContext())
    return workflow


def add_accuracy(task, site, reply):
    """Add the received model's accuracy to the training reply, as stock scripts do."""
    reply.metrics["accuracy"], reply.meta[TEST_EXAMPLES] = 0.5, 10
    return reply


def test_the_stock_workflow_gives_the_simulators_model_and_files(tmp_path):
    state, _ = simulate()
    run_fedavg(str(tmp_path / "run"), add_accuracy)
    model = files.load_tensors(tmp_path / "run" / "model.safetensors")
    module = make_model()
    module.load_state_dict(model)
    packed = Layout.of(module).pack(module.state_dict())
    for name in ("params", "buffers", "counters"):
        torch.testing.assert_close(getattr(packed, name), getattr(state.model, name), rtol=0, atol=1e-6)
    records = files.read_rounds(tmp_path / "run")
    assert [record.round for record in records] == [1, 2, 3]
    # Sites evaluate a round's model when the next round begins; nobody evaluates the last one.
    assert [bool(record.domains) for record in records] == [True, True, False]
    assert files.read_result(tmp_path / "run")["domains"] == dict.fromkeys(("dark", "noisy", "plain"), 50.0)


def test_bad_and_failing_sites_are_left_out_by_name(tmp_path):
    def spoil(task, site, reply):
        if site == "noisy-0":
            return fail(task, site, reply)
        reply.params["2.bias"] = reply.params["2.bias"] * (float("nan") if site == "dark-0" else 1)
        return reply

    run_fedavg(str(tmp_path / "run"), spoil)
    for record in files.read_rounds(tmp_path / "run"):
        assert list(record.report["skipped"]) == ["dark-0"]
        assert record.report["missing"] == ["noisy-0"]  # the stock workflow keeps a site's error to itself


def test_a_resumed_workflow_starts_where_the_folder_ends(tmp_path):
    whole, folder = run_fedavg(str(tmp_path / "whole"), rounds=4), str(tmp_path / "run")
    run_fedavg(folder, rounds=2)
    assert count_finished_rounds(folder) == 2
    with pytest.raises(ValueError, match="set start_round = 2"):
        run_fedavg(folder, rounds=2, resume=True)
    run_fedavg(folder, rounds=2, start=2, resume=True)
    assert [record.round for record in files.read_rounds(tmp_path / "run")] == [1, 2, 3, 4]
    ours, theirs = (files.load_tensors(tmp_path / name / "model.safetensors") for name in ("run", "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert whole.aggregator._rounds is None


def test_a_workflow_that_resumes_from_another_model_is_refused(tmp_path):
    folder = str(tmp_path / "run")
    run_fedavg(folder, rounds=1)
    aggregator = FairModelAggregator("fedheal", model=MODEL, folder=folder, resume=True)
    workflow = LocalFedAvg(aggregator=aggregator, num_clients=5, num_rounds=1, start_round=1)
    workflow.persistor = FolderPersistor(MODEL, str(tmp_path / "elsewhere"))
    with pytest.raises(ValueError, match="the workflow resumes from another model than that of"):
        workflow.connect().run()


def test_without_the_module_the_names_tell_buffers_from_parameters(tmp_path):
    run_fedavg(str(tmp_path / "named"), model=None)
    run_fedavg(str(tmp_path / "module"))
    ours, theirs = (files.load_tensors(tmp_path / name / "model.safetensors") for name in ("named", "module"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("component", [FairController, FairModelAggregator])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": None}, "data = None: use a string that is not empty"),
        ({"data": 3}, "data = 3: use a string that is not empty"),
        ({"server": "adam"}, "server = 'adam': use a dictionary such as {'optimizer': 'adam'}, which a job can carry"),
        ({"server": Server("adam")}, "beta2=0.99, eps=0.001): use a dictionary such as {'optimizer': 'adam'}, which"),
        ({"max_norm": "Auto"}, "max_norm = 'Auto': use a finite number above 0, 'auto' or None"),
        ({"max_examples": 0}, "max_examples = 0: use a finite number above 0"),
        ({"folder": ""}, "folder = '': use a path such as 'runs/hospitals', or leave it out"),
    ],
)
def test_a_setting_that_would_fail_later_is_rejected_by_name(component, settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        component("fedheal", **settings)


def test_local_terms_are_refused():
    with pytest.raises(ValueError, match="has local terms"):
        FairModelAggregator("fedprox+fedheal")
