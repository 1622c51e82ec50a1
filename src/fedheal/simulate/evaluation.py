"""Evaluate the global model on every domain's test examples."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedheal.core.layout import Packed
from fedheal.core.metrics import fairness
from fedheal.core.state import TermState
from fedheal.engine.serial import find_correct
from fedheal.simulate.federation import Federation


def evaluate_domains(federation: Federation, model: Packed, terms: Sequence[TermState] = ()) -> dict[str, Any]:
    """Return the accuracy (percent) of the model per domain and per client, and the fairness metrics of both.

    A client's accuracy is that on its share of its domain's test examples, which are dealt out in turn.
    """
    module, precision = federation.local_training.module, federation.local_training.precision
    domains: dict[str, float] = {}
    clients: dict[str, float] = {}
    validation: dict[str, float] = {}
    for domain, split in federation.tests.items():
        members = _load_evaluated_model(federation, model, terms, domain)
        is_correct = find_correct(module, split, precision).cpu().numpy()
        domains[domain] = 100.0 * float(is_correct.mean())
        for i, client in enumerate(members):
            client_share = is_correct[i :: len(members)]
            if len(client_share):
                clients[client] = 100.0 * float(np.mean(client_share))
        held_out = [federation.validation[client] for client in members if client in federation.validation]
        if held_out:
            hits = torch.cat([find_correct(module, examples, precision).cpu() for examples in held_out])
            validation[domain] = 100.0 * float(hits.double().mean())
    return {
        "domains": domains,
        "clients": clients,
        "fairness": fairness(domains),
        "client_fairness": fairness(clients) if clients else None,
        "validation": validation or None,
    }


def count_by_class(
    federation: Federation, model: Packed, terms: Sequence[TermState] = ()
) -> dict[str, list[list[int]]]:
    """Return, per domain and for each class, how many test examples the model classifies correctly, and of how many."""
    counts = {}
    for domain, split in federation.tests.items():
        _load_evaluated_model(federation, model, terms, domain)
        is_correct = find_correct(federation.local_training.module, split, federation.local_training.precision).cpu()
        labels = split.labels.cpu()
        every = torch.bincount(labels)
        correct = torch.bincount(labels[is_correct], minlength=len(every))
        counts[domain] = torch.stack([correct, every], dim=1).tolist()
    return counts


def _load_evaluated_model(federation: Federation, model: Packed, terms: Sequence[TermState], domain: str) -> list[str]:
    """Load the model that a domain is evaluated with into the module; return the domain's clients."""
    members = sorted(client for client, home in federation.client_domains.items() if home == domain)
    local_training = federation.local_training
    evaluated = select_evaluated_model(federation, model, terms, members)
    local_training.module.load_state_dict(local_training.layout.unpack(evaluated))
    return members


def select_evaluated_model(
    federation: Federation, model: Packed, terms: Sequence[TermState], members: Sequence[str] = ()
) -> Packed:
    """Return the model to evaluate for a domain with these clients: the global one, unless a term gives another."""
    for term, state in zip(federation.local_training.terms, terms, strict=False):
        slots = {client: state.slots[client] for client in members if client in state.slots}
        model = term.evaluated(model, state.shared, slots)
    return model
