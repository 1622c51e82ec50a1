"""Clients of a domain hold disjoint samples that depend on the seed and the domain alone."""

from __future__ import annotations

import re

import pytest
import torch

from fedheal.data.partition import Client, partition_samples

SIZES = {"street": 100, "print": 40}
CLIENTS = {"street": 4, "print": 2}
SAMPLES = {"street": 20, "print": 20}


def map_indices(clients: tuple[Client, ...]) -> dict[str, list[int]]:
    return {client.id: client.indices.tolist() for client in clients}


def test_names_domains_and_sizes() -> None:
    clients = partition_samples(SIZES, CLIENTS, SAMPLES, seed=0)
    assert [client.id for client in clients] == ["street-0", "street-1", "street-2", "street-3", "print-0", "print-1"]
    assert [client.domain for client in clients] == ["street"] * 4 + ["print"] * 2
    assert all(client.indices.dtype == torch.int64 and len(client.indices) == 20 for client in clients)


def test_clients_of_a_domain_share_no_sample() -> None:
    indices_by_client = map_indices(partition_samples(SIZES, CLIENTS, SAMPLES, seed=3))
    street = [i for name, indices in indices_by_client.items() if name.startswith("street") for i in indices]
    assert len(set(street)) == 80
    assert set(street) <= set(range(100))
    assert sorted(indices_by_client["print-0"] + indices_by_client["print-1"]) == list(range(40))  # all of it


def test_known_samples() -> None:
    """Changes here would silently change every result."""
    (client,) = partition_samples({"street": 10}, {"street": 1}, {"street": 10}, seed=0)
    assert client.indices.tolist() == [0, 4, 6, 5, 2, 9, 1, 3, 8, 7]


def test_depends_on_seed_and_domain_only() -> None:
    both = map_indices(partition_samples(SIZES, CLIENTS, SAMPLES, seed=1))
    alone = map_indices(partition_samples({"street": 100}, CLIENTS, SAMPLES, seed=1))
    fewer = map_indices(partition_samples(SIZES, {"street": 2, "print": 1}, SAMPLES, seed=1))
    other = map_indices(partition_samples(SIZES, CLIENTS, SAMPLES, seed=2))
    same = partition_samples({"a": 50, "b": 50}, {"a": 1, "b": 1}, {"a": 50, "b": 50}, seed=1)
    assert both == both | alone
    assert both == both | fewer
    assert all(both[name] != other[name] for name in both)
    assert same[0].indices.tolist() != same[1].indices.tolist()


def test_clients_own_their_indices() -> None:
    first, second = partition_samples({"a": 4}, {"a": 2}, {"a": 2}, seed=0)
    before = second.indices.tolist()
    first.indices.zero_()
    assert second.indices.tolist() == before
    assert first.indices.untyped_storage().nbytes() == 2 * 8


@pytest.mark.parametrize(
    ("clients", "samples", "sentence"),
    [
        (
            {"a": 3},
            {"a": 4},
            "3 clients with 4 samples each need 12 samples of domain 'a', which has 10: use fewer clients_per_domain or "
            "samples_per_client",
        ),
        ({"a": 1}, {"a": 11}, "1 client needs 11 samples of domain 'a', which has 10: use fewer samples_per_client"),
        (
            {"a": 11},
            {"a": 1},
            "domain 'a' has 10 training samples for 11 clients: use at most 10 clients_per_domain",
        ),
        ({"a": 0}, {"a": 4}, "the number of clients of 'a' must be at least 1, not 0"),
        ({"a": 1}, {"a": -1}, "the number of samples per client of 'a' must be at least 1, not -1"),
        ({}, {"a": 1}, "the number of clients is missing for domain 'a'"),
    ],
)
def test_impossible_requests(clients: dict[str, int], samples: dict[str, int], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        partition_samples({"a": 10}, clients, samples, seed=0)
