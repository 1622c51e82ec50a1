"""The recipes by name. Uniform weights, the control that the paper lacks, are a row of every one.

AFL, q-FFL and the released FedHEAL start from equal weights. The paper's FedAvg weights clients by their examples. So
part of any gain over FedAvg may come from uniform weights alone.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from fedheal.aggregate.fedheal_stages import TAU
from fedheal.reproduce import paper
from fedheal.reproduce.plans import PAPER_DATA, Claim, Recipe, RecipeRow

LOCAL = {
    "fedavg": "FedAvg", "fedprox": "FedProx", "scaffold": "SCAFFOLD", "moon": "MOON",
    "feddyn": "FedDyn", "fedproc": "FedProc", "fedproto": "FedProto",
}  # fmt: skip
UNIFORM = RecipeRow("uniform weights", "fedavg+uniform")
BOTH = ("digits", "office-caltech")
STAGES = {"": "", "uniform": " + uniform weights", "afl": " + AFL", "qffl": " + q-FFL", "fedheal": " + FedHEAL"}
EQUAL_WEIGHTS = ("scaffold", "feddyn")  # their clients weigh the same by definition: the row is its own control
CONTROL = "Uniform weights are our control: the paper has no such row."
CHOSEN_ON_TEST = "The paper has one seed and chose tau and beta on the test sets."
OURS = (
    "Baselines follow the published algorithms, except where docs/methods.md names a deviation; q-FFL's L is the inverse of "
    "the effective step of all local steps, not of the learning rate. The paper's group's code differs too, as that page says."
)


def _name_with_tau(name: str, data: str) -> str:
    """Add the tau that the paper chose for a data set to the name of a method with FPHL."""
    tau = paper.CHOSEN_TAU.get(data, TAU.default)
    return name if tau == TAU.default or not name.endswith(("fphl", "fedheal")) else f"{name}:tau={tau}"


def _make_row(
    label: str, data: str, table: Mapping[str, Mapping[Any, paper.Numbers]], key: Any, method: str = ""
) -> RecipeRow:
    """Return a row with what the paper prints under a key; the method is the key, with the paper's tau, unless given."""
    method = method or _name_with_tau(str(key), data)
    data = PAPER_DATA.get(data, data)
    misprint = paper.MISPRINTS.get((data, str(key)), ((), ""))
    return RecipeRow(label, method, table.get(data, {}).get(key, ()), misprint)


def _make_stacked_row(local: str, stage: str, data: str) -> RecipeRow:
    method = local if stage == "uniform" and local in EQUAL_WEIGHTS else ""
    key = f"{local}+{stage}" if stage else local
    return _make_row(LOCAL[local] + STAGES[stage], data, paper.TABLE1, key, method)


def _list_table1_claims() -> list[Claim]:
    opponents = {"": "the local method alone", "uniform": "uniform weights", "afl": "AFL", "qffl": "q-FFL"}
    pairs = {s: tuple((x + STAGES["fedheal"], x + STAGES[s]) for x in LOCAL.values()) for s in opponents}
    return [Claim(f"FedHEAL against {name}", pairs[stage]) for stage, name in opponents.items()]


def _list_table2(data: str) -> list[RecipeRow]:
    return [
        _make_row("Ditto", data, paper.TABLE2, "ditto"),
        # Its tau counts rounds. It is set here, so that a data set's tau for FPHL never reaches it.
        _make_row("FedFV", data, paper.TABLE2, "fedfv", "fedfv:tau=1"),
        UNIFORM,
        _make_row("FedHEAL", data, paper.TABLE2, "fedavg+fedheal"),
    ]


def _list_ablation(data: str) -> list[RecipeRow]:
    return [
        _make_row("neither (FedAvg)", data, paper.ABLATION, "fedavg"),
        _make_row("FPHL", data, paper.ABLATION, "fedavg+fphl"),
        _make_row("FAEL", data, paper.ABLATION, "fedavg+fael"),
        _make_row("FPHL + FAEL (FedHEAL)", data, paper.ABLATION, "fedavg+fedheal"),
        UNIFORM,
        RecipeRow("FPHL + uniform weights", _name_with_tau("fedavg+uniform+fphl", data)),
    ]


def _list_sweep(
    data: str, table: Mapping[str, Mapping[Any, paper.Numbers]], stage: str, name: str, values: Iterable[float]
) -> list[RecipeRow]:
    rows = [_make_row(f"{name} = {x:.1f}", data, table, x, f"fedavg+{stage}:{name}={x}") for x in values]
    return [*rows, UNIFORM]


def _list_convergence(data: str) -> list[RecipeRow]:
    """Return every local method with and without FedHEAL, then the methods that FedHEAL is compared with."""
    pairs = [_make_stacked_row(local, stage, data) for local in LOCAL for stage in ("", "fedheal")]
    stages = [_make_stacked_row("fedavg", stage, data) for stage in ("uniform", "afl", "qffl")]
    return [*pairs, *stages, *_list_table2(data)[:2]]


