"""Draw and try inputs of the command line: words, experiment files, names of methods, and run folders."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import tomli_w
import torch
from guard import Broken, Interruptible, Limits
from hypothesis import strategies as st
from mutations import byte_edits, edit_bytes, edit_json, edit_words, json_edits, json_values, leaves, texts, word_edits
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

with warnings.catch_warnings():  # typer still imports names that click has deprecated
    warnings.simplefilter("ignore", DeprecationWarning)
    from fedheal import cli

import fedheal
from fedheal import methods
from fedheal.core.state import compute_checksum
from fedheal.simulate.experiment import Experiment
from tiny_data import QUICK

LONGEST_ERROR = 40_000  # characters: an odd word has up to 5,000, may come twice, and may be quoted with its part
TINY = {**QUICK, "rounds": 1}
COMMAND_LIMITS = Limits(patience=0.5)
# Left out are `workers`, whose processes would take seconds to start, and `data_root`.
FIELDS = sorted(set(Experiment.model_fields) - {"workers", "data_root"})


@dataclass(frozen=True)
class CommandResult:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str


def call_command(words: list[str]) -> CommandResult:
    """Run a command in this process, and return how its own process would have ended."""
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    path, arguments = list(sys.path), sys.argv
    sys.argv, code = ["fedheal", *words], 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), Interruptible():
            cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv, sys.path[:] = arguments, path
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return CommandResult(code, out.getvalue(), err.getvalue())


def check_result(result: CommandResult) -> str:
    """Return whether a command was accepted or rejected. Raise `Broken` unless it ended as documented."""
    last = result.err.rstrip("\n").rpartition("\n")[2]
    # Python prints a traceback for an interrupt that it loses in a finaliser.
    has_lost_interrupt = "Exception ignored in" in result.err and "KeyboardInterrupt" in result.err
    if result.code not in (0, 1, 2, 130) or ("Traceback" in result.err and not has_lost_interrupt):
        raise Broken(f"exit code {result.code}: {result.err[-2000:]}")
    if result.code == 2 and not ("fedheal: " in result.err or "Usage:" in result.out + result.err):
        raise Broken(f"exit code 2 without a sentence: {last!r}")
    if len(result.err) > LONGEST_ERROR:
        raise Broken(f"an error of {len(result.err)} characters: {result.err[:200]!r}")
    return "rejected" if result.code == 2 else "accepted"


@contextlib.contextmanager
def enter_fresh_folder(folder: Path) -> Iterator[Path]:
    """Make an empty folder, work in it, and remove it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with contextlib.chdir(folder):
        yield folder
    shutil.rmtree(folder, ignore_errors=True)


