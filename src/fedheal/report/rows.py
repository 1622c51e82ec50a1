"""From run folders to rows: one method (or bound) and one seed, with its accuracy per domain."""

from __future__ import annotations

import glob
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from fedheal.core.atomic_files import write_if_changed
from fedheal.core.errors import shorten_list
from fedheal.core.metrics import fairness
from fedheal.core.rng import SEED_FIELDS
from fedheal.data.on_disk import FOLDER_PREFIX
from fedheal.report.last_rounds import list_round_notes
from fedheal.runs.folder import read_json, read_result, read_toml
from fedheal.runs.schema import FREE, LATER_SETTINGS

BOUNDS = {
    "standalone": "one model per client, trained on its own data only; evaluated on its own domain, mean over the domain's "
    "clients",
    "centralised": "one model trained on the pooled data of all clients",
    "leave-one-domain-out": "each domain evaluated with a model of the other domains' clients (FedAvg)",
}
UNSEEN = "unseen"  # the evaluation of each domain with a model that was trained without its clients
BOUND_METHOD = "fedavg"  # the method of every bound
BOUND_SETTINGS = frozenset({"only", "without", "pool"})  # settings that make a run a part of a bound
FINISHED = "a run is finished when its folder has a result.json"
MAX_SUGGESTED = 5  # folders that an error names
ORDER_FILE = "comparison.json"  # beside the runs of a comparison
Seeds = tuple[int, ...]  # of the split, the initial model and the batches
FAIRNESS_COLUMNS = {"AVG": "avg", "STD": "std", "worst": "worst"}  # columns after the domains -> keys of `fairness`


@dataclass(frozen=True)
class Row:
    """One method and seed. `domains`: accuracy in percent; `fairness`: AVG, STD, worst and the like over them.

    With `evaluation="unseen"`, each domain's accuracy is that of the run that left it out.
    """

    method: str
    seed: int
    domains: Mapping[str, float]
    fairness: Mapping[str, float]
    validation: Mapping[str, Any] | None = None
    summaries: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    evaluation: str = "all"

    @property
    def data(self) -> str:
        """The name of the data set."""
        return str(self.summaries[0]["data"])

    @property
    def table(self) -> str:
        """The table that the row belongs into: the data set, and whether its domains were unseen in training."""
        return self.name_table(self.data)

    def name_table(self, data: str) -> str:
        """Return what the row's table is called if its data set is called `data`."""
        return f"{data}, unseen domains" if self.evaluation == UNSEEN else data

    def collect(self, field: str) -> dict[str, Any]:
        """Return a field of the result that has an entry for each domain; of unseen domains, each from its own run."""
        if self.evaluation != UNSEEN:
            return dict(self.summaries[0].get(field) or {})
        parts = {summary["without"][0]: summary.get(field) or {} for summary in self.summaries}
        return {domain: part[domain] for domain, part in parts.items() if domain in part}

    @property
    def folder(self) -> str:
        """The folder of the row's (first) run."""
        return str(self.summaries[0].get("folder", "?"))

    @property
    def seeds(self) -> Seeds:
        """The seeds of the split, the initial model and the batches, by which runs of two methods are paired."""
        summary = self.summaries[0] if self.summaries else {}
        return tuple(int(summary.get(field, self.seed)) for field in SEED_FIELDS)

    def get_value(self, column: str) -> float:
        """Return the number in a column of a table: a domain, AVG, STD or worst."""
        return float(self.fairness[FAIRNESS_COLUMNS[column]] if column in FAIRNESS_COLUMNS else self.domains[column])


REPORT_FIELDS = frozenset(
    {"method", "data", "seed", "rounds", "domains", "clients", "trained", "test_sizes", "only", "without", "pool"}
    | {f"validation.{name}" for name in FAIRNESS_COLUMNS.values()}
)


