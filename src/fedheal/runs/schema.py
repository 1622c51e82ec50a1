"""The fields of `rounds.jsonl` and `result.json`: one schema for what writes, reads and reports them.

Types are strict: `true` is not a number and `"5"` is not 5. Fields that are not declared here are allowed, so that files of
later versions stay readable.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from fedheal.core.errors import describe_allowed

# Settings that change no result: a resumed run may differ in them.
FREE = frozenset({"name", "workers", "lanes", "save_seconds", "data_root", "ray_address"})
# Settings that the files of earlier runs lack, with the values that those runs had: they resume and compare with later ones.
LATER_SETTINGS: dict[str, Any] = {
    "optimizer": "sgd", "lr_schedule": "constant", "warmup_rounds": 0, "server_beta2": 0.99, "server_eps": 0.001,
    "evaluate": "all",
}  # fmt: skip
SCHEMA_VERSION = 2  # of the results that this version writes
ROUNDING = 1e-6  # a mean of accuracies of 100 may be a little more
REPORT_NUMBERS = ("kept", "distance", "kept_by_tensor")  # parts of an aggregator's report that map names to numbers
Model = TypeVar("Model", bound=BaseModel)


class _Record(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class RoundRecord(_Record):
    """One round: a line of `rounds.jsonl`. Accuracies are in percent, and `None` in rounds without evaluation."""

    round: int
    cohort: int = 0  # clients asked
    replied: int = 0
    weights: dict[str, float] = Field(default_factory=dict)
    train_loss: float | None = None
    report: dict[str, Any] = Field(default_factory=dict)  # the aggregator's
    seconds: dict[str, float] = Field(default_factory=dict)  # by phase
    domains: dict[str, float] | None = None
    clients: dict[str, float] | None = None
    fairness: dict[str, float] | None = None
    client_fairness: dict[str, float] | None = None
    validation: dict[str, float] | None = None  # by domain, on examples held out of its clients' training data
    # Written by federations, whose clients come and go; version 0.1 called it `homes`.
    client_domains: dict[str, str | None] | None = Field(None, validation_alias=AliasChoices("client_domains", "homes"))

    @field_validator("report", mode="before")
    @classmethod
    def _rename_old_keys(cls, report: Any) -> Any:
        if isinstance(report, dict) and "not_judged" in report:  # as version 0.1 wrote it
            return {"not_evaluated" if key == "not_judged" else key: value for key, value in report.items()}
        return report

    def to_json(self) -> str:
        """Return the line of `rounds.jsonl`."""
        try:
            _check_record(self)
        except ValueError as error:
            raise ValueError(f"round {self.round} cannot be recorded: {error}") from None
        fields = dict(self)
        if fields["client_domains"] is None:
            del fields["client_domains"]
        return dump_json(fields, f"round {self.round}")


class Fairness(_Record):
    """How evenly a model serves domains or clients (see `fedheal.core.metrics`)."""

    avg: float
    std: float
    worst: float
    best: float
    gap: float
    cov: float
    gini: float
    jain: float
    entropy: float


class ValidationResult(Fairness):
    """Accuracy on validation data."""

    domains: dict[str, float]


class _RunHead(_Record):
    """The first fields of a result; those of `Fairness` follow them, since pydantic goes through bases from last to first."""

    method: str
    algorithm: str = ""  # of a federation
    data: str
    seed: int
    split_seed: int | None = None  # where another than `seed` was given; likewise the next two
    init_seed: int | None = None
    batch_seed: int | None = None
    rounds: int
    averaged: int  # evaluated rounds that the accuracies are means of
    domains: dict[str, float] = Field(min_length=1)

    @field_validator("domains")
    @classmethod
    def _check_accuracies(cls, domains: dict[str, float]) -> dict[str, float]:
        return _check_percentages(domains, "domains")


class RunResult(Fairness, _RunHead):
    """A finished run: `result.json`. Accuracies are in percent and means over the last evaluated rounds.

    These are the fields that this version writes, in their order. Files of earlier versions lack some (see `check_result`).
    """

    clients: dict[str, float]
    client_fairness: dict[str, float]
    validation: ValidationResult | None
    trained: dict[str, str]  # domains of the clients that trained
    only: list[str]
    without: list[str]
    pool: bool
    evaluate: str = "all"  # or unseen: the run is the part of an evaluation that leaves out the domain of `without`
    classes: list[Any]
    test_sizes: dict[str, float]
    dropouts: int = 0  # of a federation, summed over rounds
    skipped: int = 0  # likewise
    device: str
    hardware: str
    precision: str
    threads: int
    data_fingerprint: str
    used_fingerprint: str
    data_notes: list[str]
    bytes_sent: float
    bytes_received: float
    consistency: dict[str, list[float]] | None
    seconds: dict[str, float]
    versions: dict[str, str]
    engine: str = ""  # which one trained the clients, and why not the usual one
    by_class: dict[str, list[list[int]]] = Field(default_factory=dict)  # correct and all test examples, at the end
    # By domain, after the last round: `ece` in percent, `brier` and `nll`; None if not finite (see `core.calibration`).
    calibration: dict[str, dict[str, float | None]] = Field(default_factory=dict)
    schema_version: int = 1  # that of files without the field; 2 has `calibration` and `evaluate`
    own: list[Any] = Field(default_factory=list)  # what can be seen of a method that is not in the registry

    @field_validator("schema_version")
    @classmethod
    def _check_version(cls, version: int) -> int:
        if version > SCHEMA_VERSION:
            raise ValueError(f"schema_version = {version} belongs to a newer version of fedheal than this one: upgrade")
        return version

    @field_validator("test_sizes")
    @classmethod
    def _check_test_sizes(cls, sizes: dict[str, float], info: ValidationInfo) -> dict[str, float]:
        if "domains" in info.data and sizes.keys() != info.data["domains"].keys():
            raise ValueError(f"test_sizes must have the names of domains, got {reprlib.repr(sizes)}")
        return sizes

    @field_validator("clients")
    @classmethod
    def _check_clients(cls, clients: dict[str, float]) -> dict[str, float]:
        return _check_percentages(clients, "clients")

    @field_validator("consistency")
    @classmethod
    def _check_consistency(cls, shares: dict[str, list[float]] | None) -> dict[str, list[float]] | None:
        if shares is not None and len(set(map(len, shares.values()))) > 1:
            raise ValueError(f"consistency must have lists of one length, got {reprlib.repr(shares)}")
        return shares


def _check_percentages(accuracies: dict[str, float], name: str) -> dict[str, float]:
    """Return the accuracies. Raise ValueError if one is not from 0 to 100; NaN is not, either."""
    if not all(0 <= accuracy <= 100 + ROUNDING for accuracy in accuracies.values()):
        raise ValueError(f"{name} must have accuracies from 0 to 100, got {reprlib.repr(accuracies)}")
    return accuracies


def check_result(summary: Mapping[str, Any], required: Collection[str] | None = None) -> None:
    """Raise ValueError if a field of a result has the wrong type, or if a required one (None: any) is missing.

    `validation.avg` is the field `avg` within `validation`.
    """
    try:
        RunResult.model_validate(summary)
    except ValidationError as error:
        for problem in error.errors(include_url=False):
            field = ".".join(map(str, problem["loc"]))
            if problem["type"] != "missing" or required is None or field in required:
                raise ValueError(explain_problem(problem)) from None


def parse_model(model: type[Model], fields: Mapping[str, Any]) -> Model:
    """Return a model, or raise ValueError with one sentence about the first field that is wrong."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise ValueError(explain_problem(error.errors(include_url=False)[0])) from None


