"""What clients find of a model: read from their replies, and put together for a round's record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedheal.core.metrics import fairness
from fedheal.flower.node_registry import Heard
from fedheal.flower.replies import Admission, Refused, examples_of, numbers

ACCURACY = ("accuracy", "eval_acc")  # what clients call the share of test examples they have right


@dataclass(frozen=True)
class Judged:
    """What one client found of the model; `accuracy` from 0 to 1, if it sent one."""

    client: str
    domain: str
    num_examples: float
    accuracy: float | None

    @staticmethod
    def together(judged: Sequence[Judged]) -> dict[str, Any]:
        """A round's accuracies per client and per domain (over its clients' examples), in percent, and how even they are."""
        known = [(one, 100.0 * one.accuracy) for one in judged if one.accuracy is not None]
        if not known:
            return {}
        clients = {one.client: accuracy for one, accuracy in known}
        domains: dict[str, float] = {}
        for domain in sorted({one.domain for one, _ in known}):
            here = [(accuracy, one.num_examples) for one, accuracy in known if one.domain == domain]
            domains[domain] = float(np.average([a for a, _ in here], weights=[n for _, n in here]))
        return {
            "domains": domains,
            "clients": clients,
            "fairness": fairness(domains),
            "client_fairness": fairness(clients),
        }


def judged(one: Heard, admission: Admission) -> Judged:
    """An evaluation reply, checked; `Refused` says what is wrong."""
    if one.trouble is not None:
        raise Refused(one.trouble)
    found = numbers(one.message.content.metric_records)
    examples = examples_of(found, admission)
    wrong = [f"{key} = {found[key]}" for key in ACCURACY if key in found and not 0 <= found[key] <= 1]
    if wrong:
        raise Refused(", ".join(wrong))
    accuracy = next((found[key] for key in ACCURACY if key in found), None)
    return Judged(one.client, one.domain, examples, accuracy)
