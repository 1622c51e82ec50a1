"""Every writer against its real library, offline: what was written is read back and compared with the records."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fedheal import tracking
from fedheal.core.metrics import fairness
from fedheal.runs.schema import RoundRecord
from fedheal.simulate.callbacks import Callback
from fedheal.simulate.runner import run
from fedheal.tracking import MLflow, TensorBoard, Tracker, Wandb, tracker
from fedheal.tracking.base import LAST_METRIC, make_title, result_metrics, round_metrics
from tiny_data import quick

# SQLAlchemy 2.1 warns of a loader strategy that MLflow's models use.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")

LIBRARIES = ("tensorboard", "mlflow", "wandb")
EXPERIMENT: dict[str, Any] = {"name": "", "method": "fedavg", "data": "tiny", "seed": 3, "rounds": 5, "lr": 0.1}
RESULT: dict[str, Any] = {
    "method": "fedavg",
    "avg": 55.5,
    "domains": {"plain": 61.0, "dark": 50.0},
    "classes": ["a", "b"],
    "versions": {"python": "3"},
}
Rounds = dict[int, dict[str, float]]  # round -> its numbers


def needs_library(name: str) -> pytest.MarkDecorator:
    """Skip a test if the library is not installed, unless `FEDHEAL_TEST_ALL` is set."""
    missing = find_spec(name) is None and not os.environ.get("FEDHEAL_TEST_ALL")
    return pytest.mark.skipif(missing, reason=f"{name} is not installed")


def mark_mlflow(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test as slow: MLflow takes seconds to import and to create its database."""
    return pytest.mark.slow(needs_library("mlflow")(test))


SLOW = {"mlflow": [pytest.mark.slow], "wandb": [pytest.mark.slow]}  # databases and services take seconds
each = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[needs_library(name), *SLOW.get(name, [])]) for name in LIBRARIES]
)


# --- records, and writing them


def make_record(number: int) -> RoundRecord:
    """Return a round's record; odd rounds are evaluated, and the second client's name needs escaping."""
    weights = {"plain-0": 0.25 + number / 100, "dark/é?": 0.75 - number / 100}
    kept = {"plain-0": 0.5, "dark/é?": 1 / number}
    seconds = {"train": 1.5 * number, "aggregate": 0.25, "evaluate": 0.125}
    plain = RoundRecord(
        round=number,
        cohort=2,
        replied=2,
        weights=weights,
        train_loss=1 / number,
        report={"kept": kept},
        seconds=seconds,
    )
    if number % 2 == 0:
        return plain
    domains, clients = {"plain": 60.0 + number, "dark": 40.0 - number}, {"plain-0": 61.0, "dark/é?": 30.0}
    evenness = {"fairness": fairness(domains), "client_fairness": fairness(clients)}
    return plain.model_copy(update={"domains": domains, "clients": clients, **evenness})


def make_records(last: int, first: int = 1) -> list[RoundRecord]:
    return [make_record(number) for number in range(first, last + 1)]


def run_callback(callback: Callback, done: Sequence[RoundRecord], new: Sequence[RoundRecord], end: bool = True) -> None:
    """Call a callback as a run does; with `end=False`, as a run that fails."""
    callback.started(EXPERIMENT, done)
    for item in new:
        callback.round(item)
    if end:
        callback.finished(RESULT)


# --- reading back


def read_tensorboard(folder: Path, ended: bool = True) -> Rounds:
    rounds: Rounds = {}
    events = _load_events(folder)
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            row = rounds.setdefault(event.step, {})
            assert tag not in row, f"{tag} stands twice at step {event.step}"
            row[tag] = event.value
    return rounds


