"""Bounds of a comparison, which show how far fairness could go.

`standalone` trains a model per client, on that client's data only. `centralised` trains one model on all clients' data in one
place. `leave-one-domain-out` runs FedAvg without one domain's clients, for each domain. A bound is a group of ordinary runs;
`report.rows` combines them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedheal.data.domains import Domains
from fedheal.report.rows import BOUNDS
from fedheal.simulate.build import load_domains, partition_clients
from fedheal.simulate.experiment import Experiment


def load_bound_domains(methods: Sequence[str], values: Mapping[str, Any]) -> Domains | None:
    """Return the data that bounds are planned from, or None if no method is a bound. Raise ValueError on conflicting fields."""
    if not set(methods) & set(BOUNDS):
        return None
    for field in ("only", "without", "pool"):
        if field in values:
            raise ValueError(f"{field} cannot be set in a comparison with bounds ({', '.join(BOUNDS)}): bounds set it")
    return load_domains(Experiment.of(dict(values) | {"method": "fedavg"}))


def plan_bound(bound: str, values: Mapping[str, Any], domains: Domains) -> list[Experiment]:
    """Return the experiments that make up a bound for one seed."""
    values = dict(values) | {"method": "fedavg"}
    seed = values["seed"]
    if bound == "centralised":
        changes: list[dict[str, Any]] = [{"pool": True, "name": f"centralised-seed{seed}"}]
    elif bound == "leave-one-domain-out":
        names = [domain.name for domain in domains.domains]
        changes = [{"without": [name], "name": f"without-{name}-seed{seed}"} for name in names]
    else:
        clients = [client.id for client in partition_clients(Experiment.of(values), domains)]
        changes = [{"only": [client], "name": f"standalone-{client}-seed{seed}"} for client in clients]
    return [Experiment.of(values | change) for change in changes]