def find_results(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the results of all finished runs in or under these folders, each once and with its `folder`.

    A result has the names of runs beside it that are not finished as `unfinished`, if there are any.
    """
    folders: dict[Path, None] = {}
    begun: list[Path] = []
    for path in paths:
        check_runs_exist(path)
        folders |= dict.fromkeys(sorted(file.parent for file in path.rglob("result.json")))
        begun += _list_begun(path)
    unfinished: dict[Path, list[str]] = {}
    for folder in dict.fromkeys(begun):
        if folder not in folders:
            unfinished.setdefault(folder.parent, []).append(folder.name)
    beside = {folder: unfinished.get(folder.parent) for folder in folders}
    return [load_summary(folder) | ({"unfinished": names} if names else {}) for folder, names in beside.items()]


def _list_begun(path: Path) -> list[Path]:
    """Return the folders of simulations in or under a folder, finished or not."""
    return sorted(file.parent for file in path.rglob("experiment.toml"))


def check_runs_exist(path: Path) -> None:
    """Raise ValueError if a path is not a folder, and name one that may be meant."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: {_suggest_folder(path)}")
    if not path.is_dir():
        raise ValueError(f"{path} is a file, not a folder: name a folder of runs, such as {path.parent}")


def explain_no_runs(paths: Sequence[Path]) -> str:
    """Say why there is no finished run in these folders, and how to resume a run, a comparison or a federation."""
    federation = next((file.parent for path in paths for file in sorted(path.rglob("federation.toml"))), None)
    if federation is None:
        begun = [folder for path in paths for folder in _list_begun(path)]
        if not begun:
            return "it holds no runs" if len(paths) == 1 else "they hold no runs"
        if all(folder in paths for folder in begun):
            return f"{FINISHED}; resume it with fedheal run --resume --out {begun[0]}"
        again = "run the same fedheal compare (or demo, sweep or reproduce) again"
        return f"{FINISHED}; {again} to resume its runs, or fedheal run --resume --out FOLDER for a run of its own"
    if (federation / "model.safetensors").is_file():
        return f"{federation} holds a federation without a result.json, since no client sent a usable 'accuracy'"
    remedy = f"resume it with resume=true; fedheal report {federation} --diagnose shows its rounds now"
    return f"{federation} holds a federation that is not finished: {remedy}"


def _suggest_folder(path: Path) -> str:
    """Say which folder may be meant instead of one that does not exist, or how to get runs."""
    similar = sorted(map(str, path.parent.glob(f"{glob.escape(path.name)}*"))) if path.name else []
    if similar:
        return f"did you mean {similar[0]}?"
    patterns = ("*/result.json", "*/*/result.json")  # no deeper: it may be /
    files = (file for pattern in patterns for file in path.parent.glob(pattern))
    others = sorted({str(path.parent / file.relative_to(path.parent).parts[0]) for file in files})
    if others:
        return f"finished runs are in {shorten_list(others, MAX_SUGGESTED)}"
    return "name a folder that fedheal run, compare, sweep or demo has written to, such as runs/demo"


def find_rows(paths: Sequence[Path]) -> list[Row]:
    """Return the rows of all finished runs, methods in the order that a comparison was given them in, else by name.

    Raises:
        ValueError: If a folder does not exist, or a file in it is not what a run or a comparison writes.
    """
    rows = build_rows(find_results(paths))
    order: dict[str, int] = {}
    for folder in dict.fromkeys(Path(row.folder).parent for row in rows):
        if (folder / ORDER_FILE).is_file():
            methods = read_json(folder / ORDER_FILE).get("methods")
            if not isinstance(methods, list):
                raise ValueError(
                    f"{folder / ORDER_FILE} does not hold a list of methods: remove it, or repeat the comparison"
                )
            for method in methods:
                order.setdefault(str(method), len(order))
    return sorted(rows, key=lambda row: (order.get(row.method, len(order)), row.method, row.seeds))


def write_method_order(folder: Path, rows: Sequence[Row]) -> None:
    """Record the order of a comparison's methods beside its runs, for later reports."""
    methods = list(dict.fromkeys(row.method for row in rows))
    write_if_changed(folder / ORDER_FILE, json.dumps({"methods": methods}, indent=2) + "\n")


