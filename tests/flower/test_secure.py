"""Secure sums in a federation: the model is the core's up to quantisation, drop-outs are survived, nothing else ends a run."""

from __future__ import annotations

import copy
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import ndarray_to_bytes
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from safetensors.torch import load_file

import fedheal
from fedheal.aggregate import Aggregated, combine
from fedheal.aggregate import fedheal as make_fedheal
from fedheal.core.layout import Packed
from fedheal.flower import FedHEAL
from fedheal.flower.messages import model_to_record, record_to_model
from fedheal.flower.secure import SecureFedHEAL, SecureStrategy
from fedheal.runs import folder as files
from flower.local_grid import LocalGrid
from flower.secure_sites import LAYOUT, START, CopyingGrid, find_stage, make_grid, make_updates

TAU = 0.6  # few entries are kept by everyone


def run(grid: LocalGrid, rounds: int = 1, **settings: Any) -> SecureStrategy:
    strategy = SecureFedHEAL(tau=TAU, **{"fraction_evaluate": 0.0, **settings})
    strategy.start(grid, START, num_rounds=rounds)
    return strategy


def run_core(cohorts: list[list[int]], **parameters: Any) -> Aggregated:
    """Return the core's last round after rounds with these sites."""
    aggregator = make_fedheal(tau=TAU, **parameters)
    model, state = record_to_model(LAYOUT, START), aggregator.init(LAYOUT)
    for number, partitions in enumerate(cohorts, 1):
        updates = make_updates(partitions, number, model_to_record(LAYOUT, model))
        aggregated = aggregator.apply(model, updates, state)
        model, state = aggregated.model, aggregated.state
    return aggregated


def assert_close(strategy: SecureStrategy, core: Packed) -> None:
    """Assert that the model is the core's up to the rounds' bounds, which are small, and float64's own rounding."""
    sums = [record.report["secure_sum"] for record in strategy.history]
    bound = sum(about["bound"] for about in sums)
    assert 0 < bound < 1e-6 * len(sums)
    assert float((strategy.state.model.params - core.params).abs().max()) <= bound + 1e-14
    assert float((strategy.state.model.buffers - core.buffers).abs().max()) <= bound + 1e-14
    assert torch.equal(strategy.state.model.counters, core.counters)


@pytest.mark.slow
@pytest.mark.parametrize(("sites", "rounds", "fael"), [(4, 3, "momentum"), (4, 2, False), (10, 2, "momentum")])
def test_the_model_is_the_cores_up_to_the_bound(sites, rounds, fael):
    strategy = run(make_grid(sites), rounds, fael=fael)
    core, last = run_core([list(range(sites))] * rounds, fael=fael), strategy.history[-1]
    assert_close(strategy, core.model)
    assert (last.cohort, last.replied, last.report["skipped"]) == (sites, sites, {})
    assert last.report["unkept"] == core.report["unkept"]
    assert [last.weights[f"partition-{i}"] for i in range(sites)] == pytest.approx(core.weights.tolist(), rel=1e-12)
    assert core.report["unkept"] > 0  # the mask is at work


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sites", "stages"),
    [
        (4, (Stage.SETUP, Stage.SETUP)),
        (4, (Stage.SHARE_KEYS, Stage.UNMASK)),
        (10, (Stage.SETUP, Stage.SHARE_KEYS)),
    ],
)
def test_two_drop_outs_leave_the_cores_model_of_the_others(sites, stages):
    strategy = run(make_grid(sites, dict(zip((1, 3), stages, strict=True))))
    # Who leaves in the last stage has given its vector: the others' shares unmask it.
    lost = {i for i, stage in zip((1, 3), stages, strict=True) if stage != Stage.UNMASK}
    assert_close(strategy, run_core([[i for i in range(sites) if i not in lost]]).model)
    report = strategy.history[-1].report
    assert set(report["skipped"]) == {f"partition-{i}" for i in lost}
    assert all("dropped out of the secure sum in stage" in why for why in report["skipped"].values())


