"""The numbers are right (against brute force and scipy), and they hold what they claim (simulated over many experiments)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedheal.analysis import paired_tests as fs
from fedheal.analysis import standard_error as sampling

ALPHA, LEVEL = 0.05, 0.95
SEEDS = (3, 5, 8, 10, 20)
DOCS = Path(__file__).parents[2] / "docs" / "statistics.md"

# differences between two methods, mean 0
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
SYMMETRIC: dict[str, Draw] = {
    "normal": lambda g, shape: g.normal(size=shape),
    "heavy tails (t, 3 df)": lambda g, shape: g.standard_t(3, size=shape),
    "both methods lognormal": lambda g, shape: g.lognormal(size=shape) - g.lognormal(size=shape),
}
SKEWED: dict[str, Draw] = {
    "exponential": lambda g, shape: g.exponential(size=shape) - 1,
    "lognormal": lambda g, shape: g.lognormal(size=shape) - np.exp(0.5),
    "collapses in 1 seed of 10": lambda g, shape: g.normal(size=shape) - 8 * ((g.random(shape) < 0.1) - 0.1),
}
DRAWS = SYMMETRIC | SKEWED


# --- simulation ---------------------------------------------------------------------------------------------------------------


def experiments(
    name: str, runs: int, n: int, difference: float = 0.0, stream: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Two methods' results, each [runs, n]: the seed moves both by much (sd 8), the methods differ by little."""
    generator = np.random.default_rng([stream, n, list(DRAWS).index(name)])
    seed_effect = 60 + 8 * generator.normal(size=(runs, n))
    return seed_effect + difference + DRAWS[name](generator, (runs, n)), seed_effect


