"""Run folders with invented numbers, of any size: what a report reads, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedheal.core.metrics import count_averaged, fairness, last_mean
from fedheal.report import rows
from fedheal.simulate.experiment import Experiment

DOMAINS = {"digits": ("mnist", "usps", "svhn", "syn"), "office-caltech": ("amazon", "dslr", "caltech", "webcam")}


def run_folder(
    folder: Path,
    method: str = "fedavg+fedheal",
    data: str = "digits",
    seed: int = 0,
    rounds: int = 20,
    per_domain: int = 5,
    tensors: int = 8,
    finished: bool = True,
) -> Path:
    """Write a run whose accuracy rises towards a level of its own in every domain; the last domain lags."""
    rng = np.random.default_rng([seed, sum(method.encode()), len(data)])
    domains = DOMAINS.get(data, ("photo", "sketch", "paint"))
    client_domains = {f"{domain}-{k}": domain for domain in domains for k in range(per_domain)}
    level = rng.uniform(75, 95, len(domains)) - np.array([0] * (len(domains) - 1) + [30])
    masks = "fedheal" in method or "fphl" in method
    records = []
    for t in range(1, rounds + 1):
        accuracy = level * (1 - np.exp(-3 * t / rounds)) + rng.normal(0, 0.6, len(domains))
        weights = rng.dirichlet(np.full(len(client_domains), 30.0))
        by_domain = dict(zip(domains, accuracy.tolist(), strict=True))
        report: dict[str, Any] = {"skipped": {}}
        if masks:
            report["kept"] = dict(zip(client_domains, rng.uniform(0.6, 1, len(client_domains)).tolist(), strict=True))
            report["kept_by_tensor"] = {
                f"layer{i}.weight": float(x) for i, x in enumerate(rng.uniform(0.5, 1, tensors))
            }
            report["distance"] = dict(
                zip(client_domains, rng.uniform(0.1, 1, len(client_domains)).tolist(), strict=True)
            )
        records.append({
            "round": t, "cohort": len(client_domains), "replied": len(client_domains), "train_loss": 1.0, "report": report,
            "weights": dict(zip(client_domains, weights.tolist(), strict=True)),
            "seconds": {"train": 1.0, "aggregate": 0.1, "evaluate": 0.2}, "domains": by_domain,
            "clients": {c: by_domain[d] for c, d in client_domains.items()}, "fairness": fairness(by_domain),
            "client_fairness": None, "validation": None,
        })  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiment.toml").write_text(
        f'method = "{method}"\ndata = "{data}"\nseed = {seed}\nrounds = {rounds}\nlr = 0.001\n'
    )
    (folder / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if finished:
        (folder / "result.json").write_text(
            json.dumps(_result(method, data, seed, rounds, records, client_domains, masks, rng))
        )
    return folder


def _result(method, data, seed, rounds, records, client_domains, masks, rng) -> dict[str, Any]:
    accuracy = last_mean([record["domains"] for record in records])
    return {
        "method": method, "data": data, "seed": seed, "rounds": rounds, "averaged": count_averaged(rounds), "domains": accuracy,
        **fairness(accuracy), "clients": last_mean([record["clients"] for record in records]), "validation": None,
        "trained": client_domains, "only": [], "without": [], "pool": False, "classes": list("0123456789"),
        "test_sizes": dict.fromkeys(accuracy, 500), "device": "cpu", "precision": "fp32", "threads": 1,
        "data_fingerprint": "0123abcd", "bytes_sent": 10**8, "bytes_received": 10**8,
        "consistency": {c: rng.dirichlet(np.ones(10)).tolist() for c in client_domains} if masks else None,
        "seconds": {"train": 1.0 * rounds, "aggregate": 0.1 * rounds, "evaluate": 0.2 * rounds},
        "versions": {"fedheal": "0.1.0", "python": "3.11", "torch": "2.13.0"},
    }  # fmt: skip


def load_rows(folder: Path) -> list[rows.Row]:
    """Return the rows of all runs in a folder, in the order of the report command."""
    return rows.find_rows([folder])


def make_run(
    folder: Path,
    data: str,
    method: str,
    domains: dict[str, float],
    rounds: int,
    seconds: Any = (),
    seed: int = 0,
    **fields: Any,
) -> None:
    """Write a finished run with the same accuracies in every round, named as `results/` has it."""
    experiment = Experiment(data=data, method=method, rounds=rounds, seed=seed, **fields)
    path = folder / experiment.folder_name
    path.mkdir(parents=True)
    (path / "experiment.toml").write_text(experiment.to_toml())
    record = {"domains": domains, "fairness": fairness(domains)}
    seconds = seconds or [1.0] * rounds
    records = [record | {"round": i, "seconds": {"train": s - 0.5, "evaluate": 0.5}} for i, s in enumerate(seconds, 1)]
    (path / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    summary = {
        "method": experiment.method_name, "data": data, "seed": seed, "rounds": rounds, "averaged": count_averaged(rounds),
        "domains": domains, "clients": {}, "trained": {}, "test_sizes": dict.fromkeys(domains, 100),
        **fairness(domains), "pool": False, "only": [], "without": [], "precision": "bf16", "hardware": "a GPU",
        "data_fingerprint": "x", "versions": {"fedheal": "1"}, "data_notes": [],
    }  # fmt: skip
    (path / "result.json").write_text(json.dumps(summary))
