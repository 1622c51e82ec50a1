"""Search for methods that are better than FedHEAL and than uniform weights, by the rule of docs/search-plan.md.

    python benchmarks/search.py --data embedded --seeds 100-102 --jobs 2 --out runs/search
    python benchmarks/search.py --data digits --data-root DATA --seeds 100 --rounds 30 --device cuda --out runs/search

It prints a Markdown table of all finished runs in the folder, best first. A repeated command keeps finished runs and resumes
stopped ones. A run is scored on training images that no client holds, drawn by its seed. No test image is used.
Fields such as `precision=bf16` come before the options.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from arguments import exit_with_error
from fedheal import methods
from fedheal.campaign.compare import parse_seeds
from fedheal.campaign.jobs import Job, run_job
from fedheal.core.metrics import fairness
from fedheal.core.rng import generator
from fedheal.data import get_protocol
from fedheal.data.domains import Domain, Domains, Split
from fedheal.methods import SERVERS
from fedheal.report.rows import load_summary
from fedheal.runs.folder import read_rounds
from fedheal.simulate.build import load_domains
from fedheal.simulate.devices import resolve_device
from fedheal.simulate.experiment import Experiment, parse_overrides

UNIFORM, FEDHEAL = CONTROLS = ("fedavg+uniform", "fedavg+fedheal")
PER_STEP = "fedheal:per_step=true"
FAIR = "afl:floor=0.5+fphl"
CANDIDATES = [
    *("fedavg", PER_STEP, "fedpw"),  # for orientation
    *(f"{stages}+total-variance" for stages in ("uniform", "fedheal", "afl+fphl")),
    *(f"{PER_STEP}+mix:{held}" for held in ("uniform=0.25", "uniform=0.5", "uniform=0,power=0.5")),
    f"{PER_STEP}+mix:uniform=0.25,last=0.9",
    "fael:per_step=true+mix:uniform=0.5",
    "fael-exact:ridge=1,towards=uniform,floor=0.2",
    "fael-exact:ridge=0.1,towards=uniform,floor=0.5",
    "fael-exact:towards=uniform+mix:uniform=0.25,last=0.9",
    *("afl", "afl:floor=0.25", "afl:floor=0.5", "afl:floor=0.75", "afl:gamma=0.1,floor=0.5"),
    *("afl+fphl", FAIR, "afl:gamma=0.03,floor=0.25+fphl", "afl:gamma=0.1,floor=0.5+fphl"),
    *("afl+mix:uniform=0.25", "afl+mix:uniform=0.5", "afl+fphl+mix:uniform=0.25", "afl+fphl+mix:uniform=0.5"),
    *("afl:gamma=0.03+fphl+mix:uniform=0.5", "afl:gamma=0.1,floor=0.5+mix:uniform=0,last=0.9"),
    *("fedheal:per_domain=true", "fedheal:per_domain=true,per_step=true"),
    *(f"qffl:q={q}{mask}" for q in (0.25, 0.5, 1) for mask in ("", "+fphl")),
    "qffl:q=1+fphl+mix:uniform=0,last=0.9",
    "qffl:q=2,mode=reweight+fphl+mix:uniform=0.25,last=0.9",
    *(f"{stages}+fedavgm:beta1=0.5" for stages in ("uniform", "fedheal", FAIR)),
    *("uniform+fedadam", f"{FAIR}+fedadam"),
]
HELD_OUT = 2000  # images of a domain, or all that clients leave
COLUMNS = ("avg", "std", "worst")
GAIN_SIGNS = {"avg": 1, "std": -1}

RunsByMethod = dict[str, dict[int, dict[str, Any]]]  # method -> seed -> run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="fields that differ from the protocol")
    parser.add_argument("--data", choices=["embedded", "digits"], default="embedded")
    parser.add_argument("--data-root", default=None, help="the data directory, if not that of FEDHEAL_DATA")
    parser.add_argument("--seeds", default="100-102", help="a seed, a range (100-102) or a list (100,104-106)")
    parser.add_argument("--rounds", type=int, default=None, help="if not those of the protocol")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each with one thread")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--candidates", nargs="+", metavar="METHOD", default=CANDIDATES, help="these instead of all")
    parser.add_argument("--out", type=Path, default=Path("runs/search"))
    options = parser.parse_intermixed_args()
    try:
        search(options)
    except ValueError as error:
        exit_with_error(str(error))


def search(options: argparse.Namespace) -> None:
    """Run all unfinished runs, and print the tables."""
    if options.jobs < 1:
        raise ValueError(f"jobs = {options.jobs}: use 1 or more")
    resolve_device(options.device)
    fields = parse_overrides(options.overrides) | {"device": options.device, "data_root": options.data_root}
    fields |= {} if options.rounds is None else {"rounds": options.rounds}
    names = list(dict.fromkeys(methods.get(name).name for name in [*CONTROLS, *options.candidates]))
    names = list(dict.fromkeys([*CONTROLS, *(find_control(name) for name in names), *names]))
    folder = options.out / options.data
    seeds = parse_seeds(f"{options.seeds}-{options.seeds}" if options.seeds.isdigit() else options.seeds)
    runs = [(options.data, folder, method, seed, fields) for seed in seeds for method in names]
    unfinished = [run for run in runs if not make_job(*run).is_finished]
    print(f"{len(runs)} runs, {len(unfinished)} to do", file=sys.stderr, flush=True)
    for line in run_all(unfinished, options.jobs):
        print(line, file=sys.stderr, flush=True)
    tables = {data: read_runs(options.out / data) for data in ("embedded", "digits") if (options.out / data).is_dir()}
    for data, runs_by_method in tables.items():
        print_table(data, runs_by_method, tables)


def run_all(runs: list[tuple[Any, ...]], processes: int) -> Iterator[str]:
    """Run all, several at a time. Yield a line for each finished run."""
    if processes == 1:
        yield from (run_one(*run) for run in runs)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        try:
            for future in as_completed([pool.submit(run_one, *run) for run in runs]):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_one(data: str, folder: Path, method: str, seed: int, fields: Mapping[str, Any]) -> str:
    """Run or resume one run. Return its numbers in a line."""
    job = make_job(data, folder, method, seed, fields)
    run_job(job)
    summary = load_summary(job.folder)
    numbers = " ".join(f"{key} {summary[key]:.2f}" for key in COLUMNS)
    return f"{job.folder.name}: {numbers} ({sum(summary['seconds'].values()):.0f} s)"


def make_job(data: str, folder: Path, method: str, seed: int, fields: Mapping[str, Any]) -> Job:
    """Return a run on held-out images, with the protocol of its data set."""
    held_out = load_held_out(data, fields["data_root"], seed)
    own = {key: value for key, value in fields.items() if key != "data_root"}
    experiment = Experiment.of(get_protocol(data) | own | {"data": held_out, "method": method, "seed": seed})
    return Job(experiment, folder / experiment.folder_name)


@functools.lru_cache(maxsize=1)
def load_held_out(data: str, root: str | None, seed: int) -> Any:
    """Return the data of a seed, fingerprinted once."""
    domains = load_domains(Experiment.of({"data": data, "data_root": root, "method": "fedavg"}))
    return Experiment(data=hold_out(domains, seed), method="fedavg").data_object


def hold_out(domains: Domains, seed: int) -> Domains:
    """Return the data with training images that no client needs in place of the test images."""
    parts = zip(domains.domains, domains.clients_per_domain, domains.samples_per_client, strict=True)
    changed = [_hold_out_domain(domain, clients * samples, seed) for domain, clients, samples in parts]
    return replace(domains, name=f"{domains.name}-held-out", domains=tuple(changed), identity="")


def _hold_out_domain(domain: Domain, needed: int, seed: int) -> Domain:
    order = torch.randperm(len(domain.train), generator=generator(seed, "held-out", domain.name))
    cut = min(HELD_OUT, len(order) - needed)
    if cut < 1 or needed < 1 or domain.excerpt is not None:
        raise ValueError(f"domain '{domain.name}': clients leave no training image to hold out")
    test_rows, train_rows = order[:cut].sort().values, order[cut:].sort().values
    train, test = (Split(domain.train.images[rows], domain.train.labels[rows]) for rows in (train_rows, test_rows))
    return replace(domain, train=train, test=test)


def find_control(name: str) -> str:
    """Return uniform weights with the server optimiser of a method, if it has one."""
    last = methods.get(name).parts[-1]
    return f"{UNIFORM}+{last.format(defaults=False)}" if last.name in SERVERS else UNIFORM


def read_runs(folder: Path) -> RunsByMethod:
    """Return the finished runs by method and seed: fairness, and the domains' weights in the last round."""
    runs: RunsByMethod = {}
    for path in sorted(folder.glob("*/result.json")):
        summary, last = load_summary(path.parent), read_rounds(path.parent)[-1]
        weights = dict.fromkeys(summary["domains"], 0.0)
        for client, weight in last.weights.items():
            weights[client.rpartition("-")[0]] += weight
        run = {**fairness(summary["domains"]), "weights": weights}
        runs.setdefault(methods.get(summary["method"]).name, {})[summary["seed"]] = run
    return runs


