"""The runs that results/ is made of: the rows, data sets, settings and seeds of each campaign, and where its runs are kept."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import results_table1
from fedheal.reproduce import RECIPES
from fedheal.reproduce.plans import Recipe
from fedheal.runs.schema import FREE
from fedheal.simulate.experiment import Experiment
from results_confirmation import CONFIRMATIONS, ROUNDS
from results_studies import DATA, STUDIES

# A run may differ from the plan in these settings, because the tables show them.
MAY_DIFFER = FREE | {"seed", "rounds", "device", "precision", "engine", "deterministic"}


@dataclass(frozen=True)
class Campaign:
    """Rows that are run with several seeds on several data sets.

    Attributes:
        recipe: The rows.
        settings: By data set, settings beside those of its protocol.
        folder: Where the runs are kept, below results/.
        seeds: The seeds that belong to it, by data set; None for all.
        may_differ: The settings in which a run may differ from the plan.
    """

    recipe: Recipe
    settings: Mapping[str, Mapping[str, Any]]
    folder: str = ""
    seeds: Mapping[str, Collection[int]] | None = None
    may_differ: frozenset[str] = MAY_DIFFER

    def get_settings(self, data: str) -> Mapping[str, Any]:
        """Return the settings of a data set. Raise ValueError if there is no plan for it."""
        if data not in self.settings:
            raise ValueError(f"data = {data}: there is no plan for it; use one of {', '.join(self.settings)}")
        return self.settings[data]

    def count_rounds(self, data: str) -> int:
        """Return the planned number of rounds."""
        return Experiment.of({**self.get_settings(data), "data": data}).rounds

    def find_departure(self, experiment: Experiment) -> str:
        """Return why a run is not part of this campaign, or an empty string if it is."""
        data = experiment.data
        if data not in self.settings:
            return f"there is no plan for {data}"
        names = {Experiment.of({"method": row.method, "data": data}).method_name for row in self.recipe.list_rows(data)}
        if experiment.method_name not in names:
            return f"{experiment.method_name} is not in the plan"
        if self.seeds is not None and experiment.seed not in self.seeds[data]:
            return f"seed {experiment.seed} is not in the plan"
        planned = Experiment.of({**self.settings[data], "data": data, "method": experiment.method}).to_dict()
        found = experiment.to_dict()
        differ = sorted(key for key in {*planned, *found} - self.may_differ if planned.get(key) != found.get(key))
        return f"it departs from the plan in {', '.join(differ)}" if differ else ""


HEADLINE = Campaign(
    RECIPES["headline"],
    {"digits": {}, "office-caltech": {"allow_missing": True}},  # Caltech, a domain, is not available everywhere
)
CAMPAIGNS = {
    "headline": HEADLINE,
    **{
        confirmation.folder: Campaign(
            confirmation.recipe,
            {data: {**HEADLINE.settings.get(data, {}), "rounds": ROUNDS[data]} for data in confirmation.seeds},
            confirmation.folder,
            confirmation.seeds,
            MAY_DIFFER - {"rounds"},
        )
        for confirmation in CONFIRMATIONS
    },
    "table1": Campaign(
        RECIPES["table1"],
        {"digits": HEADLINE.settings["digits"]},
        results_table1.FOLDER,
        {"digits": (results_table1.SEED,)},
        MAY_DIFFER - {"rounds"},
    ),
    **{
        study.name: Campaign(
            study.recipe, {DATA: study.settings}, study.folder, {DATA: study.seeds}, MAY_DIFFER - {"rounds"}
        )
        for study in STUDIES
    },
}
