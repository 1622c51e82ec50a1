"""A server's records of thousands of rounds in little memory."""

from __future__ import annotations

import tracemalloc

import pytest

from fedheal.federation.round_history import RoundHistory
from fedheal.runs.schema import RoundRecord
from flower.sites import Sites


def make_record(number: int) -> RoundRecord:
    clients = [f"hospital-{i:02d}" for i in range(20)]
    shares = {client: 1 / (number + i + 1) for i, client in enumerate(clients)}
    domains = dict.fromkeys(clients, "here")
    return RoundRecord(round=number, weights=shares, report={"skipped": {}, "kept": shares}, client_domains=domains)


def test_records_come_back_as_they_were():
    records = [make_record(number) for number in range(1, 6)]
    history = RoundHistory(records[:3])
    for record in records[3:]:
        history.append(record)
    assert list(history) == records
    assert (history[0], history[-1], history[1:3], len(history)) == (records[0], records[4], records[1:3], 5)
    with pytest.raises(IndexError):
        history[5]


def test_a_thousand_rounds_take_little_memory():
    tracemalloc.start()
    try:
        records = [make_record(number) for number in range(200)]
        plain = tracemalloc.get_traced_memory()[0]
        history = RoundHistory(records)
        compressed = tracemalloc.get_traced_memory()[0] - plain
    finally:
        tracemalloc.stop()
    assert len(history) == 200
    assert compressed < plain / 4


def test_a_federation_with_a_folder_keeps_its_history_small(tmp_path):
    strategy = Sites(rounds=2).run(folder=tmp_path / "run")
    assert isinstance(strategy.history, RoundHistory)
    assert [record.round for record in strategy.history] == [1, 2]