def compute_margin(runs: RunsByMethod, name: str) -> float:
    """Return the smallest gain in AVG and STD over the controls; NaN for a control, or if there is no common seed."""
    controls = dict.fromkeys([*CONTROLS, find_control(name)])
    if name in controls or not all(control in runs for control in controls):
        return float("nan")
    return min(
        sign * subtract_methods(runs, name, control, key) for control in controls for key, sign in GAIN_SIGNS.items()
    )


def subtract_methods(runs: RunsByMethod, a: str, b: str, key: str) -> float:
    """Return the mean difference of two methods over the seeds that both have."""
    common = runs[a].keys() & runs.get(b, {}).keys()
    return float(np.mean([runs[a][seed][key] - runs[b][seed][key] for seed in common])) if common else float("nan")


def print_table(data: str, runs: RunsByMethod, tables: Mapping[str, RunsByMethod]) -> None:
    """Print all methods, best first by the margin on all data sets, then on this one."""
    margins = {
        name: {key: compute_margin(table, name) for key, table in tables.items() if name in table} for name in runs
    }
    overall = {name: min(gains.values()) if len(gains) == 2 else float("nan") for name, gains in margins.items()}
    first_method = next(iter(runs.values()), {})
    domains = list(next(iter(first_method.values()))["weights"]) if first_method else []
    differences = [f"{key.upper() if key != 'worst' else key} - {c}" for c in ("uniform", "FedHEAL") for key in COLUMNS]
    columns = [
        "method",
        "seeds",
        "AVG",
        "STD",
        "worst",
        *differences,
        "margin",
        "overall",
        f"weights: {', '.join(domains)}",
    ]
    print(f"\n{data}, held-out images, percent; differences in points\n")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")

    def rank_method(name: str) -> tuple[float, ...]:
        return tuple(-np.nan_to_num(value, nan=-1e9) for value in (overall[name], margins[name][data]))

    for name in sorted(runs, key=lambda name: (*rank_method(name), name)):
        own_runs = runs[name].values()
        numbers = [f"{np.mean([run[key] for run in own_runs]):.2f}" for key in COLUMNS]
        gaps = [f"{subtract_methods(runs, name, control, key):+.2f}" for control in CONTROLS for key in COLUMNS]
        weights = " ".join(f"{100 * np.mean([run['weights'][domain] for run in own_runs]):.0f}" for domain in domains)
        cells = [*numbers, *gaps, f"{margins[name][data]:+.2f}", f"{overall[name]:+.2f}", weights]
        print(f"| `{name}` | {len(own_runs)} | {' | '.join(cells)} |".replace("+nan", "").replace("nan", ""))


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