@pytest.mark.slow
@pytest.mark.parametrize("sites", [4, 10])
def test_two_drop_outs_after_the_weights_were_sent_leave_the_others_weights(sites):
    strategy = run(make_grid(sites, dict.fromkeys((1, 3), Stage.COLLECT_MASKED_VECTORS)))
    remaining = [i for i in range(sites) if i not in (1, 3)]
    before = record_to_model(LAYOUT, START)
    aggregator = make_fedheal(tau=TAU)
    everyone = aggregator.apply(before, make_updates(list(range(sites)), 1, START), aggregator.init(LAYOUT))
    updates, u = make_updates(remaining, 1, START), everyone.weights[remaining]
    weighted = (u[:, None] * updates.deltas).sum(dim=0)
    params = combine(before.params, weighted, u.sum().expand(len(weighted)))  # in the first round all is kept
    buffers = (u[:, None] * updates.buffers).sum(dim=0) / u.sum()
    assert_close(strategy, Packed(params, buffers, updates.counters.amax(dim=0)))
    weights = strategy.history[-1].weights
    assert weights == pytest.approx({f"partition-{i}": float(everyone.weights[i] / u.sum()) for i in remaining})
    # The state goes on as if they had been absent.
    alone = aggregator.apply(before, updates, aggregator.init(LAYOUT))
    ours, cores = strategy.state.aggregator.stage.states[1], alone.state.stage.states[1]
    assert ours.clients == cores.clients
    assert np.allclose(ours.p, cores.p, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [Stage.SETUP, Stage.COLLECT_MASKED_VECTORS])
def test_a_drop_out_counts_against_the_threshold_and_not_against_min_replies(stage):
    strict, lenient = (run(make_grid(4, {1: stage}), min_replies=number) for number in (4, 2))
    assert set(strict.history[0].report["skipped"]) == {"partition-1"}
    assert set(strict.history[0].weights) == {"partition-0", "partition-2", "partition-3"}
    assert torch.equal(strict.state.model.params, lenient.state.model.params)
    assert not torch.equal(strict.state.model.params, record_to_model(LAYOUT, START).params)


@pytest.mark.slow
def test_below_the_threshold_the_model_stays_and_the_next_round_works():
    grid = make_grid(4, dict.fromkeys((0, 1, 3), Stage.COLLECT_MASKED_VECTORS))
    strategy = SecureFedHEAL(tau=TAU, fraction_evaluate=0.0)
    arrays = strategy.begin(START)
    for number in (1, 2):
        messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
        arrays, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
        strategy.aggregate_evaluate(number, [])
        if number == 1:
            assert torch.equal(strategy.state.model.params, record_to_model(LAYOUT, START).params)
            skipped = strategy.history[0].report["skipped"]
            assert skipped["partition-2"] == "the secure sum failed: 1 of 4 clients were left, and 2 are needed"
            assert (
                skipped["partition-0"] == "it dropped out of the secure sum in stage 'collect_masked_vectors': no reply"
            )
            grid = make_grid(4)
    assert strategy.history[1].report["secure_sum"]["clients"] == 4
    assert not torch.equal(strategy.state.model.params, record_to_model(LAYOUT, START).params)


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path):
    whole = run(make_grid(4, folder=tmp_path / "a"), rounds=3, folder=tmp_path / "whole", fraction_evaluate=1.0)
    run(make_grid(4, folder=tmp_path / "b"), rounds=2, folder=tmp_path / "cut", fraction_evaluate=1.0)
    resumed = run(
        make_grid(4, folder=tmp_path / "b"), rounds=3, folder=tmp_path / "cut", resume=True, fraction_evaluate=1.0
    )
    assert torch.equal(whole.state.model.params, resumed.state.model.params)
    assert torch.equal(whole.state.model.buffers, resumed.state.model.buffers)
    records = files.read_rounds(tmp_path / "cut")
    assert [record.round for record in records] == [1, 2, 3]
    assert all(record.report["secure_sum"]["clients"] == 4 for record in records)
    assert (tmp_path / "cut" / "result.json").exists()
    with pytest.raises(ValueError, match="holds a federation with method"):
        FedHEAL(tau=TAU, placement="client", folder=tmp_path / "cut", resume=True).begin(START)


def replace_vector(reply: Message, values: Any) -> None:
    """Replace a masked vector, if the reply holds one, by a function of its list of bytes."""
    config = reply.content.config_records.get(RECORD_KEY_CONFIGS, {})
    if Key.MASKED_PARAMETERS in config:
        config[Key.MASKED_PARAMETERS] = values(config[Key.MASKED_PARAMETERS])


@pytest.mark.slow
def test_malformed_vectors_are_drop_outs():
    wrong = {1: [b"no array"], 2: [ndarray_to_bytes(np.zeros(n, np.int64)) for n in (1, 5)]}

    def change(partition: int, reply: Message) -> None:
        replace_vector(reply, lambda old: wrong.get(partition, old))

    strategy = run(make_grid(4, change=change))
    report = strategy.history[0].report
    assert "cannot be read" in report["skipped"]["partition-1"]
    assert "its vector has shapes [(1,), (5,)], not [(1,), (1207,)] of int64" in report["skipped"]["partition-2"]
    assert report["secure_sum"]["clients"] == 2


