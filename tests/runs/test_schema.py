"""One schema for what writes, reads and reports `rounds.jsonl` and `result.json`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fedheal.runs.schema import Fairness, RoundRecord, RunResult, check_result, parse_round
from fedheal.runs.summary import summarise_run


def make_history() -> list[RoundRecord]:
    seconds = {"train": 1.0, "aggregate": 0.5, "evaluate": 0.25}
    accuracies: list[dict[str, float]] = [{"b": 50.0}, {"b": 70.0, "a": 40.0}]
    return [RoundRecord(round=i, seconds=seconds, domains=accuracy) for i, accuracy in enumerate(accuracies, 1)]


def test_a_line_has_every_field_in_order_and_a_federation_one_more() -> None:
    fields = list(RoundRecord.model_fields)
    assert list(json.loads(RoundRecord(round=1).to_json())) == fields[:-1]
    assert list(json.loads(RoundRecord(round=1, client_domains={"a": None}).to_json())) == fields


def test_an_old_word_for_clients_without_a_usable_evaluation_is_read() -> None:
    old = RoundRecord(round=1, report={"skipped": {}, "not_judged": {"a": "no accuracy"}})
    assert old.report == {"skipped": {}, "not_evaluated": {"a": "no accuracy"}}


def test_the_deviation_is_that_of_the_means_and_not_the_mean_of_the_rounds_deviations() -> None:
    uneven = [{"a": 0.0, "b": 10.0}, {"a": 10.0, "b": 0.0}]
    rounds = [RoundRecord(round=i, domains=uneven[i % 2], seconds=make_history()[0].seconds) for i in range(1, 9)]
    assert summarise_run(rounds)["std"] == 0.0


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"cohort": True}, "cohort must be a whole number, got True"),
        ({"weights": [0.5]}, "weights must be a dictionary, got [0.5]"),
        ({"weights": {"a": "1"}}, "weights.a must be a number, got '1'"),
        ({"report": {"kept": {"a": True}}}, "report.kept must map names to numbers, got {'a': True}"),
        ({"domains": {"a": 250.0}}, "domains must have accuracies from 0 to 100, got {'a': 250.0}"),
        ({"domains": {"a": float("nan")}}, "domains must have accuracies from 0 to 100, got {'a': nan}"),
        ({"clients": {"a": 9.0, "b": -1.0}}, "clients must have accuracies from 0 to 100, got {'a': 9.0, 'b': -1.0}"),
        ({"validation": {"a": 101.0}}, "validation must have accuracies from 0 to 100, got {'a': 101.0}"),
    ],
)
def test_a_round_with_a_wrong_type_is_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^" + sentence.replace("[", r"\[").replace("{", r"\{")):
        parse_round({"round": 1} | fields)


def test_a_report_of_the_wrong_type_is_refused_when_written() -> None:
    with pytest.raises(ValueError, match=r"^round 3 cannot be recorded: report\.distance must map names to numbers"):
        RoundRecord(round=3, report={"distance": [1.0]}).to_json()


def test_a_summary_has_the_last_accuracies_of_each_unit_in_the_order_of_the_schema() -> None:
    summary = summarise_run(make_history(), method="fedavg", data="digits", bytes_sent=3)
    assert summary["domains"] == {"b": 70.0, "a": 40.0}  # of two rounds, the last
    assert list(summary["domains"]) == ["b", "a"]
    assert list(summarise_run(make_history(), sort_names=True)["domains"]) == ["a", "b"]
    assert (summary["averaged"], summary["validation"], summary["seconds"]["train"]) == (1, None, 2.0)
    assert list(summary) == [name for name in RunResult.model_fields if name in summary]
    with pytest.raises(ValueError, match="there is no seed"):
        check_result(summary)
    check_result(summary, required=["method"])


def test_the_old_name_of_the_clients_domains_is_read() -> None:
    record = RoundRecord(round=1, client_domains={"a": "x"})
    assert '"client_domains": {"a": "x"}' in record.to_json()
    for line in (record.to_json(), record.to_json().replace("client_domains", "homes")):
        assert RoundRecord.model_validate_json(line).client_domains == {"a": "x"}


def test_a_result_has_the_fields_of_fairness_behind_its_domains() -> None:
    """The fields are declared once, and this is their order in `result.json`."""
    names = list(RunResult.model_fields)
    start = names.index("domains") + 1
    assert names[:2] == ["method", "algorithm"]
    assert names[start : start + len(Fairness.model_fields)] == list(Fairness.model_fields)
    assert not RunResult.__annotations__.keys() & Fairness.model_fields.keys()
