"""The recipes by name, one function a result; uniform weights, the control the paper lacks, are in every one.

AFL, q-FFL and the released FedHEAL start from equal weights while the paper's FedAvg weighs clients by their examples, so
part of any gain over FedAvg may be uniform weighting alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedheal.reproduce import paper
from fedheal.reproduce.plans import BESIDE, Claim, Entry, Recipe, printed_in

LOCAL = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "moon": "MOON",
    "feddyn": "FedDyn",
    "fedproc": "FedProc",
    "fedproto": "FedProto",
}
STAGES = {"": "", "uniform": " + uniform weights", "afl": " + AFL", "qffl": " + q-FFL", "fedheal": " + FedHEAL"}
EQUAL_ALREADY = ("scaffold", "feddyn")  # by definition their clients weigh the same: the row is its own control
CONTROL = "Uniform weights are our control: the paper has no such row."
CHOSEN_ON_TEST = "The paper has one seed and chose tau and beta on the test sets."
OURS = "Baselines here are the published algorithms; docs/methods.md says where the paper's group's code differs from them."


def fedheal(local: str, data: str) -> str:
    """FedHEAL with the tau that the paper chose for the data set."""
    tau = paper.CHOSEN_TAU.get(data, 0.3)
    return f"{local}+fedheal" + ("" if tau == 0.3 else f":tau={tau}")


def _entry(label: str, method: str, data: str, table: Mapping[str, Mapping[Any, paper.Numbers]], key: Any) -> Entry:
    misprint = paper.MISPRINTS.get((BESIDE.get(data, data), str(key)), ((), ""))
    return Entry(label, method, printed_in(data, table, key), misprint)


def _stacked(local: str, stage: str, data: str) -> Entry:
    method = {"": local, "fedheal": fedheal(local, data)}.get(stage, f"{local}+{stage}")
    if stage == "uniform" and local in EQUAL_ALREADY:
        method = local
    key = f"{local}+{stage}" if stage else local
    return _entry(LOCAL[local] + STAGES[stage], method, data, paper.TABLE1, key)


def table1(data: str) -> list[Entry]:
    """Seven ways to train locally, each alone and with four server stages."""
    return [_stacked(local, stage, data) for local in LOCAL for stage in STAGES]


def table1_claims() -> list[Claim]:
    against = {"": "the local method alone", "uniform": "uniform weights", "afl": "AFL", "qffl": "q-FFL"}
    return [
        Claim(
            f"FedHEAL against {words}",
            tuple((name + STAGES["fedheal"], name + STAGES[stage]) for name in LOCAL.values()),
        )
        for stage, words in against.items()
    ]


def table2(data: str) -> list[Entry]:
    """Methods of their own, beside FedHEAL."""
    ours = _entry("FedHEAL", fedheal("fedavg", data), data, paper.TABLE2, "fedavg+fedheal")
    return [
        _entry("Ditto", "ditto", data, paper.TABLE2, "ditto"),
        # Its tau counts rounds: said here, so that the tau a data set's protocol has for FPHL never reaches it.
        _entry("FedFV", "fedfv:tau=1", data, paper.TABLE2, "fedfv"),
        Entry("uniform weights", "fedavg+uniform"),
        ours,
    ]


def ablation(data: str) -> list[Entry]:
    """FPHL and FAEL, each alone and together."""
    tau = paper.CHOSEN_TAU.get(data, 0.3)
    masked = "fphl" + ("" if tau == 0.3 else f":tau={tau}")
    return [
        _entry("neither (FedAvg)", "fedavg", data, paper.ABLATION, "fedavg"),
        _entry("FPHL", f"fedavg+{masked}", data, paper.ABLATION, "fedavg+fphl"),
        _entry("FAEL", "fedavg+fael", data, paper.ABLATION, "fedavg+fael"),
        _entry("FPHL + FAEL (FedHEAL)", fedheal("fedavg", data), data, paper.ABLATION, "fedavg+fedheal"),
        Entry("uniform weights", "fedavg+uniform"),
        Entry("FPHL + uniform weights", f"fedavg+uniform+{masked}"),
    ]


def beta(data: str) -> list[Entry]:
    """FAEL alone, by its momentum."""
    swept = [
        _entry(f"beta = {b:.1f}", f"fedavg+fael:beta={b}", data, paper.BETA, b) for b in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    ]
    return [*swept, Entry("uniform weights", "fedavg+uniform")]


def tau(data: str) -> list[Entry]:
    """FedHEAL with beta = 0.4, by the threshold of consistency."""
    swept = [_entry(f"tau = {t / 10:.1f}", f"fedavg+fedheal:tau={t / 10}", data, paper.TAU, t / 10) for t in range(10)]
    return [*swept, Entry("uniform weights", "fedavg+uniform")]


def consistency(data: str) -> list[Entry]:
    """FedAvg with one client a domain, watched."""
    return [Entry("FedAvg", "fedavg+directions"), Entry("uniform weights", "fedavg+uniform+directions")]


def convergence(data: str) -> list[Entry]:
    """Every local method with and without FedHEAL, then the methods FedHEAL is compared with."""
    pairs = [_stacked(local, stage, data) for local in LOCAL for stage in ("", "fedheal")]
    return [*pairs, *(_stacked("fedavg", stage, data) for stage in ("uniform", "afl", "qffl")), *table2(data)[:2]]


def headline(data: str) -> list[Entry]:
    """The rows that carry the paper's argument, those that matter most first.

    On Office-Caltech only the first four, and FAEL per unit of reach: clients there differ most in their steps.
    """
    whole = fedheal("fedavg", data)
    more = "," if ":" in whole else ":"
    first = [
        _entry("FedAvg", "fedavg", data, paper.TABLE1, "fedavg"),
        Entry("uniform weights", "fedavg+uniform"),
        _entry("FedHEAL (released)", f"{whole}{more}variant=released", data, paper.TABLE1, "fedavg+fedheal"),
        _entry("FedHEAL (paper)", whole, data, paper.TABLE1, "fedavg+fedheal"),
    ]
    if data == "office-caltech":
        return [*first, Entry("FedHEAL per step", f"{whole}{more}per_step=true")]
    ditto, fedfv = table2(data)[:2]
    return [
        *first,
        _entry("FAEL alone", "fedavg+fael", data, paper.ABLATION, "fedavg+fael"),
        _entry("FPHL alone", "fedavg+fphl", data, paper.ABLATION, "fedavg+fphl"),
        Entry("exact FAEL alone", "fedavg+fael-exact"),
        _entry("AFL", "fedavg+afl", data, paper.TABLE1, "fedavg+afl"),
        _entry("q-FFL", "fedavg+qffl", data, paper.TABLE1, "fedavg+qffl"),
        fedfv,
        ditto,
    ]


def _one_client_a_domain(rounds: int) -> Mapping[str, Any]:
    return {"clients_per_domain": 1, "block": min(10, max(2, rounds // 2)), "long": min(100, rounds)}


RECIPES = {
    "headline": Recipe(
        "FedAvg, uniform weights and FedHEAL; its parts; other methods of fairness",
        ("digits", "office-caltech"),
        headline,
        (CONTROL, "The paper has one row for FedHEAL: it stands beside both variants.",
         "Exact FAEL, where it is a row, is ours: weights by FAEL's objective itself, not by the momentum rule.",
         "FedHEAL per step, where it is a row, is ours: per_step=true in the paper's form (docs/methods.md).", OURS,
         CHOSEN_ON_TEST),
        lambda: [
            Claim(f"FedHEAL ({variant}) against FedAvg and uniform weights",
                  tuple((f"FedHEAL ({variant})", other) for other in ("FedAvg", "uniform weights")))
            for variant in ("released", "paper")
        ],
    ),
    "table1": Recipe(
        "Seven local methods alone, with uniform weights, AFL, q-FFL and FedHEAL",
        ("digits", "office-caltech"),
        table1,
        (CONTROL, "SCAFFOLD and FedDyn weigh clients equally by definition: their control is the row itself.", OURS,
         CHOSEN_ON_TEST),
        table1_claims,
    ),
    "table2": Recipe(
        "Ditto, FedFV and FedHEAL",
        ("digits", "office-caltech"),
        table2,
        (CONTROL, "Ditto: the average of the personal models is judged, as in the paper.", CHOSEN_ON_TEST),
        lambda: [Claim("FedHEAL against the others", tuple(("FedHEAL", x) for x in ("Ditto", "FedFV", "uniform weights")))],
    ),
    "ablation": Recipe(
        "FPHL and FAEL, each alone and together",
        ("digits", "office-caltech"),
        ablation,
        (CONTROL, "FPHL + uniform weights is ours too: it shows what FAEL adds to a mask.", CHOSEN_ON_TEST),
        lambda: [
            Claim("FAEL against uniform weights, without and with FPHL",
                  (("FAEL", "uniform weights"), ("FPHL + FAEL (FedHEAL)", "FPHL + uniform weights"))),
        ],
    ),
    "beta": Recipe(
        "FAEL alone, by beta",
        ("digits",),
        beta,
        (CONTROL, "beta = 0 is FedAvg. The paper prints AVG and STD only, for Digits only.", CHOSEN_ON_TEST),
        kind="sweep",
    ),
    "tau": Recipe(
        "FedHEAL with beta = 0.4, by tau",
        ("digits", "office-caltech"),
        tau,
        (CONTROL, "The paper shows tau in a figure without numbers; two of its points stand in its other tables (tau = 0 keeps "
         "everything: FAEL alone).", CHOSEN_ON_TEST),
        kind="sweep",
    ),
    "consistency": Recipe(
        "How often parameters move the same way: four clients, one a domain",
        ("digits",),
        consistency,
        ("The paper: almost half of the parameters of one layer, chosen at random, keep their direction in more than 90 of 100 "
         "rounds. An update of exactly zero counts as going up.", "By chance alone 0.2 % of the parameters would keep their "
         "direction in all of 10 rounds, and none in more than 90 of 100."),
        values=_one_client_a_domain,
        smoke={"rounds": 20, "epochs": 1},
        kind="consistency",
    ),
    "convergence": Recipe(
        "Mean accuracy by round, with and without FedHEAL",
        ("digits", "office-caltech"),
        convergence,
        (CONTROL, "The paper shows convergence in figures without numbers; beside ours stand the final numbers of its tables.",
         CHOSEN_ON_TEST),
        kind="curves",
    ),
}  # fmt: skip