def write_words(values: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def check_finite(folder: Path) -> None:
    """Raise `Broken` if a model in the folder holds NaN or infinity."""
    for path in folder.rglob("model.safetensors"):
        with contextlib.suppress(SafetensorError, OSError):
            for name, values in load_file(path).items():
                if values.is_floating_point() and not bool(torch.isfinite(values).all()):
                    raise Broken(f"{path.name} is not finite in {name}")


class CommandLines:
    """Words of every command: valid lines with words changed, doubled, cut or moved, and odd fields."""

    name, limits = "command lines", COMMAND_LIMITS
    lines: ClassVar[list[list[str]]] = [
        ["run", *write_words(TINY), "--out", "runs/a", "--quiet"],
        ["run", *write_words(TINY), "--json"],
        ["run", "--resume", "--out", "done/fedavg-0"],
        ["compare", "fedavg", "fedheal", "--seeds", "2", "--jobs", "1", "--data", "tiny_data:load",
         *write_words({k: v for k, v in TINY.items() if k != "data"})],
        ["sweep", "method=fedheal", "tau=0.2,0.5", "--seeds", "1", "--jobs", "1", *write_words(TINY), "validation=0.3"],
        ["report", "done"],
        ["report", "done", "--format", "markdown", "--reference", "fedavg"],
        ["report", "done", "--format", "csv", "--out", "table.csv"],
        ["report", "done/fedavg-0", "--diagnose", "--by", "client"],
        ["methods"],
        ["methods", "fedprox:mu=0.1+fedheal:tau=0.4"],
        ["data", "list"],
        ["data", "check", "digits", "--data-root", "."],
        ["data", "show", "tiny_data:load", "--clients", "--out", "sheets"],
        ["data", "prepare", "office-caltech", "--data-root", "."],
        ["data", "export", "digits", "--seeds", "0-1", "--data-root", "."],
        ["reproduce", "table1", "--rows", "none*", "--smoke"],
        ["--version"],
        ["run", "--help"],
        [],
    ]  # fmt: skip
    fields = st.tuples(st.sampled_from([*FIELDS, "tau", "beta", "mu", "x", ""]), st.one_of(leaves.map(str), texts))
    cases = st.tuples(st.sampled_from(range(len(lines))), word_edits, st.lists(fields, max_size=2))
    valid: ClassVar[list[Any]] = [(number, [], []) for number in (0, 3, 5, 6, 8, 9, 10, 11, 17)]

    def __init__(self, work: Path) -> None:
        self.folder = work / "play" / "a" / "b" / "here"
        self.runs = make_runs(work / "prepared")

    def attempt(self, case: Any) -> str:
        number, edits, fields = case
        words = edit_words([*self.lines[number], *(f"{key}={value}" for key, value in fields)], edits)
        # A cluster and a tracker have their own files and connections.
        if {"fetch", "demo"} & set(words) or any(w.startswith(("--ray", "--track", "--jobs=")) for w in words):
            return "left out"
        with enter_fresh_folder(self.folder) as folder:
            shutil.copytree(self.runs, folder / "done")
            outcome = check_result(call_command(words))
            check_finite(folder)
        return outcome


class ExperimentFiles:
    """Experiment files: a valid one with edited bytes, lines or values; then the run that it describes."""

    name, limits = "experiment files", COMMAND_LIMITS
    cases = st.one_of(
        st.tuples(st.just("bytes"), byte_edits),
        st.tuples(st.just("values"), st.lists(st.tuples(st.sampled_from(FIELDS), json_values), min_size=1, max_size=3)),
        st.tuples(st.just("lines"), word_edits),
        st.tuples(st.just("nested"), st.integers(1, 5000)),
    )
    valid: ClassVar[list[Any]] = [("lines", [])]

    def __init__(self, work: Path) -> None:
        self.folder = work / "play" / "here"
        self.text = Experiment(**TINY).to_toml()

    def attempt(self, case: Any) -> str:
        kind, edits = case
        with enter_fresh_folder(self.folder) as folder:
            (folder / "file.toml").write_bytes(self.make_file(kind, edits))
            outcome = check_result(call_command(["run", "file.toml", "--quiet"]))
            check_finite(folder)
            if strays := sorted(p.name for p in folder.iterdir() if p.name not in ("file.toml", "runs")):
                raise Broken(f"it wrote {strays[:3]} beside the run folder")
        return outcome

    def make_file(self, kind: str, edits: Any) -> bytes:
        if kind == "bytes":
            return edit_bytes(self.text.encode(), edits)
        if kind == "lines":
            return "\n".join(edit_words(self.text.splitlines(), edits)).encode("utf-8", "surrogateescape")
        if kind == "nested":
            return (self.text + f"only = {'[' * edits}{']' * edits}\n").encode()
        values = {**Experiment(**TINY).to_dict(), **dict(edits)}
        try:
            return tomli_w.dumps({k: v for k, v in values.items() if v is not None}).encode()
        except (TypeError, ValueError, UnicodeEncodeError):  # TOML has no null, for example
            return json.dumps(values).encode()


class MethodNames:
    """Names of methods. The canonical name of an accepted method must mean the same method."""

    name, limits = "method names", Limits()
    parts = (
        "fedavg", "fedprox:mu=0.1", "scaffold", "moon", "feddyn", "fedheal:tau=0.3,beta=0.4", "fphl", "fael", "afl", "qffl",
        "uniform", "fedheal:variant=released", "fael-exact", "ditto", "fedfv", "math:hypot", "json:dumps",
    )  # fmt: skip
    assignments = st.tuples(
        st.sampled_from(("tau", "beta", "mu", "q", "variant", "")), st.one_of(leaves.map(str), texts)
    )
    cases = st.tuples(
        st.lists(st.sampled_from(parts), min_size=1, max_size=3),
        word_edits,
        st.lists(assignments.map(lambda pair: f"{pair[0]}={pair[1]}"), max_size=2),
        st.sampled_from("+ :,"),
    )
    valid: ClassVar[list[Any]] = [(["fedprox:mu=0.1", "fedheal:tau=0.3,beta=0.4"], [], [], "+")]

    def __init__(self, work: Path) -> None:
        pass

    def attempt(self, case: Any) -> str:
        parts, edits, assignments, sign = case
        name = sign.join(edit_words(parts, edits)) + (":" + ",".join(assignments) if assignments else "")
        try:
            method = methods.get(name)
        except ValueError as error:
            if len(str(error)) > LONGEST_ERROR:
                raise Broken(f"an error of {len(str(error))} characters") from None
            return "rejected"
        if methods.get(method.name).full_name != method.full_name:
            raise Broken(f"{name!r} is {method.full_name!r}, and its name {method.name!r} another method")
        return "accepted"


def make_runs(folder: Path) -> Path:
    """Run a comparison of two methods, unless the folder has one."""
    if not folder.exists():
        for method in ("fedavg", "fedheal"):
            experiment = Experiment(**{**TINY, "rounds": 3, "save_seconds": 0, "method": method, "validation": 0.2})
            fedheal.run(experiment, folder / f"{method}-0", progress=False)
        (folder / "comparison.json").write_text('{"methods": ["fedheal", "fedavg"]}')
    return folder


FILES = (
    "result.json",
    "rounds.jsonl",
    "experiment.toml",
    "model.safetensors",
    "state/newest",
    "state/older",
    "../comparison.json",
)


class RunFolders:
    """Run folders: one file damaged, exchanged, doubled, removed or forged; then reports, loading and resuming."""

    name, limits = "run folders", COMMAND_LIMITS
    damage = st.one_of(
        st.tuples(st.just("bytes"), byte_edits),
        st.tuples(st.just("json"), json_edits),
        st.tuples(st.just("lines"), word_edits),
        st.tuples(st.sampled_from(("delete", "folder", "link", "pipe", "other", "empty", "deep")), st.just([])),
    )
    uses = (
        "report",
        "report",
        "csv",
        "latex",
        "diagnose",
        "by client",
        "resume",
        "resume",
        "resume",
        "resume",
        "load",
        "load",
        "page",
    )
    cases = st.tuples(st.sampled_from(FILES), damage, st.sampled_from(uses), st.booleans())
    valid: ClassVar[list[Any]] = [("result.json", ("lines", []), use, False) for use in dict.fromkeys(uses)]

    def __init__(self, work: Path) -> None:
        self.folder = work / "play" / "here"
        self.runs = make_runs(work / "prepared")

    def attempt(self, case: Any) -> str:
        file, (kind, edits), use, is_unfinished = case
        with enter_fresh_folder(self.folder) as folder:
            shutil.copytree(self.runs, folder / "done")
            run = folder / "done" / "fedheal-0"
            if is_unfinished:  # so that a resume reads the checkpoints
                (run / "result.json").unlink()
            damage_file(find_file(run, file), find_file(folder / "done" / "fedavg-0", file), kind, edits)
            outcome = self.use_run(use, run)
            if use == "resume" and outcome == "accepted" and file != "model.safetensors":
                check_finite(folder)
        return outcome

    def use_run(self, use: str, run: Path) -> str:
        if use == "load":
            try:
                fedheal.load(run)
            except (ValueError, OSError):
                return "rejected"
            return "accepted"
        words = {
            "report": ["report", "done"],
            "csv": ["report", "done", "--format", "csv"],
            "latex": ["report", "done", "--format", "latex"],
            "page": ["report", "done", "--html"],
            "diagnose": ["report", str(run), "--diagnose"],
            "by client": ["report", str(run), "--diagnose", "--by", "client"],
            "resume": ["run", "--resume", "--out", str(run), "--quiet"],
        }
        return check_result(call_command(words[use]))


def find_file(run: Path, name: str) -> Path:
    if name.startswith("state/"):
        newest, older = sorted((run / "state").glob("*.safetensors"), reverse=True)[:2]
        return newest if name == "state/newest" else older
    return run / name


def damage_file(path: Path, other: Path, kind: str, edits: Any) -> None:
    data = path.read_bytes() if path.exists() else b"{}"
    path.unlink(missing_ok=True)
    if kind == "bytes":
        path.write_bytes(edit_bytes(data, edits))
    elif kind == "json":
        path.write_bytes(forge_file(data, path.suffix, edits))
    elif kind == "lines":
        lines = data.decode("utf-8", "surrogateescape").split("\n")
        path.write_bytes(
            "\n".join(edit_words(lines, edits)).encode("utf-8", "surrogatepass" if edits else "surrogateescape")
        )
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(path.name)
    elif kind == "pipe":
        path.write_bytes(data + data)
    elif kind == "other" and other.exists():
        path.write_bytes(other.read_bytes())
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "deep":
        path.write_bytes(b'{"round": 1, "x": ' + b"[" * 100_000)


def forge_file(data: bytes, suffix: str, edits: Any) -> bytes:
    """Edit the values of a file. A checkpoint gets a right checksum, as from another program."""
    if suffix == ".jsonl":
        records = [json.loads(line) for line in data.decode().splitlines()]
        return "".join(json.dumps(record) + "\n" for record in edit_json(records, edits) or []).encode()
    if suffix == ".json":
        return json.dumps(edit_json(json.loads(data), edits)).encode()
    if suffix == ".safetensors":
        return forge_tensors(data, edits)
    return edit_bytes(data, [("set", 7, 3, b"nan")])


def forge_tensors(data: bytes, edits: Any) -> bytes:
    path = Path("forged.tmp")
    path.write_bytes(data)
    with safe_open(path, "pt") as file:
        header = json.loads((file.metadata() or {}).get("fedheal", "{}"))
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a dictionary)
    path.unlink()
    if edits[0][1] % 2 and arrays:
        name = sorted(arrays)[edits[0][1] % len(arrays)]
        value = arrays.pop(name)
        changed = {"replace": value.flatten(), "add": value.double() * float("nan"), "nest": value[None]}
        arrays |= {name: changed[edits[0][0]]} if edits[0][0] in changed else {}
    elif "state" in header:
        header["state"] = edit_json(header["state"], edits)
    arrays = {name: value.contiguous() for name, value in arrays.items()}
    try:
        header["sum"] = compute_checksum(arrays, header.get("state"))
        return save(arrays, {"fedheal": json.dumps(header)})
    except (TypeError, ValueError):
        return data
