"""From a run's rounds to its result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedheal.core.clock import PHASES
from fedheal.core.metrics import count_averaged, fairness, last_mean
from fedheal.runs.schema import SCHEMA_VERSION, RoundRecord, RunResult


def summarise_run(history: Sequence[RoundRecord], *, sort_names: bool = False, **facts: Any) -> dict[str, Any]:
    """Return what `result.json` holds.

    Args:
        history: The records of all rounds.
        sort_names: Order domains and clients by name, not by first evaluation.
        **facts: The fields of `RunResult` that do not follow from the rounds.
    """
    evaluated = [record for record in history if record.domains]
    domains, clients, validation = (
        last_mean([getattr(record, key) or {} for record in evaluated]) for key in ("domains", "clients", "validation")
    )
    if sort_names:
        domains, clients = dict(sorted(domains.items())), dict(sorted(clients.items()))
    summary = facts | {
        "averaged": count_averaged(len(evaluated)),
        "domains": domains,
        **fairness(domains),
        "clients": clients,
        "client_fairness": fairness(clients) if clients else {},
        "validation": {"domains": validation, **fairness(validation)} if validation else None,
        "schema_version": SCHEMA_VERSION,
        "seconds": {phase: sum(record.seconds[phase] for record in history) for phase in PHASES},
    }
    return {name: summary[name] for name in (*RunResult.model_fields, *facts) if name in summary}
