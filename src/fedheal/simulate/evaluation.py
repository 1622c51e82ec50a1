"""Evaluate the global model on every domain's test examples."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedheal.core.calibration import score_logits, summarise_scores
from fedheal.core.layout import Packed
from fedheal.core.metrics import fairness
from fedheal.core.state import TermState
from fedheal.data.augment import normalise_images
from fedheal.data.domains import Split
from fedheal.engine import Engine
from fedheal.engine.cohort import CohortEngine
from fedheal.engine.pooled import PooledEngine
from fedheal.engine.precision import autocast
from fedheal.engine.serial import LocalTraining, eval_batches, find_correct_in_turn
from fedheal.simulate.federation import Federation


def evaluate_domains(
    federation: Federation, model: Packed, terms: Sequence[TermState] = (), engine: Engine | None = None
) -> dict[str, Any]:
    """Return the accuracy (percent) of the model per domain and per client, and the fairness metrics of both.

    A client's accuracy is that on its share of its domain's test examples, which are dealt out in turn. `engine` evaluates,
    if it has workers or graphs for that.
    """
    members = federation.members
    models = {d: select_evaluated_model(federation, model, terms, members[d]) for d in federation.tests}
    held_out = [
        (domain, federation.validation[client])
        for domain in federation.tests
        for client in members[domain]
        if client in federation.validation
    ]
    pairs = [(models[domain], split) for domain, split in [*federation.tests.items(), *held_out]]
    if isinstance(engine, PooledEngine | CohortEngine):
        found = engine.find_correct(pairs)
    else:
        found = find_correct_in_turn(federation.local_training, pairs)
    correct = torch.split(torch.cat(found).cpu(), [len(split) for _, split in pairs])  # read from a GPU once
    is_correct = {domain: hits.numpy() for domain, hits in zip(federation.tests, correct, strict=False)}
    clients, domains = dict[str, float](), dict[str, float]()
    for domain, marks in is_correct.items():
        owners, sizes = _deal_out(len(marks), max(len(members[domain]), 1))
        hits_by_owner = np.bincount(owners[marks], minlength=len(sizes))
        clients |= zip(members[domain], (100.0 * (hits_by_owner / sizes)).tolist(), strict=False)
        domains[domain] = 100.0 * (np.count_nonzero(marks) / len(marks))
    hits_of: dict[str, list[Tensor]] = {}
    for (domain, _), hits in zip(held_out, correct[len(federation.tests) :], strict=True):
        hits_of.setdefault(domain, []).append(hits)
    validation = {domain: 100.0 * float(torch.cat(hits).double().mean()) for domain, hits in hits_of.items()}
    return {
        "domains": domains,
        "clients": clients,
        "fairness": fairness(domains),
        "client_fairness": fairness(clients) if clients else None,
        "validation": validation or None,
    }


@lru_cache(maxsize=128)
def _deal_out(examples: int, clients: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the owner of each example, dealt out in turn, and how many each owner has."""
    owners = np.arange(examples) % clients
    return owners, np.bincount(owners)


def evaluate_classes(federation: Federation, model: Packed, terms: Sequence[TermState] = ()) -> dict[str, Any]:
    """Return the fields `by_class` and `calibration` of a result: how the model does within each domain.

    `by_class` has, for each class, how many test examples are classified correctly, and of how many.
    """
    members, by_class, calibration = federation.members, {}, {}
    for domain, split in federation.tests.items():
        evaluated = select_evaluated_model(federation, model, terms, members[domain])
        scores = _score_split(federation.local_training, evaluated, split)
        labels = split.labels.cpu()
        every = torch.bincount(labels)
        correct = torch.bincount(labels[scores[:, 1] > 0], minlength=len(every))
        by_class[domain] = torch.stack([correct, every], dim=1).tolist()
        calibration[domain] = summarise_scores(scores)
    return {"by_class": by_class, "calibration": calibration}


@torch.no_grad()
def _score_split(local_training: LocalTraining, model: Packed, split: Split) -> Tensor:
    """Return the scores of each example, from logits in the batches that accuracies come from."""
    module, scores = local_training.load_model(model, training=False), []
    for images, labels in eval_batches(split, cached=True):
        with autocast(local_training.precision, images.device):
            logits = module(normalise_images(images))
        scores.append(score_logits(logits, labels))
    return torch.cat(scores).cpu()


def select_evaluated_model(
    federation: Federation, model: Packed, terms: Sequence[TermState], members: Sequence[str] = ()
) -> Packed:
    """Return the model to evaluate for a domain with these clients: the global one, unless a term gives another."""
    for term, state in zip(federation.local_training.terms, terms, strict=False):
        slots = {client: state.slots[client] for client in members if client in state.slots}
        model = term.evaluated(model, state.shared, slots)
    return model
