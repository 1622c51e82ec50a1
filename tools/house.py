"""Measure the structure of the package: files, functions, imports, and the calls of one round.

    python tools/house.py                    measure this tree
    python tools/house.py REVISION           compare that revision with this tree, as a Markdown table

A hop is a distinct call from one package to another during one round of FedAvg. Calls into `core` do not count, because all
packages share its vocabulary. A module at the top level counts as a package.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# `core`, and the modules of earlier revisions that are now in it.
CORE = {"core", "layout", "rng", "metrics", "types", "collect", "own", "version"}

# This runs in a process of its own, which imports the measured tree.
TRACE = """
import json, sys
from pathlib import Path
import fedheal
root = str(Path(fedheal.__file__).parent) + "/"
experiment = fedheal.Experiment(
    method="fedavg", data="embedded", model="small_cnn", rounds=1, steps=1, clients_per_domain=1, device="cpu"
)
calls, deepest = set(), 0

def locate(frame):
    path = frame.f_code.co_filename
    return (path.removeprefix(root), frame.f_code.co_qualname.split(".<")[0]) if path.startswith(root) else None

def trace(frame, event, argument):
    global deepest
    callee = locate(frame) if event == "call" else None
    if callee is None:
        return
    chain, above = [callee], frame.f_back
    while above is not None and chain[-1][1] != "run_round":
        caller = locate(above)
        if caller is not None:
            chain.append(caller)
        above = above.f_back
    if chain[-1][1] == "run_round" and len(chain) > 1:
        deepest = max(deepest, len(chain))
        calls.add((chain[1][0], callee[0], callee[1]))

sys.setprofile(trace)
fedheal.run(experiment, progress=False)
sys.setprofile(None)
print(json.dumps({"calls": sorted(calls), "deepest": deepest}))
"""


def measure_tree(root: Path) -> dict[str, Any]:
    """Return the numbers of one tree by the names of their rows."""
    package = root / "src" / "fedheal"
    files = sorted(package.rglob("*.py"))
    lines = {path: len(path.read_text().splitlines()) for path in files}
    functions = [length for path in files for length in list_function_lengths(path)]
    per_package: dict[str, int] = defaultdict(int)
    for path in files:
        per_package[name_package(path.relative_to(package))] += 1
    top_level = [path for path in files if path.parent == package]
    round_calls = trace_round(root)
    return {
        "lines of source": sum(lines.values()),
        "lines of tests": sum(len(path.read_text().splitlines()) for path in (root / "tests").rglob("*.py")),
        "files": len(files),
        "files at the top level": len(top_level),
        "median file, lines": int(median(lines.values())),
        "longest file, lines": max(lines.values()),
        "functions": len(functions),
        "median function, lines": int(median(functions)),
        "longest function, lines": max(functions),
        "functions over 60 lines": sum(length > 60 for length in functions),
        "ranks of imports between packages": count_ranks(package),
        "hops of one round": count_hops(round_calls["calls"]),
        "deepest chain of calls in a round": round_calls["deepest"],
        "files per package": ", ".join(f"{name} {number}" for name, number in sorted(per_package.items())),
    }


def name_package(path: Path) -> str:
    """Return the package of a path below `fedheal`; a module at the top level counts as one."""
    return path.parts[0].removesuffix(".py")


def list_function_lengths(path: Path) -> list[int]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return [
        node.end_lineno - node.lineno + 1 for node in nodes if isinstance(node, ast.FunctionDef) and node.end_lineno
    ]


def count_ranks(package: Path) -> int:
    """Return the length of the longest chain of imports between packages. Imports inside functions do not count."""
    imports: dict[str, set[str]] = defaultdict(set)
    for path in package.rglob("*.py"):
        part = name_package(path.relative_to(package))
        if part in ("__init__", "__main__"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fedheal":
                names = [node.module] if "." in node.module else [f"fedheal.{alias.name}" for alias in node.names]
                imports[part] |= {name.split(".")[1] for name in names} - {part}

    @cache
    def compute_rank(part: str) -> int:
        return 1 + max((compute_rank(imported) for imported in imports[part]), default=0)

    return max(compute_rank(part) for part in list(imports))


def trace_round(root: Path) -> dict[str, Any]:
    """Run one round of the tree's package in a process of its own; return its calls between files."""
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    process = subprocess.run(
        [sys.executable, "-c", TRACE],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=tempfile.gettempdir(),
    )
    round_calls: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return round_calls


def count_hops(calls: list[list[str]]) -> int:
    hops = set()
    for caller, callee, function in calls:
        origin, target = name_package(Path(caller)), name_package(Path(callee))
        if origin != target and target not in CORE:
            hops.add((origin, callee, function))
    return len(hops)


def measure_revision(revision: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        return measure_tree(Path(folder))


def main(words: list[str]) -> int:
    if len(words) > 1 or (words and words[0].startswith("-")):
        print(__doc__)
        return 0 if words in (["-h"], ["--help"]) else 2
    after = measure_tree(ROOT)
    if not words:
        for name, value in after.items():
            print(f"{name}: {value}")
        return 0
    try:
        before = measure_revision(words[0])
    except subprocess.CalledProcessError as error:
        print(f"{words[0]} cannot be measured: {error.stderr.decode().strip()}", file=sys.stderr)
        return 2
    print("| | before | after |\n|---|---|---|")
    for name, value in after.items():
        print(
            f"| {name} | {before[name]:,} | {value:,} |"
            if isinstance(value, int)
            else f"| {name} | {before[name]} | {value} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