def load_summary(folder: Path, required: Iterable[str] = ()) -> dict[str, Any]:
    """Return the result of a finished run, with its `folder` and, if there are any, notes on its rounds as `round_notes`.

    Raises:
        ValueError: If it lacks what a report needs.
    """
    summary = rename_domains(read_result(folder, {*REPORT_FIELDS, *required})) | {"folder": str(folder)}
    notes = list_round_notes(folder, summary)
    return summary | ({"round_notes": notes} if notes else {})


def rename_domain(name: str) -> str:
    """Return the name of a domain in reports: one that a client has called like a column of the table is told apart.

    >>> rename_domain("street"), rename_domain("worst")
    ('street', 'worst (domain)')
    """
    return f"{name} (domain)" if name in FAIRNESS_COLUMNS else name


def rename_domains(summary: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a run with the names that its domains have in reports."""
    if FAIRNESS_COLUMNS.keys().isdisjoint(summary["domains"]):
        return summary
    by_domain = {key: summary[key] for key in ("domains", "test_sizes", "by_class", "calibration") if summary.get(key)}
    renamed = {key: {rename_domain(domain): x for domain, x in found.items()} for key, found in by_domain.items()}
    trained = {client: rename_domain(str(domain)) for client, domain in summary["trained"].items()}
    return {**summary, **renamed, "trained": trained, "without": [rename_domain(name) for name in summary["without"]]}


def collect_data_notes(summaries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what is special about the runs' data, such as a stand-in for an unavailable domain; each note once.

    Notes on a run's rounds follow: which domains were not evaluated with its last model.
    """
    runs = list(summaries)
    notes = [note for run in runs for note in run.get("data_notes", ())]
    for run in (run for run in runs if "round_notes" in run):
        whose = f"{_name_row(run)} with seed {run['seed']}: " if len(runs) > 1 else ""
        notes += [whose + note for note in run["round_notes"]]
    return list(dict.fromkeys(notes))


def group_by_data(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Return the rows of each table: a data set, or its unseen domains. Raise ValueError if they have other domains."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        group = groups.setdefault(row.table, [])
        group.append(row)
        if set(row.domains) != set(group[0].domains):
            folders = " and ".join(f"{r.folder} has {', '.join(r.domains)}" for r in (group[0], row))
            raise ValueError(
                f"the runs on '{row.data}' are not over the same domains: {folders}; report them separately"
            )
    return groups


def name_data_sets(names: Iterable[str]) -> dict[str, str]:
    """Return what each data set is called in a report.

    A folder of images is called by its last name, and by as many of the folders above it as tell it from the others.

    >>> name_data_sets(["digits", "folder:/data/photos"])
    {'digits': 'digits', 'folder:/data/photos': 'photos'}
    >>> list(name_data_sets(["folder:/a/x/photos", "folder:/b/x/photos", "folder:/c/photos"]).values())
    ['a/x/photos', 'b/x/photos', 'c/photos']
    """
    parts = {name: _split_folder(name) for name in names}
    depths = dict.fromkeys(parts, 1)
    while True:
        shown = {name: str(PurePath(*parts[name][-depth:])) for name, depth in depths.items()}
        times = Counter(shown.values())
        unclear = [name for name, depth in depths.items() if times[shown[name]] > 1 and depth < len(parts[name])]
        if not unclear:
            return shown
        depths |= {name: depths[name] + 1 for name in unclear}


def _split_folder(data: str) -> tuple[str, ...]:
    """Return the parts of the path of a folder of images; another data set's name is one part."""
    path = data.removeprefix(FOLDER_PREFIX)
    return (data,) if path == data else PurePath(path).parts or (data,)


def build_rows(summaries: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return one row per run, in order. The runs of a complete bound, or of all unseen domains, become one row."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for summary in summaries:
        bound = _find_bound(summary)
        groups.setdefault((bound, _make_bound_key(summary) if bound else ""), []).append(summary)
    return [row for (bound, _), group in groups.items() for row in _build_group(bound, group)]


def read_settings(summary: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return a run's settings, and whether they are complete: an absent setting of a complete description is not set.

    The device and the precision are those that the run had, which its description may leave open by `auto`.
    """
    folder = Path(str(summary.get("folder", "")))
    for name, is_complete in (("experiment.toml", True), ("federation.toml", False)):
        if (folder / name).is_file():
            settings = (LATER_SETTINGS if is_complete else {}) | read_toml(folder / name)
            used = {key: str(summary[key]).partition(":")[0] for key in ("device", "precision") if key in summary}
            return settings | {key: value for key, value in used.items() if key in settings}, is_complete
    return {key: summary[key] for key in ("method", "data", "seed", "rounds") if key in summary}, False


def _find_bound(summary: Mapping[str, Any]) -> str:
    """Return the bound or the evaluation that a run is a part of, or an empty string."""
    only, without = summary["only"], summary["without"]
    if summary.get("evaluate") == UNSEEN:
        return UNSEEN
    if summary["method"] != BOUND_METHOD:
        return ""
    if summary["pool"]:
        return "" if only or without else "centralised"
    if not only and len(without) == 1 and without[0] in summary["domains"]:
        return "leave-one-domain-out"
    if not without and len(only) == 1 and only[0] in summary["trained"]:
        return "standalone"
    return ""


def _make_bound_key(summary: Mapping[str, Any]) -> str:
    """Return what the parts of one bound have in common: data, seed, rounds and all settings that affect results."""
    settings = {key: summary.get(key) for key in ("data", "seed", "rounds", *SEED_FIELDS)} | read_settings(summary)[0]
    shared = {key: value for key, value in settings.items() if key not in FREE | BOUND_SETTINGS}
    if summary.get("evaluate") == UNSEEN:
        shared |= {"method": summary["method"], "pool": summary["pool"]}
    return json.dumps(shared, sort_keys=True, default=str)


def _build_group(bound: str, group: Sequence[Mapping[str, Any]]) -> list[Row]:
    combined = _combine_parts(bound, group) if bound in ("leave-one-domain-out", "standalone", UNSEEN) else {}
    if combined:
        domains = {domain: combined[domain] for domain in group[0]["domains"]}
        row = Row(bound, int(group[0]["seed"]), domains, fairness(domains), summaries=tuple(group))
        name = _name_row({**group[0], "without": []})
        return [replace(row, method=name, evaluation=UNSEEN) if bound == UNSEEN else row]
    rows = []
    for s in group:
        name = bound if bound == "centralised" else _name_row(s)
        rows.append(Row(name, int(s["seed"]), s["domains"], fairness(s["domains"]), s.get("validation"), (s,)))
    return rows


def _name_row(summary: Mapping[str, Any]) -> str:
    """Return the method, and who took part if not everyone did."""
    words = [f"{key}={','.join(map(str, summary[key]))}" for key in ("only", "without") if summary[key]]
    return " ".join([str(summary["method"]), *words, *(["pool=true"] if summary["pool"] else [])])


def _combine_parts(bound: str, group: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return each domain's accuracy, mean over its parts; nothing unless there is exactly one run per domain or client."""
    if bound == "standalone":
        parts, expected = [summary["only"][0] for summary in group], group[0]["clients"]
        domains = [summary["trained"][client] for client, summary in zip(parts, group, strict=True)]
    else:
        parts, expected = [summary["without"][0] for summary in group], group[0]["domains"]
        domains = parts
    if sorted(parts) != sorted(expected) or set(domains) != set(group[0]["domains"]):
        return {}
    accuracies = [(domain, float(summary["domains"][domain])) for domain, summary in zip(domains, group, strict=True)]
    return {domain: float(np.mean([x for d, x in accuracies if d == domain])) for domain in domains}
