"""Comparisons and reports in Python: `fedheal.compare` and `fedheal.make_report`."""

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from fedheal.campaign.checks import check_campaign_folder
from fedheal.campaign.compare import choose_seeds, expand_unseen, name_design, plan
from fedheal.campaign.jobs import Job, run_job
from fedheal.campaign.pool import run_all
from fedheal.core.arrays import make_frame
from fedheal.core.checks import check_type
from fedheal.methods import Method
from fedheal.methods.registry import METHOD_REMEDY
from fedheal.report.comparability import check_reference
from fedheal.report.html_page import render_page
from fedheal.report.rows import Row, build_rows, explain_no_runs, find_rows, load_summary, write_method_order
from fedheal.report.tables import flatten_rows
from fedheal.report.text_report import format_report
from fedheal.runs.folder import make_folder, write_text
from fedheal.simulate.experiment import format_value, make_folder_name
from fedheal.simulate.objects import wrap_objects


@dataclass(frozen=True)
class Report:
    """Finished runs as tables and conclusions. A notebook shows it; `print` gives the same text.

    Attributes:
        rows: A row for each method and seed, with `method`, `seed`, `domains` and `fairness`.
        reference: The method that the others are compared with; FedAvg or the first if None.
    """

    rows: tuple[Row, ...]
    reference: str | None = None

    def __str__(self) -> str:
        """Return a table for each data set, and what may be concluded from it."""
        return format_report(self.rows, "text", self.reference)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_pandas(self) -> Any:
        """Return a data frame with a row for each method and seed. Raise ValueError if pandas is not installed."""
        return make_frame(flatten_rows(self.rows))

    def to_latex(self) -> str:
        r"""Return a LaTeX table for each data set, with conclusions as comments; a document needs `\usepackage{booktabs}`."""
        return format_report(self.rows, "latex", self.reference)

    def write_html(self, path: str | Path, title: str = "") -> Path:
        """Write the HTML page with all tables and figures; return its path."""
        make_folder(Path(path).parent)
        write_text(Path(path), render_page(self.rows, title, self.reference))
        return Path(path)


def compare(
    methods: str | Method | Sequence[str | Method],
    data: Any = "embedded",
    seeds: int | str | Sequence[int] | None = None,
    out: str | Path | None = None,
    jobs: int = 1,
    reference: str | None = None,
    vary: str | Mapping[str, int | str | Sequence[int]] | None = None,
    **fields: Any,
) -> Report:
    """Compare methods over seeds, paired: for one seed all have the same split, cohorts, batches and initial model.

    Finished runs are not run again and stopped ones are resumed, so the call may be repeated.

    Args:
        methods: Names of methods or bounds, or `Method` values.
        data: A data set's name, a `Domains`, or a function that returns one.
        seeds: How many, from 0 on; a list; or a text such as "3-7" or "0,8-12". 8 by default.
        out: The folder of the runs; named after the data and the given fields by default.
        jobs: How many runs at a time, in processes of their own; 0 for as many as fit. Objects stay in this process: with
            data, a model or a method given as one, runs go one after another.
        reference: The method that the others are compared with; FedAvg or the first by default.
        vary: Instead of `seeds`, the seeds of split, initial model or batches, such as `{"split": 10, "init": 3}` or
            "split=10,init=3". All combinations are run, and the report has their variance components.
        **fields: Fields that all experiments share, such as `rounds=10`, `model=my_module` or `evaluate="unseen"`.

    Returns:
        The report.

    Raises:
        ValueError: A run is not possible, or `jobs` asks for processes that objects cannot be sent to.
    """
    check_type("methods", methods, Iterable | Method, "give a list of names or Method values")
    methods = [methods] if isinstance(methods, str | Method) else list(methods)
    for i, method in enumerate(methods):
        check_type(f"methods[{i}]", method, str | Method, METHOD_REMEDY)
    values = fields | {"data": data}
    objects = wrap_objects(values)  # once, not for every run
    values |= objects
    if jobs != 1 and (objects or any(isinstance(method, Method) for method in methods)):
        raise ValueError(f"jobs = {jobs}: data, models and methods given as objects stay in this process; use jobs=1")
    numbers = choose_seeds(seeds, vary)
    if numbers and "init_seed" in numbers[0] and isinstance(fields.get("model"), nn.Module):
        raise ValueError(f"vary = {vary}: a module's values are those of every run; give a function, or leave out init")
    named = Path("runs") / _name_comparison(values, name_design(numbers))
    folder = check_campaign_folder(named if out is None else Path(out))
    planned = _plan_jobs(methods, numbers, values, folder)
    for job in planned:
        if job.experiment.model_object is not None and job.is_finished:
            run_job(job)  # which refuses a run whose model was another one, although its function has the same name
    for _ in run_all(planned, jobs):
        pass
    rows = build_rows(load_summary(job.folder) for job in planned)
    write_method_order(folder, rows)
    return _build_report(rows, reference)


def _plan_jobs(
    methods: Sequence[str | Method], seeds: Sequence[Mapping[str, int]], values: Mapping[str, Any], folder: Path
) -> list[Job]:
    """Return the runs of all methods, those with a name first."""
    names = [method for method in methods if not isinstance(method, Method)]
    own = [method for method in methods if isinstance(method, Method)]
    planned = plan(names, seeds, values, folder) if names or not own else []
    for method in own:
        experiments = [e for own_seeds in seeds for e in expand_unseen({**values, "method": method, **own_seeds})]
        planned += [Job(experiment, folder / experiment.folder_name) for experiment in experiments]
    if len({job.folder for job in planned}) < len(planned):
        raise ValueError("two of the methods have the same name: give each Method a name of its own")
    return planned


def _name_comparison(values: Mapping[str, Any], design: Sequence[str]) -> str:
    """Return a folder's name: the data, what is varied, and the fields that were given."""
    words = {key: getattr(value, "description", format_value(value)) for key, value in values.items()}
    data = words.pop("data").replace(":", ".")
    return make_folder_name(
        "-".join(["compare", data, *design, *sorted(f"{key}={word}" for key, word in words.items())])
    )


def make_report(*folders: str | Path, reference: str | None = None) -> Report:
    """Read finished runs.

    Args:
        *folders: Run folders, or folders of them.
        reference: The method that the others are compared with; FedAvg or the first by default.

    Returns:
        The report.

    Raises:
        ValueError: There is no finished run, a result is damaged, or no run is of the reference.
        TypeError: A folder is no path.
    """
    if not folders:
        raise ValueError("give at least one run folder, such as make_report('runs')")
    for folder in folders:
        check_type("a folder", folder, str | PathLike, "give paths one by one, such as make_report('runs/a', 'runs/b')")
    paths = [Path(folder) for folder in folders]
    rows = find_rows(paths)
    if not rows:
        raise ValueError(f"there is no finished run in {', '.join(map(str, folders))}: {explain_no_runs(paths)}")
    return _build_report(rows, reference)


def _build_report(rows: Sequence[Row], reference: str | None) -> Report:
    check_reference(rows, reference)
    return Report(tuple(rows), reference)