WEAK_KEY = (
    ec.generate_private_key(ec.SECP256R1()).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "make_value", "reason"),
    [
        (Key.PUBLIC_KEY_1, lambda old: b"junk", "its key 'pk1' cannot be read"),
        (Key.PUBLIC_KEY_2, lambda old: b"junk", "its key 'pk2' cannot be read"),
        (Key.PUBLIC_KEY_2, lambda old: WEAK_KEY, "its key 'pk2' is not of the curve SECP384R1"),
        (Key.DESTINATION_LIST, lambda old: [5, 6], "not for each of the other nodes, once"),
        (Key.DESTINATION_LIST, lambda old: [], "not for each of the other nodes, once"),
        (Key.DESTINATION_LIST, lambda old: [old[0]] * len(old), "not for each of the other nodes, once"),
        (Key.DESTINATION_LIST, lambda old: [str(node) for node in old], "not for each of the other nodes, once"),
        (Key.CIPHERTEXT_LIST, lambda old: [b"x"], "it sends 1 key shares for 3 nodes"),
        (Key.CIPHERTEXT_LIST, lambda old: [1] * len(old), "it sends 3 key shares for 3 nodes"),
        (Key.SHARE_LIST, lambda old: [b"junk"] * len(old), "has 4 bytes, which no share has"),
        (Key.SHARE_LIST, lambda old: [share + bytes(16) for share in old], "has 68 bytes, which no share has"),
        (Key.SHARE_LIST, lambda old: [], "it sends 0 shares of 4 secrets"),
        (Key.NODE_ID_LIST, lambda old: [1, 2, 3], "not those that it was asked for"),
    ],
)
def test_who_breaks_the_protocol_is_a_drop_out(key, make_value, reason, caplog):
    def change(partition: int, reply: Message) -> None:
        config = reply.content.config_records.get(RECORD_KEY_CONFIGS, {})
        if partition == 1 and key in config:
            config[key] = make_value(config[key])

    strategy = run(make_grid(4, change=change))
    report = strategy.history[0].report
    assert set(report["skipped"]) <= {"partition-1"}
    assert reason in caplog.text
    if key in (Key.NODE_ID_LIST, Key.SHARE_LIST):  # its vector is in the sum, and the others' shares unmask it
        assert report["secure_sum"]["clients"] == 4
    else:
        assert reason in report["skipped"]["partition-1"]
        assert report["secure_sum"]["clients"] == 3


def test_sites_that_get_wrong_ciphertexts_say_whose_they_are():
    def change(partition: int, reply: Message) -> None:
        config = {} if reply.has_error() else reply.content.config_records.get(RECORD_KEY_CONFIGS, {})
        if partition == 1 and Key.CIPHERTEXT_LIST in config:
            config[Key.CIPHERTEXT_LIST] = [b"x"] * len(config[Key.CIPHERTEXT_LIST])

    skipped = run(make_grid(3, change=change)).history[0].report["skipped"]
    reason = "its node reports an error: ValueError: it cannot decrypt the key shares that node 101 sent it"
    for client in ("partition-0", "partition-2"):
        assert skipped[client] == f"it dropped out of the secure sum in stage 'collect_masked_vectors': {reason}"
    assert skipped["partition-1"] == "the secure sum failed: 1 of 3 clients were left, and 2 are needed"


def test_a_wrong_vector_of_the_right_shape_leaves_the_model_as_it_was():
    noise = ndarray_to_bytes(np.random.default_rng(0).integers(0, 2**48, 2 * 600 + 7))

    def change(partition: int, reply: Message) -> None:
        replace_vector(reply, lambda old: [old[0], noise] if partition == 1 else old)

    strategy = run(make_grid(2, change=change))
    assert torch.equal(strategy.state.model.params, record_to_model(LAYOUT, START).params)
    assert "beyond what its clients can add up to" in strategy.history[0].report["skipped"]["partition-0"]