def _load_events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (only,) = {path.parent for path in folder.rglob("events.out.tfevents.*")}
    events = EventAccumulator(str(only), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def read_mlflow(folder: Path, ended: bool = True) -> Rounds:
    client, only = _find_mlflow_run(folder)
    assert only.info.status == ("FINISHED" if ended else "RUNNING")
    rounds: Rounds = {}
    for name in only.data.metrics:
        for point in client.get_metric_history(only.info.run_id, name):
            row = rounds.setdefault(point.step, {})
            assert name not in row, f"{name} stands twice at step {point.step}"
            row[name] = point.value
    return rounds


def _find_mlflow_run(folder: Path) -> tuple[Any, Any]:
    from mlflow import MlflowClient

    (database,) = folder.rglob("mlflow.db")
    client = MlflowClient(tracking_uri=f"sqlite:///{database}")
    (only,) = client.search_runs([client.get_experiment_by_name("fedheal").experiment_id])
    return client, only


def read_wandb(folder: Path, ended: bool = True) -> Rounds:
    rounds: Rounds = {}
    for item in _read_wandb_records(folder, ended):
        if item.HasField("history"):
            row = _parse_items(item.history.item)
            step = int(row.pop("_step"))
            assert step not in rounds, f"step {step} stands twice"
            rounds[step] = {name: value for name, value in row.items() if not name.startswith("_")}
    return rounds


def _parse_items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _find_wandb_folder(folder: Path) -> Path:
    (link,) = folder.rglob("latest-run")
    return link.parent


def _read_wandb_records(folder: Path, ended: bool = True) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (_find_wandb_folder(folder) / "latest-run").resolve().glob("run-*.wandb")
    for _ in range(500):  # the service ends the file a moment after the run's end
        items = [Record.FromString(frame) for frame in _split_frames(file.read_bytes())]
        if not ended or any(item.HasField("exit") for item in items):
            return items
        time.sleep(0.01)
    raise AssertionError(f"{file} has no end")


def _split_frames(log: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log after its seven bytes of header: blocks of 32 KiB, which may split a record."""
    at, whole = 7, b""
    while at + 7 <= len(log):
        if 0x8000 - at % 0x8000 < 7:
            at += 0x8000 - at % 0x8000
            continue
        length, kind = struct.unpack_from("<HB", log, at + 4)
        if at + 7 + length > len(log):  # the service is still writing this part
            return
        whole += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # all of it, or its last part
            yield whole
            whole = b""


READERS: dict[str, Callable[..., Rounds]] = {
    "tensorboard": read_tensorboard,
    "mlflow": read_mlflow,
    "wandb": read_wandb,
}


def assert_same(actual: Mapping[int, Mapping[str, float]], expected: Sequence[RoundRecord]) -> None:
    """Assert that exactly these rounds and metrics were written, in single precision and without the result."""
    rounds = {
        step: {key: value for key, value in row.items() if not key.startswith("result/")}
        for step, row in actual.items()
    }
    assert rounds == {item.round: pytest.approx(round_metrics(item), rel=1e-6) for item in expected}


# --- surroundings


def forbid_network(tell: Callable[[str], object]) -> None:
    """Refuse and report connections to other machines and look-ups of names; W&B's service uses a local socket."""
    connect, look_up = socket.socket.connect, socket.getaddrinfo
    here = ("127.0.0.1", "::1", "localhost")

    def watched_connect(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and address[0] not in here:
            tell(f"connect to {address}")
            raise OSError("this is offline")
        connect(self, address)

    def watched_look_up(host: Any, *rest: Any, **more: Any) -> Any:
        if host not in (*here, None):
            tell(f"look up {host}")
            raise OSError("this is offline")
        return look_up(host, *rest, **more)

    socket.getaddrinfo = watched_look_up
    socket.socket.connect = watched_connect


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(socket, "getaddrinfo", socket.getaddrinfo)  # to be put back
    monkeypatch.setattr(socket.socket, "connect", socket.socket.connect)
    tried: list[str] = []
    forbid_network(tried.append)
    yield
    assert tried == []


@pytest.fixture(autouse=True, scope="module")
def _stop_service() -> Iterator[None]:
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty MLflow database, made once because its tables take seconds; tests get a copy."""
    folder = tmp_path_factory.mktemp("fresh") / "mlflow"
    run_callback(MLflow(folder), [], make_records(1))
    assert_same(read_mlflow(folder), make_records(1))
    client, only = _find_mlflow_run(folder)
    client.delete_run(only.info.run_id)
    return folder / "mlflow.db"


@pytest.fixture
def mlflow_place(database: Path, tmp_path: Path) -> Path:
    (tmp_path / "mlflow").mkdir()
    shutil.copy(database, tmp_path / "mlflow")
    return tmp_path


@pytest.fixture
def place(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder for the writer of that name."""
    if name == "mlflow":
        request.getfixturevalue("mlflow_place")
    return tmp_path


def list_open_files(folder: Path) -> list[str]:
    """Return the files in this folder that this process holds open."""
    links = [Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd")]
    return [
        str(link.readlink()) for link in links if link.is_symlink() and str(link.readlink()).startswith(str(folder))
    ]


# --- tests


def test_numbers_of_an_evaluated_round() -> None:
    metrics = round_metrics(make_record(3))
    assert metrics["accuracy/plain"] == 63.0
    assert metrics["fairness/avg"] == 50.0
    assert metrics["fairness/worst"] == metrics["accuracy/dark"] == 37.0
    assert metrics["client_fairness/gap"] == 31.0
    assert metrics["kept/mean"] == pytest.approx((0.5 + 1 / 3) / 2)
    assert [name for name in metrics if name.startswith("weight/")] == ["weight/plain-0", "weight/dark_2f_é_3f_"]
    assert list(metrics)[-1] == LAST_METRIC


def test_numbers_leave_out_what_is_not_there() -> None:
    assert round_metrics(RoundRecord(round=1, cohort=2)) == {"clients/asked": 2.0, LAST_METRIC: 0.0}


@each
def test_reads_back(name: str, place: Path) -> None:
    run_callback(tracker(name, place), [], make_records(5))
    rounds = READERS[name](place)
    assert_same(rounds, make_records(5))
    if name != "wandb":  # which has a place of its own for it
        assert {key: value for key, value in rounds[5].items() if key.startswith("result/")} == result_metrics(RESULT)
    assert list_open_files(place) == []


@needs_library("tensorboard")
def test_tensorboard_holds_experiment_and_result(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    run_callback(TensorBoard(tmp_path), [], make_records(1))
    events = _load_events(tmp_path)
    content = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = HParamsPluginData.FromString(content).session_start_info
    assert {key: value.number_value or value.string_value for key, value in start.hparams.items()} == EXPERIMENT
    assert "_hparams_/session_end_info" in events.summary_metadata
    for title, expected in (("experiment", EXPERIMENT), ("result", RESULT)):
        (text,) = events.Tensors(f"{title}/text_summary")
        assert json.loads(text.tensor_proto.string_val[0]) == expected


@mark_mlflow
def test_mlflow_holds_experiment_and_result(mlflow_place: Path) -> None:
    run_callback(tracker("mlflow", mlflow_place), [], make_records(1))
    _, run = _find_mlflow_run(mlflow_place)
    assert run.data.params == {key: str(value) for key, value in EXPERIMENT.items()}
    assert run.data.metrics["result/domains/dark"] == 50.0
    assert run.data.tags["fedheal.python"] == "3"
    assert (run.info.status, run.info.run_name) == ("FINISHED", "fedavg-tiny-seed3")
    assert list(mlflow_place.rglob("*.unfinished")) == []


@pytest.mark.slow
@needs_library("wandb")
def test_wandb_holds_experiment_and_result(tmp_path: Path) -> None:
    run_callback(Wandb("project", tmp_path), [], make_records(1))
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    for item in _read_wandb_records(tmp_path):
        if item.HasField("run"):
            assert (item.run.project, item.run.display_name) == ("project", "fedavg-tiny-seed3")
            config |= _parse_items(item.run.config.update)
        if item.HasField("summary"):
            summary |= _parse_items(item.summary.update)
    assert {key: config[key] for key in EXPERIMENT} == EXPERIMENT
    assert {key: summary[key] for key in result_metrics(RESULT)} == result_metrics(RESULT)
    assert summary["result/method"] == "fedavg"


@each
def test_resume_goes_on_in_the_same_run(name: str, place: Path) -> None:
    """Round 4 was written, but the last state is of round 2: rounds 3 and 4 are written again."""
    run_callback(tracker(name, place), [], make_records(4), end=False)
    again = tracker(name, place)
    again.started(EXPERIMENT | {"name": "renamed", "workers": 4}, make_records(2))
    for item in make_records(5, first=3):
        again.round(item)
    again.finished(RESULT)
    assert_same(READERS[name](place), make_records(5))


@each
def test_resume_before_the_first_state(name: str, place: Path) -> None:
    run_callback(tracker(name, place), [], make_records(2), end=False)
    run_callback(tracker(name, place), [], make_records(3))
    assert_same(READERS[name](place), make_records(3))


@each
def test_a_writer_that_joins_late_fills_in_the_rounds_done(name: str, place: Path) -> None:
    run_callback(tracker(name, place), make_records(3), make_records(4, first=4))
    assert_same(READERS[name](place), make_records(4))


@each
def test_the_same_writer_again_after_a_failed_run(name: str, place: Path) -> None:
    writer = tracker(name, place)
    run_callback(writer, [], make_records(2), end=False)
    run_callback(writer, make_records(2), make_records(3, first=3))
    assert_same(READERS[name](place), make_records(3))


@pytest.mark.slow
@needs_library("wandb")
def test_an_earlier_offline_run_is_left_alone(tmp_path: Path) -> None:
    run_callback(Wandb("project", tmp_path), [], make_records(2), end=False)
    (first,) = tmp_path.glob("wandb/offline-run-*")
    run_callback(Wandb("project", tmp_path), make_records(2), make_records(3, first=3))
    assert first.exists()
    assert len({path.name.rsplit("-", 1)[1] for path in tmp_path.glob("wandb/offline-run-*")}) == 2


@mark_mlflow
def test_mlflow_by_uri(mlflow_place: Path) -> None:
    spec = f"mlflow:sqlite:///{mlflow_place / 'mlflow' / 'mlflow.db'}"
    run_callback(tracker(spec, mlflow_place / "out"), [], make_records(2), end=False)
    run_callback(tracker(spec, mlflow_place / "out"), make_records(2), make_records(3, first=3))
    assert_same(read_mlflow(mlflow_place), make_records(3))


@mark_mlflow
def test_mlflow_makes_a_new_run_where_the_old_one_is_gone(mlflow_place: Path) -> None:
    run_callback(tracker("mlflow", mlflow_place), [], make_records(2), end=False)
    client, only = _find_mlflow_run(mlflow_place)
    client.delete_run(only.info.run_id)
    run_callback(tracker("mlflow", mlflow_place), make_records(2), make_records(3, first=3))
    assert_same(read_mlflow(mlflow_place), make_records(3))


@mark_mlflow
def test_mlflow_takes_many_clients(mlflow_place: Path) -> None:
    many = make_record(1).model_copy(update={"weights": {f"c{i}": i / 1100 for i in range(1100)}})
    run_callback(tracker("mlflow", mlflow_place), [], [many])
    assert _find_mlflow_run(mlflow_place)[1].data.metrics == round_metrics(many) | result_metrics(RESULT)


@mark_mlflow
def test_a_run_that_fails_is_marked_so(mlflow_place: Path) -> None:
    with MLflow(mlflow_place / "mlflow") as writer:
        run_callback(writer, [], make_records(1), end=False)
    assert _find_mlflow_run(mlflow_place)[1].info.status == "FAILED"


@each
def test_a_run_of_an_experiment(name: str, place: Path) -> None:
    """In the run's own folder, which must be empty until the run begins."""
    out = place / "out"
    spec = f"mlflow:sqlite:///{place / 'mlflow' / 'mlflow.db'}" if name == "mlflow" else name
    result = run(quick(rounds=2), out, callbacks=[tracker(spec, out)])
    assert_same(READERS[name](place), result.history)


@each
def test_what_fails_later_is_a_warning(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = tracker(name, place)
    run_callback(writer, [], make_records(1), end=False)

    def raise_disk_full(self: Tracker, step: int, values: Mapping[str, float]) -> None:
        raise OSError("no space left\non the device")

    with monkeypatch.context() as patched:
        patched.setattr(type(writer), "_log", raise_disk_full)
        with pytest.warns(RuntimeWarning, match=f"^{name} no longer records this run, which continues: no space left$"):
            writer.round(make_record(2))
        writer.round(make_record(3))  # says nothing more
        writer.finished(RESULT)
    assert list_open_files(place) == []
    run_callback(tracker(name, place), make_records(3), make_records(4, first=4))
    assert_same(READERS[name](place), make_records(4))


@pytest.mark.parametrize("name", [pytest.param("tensorboard", marks=needs_library("tensorboard"))])
def test_what_cannot_be_opened_is_an_error(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("not a folder")
    with pytest.raises(ValueError, match=f"^{name} cannot record this run: "):
        tracker(name, tmp_path).started(EXPERIMENT, [])


@mark_mlflow
def test_a_uri_that_mlflow_does_not_know(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^mlflow cannot record this run: .*nowhere"):
        tracker("mlflow:nowhere://x", tmp_path).started(EXPERIMENT, [])


@each
def test_missing_library(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch.utils.tensorboard", "tensorboard", "mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"{name}.*: run pip install '\.\[track\]' in a checkout of fedheal$"):
        tracker(name, tmp_path)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("tensorbord", "unknown tracker 'tensorbord' (did you mean 'tensorboard'?); the trackers are: tensorboard, ml"),
        ("", "unknown tracker ''; the trackers are: "),
        ("wandb:there", "tracker 'wandb:there': only mlflow takes a URI after the colon"),
        ("mlflow:", "tracker 'mlflow:': only mlflow takes a URI after the colon"),
    ],
)
def test_a_tracker_that_is_none(spec: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}"):
        tracker(spec, tmp_path)


KILLED = """
import os, signal, sys, time
from pathlib import Path
from fedheal.tracking import tracker
assert not {"tensorboard", "mlflow", "wandb"} & set(sys.modules), "imported too early"
from test_tracking import EXPERIMENT, forbid_network, make_records
forbid_network(lambda tried: print(tried, flush=True))
trackers = [tracker(name, Path(sys.argv[1])) for name in ("tensorboard", "mlflow", "wandb")]
for writer in trackers:
    writer.started(EXPERIMENT, [])
for record in make_records(3):
    for writer in trackers:
        writer.round(record)
time.sleep(1)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL")
@needs_library("tensorboard")
@needs_library("mlflow")
@needs_library("wandb")
def test_a_killed_process_loses_nothing(mlflow_place: Path) -> None:
    """The process does not look like a test to the libraries, which turn telemetry off in tests."""
    clean = {
        key: value
        for key, value in os.environ.items()
        if key != "CI" and not key.startswith(("PYTEST_", "GITHUB_", "MLFLOW_", "WANDB_"))
    }
    paths = [str(Path(tracking.__file__).parents[2]), str(Path(__file__).parent), str(Path(__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(mlflow_place)],
        env=clean | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-9, ""), done.stderr
    for name, read in READERS.items():
        folder = mlflow_place / name
        assert_same(read(folder, ended=False), make_records(3))
        run_callback(tracker(name, mlflow_place), make_records(2), make_records(4, first=3))
        assert_same(read(folder), make_records(4))


def test_a_title_holds_the_seeds_that_were_set() -> None:
    experiment = {"method": "fedavg", "data": "digits", "seed": 2}
    assert make_title(experiment) == "fedavg-digits-seed2"
    assert make_title(experiment | {"split_seed": 0, "batch_seed": 5}) == "fedavg-digits-seed2-split0-batch5"