def _list_headline(data: str) -> list[RecipeRow]:
    """Return the rows that carry the paper's argument; on Office-Caltech, where steps differ most, FedHEAL per step too."""
    method = _name_with_tau("fedavg+fedheal", data)
    separator = "," if ":" in method else ":"
    first = [
        _make_row("FedAvg", data, paper.TABLE1, "fedavg"),
        UNIFORM,
        _make_row("FedHEAL (released)", data, paper.TABLE1, "fedavg+fedheal", f"{method}{separator}variant=released"),
        _make_row("FedHEAL (paper)", data, paper.TABLE1, "fedavg+fedheal"),
    ]
    parts = [
        _make_row("FAEL alone", data, paper.ABLATION, "fedavg+fael"),
        _make_row("FPHL alone", data, paper.ABLATION, "fedavg+fphl"),
    ]
    if data == "office-caltech":
        return [*first, *parts, RecipeRow("FedHEAL per step", f"{method}{separator}per_step=true")]
    return [
        *first,
        *parts,
        RecipeRow("exact FAEL alone", "fedavg+fael-exact"),
        _make_row("AFL", data, paper.TABLE1, "fedavg+afl"),
        _make_row("q-FFL", data, paper.TABLE1, "fedavg+qffl"),
        RecipeRow("q-FFL (q = 0.5)", "fedavg+qffl:q=0.5"),
        RecipeRow("q-FFL (reweight)", "fedavg+qffl:mode=reweight"),
        *_list_table2(data)[1::-1],
    ]


RECIPES = {
    "headline": Recipe(
        "FedAvg, uniform weights and FedHEAL; its parts; other methods of fairness",
        BOTH, _list_headline,
        (CONTROL, "The paper has one row for FedHEAL: it is compared with both variants.",
         "Exact FAEL, where it is a row, is ours: weights by FAEL's objective itself, not by the momentum rule.",
         "FedHEAL per step, where it is a row, is ours: per_step=true in the paper's form (docs/methods.md).",
         "The paper does not give q-FFL's q: ours is 1 unless the row says otherwise. q-FFL (reweight) leaves out the "
         "curvature term; it oscillates for large q.", OURS, CHOSEN_ON_TEST),
        lambda: [
            Claim(f"FedHEAL ({variant}) against FedAvg and uniform weights",
                  tuple((f"FedHEAL ({variant})", other) for other in ("FedAvg", "uniform weights")))
            for variant in ("released", "paper")
        ],
    ),
    "table1": Recipe(
        "Seven local methods alone, with uniform weights, AFL, q-FFL and FedHEAL",
        BOTH, lambda data: [_make_stacked_row(local, stage, data) for local in LOCAL for stage in STAGES],
        (CONTROL, "SCAFFOLD and FedDyn weigh clients equally by definition: their control is the row itself.", OURS,
         CHOSEN_ON_TEST),
        _list_table1_claims,
    ),
    "table2": Recipe(
        "Ditto, FedFV and FedHEAL",
        BOTH, _list_table2,
        (CONTROL, "Ditto: the average of the personal models is evaluated, as in the paper.", CHOSEN_ON_TEST),
        lambda: [Claim("FedHEAL against the others", tuple(("FedHEAL", x) for x in ("Ditto", "FedFV", "uniform weights")))],
    ),
    "ablation": Recipe(
        "FPHL and FAEL, each alone and together",
        BOTH, _list_ablation,
        (CONTROL, "FPHL + uniform weights is ours too: it shows what FAEL adds to a mask.", CHOSEN_ON_TEST),
        lambda: [
            Claim("FAEL against uniform weights, without and with FPHL",
                  (("FAEL", "uniform weights"), ("FPHL + FAEL (FedHEAL)", "FPHL + uniform weights"))),
        ],
    ),
    "beta": Recipe(
        "FAEL alone, by beta",
        ("digits",), lambda data: _list_sweep(data, paper.BETA, "fael", "beta", (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)),
        (CONTROL, "beta = 0 is FedAvg. The paper prints AVG and STD only, for Digits only.", CHOSEN_ON_TEST),
        figure="sweep",
    ),
    "tau": Recipe(
        "FedHEAL with beta = 0.4, by tau",
        BOTH, lambda data: _list_sweep(data, paper.TAU, "fedheal", "tau", (t / 10 for t in range(10))),
        (CONTROL, "The paper shows tau in a figure without numbers; two of its points are in its other tables (tau = 0 keeps "
         "everything: FAEL alone).", CHOSEN_ON_TEST),
        figure="sweep",
    ),
    "consistency": Recipe(
        "How often parameters move the same way: four clients, one per domain",
        ("digits",),
        lambda data: [RecipeRow("FedAvg", "fedavg+directions"), RecipeRow("uniform weights", "fedavg+uniform+directions")],
        ("The paper: almost half of the parameters of one layer, chosen at random, keep their direction in more than 90 of 100 "
         "rounds. An update of exactly zero counts as an increase.", "By chance alone 0.2 % of the parameters would keep their "
         "direction in all of 10 rounds, and none in more than 90 of 100."),
        values=lambda rounds: {"clients_per_domain": 1, "block": min(10, max(2, rounds // 2)), "long": min(100, rounds)},
        smoke={"rounds": 20, "epochs": 1},
        figure="consistency",
    ),
    "convergence": Recipe(
        "Mean accuracy by round, with and without FedHEAL",
        BOTH, _list_convergence,
        (CONTROL, "The paper shows convergence in figures without numbers; compared are the final numbers of its tables.",
         CHOSEN_ON_TEST),
        figure="curves",
    ),
}  # fmt: skip
