"""A round in numbers and in one line."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedheal.core.metrics import fairness
from fedheal.federation.replies import EvaluateReply
from fedheal.runs.schema import RoundRecord


def summarise_evaluations(evaluations: Sequence[EvaluateReply]) -> dict[str, Any]:
    """Return accuracies by client and by domain (over its clients' examples), in percent, and their fairness."""
    clients = {e.client: 100.0 * e.accuracy for e in evaluations if e.accuracy is not None}
    if not clients:
        return {}
    domains = {}
    for domain in sorted({e.domain for e in evaluations if e.client in clients}):
        group = [e for e in evaluations if e.client in clients and e.domain == domain]
        accuracies, sizes = [clients[e.client] for e in group], [e.num_examples for e in group]
        domains[domain] = float(np.average(accuracies, weights=sizes))
    measures = {"fairness": fairness(domains), "client_fairness": fairness(clients)}
    return {"domains": domains, "clients": clients, **measures}


def describe_round(record: RoundRecord) -> str:
    """Describe a round in one line, with the name of the worst served client."""
    line = f"{record.replied} of {record.cohort} nodes replied, {len(record.report['skipped'])} skipped"
    line += "" if record.train_loss is None else f", training loss {record.train_loss:.3f}"
    if record.domains and record.clients:
        mean = sum(record.domains.values()) / len(record.domains)
        worst, accuracy = min(record.clients.items(), key=lambda item: item[1])
        line += f", accuracy {mean:.1f} %, worst served: '{worst}' with {accuracy:.1f} %"
    return line


def describe_causes(record: RoundRecord) -> str:
    """Say why a round left the model as it was."""
    skipped, missing = record.report["skipped"], record.report["missing"]
    causes = [str(record.report["unmoved"])] if "unmoved" in record.report else []
    causes += [f"'{client}' was skipped ({reason})" for client, reason in list(skipped.items())[:2]]
    causes += [f"no reply from {', '.join(missing[:5])}"] if missing else []
    return f"in the last one {'; '.join(causes) or 'no reply counted'}"


def describe_last_outliers(history: Sequence[RoundRecord]) -> str:
    """Name the outliers of the last round that counted, which may be why no later one does. Return "" if there are none."""
    last = next((record for record in reversed(history) if any(record.weights.values())), None)
    far = {} if last is None else last.report.get("far_norms", {})
    if last is None or not far:
        return ""
    named = "; ".join(f"'{client}' had {why}" for client, why in list(far.items())[:2])
    return f"; in round {last.round}, the last that counted, {named}"
