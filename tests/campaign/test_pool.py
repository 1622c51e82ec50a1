"""Many runs at once: each on its GPU, each once, and what becomes of the others when one fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from disk_hooks import raise_disk_full
from fedheal.campaign import placement, pool
from fedheal.campaign import ray as ray_jobs
from fedheal.campaign.checks import check_jobs
from fedheal.campaign.jobs import Job
from fedheal.campaign.placement import DeviceSlots, Gpu
from fedheal.campaign.pool import describe_schedule, run_all
from fedheal.runs import folder as records
from fedheal.simulate.experiment import Experiment
from fedheal.simulate.round import Diverged
from tiny_data import quick

GIB = 2**30


class Threads(ThreadPoolExecutor):
    """Stands in for a pool of processes: a place's threads have its GPU in their names."""

    _processes = None

    def __init__(self, place: DeviceSlots) -> None:
        super().__init__(place.slots, thread_name_prefix=f"gpu{place.gpu}")


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(placement, "count_gpus", lambda: 2)
    monkeypatch.setattr(placement, "query_gpus", lambda: (Gpu(0, 80 * GIB), Gpu(1, 80 * GIB)))
    monkeypatch.setattr(placement, "count_cores", lambda: 16)


class FakeRuns:
    """Stands in for runs: records where each was, and what it waits for before it ends."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.where: dict[str, str] = {}
        self.ended: set[str] = set()
        self.most = Counter[str]()  # at once on a GPU
        self.waits: dict[str, Callable[[], bool]] = {}

    def run(self, job: Job) -> None:
        name, gpu = job.folder.name, threading.current_thread().name.partition("_")[0]
        with self.lock:
            assert name not in self.where, "started twice"
            self.where[name] = gpu
            here = [other for other, place in self.where.items() if place == gpu and other not in self.ended]
            self.most[gpu] = max(self.most[gpu], len(here))
        deadline = time.monotonic() + 30
        while name in self.waits and not self.waits[name]() and time.monotonic() < deadline:
            time.sleep(0.005)
        with self.lock:
            self.ended.add(name)
        if name == "bad":
            raise ValueError("a bad run")


@pytest.fixture
def fake_runs(monkeypatch, two_gpus):
    runs = FakeRuns()
    monkeypatch.setattr(pool, "_start_pool", Threads)
    monkeypatch.setattr(pool, "run_job", runs.run)
    monkeypatch.setattr(pool, "_run_in_worker", runs.run)
    return runs


def make_jobs(folder: Path, *names: str, **keys: object) -> list[Job]:
    return [Job(quick(name=name, **{"device": "auto"} | keys), folder / name) for name in names]


def test_whoever_is_free_takes_the_next_run(fake_runs, tmp_path):
    """Of nine runs, one a GPU at a time, the first is long: the other GPU does all the rest."""
    fake_runs.waits["a"] = lambda: fake_runs.ended == set("bcdefghi")
    done = [job.folder.name for job in run_all(make_jobs(tmp_path, *"abcdefghi"), 2)]
    assert sorted(done) == list("abcdefghi")
    assert fake_runs.where.pop("a") == "gpu0"
    assert set(fake_runs.where.values()) == {"gpu1"}
    assert fake_runs.most == {"gpu0": 1, "gpu1": 1}


def test_small_runs_share_gpus_and_large_ones_do_not(fake_runs, tmp_path, monkeypatch):
    for name in "abcdefgh":
        fake_runs.waits[name] = lambda: len(fake_runs.where) >= 8
    list(run_all(make_jobs(tmp_path, *"abcdefgh", "more"), 0))
    assert fake_runs.most == {"gpu0": 4, "gpu1": 4}
    fake_runs.most.clear()
    monkeypatch.setattr(placement, "is_small_run", lambda _: False)
    for name in "ij":
        fake_runs.waits[name] = lambda: {"i", "j"} <= set(fake_runs.where)
    list(run_all(make_jobs(tmp_path, *"ijkl"), 0))
    assert fake_runs.most == {"gpu0": 1, "gpu1": 1}


def test_after_an_error_nothing_new_starts(fake_runs, tmp_path):
    fake_runs.waits["long"] = lambda: "bad" in fake_runs.ended
    fake_runs.waits["bad"] = lambda: "long" in fake_runs.where
    with pytest.raises(ValueError, match="a bad run"):
        list(run_all(make_jobs(tmp_path, "bad", "long", "never", "neither"), 2))
    assert "bad" in fake_runs.ended
    assert "neither" not in fake_runs.where  # one more may have begun if `long` was done first


def test_whoever_stops_asking_stops_the_rest(fake_runs, tmp_path):
    iterator = run_all(make_jobs(tmp_path, *"abcdefghi"), 2)
    next(iterator)
    iterator.close()
    assert len(fake_runs.where) == 2


def test_one_at_a_time_is_in_this_process(fake_runs, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "_start_pool", lambda place: pytest.fail("a process was started"))
    list(run_all(make_jobs(tmp_path, *"ab"), 1))
    list(run_all(make_jobs(tmp_path, "c"), 0))
    monkeypatch.setattr(placement, "count_gpus", lambda: 1)
    monkeypatch.setattr(placement, "is_small_run", lambda _: False)
    list(run_all(make_jobs(tmp_path, *"de"), 0))
    assert set(fake_runs.where) == set("abcde")
    assert set(fake_runs.where.values()) == {"MainThread"}


def test_runs_on_different_devices_go_one_kind_after_the_other(fake_runs, tmp_path):
    fake_runs.waits["a"] = lambda: "b" in fake_runs.where
    mixed = [
        *make_jobs(tmp_path, "a", "b"),
        *make_jobs(tmp_path, "c", "d", device="cpu"),
        *make_jobs(tmp_path, "e", "f", device="cuda:1"),
    ]
    assert describe_schedule(mixed, 0) == "2 at a time on 2 GPUs, then 2 at a time, then 2 at a time"
    assert [job.folder.name in "ab" for job in run_all(mixed, 0)] == [True, True, False, False, False, False]
    assert fake_runs.where == {"a": "gpu0", "b": "gpu1", "c": "gpuNone", "d": "gpuNone", "e": "gpuNone", "f": "gpuNone"}


def test_the_schedule_is_described_beforehand(two_gpus, tmp_path):
    planned = make_jobs(tmp_path, *"abcdefghijkl")
    assert describe_schedule(planned, 0) == "8 at a time on 2 GPUs"
    assert describe_schedule(planned, 3) == "3 at a time on 2 GPUs"
    assert describe_schedule(planned[:1], 0) == "1 at a time on one GPU"
    assert describe_schedule(planned, 0, ray="auto") == "as tasks of a Ray cluster"
    for job in planned:
        job.folder.mkdir()
        (job.folder / "experiment.toml").write_text(job.experiment.to_toml())
        (job.folder / "result.json").write_text("{}")
    assert describe_schedule(planned, 0) == "all of them finished"


@pytest.mark.parametrize(("processes", "ray"), [(0, None), (2, None), (1, "auto")])
def test_runs_that_each_need_a_whole_cluster_go_one_by_one(tmp_path, processes, ray):
    with pytest.raises(ValueError, match="engine = 'ray' gives one run the whole cluster: use --jobs 1"):
        run_all(make_jobs(tmp_path, "a", "b", engine="ray", device="cpu"), processes, ray)


@pytest.mark.parametrize(
    ("keys", "gpus", "share"),
    [
        ({"device": "cpu"}, True, 0.0),
        ({"device": "auto"}, False, 0.0),
        ({"device": "auto"}, True, 0.25),
        ({"device": "cuda"}, True, 0.25),
        ({"device": "cuda", "model": "tiny_data:unable"}, True, 1.0),
        ({"device": "cuda", "data": "digits", "model": "resnet10", "batch_size": 64}, True, 1.0),
    ],
    ids=str,
)
def test_on_a_cluster_small_runs_ask_for_a_part_of_a_gpu(keys, gpus, share):
    assert ray_jobs._choose_resources(quick(threads=2, **keys), gpus) == {"num_cpus": 2, "num_gpus": share}


@pytest.mark.slow
def test_real_processes_see_one_gpu_each_and_give_what_this_one_gives(tmp_path, monkeypatch, two_gpus):
    """The GPUs are simulated, so the runs use the CPU; their environment variables are real."""
    log = tmp_path / "log"
    monkeypatch.setenv("TINY_DATA_LOG", str(log))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7, GPU-made-up")
    planned = make_jobs(tmp_path, *"abcd", data="tiny_data:load_and_log")
    expected = records.read_json(next(run_all(make_jobs(tmp_path, "here", device="cpu"))).folder / "result.json")
    assert {job.folder.name for job in run_all(planned, 2)} == set("abcd")
    seen = [line.split(" ", 1) for line in log.read_text().splitlines()]
    assert len(seen) == 4
    assert str(os.getpid()) not in {process for process, _ in seen}
    assert {where for _, where in seen} == {"7", "GPU-made-up"}
    assert len({tuple(pair) for pair in seen}) == 2  # a process stays with its GPU
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "7, GPU-made-up"
    for job in planned:
        result = records.read_json(job.folder / "result.json")
        assert result["domains"] == expected["domains"]
        assert result["device"] == expected["device"] == "cpu"


@pytest.mark.slow
def test_an_error_in_a_process_is_the_error_here(tmp_path):
    planned = [*make_jobs(tmp_path, "bad", "worse", lr=1e9, device="cpu"), *make_jobs(tmp_path, "never", device="cpu")]
    with pytest.raises(ValueError, match="its update holds NaN") as raised:
        list(run_all(planned, 2))
    assert raised.value.__notes__[-1] in {f"in the run {job.folder}" for job in planned[:2]}
    assert not any(job.is_finished for job in planned)
    assert not planned[2].folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_process_does_not_keep_the_others_waiting(killed, monkeypatch):
    """One of two idle processes holds the queue's lock while it waits for a job, and is killed with it."""
    monkeypatch.setattr(pool, "GRACE_SECONDS", 0.2)
    processes = pool._start_pool(DeviceSlots(None, 2))
    for future in [processes.submit(time.sleep, 0.2) for _ in range(2)]:
        future.result()
    workers = list(processes._processes.values())
    os.kill(workers[killed].pid, signal.SIGKILL)
    closing = threading.Thread(target=pool.close_pools, args=([processes],), daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert all(worker.exitcode is not None for worker in workers)


def test_a_folder_from_a_cluster_has_a_result_only_when_it_is_whole(tmp_path, monkeypatch):
    files = {"result.json": b"{}", "state/1.safetensors": b"x"}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", raise_disk_full)
        with pytest.raises(OSError, match="No space left"):
            ray_jobs._write_folder(files, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    ray_jobs._write_folder(files, tmp_path)
    assert (tmp_path / "result.json").read_bytes() == b"{}"


def test_an_error_on_a_cluster_is_the_error_here(monkeypatch):
    """Ray wraps the error in one of its own, whose text is the remote traceback."""
    import ray

    cause = ValueError("model 'x' has no parameter to train")
    there = ray.exceptions.RayTaskError("_run_on_cluster", "Traceback ...\n  File ...", cause).as_instanceof_cause()
    lost = ray.exceptions.WorkerCrashedError()

    def get(done: str) -> None:
        raise {"failed": there, "lost": lost}[done]

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(ValueError, match=r"^model 'x' has no parameter to train$") as raised:
        ray_jobs._get_files("failed")
    assert raised.value is cause
    with pytest.raises(ChildProcessError, match=r"a run on the Ray cluster was lost \(The worker died"):
        ray_jobs._get_files("lost")


def test_the_error_of_a_run_on_a_cluster_names_its_folder(tmp_path, monkeypatch):
    first, second = make_jobs(tmp_path, "good", "bad", device="cpu")
    tasks = iter(["done", "failed"] * 2)
    remote = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: next(tasks)))
    cluster = SimpleNamespace(
        remote=lambda **_: lambda _: remote,
        cluster_resources=dict,
        wait=lambda tasks, num_returns: (tasks[:1], tasks[1:]),
    )

    def get_files(task):
        if task == "failed":
            raise Diverged("its update holds NaN")
        return {"result.json": b"{}"}

    monkeypatch.setattr(ray_jobs, "connect_to_cluster", lambda address: nullcontext(cluster))
    monkeypatch.setattr(ray_jobs, "_get_files", get_files)
    jobs = ray_jobs.run_on_ray([first, second], "auto")
    assert next(jobs) is first
    with pytest.raises(ValueError, match="its update holds NaN") as raised:
        next(jobs)
    assert raised.value.__notes__ == [f"in the run {second.folder}"]
    searched = replace(second, may_diverge=True)
    assert list(ray_jobs.run_on_ray([first, searched], "auto")) == [first, searched]


def test_runs_with_other_weights_are_checked_too(tmp_path):
    plain, wrong = (
        Job(Experiment(data="embedded", model="small_cnn", device="cpu", weights=weights), tmp_path / name)
        for name, weights in (("plain", None), ("wrong", str(tmp_path / "none.safetensors")))
    )
    with pytest.raises(ValueError, match=r"none\.safetensors"):
        check_jobs([plain, wrong])


def test_the_cluster_of_every_run_is_checked(tmp_path, monkeypatch):
    def refuse(address):
        if address == "10.0.0.2:6379":
            raise ValueError(f"{address} does not answer")

    monkeypatch.setattr("fedheal.engine.check_reachable", refuse)
    near, far = (
        Job(
            Experiment(data="embedded", model="small_cnn", device="cpu", engine="ray", ray_address=address),
            tmp_path / name,
        )
        for name, address in (("near", "10.0.0.1:6379"), ("far", "10.0.0.2:6379"))
    )
    check_jobs([near])
    with pytest.raises(ValueError, match=r"10\.0\.0\.2:6379 does not answer"):
        check_jobs([near, far])