def parse_round(fields: Mapping[str, Any]) -> RoundRecord:
    """Return a round's record, or raise ValueError if a field has the wrong type or an accuracy is impossible."""
    record = parse_model(RoundRecord, fields)
    _check_record(record)
    return record


def dump_json(value: Mapping[str, Any], name: str, indent: int | None = None) -> str:
    """Return JSON, or raise ValueError that names the field which is not JSON: NaN and infinity are not."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be recorded: {_find_unserialisable(value)}") from error


def explain_problem(problem: Mapping[str, Any]) -> str:
    """Return one sentence about one of the errors of a pydantic `ValidationError`."""
    field = ".".join(map(str, problem["loc"]))
    if not field:
        return str(problem["msg"])
    if problem["type"] == "missing":
        return f"there is no {field}"
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    if problem["type"] == "too_short":
        least = problem["ctx"]["min_length"]
        return f"{field} must not be empty" if least == 1 else f"{field} must have at least {least} items"
    return f"{field} must be {describe_allowed(problem)}, got {reprlib.repr(problem['input'])}"


def _find_unserialisable(record: Mapping[str, Any], prefix: str = "") -> str:
    for key, value in record.items():
        try:
            json.dumps({key: value}, allow_nan=False)
        except (TypeError, ValueError):
            if isinstance(value, Mapping):
                return _find_unserialisable(value, f"{prefix}{key}.")
            return f"{prefix}{key} = {value!r} is not JSON-serialisable"
    return "it is nested too deeply"


def _check_record(record: RoundRecord) -> None:
    for name in ("domains", "clients", "validation"):
        _check_percentages(getattr(record, name) or {}, name)
    _check_report(record.report)


def _check_report(report: Mapping[str, Any]) -> None:
    """Raise ValueError if a part of an aggregator's report that is read again has the wrong type."""
    for key in REPORT_NUMBERS:
        value = report.get(key)
        numbers = value.values() if isinstance(value, dict) else [value]
        is_valid = all(isinstance(x, int | float | None) and not isinstance(x, bool) for x in numbers)
        if not is_valid or not isinstance(value, dict | None):
            raise ValueError(f"report.{key} must map names to numbers, got {reprlib.repr(value)}")