@pytest.mark.parametrize(
    ("settings", "change", "reason"),
    [
        ({}, {"distance": float("nan")}, "'distance' must be a number from 0"),
        ({}, {"distance": -1.0}, "'distance' must be a number from 0"),
        ({}, {"buffer-norm": -1.0}, "'buffer-norm' must be a number from 0"),
        ({}, {"distance": 1e11}, "beyond 1e+10"),
        ({"max_norm": 50.0}, {"distance": 1e4}, "norm 100, more than max_norm = 50"),
        ({"max_norm": "auto"}, {"distance": 1e4}, "times the median of this round"),
        ({}, {"distance": 1e8}, "its training has diverged: its update has norm 1e+04"),
    ],
)
def test_scalars_that_cannot_be_right_are_rejected(settings, change, reason):
    def alter(partition: int, reply: Message) -> None:
        if partition == 2:
            reply.content.metric_records["fedheal.sum"].update(change)

    strategy = run(make_grid(4, change=alter), min_replies=4, **settings)  # too few are left for a sum
    assert reason in strategy.history[0].report["skipped"]["partition-2"]
    assert "only 3 usable replies" in strategy.history[0].report["skipped"]["partition-0"]


def test_a_number_as_max_norm_replaces_the_check_of_diverged_training():
    def alter(partition: int, reply: Message) -> None:
        if partition == 2 and "fedheal.sum" in reply.content.metric_records:
            reply.content.metric_records["fedheal.sum"].update({"distance": 1e8})

    strategy = run(make_grid(4, change=alter), max_norm=1e5)
    assert strategy.history[0].weights["partition-2"] > 0


@pytest.mark.parametrize(
    "counters", [None, np.zeros(2, np.int64), np.zeros(1), np.array([2**60]), np.array([-(2**63)])]
)
def test_counters_that_cannot_be_right_are_rejected(counters):
    def alter(partition: int, reply: Message) -> None:
        if partition == 2:
            record = ArrayRecord({} if counters is None else {"counters": Array(counters)})
            reply.content.array_records["fedheal.counters"] = record

    strategy = run(make_grid(4, change=alter), min_replies=4)
    assert "its counters" in strategy.history[0].report["skipped"]["partition-2"]


def test_a_stranger_who_uses_a_sites_name_is_not_in_the_sum():
    grid = make_grid(2)
    pass_on = grid.spoil

    def add_stranger(node: int, reply: Message) -> list[Message]:
        forged = copy.deepcopy(reply)
        forged.metadata.__dict__["_src_node_id"] = 999
        return [*pass_on(node, reply), *([forged] if find_stage(reply) is None else [])]

    grid.spoil = add_stranger
    (record,) = run(grid).history
    assert record.report["secure_sum"]["clients"] == 2
    assert set(record.weights) == {"partition-0", "partition-1"}


def test_without_a_mask_the_second_sum_reveals_nothing():
    strategy = SecureFedHEAL(tau=0.0, fraction_evaluate=0.0)
    strategy.start(make_grid(2), START, num_rounds=2)
    assert len(set(strategy._sums.totals[600:1200].tolist())) == 1
    assert strategy.history[1].report["secure_sum"]["kept_by_one"] == strategy.history[1].report["unkept"] == 0


def test_an_app_without_the_mod_is_an_error_that_says_so():
    with pytest.raises(ValueError, match=r"needs clients with SecureSumMod\(\) in their app's mods"):
        run(make_grid(4, mods=()))


def test_settings_are_checked():
    for wrong, match in (
        ({"fael": "exact"}, "fael = 'exact'"),
        ({"threshold": 0.0}, "threshold = 0"),
        ({"min_replies": 1}, "min_replies = 1"),
        ({"stage_timeout": 0.0}, "stage_timeout = 0"),
        ({"tau": 2.0}, "tau = 2"),
    ):
        with pytest.raises(ValueError, match=match):
            SecureFedHEAL(**wrong)


@pytest.mark.slow
def test_the_example_app_trains_as_the_simulator_does(monkeypatch, tmp_path):
    folder = Path(__file__).parents[2] / "examples" / "flower" / "secure"
    monkeypatch.syspath_prepend(str(folder))
    from secure_digits import client_app, server_app

    config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config |= {"num-server-rounds": 1, "steps": 1, "min-nodes": 2, "folder": str(tmp_path / "run")}
    grid = CopyingGrid(client_app.app, {7 + i: {"partition-id": i, "num-partitions": 2} for i in range(2)})
    for context in grid.contexts.values():
        context.run_config = config
    server_app.app(grid, Context(1, 1, {}, RecordDict(), config))
    result = fedheal.run(client_app.describe_experiment(grid.contexts[7], 2))
    state_dict = load_file(tmp_path / "run" / "model.safetensors")
    for name, expected in result.model.state_dict().items():
        assert float((state_dict[name].double() - expected.double()).abs().max()) <= 1e-6
    assert (tmp_path / "run" / "result.json").exists()