def coverage(name: str, n: int, runs: int, kind: fs.Interval, stream: int = 0) -> float:
    """Share of experiments whose interval holds the true difference."""
    a, b = experiments(name, runs, n, difference=2.0, stream=stream)
    held = 0
    for i, part in enumerate(np.array_split(a - b, max(1, runs // 500))):
        low, high = fs.mean_interval(part, LEVEL, kind, resamples=999, generator=np.random.default_rng(i))
        held += int(((low <= 2.0) & (high >= 2.0)).sum())
    return held / runs


def rejected(a: np.ndarray, b: np.ndarray, test: str = "sign-flip") -> float:
    """Share of experiments with p <= alpha."""
    differences = a - b if test == "sign-flip" else [fs._signed_ranks(row) for row in a - b]
    return float(np.mean([fs.sign_flip_p(row) <= ALPHA for row in differences]))


def error(p: float, runs: int, times: float = 3) -> float:
    """So many binomial standard errors of a share that was simulated."""
    return times * (p * (1 - p) / runs) ** 0.5


def documented(title: str) -> dict[tuple[str, int], float]:
    """The table under a title in the docs."""
    text = DOCS.read_text().split(f"### {title}\n")[1].split("\n#")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    columns = [int(re.sub(r"\D", "", cell)) for cell in rows[0][1:]]
    return {(row[0], n): float(cell) for row in rows[2:] for n, cell in zip(columns, row[1:], strict=True)}


def every_case(draws: dict[str, Draw]) -> set[tuple[str, int]]:
    return {(name, n) for name in draws for n in SEEDS}


def test_intervals_cover_as_claimed_where_differences_are_symmetric() -> None:
    runs = 2000
    for name, n in every_case(SYMMETRIC):
        assert coverage(name, n, runs, "auto") >= LEVEL - error(LEVEL, runs), (name, n)


def test_intervals_cover_as_documented_where_differences_are_skewed() -> None:
    runs, table = 2000, documented("Coverage of the interval in use")
    for name, n in every_case(SKEWED):
        expected = table[name, n]
        found = coverage(name, n, runs, "auto", stream=4)
        assert found == pytest.approx(expected, abs=error(expected, runs, times=4)), (name, n)
    assert max(table[name, n] for name, n in every_case(SKEWED)) < LEVEL  # the docs do not call these 95 %


def test_holding_the_interval_to_twice_t_costs_no_coverage() -> None:
    for name in ("lognormal", "collapses in 1 seed of 10"):
        a, b = experiments(name, 1000, 8)
        x = np.sort(a - b, axis=-1)
        off = np.abs(stats.ttest_1samp(x, 0, axis=-1).statistic)
        free, student = fs._studentized_quantile(x, LEVEL, 999, np.random.default_rng(0)), stats.t.ppf(0.975, 7)
        wide, held = np.maximum(free, student), np.clip(free, student, 2 * student)
        assert (off <= wide).mean() - (off <= held).mean() <= 0.003
        assert np.quantile(wide / student, 0.99) > 5  # what it is held from


def test_bca_covers_too_little_with_few_seeds() -> None:
    runs = 1000
    for n, at_most in ((3, 0.75), (5, 0.86), (8, 0.92)):
        bca, used = (coverage("normal", n, runs, kind) for kind in ("bca", "auto"))
        assert bca < at_most < LEVEL - error(LEVEL, runs) <= used


def test_tests_keep_the_type_one_error_where_methods_are_exchangeable() -> None:
    runs = 2000
    for name, n in every_case(SYMMETRIC):
        assert rejected(*experiments(name, runs, n, stream=1)) <= ALPHA + error(ALPHA, runs), (name, n)
    for n in (5, 8, 20):
        assert rejected(*experiments("normal", 1000, n, stream=1), test="wilcoxon") <= ALPHA + error(ALPHA, 1000), n


def test_type_one_error_under_skew_is_as_documented() -> None:
    runs, table = 1000, documented("False claims of the sign-flip test")
    for name, n in every_case(SKEWED):
        expected = table[name, n]
        found = rejected(*experiments(name, runs, n, stream=1))
        assert found == pytest.approx(expected, abs=error(expected, runs, times=4)), (name, n)


def test_power_grows_with_the_difference_and_with_the_seeds() -> None:
    by_difference = [rejected(*experiments("normal", 1000, 8, difference)) for difference in (0, 0.5, 1, 1.5, 2)]
    assert np.all(np.diff(by_difference) > 0.05)
    assert by_difference[-1] > 0.95
    by_seeds = [rejected(*experiments("normal", 1000, n, 1.0)) for n in (5, 6, 8, 10, 20)]
    assert by_seeds[0] == 0  # five seeds can never show it
    assert np.all(np.diff(by_seeds) > 0.05)


def test_pairing_sees_what_the_seeds_hide() -> None:
    a, b = experiments("normal", 500, 8, difference=2.0)
    unpaired = (stats.ttest_ind(a, b, axis=-1, equal_var=False).pvalue <= ALPHA).mean()
    assert rejected(a, b) > 0.9 > 0.1 > unpaired


@pytest.mark.parametrize("better", [0, 2], ids=["none differs", "two of five differ"])
def test_holm_keeps_the_family_wise_error(better: int) -> None:
    runs, n, methods = 1500, 10, 5
    generator = np.random.default_rng(better)
    reference = generator.normal(size=(runs, 1, n))  # shared: the comparisons are correlated
    differences = generator.normal(size=(runs, methods, n)) - reference
    differences[:, :better] += 5
    p = np.array([[fs.sign_flip_p(row) for row in family] for family in differences])
    claims = np.array([fs.holm(family) for family in p]) <= ALPHA
    assert claims[:, better:].any(-1).mean() <= ALPHA + error(ALPHA, runs)
    assert (p <= ALPHA)[:, better:].any(-1).mean() > 2 * ALPHA  # without the correction it is not kept
    assert claims[:, :better].all()


@pytest.mark.slow
def test_documented_tables_are_what_the_simulation_gives() -> None:
    for title, kind, runs in (
        ("Coverage of the interval in use", "auto", 10_000),
        ("Coverage of Student's t", "t", 10_000),
        ("Coverage of the BCa bootstrap", "bca", 2_000),
    ):
        table = documented(title)
        assert set(table) == every_case(DRAWS)
        measured = {(name, n): coverage(name, n, runs, kind, stream=2) for name, n in table}
        assert measured == pytest.approx(table, abs=0.0015), title
    table = documented("False claims of the sign-flip test")
    assert set(table) == every_case(DRAWS)
    measured = {(name, n): rejected(*experiments(name, 4_000, n, stream=2)) for name, n in table}
    assert measured == pytest.approx(table, abs=0.0015)


# --- one method ---------------------------------------------------------------------------------------------------------------


def test_summary_below_eight_values_is_students_t() -> None:
    x = [70.0, 72.5, 71.0, 75.0]
    s = fs.summary(x)
    expected = stats.t.interval(0.95, 3, loc=np.mean(x), scale=stats.sem(x))
    assert (s.low, s.high) == pytest.approx(expected)
    assert s.sd == pytest.approx(np.std(x, ddof=1))


def test_summary_from_eight_values_is_once_to_twice_as_wide_as_t_and_repeats() -> None:
    x = np.random.default_rng(0).exponential(size=12)
    s, t = fs.summary(x), fs.summary(x, interval="t")
    assert s.high is not None
    assert t.high is not None
    assert 1 < (s.high - s.mean) / (t.high - t.mean) <= 2
    assert fs.summary(x[::-1]) == s
    assert fs.summary(x, generator=np.random.default_rng(5)).high == pytest.approx(s.high, rel=0.05)
    wild = [*np.linspace(1, 2, 9), -40.0]
    s, t = fs.summary(wild), fs.summary(wild, interval="t")
    assert s.high is not None
    assert t.high is not None
    assert s.high - s.mean == pytest.approx(2 * (t.high - t.mean))


@pytest.mark.parametrize("kind", ["auto", "t", "studentized", "bca"])
@pytest.mark.parametrize("n", [2, 5, 12])
def test_equal_values_have_an_interval_without_width(kind: fs.Interval, n: int) -> None:
    s = fs.summary([40.0] * n, interval=kind)
    assert (s.mean, s.sd, s.low, s.high) == (40.0, 0.0, 40.0, 40.0)


def test_few_distinct_values_keep_the_interval_finite() -> None:
    s = fs.summary([70.0] * 9 + [73.0])
    assert s.low is not None
    assert np.isfinite(s.low)
    assert s.low < 70 < s.mean


def test_bca_is_scipys() -> None:
    x = np.random.default_rng(0).normal(size=15)
    low, high = fs.mean_interval(x, kind="bca")
    expected = stats.bootstrap((np.sort(x),), np.mean, method="BCa", rng=np.random.default_rng(0)).confidence_interval
    assert (float(low), float(high)) == pytest.approx(tuple(expected))


@pytest.mark.parametrize("values", [[], [1.0, np.nan], [1.0, np.inf], [[1.0]], 3.0])
def test_values_that_are_none_are_refused(values: object) -> None:
    with pytest.raises(ValueError, match=r"value"):
        fs.summary(values)  # type: ignore[arg-type]


def test_bad_levels_and_a_single_value_are_refused() -> None:
    with pytest.raises(ValueError, match="level"):
        fs.summary([1.0, 2.0], level=95)
    with pytest.raises(ValueError, match="two values"):
        fs.mean_interval([1.0])


# --- two methods --------------------------------------------------------------------------------------------------------------

percents = st.decimals(0, 100, places=1).map(float)
pairs = st.lists(st.tuples(percents, percents), min_size=1, max_size=9)


def by_brute_force(d: list[int]) -> float:
    sums = [
        abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in itertools.product((1, -1), repeat=len(d))
    ]
    return float(np.mean([s >= abs(sum(d)) for s in sums]))


@settings(max_examples=60, deadline=None)
@given(pairs)
def test_sign_flip_p_is_that_of_every_flip(pair: list[tuple[float, float]]) -> None:
    a, b = zip(*pair, strict=True)
    in_tenths = [round(10 * x) - round(10 * y) for x, y in pair]  # whole numbers: ties are exact here
    assert fs.paired(a, b).p_value == by_brute_force(in_tenths)


@settings(max_examples=40, deadline=None)
@given(pairs, st.randoms())
def test_swapping_methods_mirrors_and_the_order_of_seeds_does_not_matter(
    pair: list[tuple[float, float]], random: Random
) -> None:
    a, b = zip(*pair, strict=True)
    c, mirrored = fs.paired(a, b), fs.paired(b, a)
    assert mirrored.mean == pytest.approx(-c.mean)
    assert mirrored.p_value == c.p_value
    assert mirrored.share_higher == pytest.approx(1 - c.share_higher)
    assert mirrored.direction == -c.direction
    if c.low is not None:
        assert mirrored.high == pytest.approx(-c.low)
    shuffled = random.sample(pair, len(pair))
    again = fs.paired(*zip(*shuffled, strict=True))
    assert again.p_value == c.p_value
    assert again.low == pytest.approx(c.low)


@pytest.mark.parametrize("n", [3, 6, 11, 20])
def test_sign_flip_agrees_with_scipys_permutation_test(n: int) -> None:
    d = np.random.default_rng(n).normal(0.5, 1, size=n)
    resamples = np.inf if n <= 11 else 9_999
    expected = stats.permutation_test(
        (d,), np.mean, permutation_type="samples", n_resamples=resamples, vectorized=True, rng=np.random.default_rng(0)
    )
    assert fs.sign_flip_p(d) == pytest.approx(expected.pvalue, abs=1e-12 if n <= 11 else 0.02)


@pytest.mark.parametrize("n", [4, 7, 15])
def test_wilcoxon_is_scipys_where_nothing_ties(n: int) -> None:
    a, b = np.random.default_rng(n).normal(size=(2, n))
    c = fs.paired(a, b, test="wilcoxon")
    assert c.p_value == pytest.approx(stats.wilcoxon(a, b, method="exact").pvalue)
    assert c.test == "exact wilcoxon"


def test_wilcoxon_counts_ties_exactly_and_drops_zeros() -> None:
    c = fs.paired([0.3, 2.0, 2.0, 2.0], [0.1 + 0.2, 1.0, 1.0, 3.0], test="wilcoxon")  # ranks 2, 2, -2
    assert c.p_value == 1.0
    assert c.equal == 1


def test_random_flips_agree_with_all_flips(monkeypatch: pytest.MonkeyPatch) -> None:
    d = np.random.default_rng(0).normal(0.4, 1, size=31)
    random = fs.sign_flip_p(d)
    assert random == fs.sign_flip_p(d)
    assert fs.paired(d, 0 * d).test == "Monte-Carlo sign-flip"
    assert fs.sign_flip_p(np.ones(31)) == pytest.approx(fs.smallest_p(31), abs=1e-4)
    monkeypatch.setattr(fs, "EXACT_UP_TO", 31)
    assert random == pytest.approx(fs.sign_flip_p(d), abs=error(random, fs.FLIPS, times=4))


@pytest.mark.parametrize("n", [1, 2, 5, 12, 30])
def test_smallest_p_is_reached_when_all_seeds_agree(n: int) -> None:
    a = np.arange(n) + 1.0
    assert fs.paired(a, 0 * a).p_value == fs.smallest_p(n) == 2 / 2**n


@pytest.mark.parametrize("n", [1, 2, 6, 40])
def test_identical_methods(n: int) -> None:
    a = np.linspace(50, 60, n)
    c = fs.paired(a, a)
    assert (c.mean, c.p_value, c.direction, c.equal, c.share_higher) == (0.0, 1.0, 0, n, 0.5)
    assert c.effect == (None if n == 1 else 0.0)


def test_a_constant_difference_has_no_effect_size() -> None:
    c = fs.paired([70.1, 60.2, 50.3, 44.4], [70.0, 60.1, 50.2, 44.3])
    assert c.effect is None
    assert (c.mean, c.p_value) == (pytest.approx(0.1), 0.125)


def test_effect_size_is_unbiased() -> None:
    generator = np.random.default_rng(0)
    a = generator.normal(0.8, 1, size=(3000, 5))
    effects = [fs._effect(fs.Summary(5, row.mean(), row.std(ddof=1), None, None)) for row in a]
    assert np.mean(effects) == pytest.approx(0.8, abs=3 * np.std(effects) / 3000**0.5)


def test_unpaired_lengths_and_unknown_tests_are_refused() -> None:
    with pytest.raises(ValueError, match="paired values"):
        fs.paired([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="sign-flip"):
        fs.paired([1.0], [1.0], test="t")  # type: ignore[arg-type]


# --- many comparisons ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0.001, 0.5))
def test_holm_claims_what_its_step_down_rule_claims(p: list[float], alpha: float) -> None:
    adjusted = fs.holm(p)
    rejected_by_rule: set[int] = set()
    for step, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        if p[i] * (len(p) - step) > alpha:
            break
        rejected_by_rule.add(i)
    assert {i for i, value in enumerate(adjusted) if value <= alpha} == rejected_by_rule
    assert all(raw <= value <= 1 for raw, value in zip(p, adjusted, strict=True))


@pytest.mark.parametrize("p", [[0.1, 1.2], [-0.1], [np.nan], [[0.1]]])
def test_holm_refuses_what_is_no_p_value(p: list[float]) -> None:
    with pytest.raises(ValueError, match="p-values"):
        fs.holm(p)


def test_compare_all_pairs_on_the_seeds_both_have() -> None:
    results = {
        "fedavg": {1: 70.0, 2: 60.0, 3: 50.0},
        "fedheal": {3: 52.0, 1: 71.0, 9: 0.0},
        "fedprox": {2: 60.0, 1: 70.0, 3: 50.0},
    }
    heal, prox = fs.compare_all(results, "fedavg")
    assert (heal.a, heal.b, heal.n, heal.mean, heal.unpaired) == ("fedheal", "fedavg", 2, 1.5, 2)
    assert (prox.n, prox.mean, prox.unpaired) == (3, 0.0, 0)
    assert heal.comparisons == 2
    assert prox.smallest_p_adjusted == 0.5  # 2 * 0.25; the other's floor is 0.5


def test_compare_all_needs_the_reference_and_shared_seeds() -> None:
    with pytest.raises(ValueError, match="reference"):
        fs.compare_all({"a": {1: 1.0}}, "b")
    with pytest.raises(ValueError, match="no seed in common"):
        fs.compare_all({"a": {1: 1.0}, "b": {2: 1.0}}, "b")
    assert fs.compare_all({"a": {1: 1.0}}, "a") == []


def test_compare_metrics_takes_both_metrics_as_one_family_unless_told() -> None:
    generator = np.random.default_rng(0)
    results = {
        method: {seed: dict(zip("pqrs", generator.uniform(40, 90, 4), strict=True)) for seed in range(6)}
        for method in ("fedavg", "fedheal", "fedprox")
    }
    together, apart = (fs.compare_metrics(results, "fedavg", one_family=one) for one in (True, False))
    assert list(together) == ["avg", "std"]
    assert [c.comparisons for cs in together.values() for c in cs] == [4] * 4
    assert [c.comparisons for cs in apart.values() for c in cs] == [2] * 4
    spread = [np.std(list(results["fedheal"][s].values()), ddof=1) for s in range(6)]
    reference = [np.std(list(results["fedavg"][s].values()), ddof=1) for s in range(6)]
    assert together["std"][0].mean == pytest.approx(np.mean(spread) - np.mean(reference))
    with pytest.raises(ValueError, match="gini"):
        fs.compare_metrics(results, "fedavg", metrics=["gini"])


# --- what may be said ---------------------------------------------------------------------------------------------------------

SHIFTS = np.array([1.0, 2.0, 3.0, 2.0, 1.5, 2.5, 2.0, 3.0])


def against(differences: np.ndarray, metric: str = "", methods: int = 1, test: fs.Test = "sign-flip") -> fs.Comparison:
    """The first of so many methods against fedavg; the others equal it."""
    base = dict.fromkeys(range(len(differences)), 60.0)
    heal = {"fedheal": {seed: 60.0 + float(d) for seed, d in enumerate(differences)}}
    others = {f"other{i}": base for i in range(methods - 1)}
    return fs.compare_all({"fedavg": base} | heal | others, "fedavg", metric=metric, test=test)[0]


def test_verdict_says_better_with_its_evidence() -> None:
    sentence = fs.verdict(against(SHIFTS, methods=3))
    assert sentence.startswith("fedheal is better than fedavg by 2.12 points (95 % CI 1.")
    assert sentence.endswith("p = 0.0234 after Holm's correction over 3 comparisons, 8 seeds).")


@pytest.mark.parametrize(
    ("sign", "metric", "higher_is_better", "word"),
    [
        (1, "", None, "better"),
        (-1, "", None, "worse"),
        (1, "avg", None, "better"),
        (-1, "std", None, "better"),
        (1, "std", None, "worse"),
        (-1, "", False, "better"),
        (1, "", False, "worse"),
        (1, "std", True, "better"),
    ],
)
def test_verdict_knows_which_way_is_better(sign: int, metric: str, higher_is_better: bool | None, word: str) -> None:
    sentence = fs.verdict(against(sign * SHIFTS, metric), higher_is_better=higher_is_better)
    place = f" in {metric.upper()}" if metric else ""
    assert sentence.startswith(f"fedheal is {word} than fedavg{place} by 2.12 points (95 % CI 1.")  # never a minus sign


@pytest.mark.parametrize(
    ("n", "methods", "needed", "smallest"), [(5, 1, 6, "0.0625"), (6, 3, 7, "0.09375"), (1, 1, 6, "1")]
)
def test_verdict_says_when_no_data_could_show_it(n: int, methods: int, needed: int, smallest: str) -> None:
    sentence = fs.verdict(against(SHIFTS[:n], methods=methods))
    assert "cannot show a difference at 0.05 with a two-sided exact sign-flip test" in sentence
    assert f"smallest possible p = {smallest}); {needed} or more can" in sentence
    assert "better" not in sentence
    assert ("Holm" in sentence) == (methods > 1)


def test_seeds_needed_are_enough_and_one_fewer_is_not() -> None:
    for methods in (1, 2, 5, 9):
        n = fs.seeds_needed(ALPHA, methods)
        assert methods * fs.smallest_p(n) <= ALPHA < methods * fs.smallest_p(n - 1)
    with pytest.raises(ValueError, match="not enough"):
        fs.seeds_needed(1e-12)


def test_verdict_at_a_level_that_few_or_no_numbers_of_seeds_can_reach() -> None:
    """2/2^n is at most 1e-6 from 21 seeds on, and random flips, from 31 on, give no p below 1e-5."""
    assert "; no number of seeds can (observed" in fs.verdict(against(np.arange(1.0, 4)), alpha=1e-12)
    for n in (3, 40):
        assert "; 21 to 30 can (observed" in fs.verdict(against(np.arange(1.0, n + 1)), alpha=1e-6)


def test_verdict_never_takes_silence_for_equality() -> None:
    mixed = fs.verdict(against(np.array([1.0, -2.0, 0.5, 3.0, -1.0, 0.0, 2.0, -1.5])))
    assert mixed.startswith("No difference between fedheal and fedavg can be concluded")
    assert (
        "8 seeds, 1 of them without a difference), which is not evidence of equality; a true difference of up to"
        in mixed
    )
    same = fs.verdict(against(np.zeros(8)))
    assert same.endswith("they are the same in all 8 seeds, which is not evidence that they are in others.")


def test_verdict_names_a_disagreement_of_test_and_interval() -> None:
    only_interval = against(np.array([1.0, 1.1, 0.9, 1.0, 1.05, -0.01]))
    assert only_interval.low is not None
    assert only_interval.low > 0
    assert only_interval.p_value > ALPHA
    assert "the interval excludes 0, but" in fs.verdict(only_interval)
    only_test = against(np.array([0.1, 0.1, 0.1, 0.1, 0.1, 9.0]))
    assert only_test.low is not None
    assert only_test.low < 0
    assert "is better" in fs.verdict(only_test)
    assert "the interval, which rests on other assumptions, includes 0" in fs.verdict(only_test)


def test_verdict_makes_no_claim_where_ranks_and_mean_point_apart() -> None:
    c = against(np.array([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9, 2.0, -40.0]), test="wilcoxon")
    assert c.p_value <= ALPHA
    assert fs.verdict(c).startswith(
        "No claim about the mean: the ranks favour a higher fedheal than fedavg but the mean does not"
    )


def test_verdict_counts_left_out_seeds_and_small_p() -> None:
    base = dict.fromkeys(range(20), 60.0)
    heal = {seed: 61.0 + seed / 10 for seed in range(18)}
    (c,) = fs.compare_all({"fedavg": base, "fedheal": heal}, "fedavg")
    assert fs.verdict(c).endswith("p < 0.0001, 18 seeds (those that only one of the two has are left out: 2)).")
    with pytest.raises(ValueError, match="alpha"):
        fs.verdict(c, alpha=5)


# --- the test set -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 30, 500])
def test_accuracy_interval_is_wilsons(n: int) -> None:
    for right in {0, 1, n // 2, n}:
        found = sampling.accuracy_error(100 * right / n, n)
        expected = stats.binomtest(right, n).proportion_ci(method="wilson")
        assert found[1:] == pytest.approx((100 * expected.low, 100 * expected.high))
        assert found.se > 0


def test_wilson_covers_thirty_images() -> None:
    n, right, true = 30, np.arange(31), np.linspace(0.1, 0.9, 401)
    ends = np.array([sampling.accuracy_error(100 * k / n, n)[1:] for k in right]) / 100
    inside = (ends[:, :1] <= true) & (true <= ends[:, 1:])
    covered = (stats.binom.pmf(right[:, None], n, true) * inside).sum(0)  # exact, no simulation
    assert covered.mean() >= 0.95
    assert covered.min() >= 0.92  # right counts are whole numbers: it swings around 95 %


def test_smallest_step_is_one_image() -> None:
    assert sampling.smallest_step(40) == 2.5
    with pytest.raises(ValueError, match="at least one"):
        sampling.smallest_step(0)


def test_note_names_small_test_sets_only() -> None:
    note = sampling.note_on_test_sets(
        {"dslr": 100.0, "amazon": 75.0, "webcam": 80.0}, {"dslr": 30, "amazon": 10_000, "webcam": 60}
    )
    assert "dslr (30 images" in note  # even where all are right
    assert "webcam (60 images" in note
    assert "amazon" not in note
    with pytest.raises(ValueError, match="missing for: b"):
        sampling.note_on_test_sets({"b": 50.0}, {"a": 3})
    with pytest.raises(ValueError, match="no domains"):
        sampling.note_on_test_sets({}, {})


def test_accuracies_that_are_none_are_refused() -> None:
    for accuracy, n in ((101.0, 30), (-1.0, 30), (50.0, 0)):
        with pytest.raises(ValueError, match="no accuracy"):
            sampling.accuracy_error(accuracy, n)


def split(only_a: int, only_b: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.zeros((2, n), bool)
    a[:only_a] = True
    b[only_a : only_a + only_b] = True
    return a, b


def test_paired_examples_is_the_exact_mcnemar_test() -> None:
    c = sampling.paired_examples(*split(8, 1, 30))
    assert c.p_value == pytest.approx(2 * (1 + 9) / 2**9)
    assert c.difference == pytest.approx(100 * 7 / 30)
    none = sampling.paired_examples([1, 0, 1], [1, 0, 1])
    assert (none.p_value, none.difference) == (1.0, 0.0)
    assert none.low < 0 < none.high  # three equal answers do not prove two models equal


@pytest.mark.parametrize(("for_a", "for_b"), [(0.05, 0.05), (0.1, 0.1), (0.2, 0.05), (0.3, 0.1), (0.02, 0.0)])
def test_paired_examples_cover_and_keep_the_type_one_error(for_a: float, for_b: float) -> None:
    runs, n, true = 2000, 30, 100 * (for_a - for_b)
    counts = np.random.default_rng(0).multinomial(n, [for_a, for_b, 1 - for_a - for_b], size=runs)[:, :2]
    kinds, times = np.unique(counts, axis=0, return_counts=True)
    found = [sampling.paired_examples(*split(int(k), int(m), n)) for k, m in kinds]
    covered = sum(t for c, t in zip(found, times, strict=True) if c.low <= true <= c.high) / runs
    assert covered >= LEVEL - error(LEVEL, runs)
    if for_a == for_b:
        assert sum(t for c, t in zip(found, times, strict=True) if c.p_value <= ALPHA) / runs <= ALPHA + error(
            ALPHA, runs
        )


@pytest.mark.parametrize(("a", "b"), [([1, 0], [1]), ([], []), ([1, 2], [1, 0]), ([[1]], [[1]])])
def test_examples_that_do_not_match_are_refused(a: list[int], b: list[int]) -> None:
    with pytest.raises(ValueError, match="example"):
        sampling.paired_examples(a, b)


@pytest.mark.parametrize("values", [[1.0], [1.0, 2.0]], ids=len)
def test_an_interval_of_no_known_kind_or_level_is_refused(values: list[float]) -> None:
    """Also for a single value, which has no interval: whether a setting is sound does not depend on the data."""
    with pytest.raises(ValueError, match="one of auto, t, studentized, bca, not 'foo'"):
        fs.summary(values, interval="foo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"level must lie between 0 and 1, not 1\.5"):
        fs.summary(values, level=1.5)
    with pytest.raises(ValueError, match="not 'foo'"):
        fs.mean_interval([1.0, 2.0], kind="foo")  # type: ignore[arg-type]
