"""What the server sees of a secure sum: scalars, masked vectors that look random, and the sum of all of them."""

from __future__ import annotations

import sys
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from scipy.stats import chisquare, spearmanr

from fedheal.flower import client
from fedheal.flower.secure import SecureFedHEAL, SecureSumMod
from fedheal.flower.secure_masks import client_protocol, expand_seed, server_protocol
from fedheal.flower.secure_mod import ORDER, WITHHELD, add_to_sum, check_request
from fedheal.flower.secure_vector import (
    LEVELS,
    MODULUS,
    SecureSumError,
    SecureSums,
    SumOrder,
    choose_range,
    encode_share,
)
from flower.secure_sites import FIRST_NODE, START, find_stage, make_change, make_grid

SITES = 4
LENGTH = 2 * 600 + 7
SETUP = {
    Key.STAGE: Stage.SETUP, Key.SAMPLE_NUMBER: 4, Key.SHARE_NUMBER: 4, Key.THRESHOLD: 2, Key.CLIPPING_RANGE: 1.0,
    Key.TARGET_RANGE: LEVELS, Key.MOD_RANGE: MODULUS, Key.MAX_WEIGHT: 1.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def server_view():
    """Everything that the server received in one round, and its strategy."""
    grid, strategy = make_grid(SITES), SecureFedHEAL(fraction_evaluate=0.0)
    strategy.start(grid, START, num_rounds=1)
    return grid.seen, strategy


def find_vectors(seen: list[Message]) -> dict[int, np.ndarray]:
    """Return the masked vectors by site, without Flower's own first entry."""
    masked = [message for message in seen if find_stage(message) == Stage.COLLECT_MASKED_VECTORS]
    configs = {m.metadata.src_node_id - FIRST_NODE: m.content.config_records[RECORD_KEY_CONFIGS] for m in masked}
    return {site: bytes_to_ndarray(config[Key.MASKED_PARAMETERS][1]) for site, config in sorted(configs.items())}


def remove_private_masks(seen: list[Message], vectors: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Take from each vector the mask that the server can reconstruct from the shares it received."""
    shares: dict[int, list[bytes]] = {}
    for message in (m for m in seen if find_stage(m) == Stage.UNMASK):
        config = message.content.config_records[RECORD_KEY_CONFIGS]
        for node, share in zip(config[Key.NODE_ID_LIST], config[Key.SHARE_LIST], strict=True):
            shares.setdefault(node - FIRST_NODE, []).append(share)
    seeds = {site: combine_shares(parts) for site, parts in shares.items()}
    masks = {site: expand_seed(seed, MODULUS, [(1,), (LENGTH,)])[1] for site, seed in seeds.items()}
    return {site: (vector - masks[site]) % MODULUS for site, vector in vectors.items()}


def looks_uniform(vector: np.ndarray, values: np.ndarray | None = None) -> bool:
    """Return whether the numbers are uniform, and not correlated with `values`."""
    counts = np.bincount(vector // (MODULUS // 32), minlength=32)
    follows = 1.0 if values is None else spearmanr(vector[: len(values)], values).pvalue
    return bool(chisquare(counts).pvalue > 1e-7 and follows > 1e-7)


def test_training_replies_hold_scalars_and_counters_only(server_view):
    seen, _ = server_view
    replies = [message.content for message in seen if find_stage(message) is None]
    assert len(replies) == SITES
    for content in replies:
        assert set(content.array_records) == {"fedheal.counters"}
        numbers = {name for record in content.metric_records.values() for name in record}
        assert numbers == {"num-examples", "train_loss", "distance", "buffer-norm"}
        assert set(content.config_records) == {"fedheal"}
        assert set(content.config_records["fedheal"]) == {"client", "round", "state_round", "token"}


def test_each_masked_vector_looks_random_also_without_the_mask_that_the_server_removes(server_view):
    seen, _ = server_view
    vectors = find_vectors(seen)
    assert sorted(vectors) == list(range(SITES))
    for masked in (vectors, remove_private_masks(seen, vectors)):
        for site, vector in masked.items():
            assert vector.min() >= 0
            assert vector.max() < MODULUS
            assert looks_uniform(vector, make_change(site, 1)["w"].flatten().numpy())


def test_the_sum_of_every_proper_subset_stays_masked_and_that_of_all_does_not(server_view):
    seen, strategy = server_view
    vectors = remove_private_masks(seen, find_vectors(seen))
    subsets = [chosen for size in range(1, SITES) for chosen in combinations(range(SITES), size)]
    assert len(subsets) == 14
    for chosen in subsets:
        total = sum(vectors[site] for site in chosen) % MODULUS
        assert looks_uniform(total, sum(make_change(site, 1)["w"].flatten().numpy() for site in chosen))
    total = sum(vectors.values()) % MODULUS
    assert total.max() <= SITES * LEVELS  # of 2**48: no mask is left
    assert not looks_uniform(total)
    sums = strategy._sums
    assert np.allclose(total * (2 / LEVELS) - SITES, sums.totals, atol=1e-12)
    weights = np.array([sums.shares[f"partition-{i}"] for i in range(SITES)])
    updates = np.stack([make_change(i, 1)["w"].flatten().numpy() for i in range(SITES)])
    assert np.allclose(sums.totals[:600] * sums.update_range, weights @ updates, atol=1e-7)


def test_the_same_updates_give_other_vectors_in_another_sum(server_view):
    grid = make_grid(SITES)
    SecureFedHEAL(fraction_evaluate=0.0).start(grid, START, num_rounds=1)
    again, first = find_vectors(grid.seen), find_vectors(server_view[0])
    assert not any((again[site] == first[site]).any() for site in again)
    assert looks_uniform((again[0] - first[0]) % MODULUS)


def test_masks_take_the_whole_seed_and_flowers_own_modules_stay_as_they_are():
    first, other = bytes(range(32)), bytes([*range(4, 8), *range(4), *range(8, 32)])  # equal when folded into 32 bits
    flowers = [pseudo_rand_gen(seed, 2**32, [(5,)])[0] for seed in (first, other)]
    assert (flowers[0] == flowers[1]).all()
    ours = [expand_seed(seed, MODULUS, [(5,)])[0] for seed in (first, other)]
    assert not (ours[0] == ours[1]).any()
    for module in (client_protocol, server_protocol):
        assert sys.modules[module.__name__].pseudo_rand_gen is pseudo_rand_gen
        assert module.pseudo_rand_gen is expand_seed


@pytest.mark.parametrize(
    ("request_", "match"),
    [
        (SETUP | {Key.THRESHOLD: 1}, "at least 2 must stay"),
        (SETUP | {Key.SAMPLE_NUMBER: 1, Key.THRESHOLD: 1}, "at least 2 must stay"),
        (SETUP | {Key.MOD_RANGE: 2**32}, "use one version of fedheal"),
        (SETUP | {Key.CLIPPING_RANGE: 1e9}, "use one version of fedheal"),
        ({Key.STAGE: Stage.UNMASK, Key.ACTIVE_NODE_ID_LIST: [1, 2], Key.DEAD_NODE_ID_LIST: [2]}, "both secrets"),
    ],
)
def test_a_site_refuses_requests_that_would_lay_its_update_open(request_, match):
    check_request(SETUP)
    with pytest.raises(ValueError, match=match):
        check_request(request_)


def make_message(content: RecordDict) -> Message:
    message = Message(content, dst_node_id=7, message_type="train")
    message.metadata.__dict__["_message_id"] = "1"
    return message


def train_site(number: int = 1) -> Context:
    """Return a site's state after it trained in a round."""
    config = ConfigRecord({"server-round": number, "fedheal.tau": 0.3})
    context = Context(1, 7, {"partition-id": 0}, RecordDict(), {})

    def train(message: Message, context: Context) -> Message:
        received = client.read_model(message)
        return client.reply(message, context, {k: v + 1 for k, v in received.items()}, 10)

    SecureSumMod()(make_message(RecordDict({"arrays": START, "config": config})), context, train)
    return context


def request_update(context: Context, order: dict[str, Any]) -> Message:
    values = {"round": 1, "share": 1.0, "update_range": 32.0, "buffer_range": 4.0} | order
    return add_to_sum(make_message(RecordDict({ORDER: ConfigRecord(values)})), context)


def test_an_update_is_summed_once_in_its_own_round_and_never_clipped():
    context = train_site()
    part = request_update(context, {}).content.array_records["fitres.parameters"]
    assert next(iter(part.values())).numpy().shape == (LENGTH,)
    with pytest.raises(ValueError, match="no update that has not been summed"):
        request_update(context, {})
    with pytest.raises(ValueError, match="of round 1, not of round 2"):
        request_update(train_site(), {"round": 2})
    for wrong in ({"update_range": 0.5}, {"share": 40.0}, {"share": float("nan")}, {"buffer_range": 0.5}):
        with pytest.raises(SecureSumError, match="would be clipped"):
            request_update(train_site(), wrong)


def test_a_site_does_not_send_its_model_to_another_strategy_or_a_broken_one():
    def train(message: Message, context: Context) -> Message:
        model = {k: torch.full_like(v, torch.nan) if k == "w" else v for k, v in client.read_model(message).items()}
        return Message(RecordDict({"arrays": ArrayRecord(model)}), reply_to=message)

    context = Context(1, 7, {"partition-id": 0}, RecordDict(), {})
    with pytest.raises(ValueError, match="sends its model by secure aggregation only"):
        SecureSumMod()(make_message(RecordDict({"arrays": START})), context, train)
    assert WITHHELD not in context.state


def test_quantisation_keeps_its_bound_at_its_worst():
    chance = np.random.default_rng(1)
    shares = {str(i): share for i, share in enumerate([1.0, 1e-3, 0.3, 0.01, 0.5])}
    deltas, kept = chance.normal(size=(5, 400)), chance.random((5, 400)) < 0.5
    kept[1], kept[:, :50] = True, (np.arange(5) == 1)[:, None]  # the smallest share alone keeps fifty entries
    deltas *= kept
    limit = choose_range(np.linalg.norm(deltas, axis=1))
    column = np.array(list(shares.values()))[:, None]
    parts = [
        encode_share(SumOrder(1, share, limit, 1.0), deltas[i], kept[i], np.zeros(0))
        for i, share in enumerate(shares.values())
    ]
    sums = SecureSums(shares, shares, limit, 1.0, np.sum(parts, axis=0))
    numerator, denominator, _ = sums.decode(400)
    exact = (column * deltas).sum(axis=0) / (column * kept).sum(axis=0)
    error = np.abs(numerator.numpy() / denominator.numpy() - exact).max()
    assert sums.compute_error_bound() / 100 < error <= sums.compute_error_bound()
    assert sums.measure_exposure(denominator) >= 50 / 400
    with pytest.raises(SecureSumError, match="too small to be summed"):
        SecureSums({"a": 1.0, "b": 1e-9}, {}, 1.0, 1.0, np.zeros(0)).compute_error_bound()
