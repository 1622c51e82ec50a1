"""Label skew and class filling keep every client's size, and depend on the seed and the domain alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedheal.data import partition
from fedheal.data.domains import Domain, Domains, Split
from fedheal.data.partition import Client, Skew, partition_samples
from fedheal.simulate.build import build_federation
from fedheal.simulate.experiment import Experiment

LABELS = torch.arange(1000) % 10


def make_clients(
    seed: int = 0, clients: int = 4, each: int = 50, validation: float = 0.0, **skew: object
) -> tuple[Client, ...]:
    sizes = {"street": 1000}, {"street": clients}, {"street": each}
    return partition_samples(*sizes, seed, {"street": LABELS}, Skew(**skew), validation)


def count_labels(clients: tuple[Client, ...]) -> np.ndarray:
    return np.stack([np.bincount(LABELS[c.indices], minlength=10) for c in clients])


def test_the_smaller_alpha_the_more_of_one_class() -> None:
    largest = [count_labels(make_clients(dirichlet=alpha)).max(axis=1).mean() / 50 for alpha in (0.05, 0.5, 5, 500)]
    assert largest == sorted(largest, reverse=True)
    assert largest[0] > 0.6
    assert largest[3] < 0.2


def test_the_shares_have_the_moments_of_the_dirichlet_distribution() -> None:
    """Mean 1/k, variance (k-1) / (k^2 (k alpha + 1)), for k = 4."""
    drawn = [partition._draw_uniform(4, seed, "test", "d", 0) for seed in range(4000)]
    for alpha in (0.1, 1.0, 10.0):
        shares = np.stack([partition._draw_shares(uniform, alpha) for uniform in drawn])
        assert shares.sum(axis=1) == pytest.approx(1)
        assert shares.mean(axis=0) == pytest.approx(0.25, abs=0.025)
        assert shares.var(axis=0) == pytest.approx(3 / 16 / (4 * alpha + 1), rel=0.1)


def test_shares_so_skewed_that_numbers_underflow_are_still_shares() -> None:
    for alpha in (1e-3, 1e-6):
        shares = partition._draw_shares(partition._draw_uniform(10, 0, "test", "d", 0), alpha)
        assert shares.sum() == pytest.approx(1)
        assert shares.max() > 0.99


def test_dirichlet_clients_are_disjoint_and_full() -> None:
    clients = make_clients(clients=20, each=50, dirichlet=0.1)  # all of it
    assert [len(c.indices) for c in clients] == [50] * 20
    assert sorted(torch.cat([c.indices for c in clients]).tolist()) == list(range(1000))


def test_a_client_keeps_its_samples_when_clients_are_added_behind_it() -> None:
    few, many = make_clients(clients=3, dirichlet=0.3), make_clients(clients=6, dirichlet=0.3)
    assert all(torch.equal(a.indices, b.indices) for a, b in zip(few, many, strict=False))


def test_known_samples_with_skew() -> None:
    """Changes here would silently change every result."""
    (client,) = partition_samples(
        {"street": 30}, {"street": 1}, {"street": 6}, 0, {"street": LABELS[:30]}, Skew(dirichlet=0.5)
    )
    (filled,) = partition_samples(
        {"street": 30}, {"street": 1}, {"street": 10}, 0, {"street": LABELS[:30]}, Skew(class_filling=True)
    )
    assert client.indices.tolist() == [6, 17, 26, 23, 16, 27]
    assert filled.indices.tolist() == [13, 0, 4, 15, 6, 11, 28, 12, 27, 29]


def test_another_seed_and_another_domain_are_skewed_otherwise() -> None:
    assert (
        count_labels(make_clients(seed=0, dirichlet=0.3)) != count_labels(make_clients(seed=1, dirichlet=0.3))
    ).any()
    both = partition_samples(
        {"a": 1000, "b": 1000}, {"a": 1, "b": 1}, {"a": 50, "b": 50}, 0, {"a": LABELS, "b": LABELS}, Skew(dirichlet=0.3)
    )
    assert (count_labels(both)[0] != count_labels(both)[1]).any()


def test_filling_gives_every_client_every_class_at_the_same_size() -> None:
    plain, filled = make_clients(clients=20, each=12), make_clients(clients=20, each=12, class_filling=True)
    assert (count_labels(plain) == 0).any()
    assert (count_labels(filled) >= 1).all()
    assert [len(set(c.indices.tolist())) for c in filled] == [12] * 20


def test_filling_changes_no_more_than_it_must() -> None:
    """As many samples are replaced as classes are missing, when nobody came before."""
    (plain,), (filled,) = make_clients(clients=1, each=12), make_clients(clients=1, each=12, class_filling=True)
    missing = int((count_labels((plain,)) == 0).sum())
    assert missing > 0
    assert len(set(plain.indices.tolist()) - set(filled.indices.tolist())) == missing


def test_filling_where_there_are_fewer_samples_than_classes() -> None:
    filled = make_clients(clients=3, each=4, class_filling=True)
    assert (count_labels(filled).max(axis=1) == 1).all()


@pytest.mark.parametrize("validation", [0.1, 0.25, 0.5])
def test_nobody_trains_with_what_a_client_holds_out_and_fillers_are_not_held_out(validation: float) -> None:
    plain = make_clients(clients=20, each=20, validation=validation)
    filled = make_clients(clients=20, each=20, class_filling=True, validation=validation)
    held_out = [client.indices[-client.held_out :] for client in filled]
    trained = [client.indices[: -client.held_out] for client in filled]
    assert {client.held_out for client in filled} == {round(20 * validation)}
    assert not set(torch.cat(held_out).tolist()) & set(torch.cat(trained).tolist())
    assert [own.tolist() for own in held_out] == [
        c.indices[-c.held_out :].tolist() for c in plain
    ]  # so none is a filler
    assert all(len(set(LABELS[own].tolist())) == min(10, len(own)) for own in trained)
    assert all(len(set(client.indices.tolist())) == 20 for client in filled)


def test_a_federation_trains_with_nothing_that_it_holds_out() -> None:
    images = torch.zeros(1000, 3, 32, 32, dtype=torch.uint8)
    images[:, 0, 0, 0], images[:, 0, 0, 1] = torch.arange(1000) // 256, torch.arange(1000) % 256
    every = Split(images, LABELS)
    data = Domains("numbered", tuple("0123456789"), (Domain("street", every, every),), (20,), (20,))
    experiment = Experiment(class_filling=True, validation=0.2, model="small_cnn")
    built = build_federation(experiment, data, torch.device("cpu"))
    trained, held_out = (
        {tuple(image) for split in splits.values() for image in split.images[:, 0, 0, :2].tolist()}
        for splits in (built.local_training.examples, built.validation)
    )
    assert len(held_out) == 20 * 4
    assert not trained & held_out


def test_filling_when_all_samples_of_a_domain_are_shared_out() -> None:
    filled = make_clients(clients=20, each=50, class_filling=True, validation=0.2)
    assert [len(client.indices) for client in filled] == [50] * 20


@pytest.mark.parametrize(
    "fields",
    [
        {"dirichlet": 0.1, "class_filling": True},
        {"dirichlet": 0.1, "pathological": 2},
        {"pathological": 2, "class_filling": True},
        {"quantity": 0.5, "class_filling": True},
    ],
)
def test_kinds_of_skew_that_exclude_each_other_are_refused(fields: dict[str, object]) -> None:
    both = " and ".join(f"{key} = {value}" for key, value in fields.items())
    with pytest.raises(ValueError, match=f"^{both} exclude each other: give one of them$"):
        Experiment(**fields)


def test_skew_of_labels_needs_labels() -> None:
    with pytest.raises(ValueError, match="need labels"):
        partition_samples({"a": 10}, {"a": 1}, {"a": 5}, 0, None, Skew(dirichlet=0.1))


# Few classes per client, and clients of different sizes


def test_each_client_holds_as_many_classes_as_asked_and_every_class_has_as_many_clients() -> None:
    clients = make_clients(clients=5, each=50, pathological=4)
    counts = count_labels(clients)
    assert ((counts > 0).sum(axis=1) == 4).all()
    assert ((counts > 0).sum(axis=0) == 2).all()  # 5 clients x 4 classes = 10 classes x 2 clients
    assert sorted(set(counts[counts > 0].tolist())) == [12, 13]
    assert [len(c.indices) for c in clients] == [50] * 5
    assert len(set(torch.cat([c.indices for c in clients]).tolist())) == 250
    assert (count_labels(make_clients(seed=1, clients=5, each=50, pathological=4)) != counts).any()


def test_a_client_whose_classes_run_out_holds_fewer() -> None:
    """Two clients hold only class 2, of which there are 100 images, 50 for each."""
    clients = make_clients(clients=11, each=90, pathological=1)
    assert sorted(len(c.indices) for c in clients) == [50, 50, *[90] * 9]


def test_classes_that_a_domain_lacks_are_not_asked_for() -> None:
    labels = {"a": torch.tensor([2, 2, 7, 7, 7, 9])}
    clients = partition_samples({"a": 6}, {"a": 3}, {"a": 2}, 0, labels, Skew(pathological=1))
    assert {tuple(set(labels["a"][c.indices].tolist())) for c in clients} == {(2,), (7,), (9,)}
    with pytest.raises(ValueError, match="pathological = 4: domain 'a' has 3 classes; use at most as many"):
        partition_samples({"a": 6}, {"a": 3}, {"a": 2}, 0, labels, Skew(pathological=4))
    with pytest.raises(ValueError, match="'a' has too few samples of the classes of client"):
        partition_samples({"a": 6}, {"a": 6}, {"a": 1}, 0, labels, Skew(pathological=1))


def test_sizes_are_skewed_the_more_the_smaller_alpha_and_the_total_stays() -> None:
    largest = []
    for alpha in (0.1, 1.0, 100.0):
        clients = make_clients(clients=10, each=100, quantity=alpha)
        sizes = [len(c.indices) for c in clients]
        assert sorted(torch.cat([c.indices for c in clients]).tolist()) == list(range(1000))
        assert min(sizes) >= 10
        largest.append(max(sizes))
    assert largest == sorted(largest, reverse=True)
    assert largest[0] > 300
    assert largest[2] < 150


@pytest.mark.parametrize("labels", [{"dirichlet": 0.3}, {"pathological": 3}])
def test_sizes_and_labels_may_be_skewed_together(labels: dict[str, float]) -> None:
    clients = make_clients(clients=4, each=60, quantity=0.5, validation=0.2, **labels)
    alone = make_clients(clients=4, each=60, quantity=0.5)
    assert [len(c.indices) for c in clients] == [len(c.indices) for c in alone]
    assert len({len(c.indices) for c in clients}) > 1
    assert [c.held_out for c in clients] == [round(0.2 * len(c.indices)) for c in clients]


def test_known_samples_with_few_classes_and_sizes() -> None:
    """Changes here would silently change every result."""
    (few,) = partition_samples(
        {"street": 30}, {"street": 1}, {"street": 6}, 0, {"street": LABELS[:30]}, Skew(pathological=2)
    )
    assert few.indices.tolist() == [18, 8, 10, 0, 28, 20]
    assert [len(c.indices) for c in make_clients(quantity=0.5)] == [29, 66, 82, 23]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=8),
    st.lists(st.integers(0, 30), min_size=8, max_size=8),
    st.data(),
)
def test_counts_are_whole_fit_and_sum_up(shares: list[float], available: list[int], data: st.DataObject) -> None:
    room = np.array(available[: len(shares)])
    number = data.draw(st.integers(0, int(room.sum())))
    actual = partition._round_shares(np.array(shares), number, room)
    assert actual.sum() == number
    assert ((actual >= 0) & (actual <= room)).all()
