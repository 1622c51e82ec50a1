"""The numbers are right (against brute force and scipy), and they hold what they claim (simulated over many experiments)."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedheal.analysis import paired_tests, standard_error

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


def simulate_experiments(
    name: str, runs: int, n: int, difference: float = 0.0, stream: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Return two methods' results, each [runs, n]: seeds shift both by much (sd 8), and the methods differ by little."""
    generator = np.random.default_rng([stream, n, list(DRAWS).index(name)])
    seed_effect = 60 + 8 * generator.normal(size=(runs, n))
    return seed_effect + difference + DRAWS[name](generator, (runs, n)), seed_effect


def measure_coverage(name: str, n: int, runs: int, student: bool = False, stream: int = 0) -> float:
    """Return the share of experiments whose interval (or Student's) contains the true difference."""
    a, b = simulate_experiments(name, runs, n, difference=2.0, stream=stream)
    if student:
        d = a - b
        low, high = stats.t.interval(LEVEL, n - 1, loc=d.mean(-1), scale=stats.sem(d, axis=-1))
        return float(((low <= 2.0) & (high >= 2.0)).mean())
    covered = 0
    for i, part in enumerate(np.array_split(a - b, max(1, runs // 500))):
        low, high = paired_tests.mean_interval(part, resamples=999, generator=np.random.default_rng(i))
        covered += int(((low <= 2.0) & (high >= 2.0)).sum())
    return covered / runs


def measure_rejection_rate(a: np.ndarray, b: np.ndarray) -> float:
    """Return the share of experiments with p <= alpha."""
    return float(np.mean([paired_tests.sign_flip_p(row) <= ALPHA for row in a - b]))


def compute_standard_errors(p: float, runs: int, times: float = 3) -> float:
    """Return `times` binomial standard errors of a simulated share."""
    return times * (p * (1 - p) / runs) ** 0.5


def read_documented_table(title: str) -> dict[tuple[str, int], float]:
    """Return the table under this title in the docs."""
    text = DOCS.read_text().split(f"### {title}\n")[1].split("\n#")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    columns = [int(re.sub(r"\D", "", cell)) for cell in rows[0][1:]]
    return {(row[0], n): float(cell) for row in rows[2:] for n, cell in zip(columns, row[1:], strict=True)}


def list_all_cases(draws: dict[str, Draw]) -> set[tuple[str, int]]:
    return {(name, n) for name in draws for n in SEEDS}


def list_some_cases() -> list[tuple[str, int]]:
    """Return two cells of each row of a table in the docs, so that each column occurs at least twice."""
    return [(name, SEEDS[(i + k) % len(SEEDS)]) for i, name in enumerate(DRAWS) for k in (0, 3)]


def test_intervals_cover_as_claimed_where_differences_are_symmetric() -> None:
    runs = 1000
    for name, n in list_all_cases(SYMMETRIC):
        assert measure_coverage(name, n, runs) >= LEVEL - compute_standard_errors(LEVEL, runs), (name, n)


def test_holding_the_interval_to_twice_t_costs_no_coverage() -> None:
    for name in ("lognormal", "collapses in 1 seed of 10"):
        a, b = simulate_experiments(name, 1000, 8)
        x = np.sort(a - b, axis=-1)
        off = np.abs(stats.ttest_1samp(x, 0, axis=-1).statistic)
        free, student = paired_tests._find_studentized_quantile(x, 999, np.random.default_rng(0)), stats.t.ppf(0.975, 7)
        wide, limited = np.maximum(free, student), np.clip(free, student, 2 * student)
        assert (off <= wide).mean() - (off <= limited).mean() <= 0.003
        assert np.quantile(wide / student, 0.99) > 5  # what the limit prevents


def test_tests_keep_the_type_one_error_where_methods_are_exchangeable() -> None:
    runs = 1000
    for name, n in list_all_cases(SYMMETRIC):
        assert measure_rejection_rate(
            *simulate_experiments(name, runs, n, stream=1)
        ) <= ALPHA + compute_standard_errors(ALPHA, runs), (name, n)


def test_power_grows_with_the_difference_and_with_the_seeds() -> None:
    by_difference = [
        measure_rejection_rate(*simulate_experiments("normal", 1000, 8, difference))
        for difference in (0, 0.5, 1, 1.5, 2)
    ]
    assert np.all(np.diff(by_difference) > 0.05)
    assert by_difference[-1] > 0.95
    by_seeds = [measure_rejection_rate(*simulate_experiments("normal", 1000, n, 1.0)) for n in (5, 6, 8, 10, 20)]
    assert by_seeds[0] == 0  # five seeds can never show it
    assert np.all(np.diff(by_seeds) > 0.05)


def test_pairing_sees_what_the_seeds_hide() -> None:
    a, b = simulate_experiments("normal", 500, 8, difference=2.0)
    unpaired = (stats.ttest_ind(a, b, axis=-1, equal_var=False).pvalue <= ALPHA).mean()
    assert measure_rejection_rate(a, b) > 0.9 > 0.1 > unpaired


@pytest.mark.parametrize("better", [0, 2], ids=["none differs", "two of five differ"])
def test_holm_keeps_the_family_wise_error(better: int) -> None:
    runs, n, methods = 1500, 10, 5
    generator = np.random.default_rng(better)
    reference = generator.normal(size=(runs, 1, n))  # shared: the comparisons are correlated
    differences = generator.normal(size=(runs, methods, n)) - reference
    differences[:, :better] += 5
    p = np.array([[paired_tests.sign_flip_p(row) for row in family] for family in differences])
    claims = np.array([paired_tests.holm(family) for family in p]) <= ALPHA
    assert claims[:, better:].any(-1).mean() <= ALPHA + compute_standard_errors(ALPHA, runs)
    assert (p <= ALPHA)[:, better:].any(-1).mean() > 2 * ALPHA  # without the correction it is not kept
    assert claims[:, :better].all()


@pytest.mark.slow
def test_documented_tables_are_what_the_simulation_gives() -> None:
    for title, student in (("Coverage of the interval in use", False), ("Coverage of Student's t", True)):
        table = read_documented_table(title)
        assert set(table) == list_all_cases(DRAWS)
        cases = [*table] if student else list_some_cases()
        measured = {(name, n): measure_coverage(name, n, 10_000, student, stream=2) for name, n in cases}
        assert measured == pytest.approx({case: table[case] for case in cases}, abs=0.0015), title
        assert max(table[name, n] for name, n in list_all_cases(SKEWED)) < LEVEL  # the docs do not call these 95 %
    table = read_documented_table("False claims of the sign-flip test")
    assert set(table) == list_all_cases(DRAWS)
    measured = {
        (name, n): measure_rejection_rate(*simulate_experiments(name, 4_000, n, stream=2))
        for name, n in list_some_cases()
    }
    assert measured == pytest.approx({case: table[case] for case in measured}, abs=0.0015)


# --- intervals ----------------------------------------------------------------------------------------------------------------


def compute_half_widths(x: list[float]) -> tuple[float, float]:
    """Return the half-widths of our interval and of Student's."""
    low, high = paired_tests.mean_interval(x)
    student = stats.t.interval(LEVEL, len(x) - 1, loc=np.mean(x), scale=stats.sem(x))
    assert (float(low) + float(high)) / 2 == pytest.approx(np.mean(x))
    return float(high - low) / 2, (student[1] - student[0]) / 2


def test_the_interval_below_eight_values_is_students_t() -> None:
    used, student = compute_half_widths([70.0, 72.5, 71.0, 75.0])
    assert used == pytest.approx(student)


def test_the_interval_from_eight_values_is_once_to_twice_as_wide_as_t_and_repeats() -> None:
    x = np.random.default_rng(0).exponential(size=12)
    used, student = compute_half_widths(list(x))
    assert 1 < used / student <= 2
    assert paired_tests.mean_interval(x[::-1]) == paired_tests.mean_interval(x)
    other = paired_tests.mean_interval(x, generator=np.random.default_rng(5))
    assert float(other[1]) - x.mean() == pytest.approx(used, rel=0.05)
    used, student = compute_half_widths([*np.linspace(1, 2, 9), -40.0])
    assert used == pytest.approx(2 * student)


@pytest.mark.parametrize("n", [2, 12])
def test_equal_values_have_an_interval_without_width(n: int) -> None:
    low, high = paired_tests.mean_interval([40.0] * n)
    assert (low, high) == (40.0, 40.0)


def test_few_distinct_values_keep_the_interval_finite() -> None:
    low, _ = paired_tests.mean_interval([70.0] * 9 + [73.0])
    assert -np.inf < float(low) < 70


@pytest.mark.parametrize("values", [[], [1.0, np.nan], [1.0, np.inf], [[1.0]], 3.0])
def test_values_that_are_none_are_refused(values: object) -> None:
    with pytest.raises(ValueError, match=r"value"):
        paired_tests.compare_pair(values, values)  # type: ignore[arg-type]


def test_a_single_value_has_no_interval() -> None:
    with pytest.raises(ValueError, match="two values"):
        paired_tests.mean_interval([1.0])


# --- two methods --------------------------------------------------------------------------------------------------------------

percents = st.decimals(0, 100, places=1).map(float)
pairs = st.lists(st.tuples(percents, percents), min_size=1, max_size=9)


def compute_p_by_brute_force(d: list[int]) -> float:
    sums = [
        abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in itertools.product((1, -1), repeat=len(d))
    ]
    return float(np.mean([s >= abs(sum(d)) for s in sums]))


@settings(max_examples=60, deadline=None)
@given(pairs)
def test_sign_flip_p_is_that_of_every_flip(pair: list[tuple[float, float]]) -> None:
    a, b = zip(*pair, strict=True)
    in_tenths = [round(10 * x) - round(10 * y) for x, y in pair]  # whole numbers: ties are exact here
    assert paired_tests.compare_pair(a, b).p_value == compute_p_by_brute_force(in_tenths)


@settings(max_examples=40, deadline=None)
@given(pairs, st.randoms())
def test_swapping_methods_mirrors_and_the_order_of_seeds_does_not_matter(
    pair: list[tuple[float, float]], random: Random
) -> None:
    a, b = zip(*pair, strict=True)
    c, mirrored = paired_tests.compare_pair(a, b), paired_tests.compare_pair(b, a)
    assert mirrored.mean == pytest.approx(-c.mean)
    assert mirrored.p_value == c.p_value
    if c.low is not None:
        assert mirrored.high == pytest.approx(-c.low)
    shuffled = random.sample(pair, len(pair))
    again = paired_tests.compare_pair(*zip(*shuffled, strict=True))
    assert again.p_value == c.p_value
    assert again.low == pytest.approx(c.low)


@pytest.mark.parametrize("n", [3, 6, 11, 20])
def test_sign_flip_agrees_with_scipys_permutation_test(n: int) -> None:
    d = np.random.default_rng(n).normal(0.5, 1, size=n)
    resamples = np.inf if n <= 11 else 9_999
    expected = stats.permutation_test(
        (d,), np.mean, permutation_type="samples", n_resamples=resamples, vectorized=True, rng=np.random.default_rng(0)
    )
    assert paired_tests.sign_flip_p(d) == pytest.approx(expected.pvalue, abs=1e-12 if n <= 11 else 0.02)


def test_random_flips_agree_with_all_flips(monkeypatch: pytest.MonkeyPatch) -> None:
    d = np.random.default_rng(0).normal(0.4, 1, size=31)
    random = paired_tests.sign_flip_p(d)
    assert random == paired_tests.sign_flip_p(d)
    assert paired_tests.sign_flip_p(np.ones(31)) == pytest.approx(paired_tests.smallest_p(31), abs=1e-4)
    monkeypatch.setattr(paired_tests, "EXACT_UP_TO", 31)
    assert random == pytest.approx(
        paired_tests.sign_flip_p(d), abs=compute_standard_errors(random, paired_tests.FLIPS, times=4)
    )


@pytest.mark.parametrize("n", [1, 2, 5, 12, 30])
def test_smallest_p_is_reached_when_all_seeds_agree(n: int) -> None:
    a = np.arange(n) + 1.0
    assert paired_tests.compare_pair(a, 0 * a).p_value == paired_tests.smallest_p(n) == 2 / 2**n


@pytest.mark.parametrize("n", [1, 2, 6, 40])
def test_identical_methods(n: int) -> None:
    a = np.linspace(50, 60, n)
    c = paired_tests.compare_pair(a, a)
    assert (c.mean, c.p_value, c.equal) == (0.0, 1.0, n)


def test_unequal_numbers_of_values_are_refused() -> None:
    with pytest.raises(ValueError, match="one value per seed, got 2 and 1"):
        paired_tests.compare_pair([1.0, 2.0], [1.0])


# --- many comparisons ---------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0.001, 0.5))
def test_holm_claims_what_its_step_down_rule_claims(p: list[float], alpha: float) -> None:
    adjusted = paired_tests.holm(p)
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
        paired_tests.holm(p)


def test_compare_all_pairs_on_the_seeds_both_have() -> None:
    results = {
        "fedavg": {1: 70.0, 2: 60.0, 3: 50.0},
        "fedheal": {3: 52.0, 1: 71.0, 9: 0.0},
        "fedprox": {2: 60.0, 1: 70.0, 3: 50.0},
    }
    heal, prox = paired_tests.compare_all(results, "fedavg")
    assert (heal.a, heal.b, heal.n, heal.mean, heal.unpaired) == ("fedheal", "fedavg", 2, 1.5, 2)
    assert (prox.n, prox.mean, prox.unpaired) == (3, 0.0, 0)
    assert heal.comparisons == 2
    assert prox.smallest_p_adjusted == 0.5  # 2 * 0.25; the other's floor is 0.5


def test_compare_all_needs_the_reference_and_shared_seeds() -> None:
    with pytest.raises(ValueError, match="reference"):
        paired_tests.compare_all({"a": {1: 1.0}}, "b")
    with pytest.raises(ValueError, match="no seed in common"):
        paired_tests.compare_all({"a": {1: 1.0}, "b": {2: 1.0}}, "b")
    assert paired_tests.compare_all({"a": {1: 1.0}}, "a") == []


def test_compare_metrics_takes_both_metrics_as_one_family() -> None:
    generator = np.random.default_rng(0)
    results = {
        method: {seed: dict(zip("pqrs", generator.uniform(40, 90, 4), strict=True)) for seed in range(6)}
        for method in ("fedavg", "fedheal", "fedprox")
    }
    together = paired_tests.compare_metrics(results, "fedavg")
    assert list(together) == ["avg", "std"]
    assert [c.comparisons for cs in together.values() for c in cs] == [4] * 4
    spread = [np.std(list(results["fedheal"][s].values()), ddof=1) for s in range(6)]
    reference = [np.std(list(results["fedavg"][s].values()), ddof=1) for s in range(6)]
    assert together["std"][0].mean == pytest.approx(np.mean(spread) - np.mean(reference))
    with pytest.raises(ValueError, match="gini"):
        paired_tests.compare_metrics(results, "fedavg", metrics=["gini"])


# --- what may be concluded ----------------------------------------------------------------------------------------------------

SHIFTS = np.array([1.0, 2.0, 3.0, 2.0, 1.5, 2.5, 2.0, 3.0])


def compare_with_fedavg(differences: np.ndarray, metric: str = "", methods: int = 1) -> paired_tests.Comparison:
    """Compare a method with FedAvg; with more `methods`, the others equal FedAvg."""
    base = dict.fromkeys(range(len(differences)), 60.0)
    heal = {"fedheal": {seed: 60.0 + float(d) for seed, d in enumerate(differences)}}
    others = {f"other{i}": base for i in range(methods - 1)}
    return paired_tests.compare_all({"fedavg": base} | heal | others, "fedavg", metric=metric)[0]


def test_verdict_says_better_with_its_evidence() -> None:
    sentence = paired_tests.verdict(compare_with_fedavg(SHIFTS, methods=3))
    assert sentence.startswith("fedheal is better than fedavg by 2.12 points (95 % CI 1.")
    assert sentence.endswith("p = 0.0234 after Holm's correction over 3 comparisons, 8 seeds).")


@pytest.mark.parametrize(
    ("sign", "metric", "word"),
    [(1, "", "better"), (-1, "", "worse"), (1, "avg", "better"), (-1, "std", "better"), (1, "std", "worse")],
)
def test_verdict_knows_which_way_is_better(sign: int, metric: str, word: str) -> None:
    sentence = paired_tests.verdict(compare_with_fedavg(sign * SHIFTS, metric))
    place = f" in {metric.upper()}" if metric else ""
    assert sentence.startswith(f"fedheal is {word} than fedavg{place} by 2.12 points (95 % CI 1.")  # never a minus sign


@pytest.mark.parametrize(
    ("n", "methods", "needed", "smallest"), [(5, 1, 6, "0.0625"), (6, 3, 7, "0.09375"), (1, 1, 6, "1")]
)
def test_verdict_says_when_no_data_could_show_it(n: int, methods: int, needed: int, smallest: str) -> None:
    sentence = paired_tests.verdict(compare_with_fedavg(SHIFTS[:n], methods=methods))
    assert "cannot show a difference at 0.05 with a two-sided exact sign-flip test" in sentence
    assert f"smallest possible p = {smallest}); {needed} or more can" in sentence
    assert "better" not in sentence
    assert ("Holm" in sentence) == (methods > 1)


def test_seeds_needed_are_enough_and_one_fewer_is_not() -> None:
    for methods in (1, 2, 5, 9):
        n = paired_tests.seeds_needed(ALPHA, methods)
        assert methods * paired_tests.smallest_p(n) <= ALPHA < methods * paired_tests.smallest_p(n - 1)
    with pytest.raises(ValueError, match="not enough"):
        paired_tests.seeds_needed(1e-12)


def test_verdict_at_a_level_that_few_or_no_numbers_of_seeds_can_reach() -> None:
    """2/2^n is at most 1e-6 from 21 seeds on, and random flips, from 31 on, give no p below 1e-5."""
    assert "; no number of seeds can (observed" in paired_tests.verdict(
        compare_with_fedavg(np.arange(1.0, 4)), alpha=1e-12
    )
    for n in (3, 40):
        assert "; 21 to 30 can (observed" in paired_tests.verdict(
            compare_with_fedavg(np.arange(1.0, n + 1)), alpha=1e-6
        )


def test_verdict_never_takes_silence_for_equality() -> None:
    mixed = paired_tests.verdict(compare_with_fedavg(np.array([1.0, -2.0, 0.5, 3.0, -1.0, 0.0, 2.0, -1.5])))
    assert mixed.startswith("No difference between fedheal and fedavg can be concluded")
    assert (
        "8 seeds, 1 of them without a difference), which is not evidence of equality; a true difference of up to"
        in mixed
    )
    same = paired_tests.verdict(compare_with_fedavg(np.zeros(8)))
    assert same.endswith("they are the same in all 8 seeds, which is not evidence that they are in others.")


def test_verdict_names_a_disagreement_of_test_and_interval() -> None:
    only_interval = compare_with_fedavg(np.array([1.0, 1.1, 0.9, 1.0, 1.05, -0.01]))
    assert only_interval.low is not None
    assert only_interval.low > 0
    assert only_interval.p_value > ALPHA
    assert "the interval excludes 0, but" in paired_tests.verdict(only_interval)
    only_test = compare_with_fedavg(np.array([0.1, 0.1, 0.1, 0.1, 0.1, 9.0]))
    assert only_test.low is not None
    assert only_test.low < 0
    assert "is better" in paired_tests.verdict(only_test)
    assert "the interval, which rests on other assumptions, includes 0" in paired_tests.verdict(only_test)


def test_verdict_counts_left_out_seeds_and_small_p() -> None:
    base = dict.fromkeys(range(20), 60.0)
    heal = {seed: 61.0 + seed / 10 for seed in range(18)}
    (c,) = paired_tests.compare_all({"fedavg": base, "fedheal": heal}, "fedavg")
    assert paired_tests.verdict(c).endswith(
        "p < 0.0001, 18 seeds (those that only one of the two has are left out: 2))."
    )
    with pytest.raises(ValueError, match="alpha"):
        paired_tests.verdict(c, alpha=5)


# --- the test set -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 30, 500])
def test_a_sampling_error_is_taken_at_the_centre_of_wilsons_interval(n: int) -> None:
    for right in {0, 1, n // 2, n}:
        interval = stats.binomtest(right, n).proportion_ci(method="wilson")
        centre = (interval.low + interval.high) / 2
        expected = 100 * math.sqrt(centre * (1 - centre) / n)
        assert float(standard_error.sampling_error(100 * right / n, n)) == pytest.approx(expected)
    assert float(standard_error.sampling_error(50.0, 0)) == 0


def test_note_names_small_test_sets_only() -> None:
    note = standard_error.note_on_test_sets(
        {"dslr": 100.0, "amazon": 75.0, "webcam": 80.0}, {"dslr": 30, "amazon": 10_000, "webcam": 60}
    )
    assert "dslr (30 images" in note  # even where all are right
    assert "webcam (60 images" in note
    assert "amazon" not in note
    with pytest.raises(ValueError, match="missing for: b"):
        standard_error.note_on_test_sets({"b": 50.0}, {"a": 3})
    with pytest.raises(ValueError, match="no domains"):
        standard_error.note_on_test_sets({}, {})
