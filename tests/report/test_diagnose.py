"""Who is under-served, on rounds written down by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fedheal.report.diagnose import diagnose_run, draw_diagnosis, explain_diagnosis, format_diagnosis
from fedheal.report.figures import save_figure
from fedheal.report.series import mean_ignoring_nan
from made_up import run_folder

# Two clinics and a hospital; the clinics' accuracy falls behind in round 3 and stays there, after a dip in round 1.
ACCURACY = {"big-0": [80, 80, 80, 80], "small-0": [70, 78, 60, 58], "small-1": [70, 78, 62, 60]}
WEIGHTS = {"big-0": 0.8, "small-0": 0.1, "small-1": 0.1}


def write_federation(folder, rounds=4, **extra):
    """Write the rounds of a federation without test sets, domains or a result."""
    folder.mkdir(parents=True)
    with (folder / "rounds.jsonl").open("w") as file:
        for t in range(rounds):
            record = {"round": t + 1, "weights": WEIGHTS, "clients": {c: a[t % 4] for c, a in ACCURACY.items()}}
            file.write(json.dumps(record | {key: value(t) for key, value in extra.items()}) + "\n")
    return folder


def test_clients_of_a_federation_that_recorded_little(tmp_path):
    diagnosis = diagnose_run(str(write_federation(tmp_path / "run")))
    assert diagnosis.kind == "client"
    by_name = {unit.name: i for i, unit in enumerate(diagnosis.units)}
    # Means of the four rounds: 73.33, 78.67, 67.33, 66. small-0 is 3.33, 0.67, 7.33 and 8 below: under-served since round 3.
    # Of four rounds the last alone counts, as in a result: over all of them it is 4.83 below.
    assert np.round(diagnosis.gaps[by_name["small-0"]], 2).tolist() == [-3.33, -0.67, -7.33, -8.0]
    assert diagnosis.find_start(by_name["small-0"]) == 3
    assert diagnosis.get_gap(by_name["small-0"]) == pytest.approx(-8.0)


def test_since_when(tmp_path):
    def get_falling_accuracy(t):
        return {"big-0": 80.0, "small-0": [40.0, 79.0, 60.0, 50.0][t], "small-1": 78.0}

    diagnosis = diagnose_run(write_federation(tmp_path / "run", clients=get_falling_accuracy))
    i = [unit.name for unit in diagnosis.units].index("small-0")
    # Means 66, 79, 72.67, 69.33; gaps -26, 0, -12.67, -19.33, the last of which counts. Round 2 was fine: since round 3.
    assert diagnosis.get_gap(i) == pytest.approx(-19.333, abs=1e-3)
    assert diagnosis.find_start(i) == 3
    head, first, *rest = format_diagnosis(diagnosis)
    assert dict(zip(head, first, strict=True)) == {
        "client": "small-0",
        "accuracy": "50.0",
        "test images": "-",
        "standard error": "-",
        "to the mean": "-19.3",
        "under-served since": "round 3",
        "weight": "10.0%",
        "x equal share": "0.30",
        "kept": "-",
        "distance": "-",
        "rounds present": "4/4",
    }
    assert [line[5] for line in rest] == ["-", "-"]
    assert explain_diagnosis(diagnosis) == [
        "small-0 is 19.3 points below the mean, more than 5 since round 3; it holds 10.0% of the weight, less than an equal "
        "share (0.30 of it)."
    ]


def test_behind_on_average_but_not_in_the_last_round(tmp_path):
    def get_recovering_accuracy(t):
        return {"big-0": 80.0, "small-0": 80.0 if t == 7 else 20.0, "small-1": 80.0}

    diagnosis = diagnose_run(write_federation(tmp_path / "run", rounds=8, clients=get_recovering_accuracy))
    i = [unit.name for unit in diagnosis.units].index("small-0")
    # Gaps of -40, and 0 in the last round: -20 over the last two of eight, and no round from which it was always behind.
    assert i in diagnosis.under_served
    assert diagnosis.find_start(i) is None
    assert format_diagnosis(diagnosis)[1][:6] == ["small-0", "50.0", "-", "-", "-20.0", "on average"]
    assert explain_diagnosis(diagnosis)[0].startswith(
        "small-0 is 20.0 points below the mean, on average over the last 2 rounds, though not more than 5 in the last"
    )
    assert draw_diagnosis(diagnosis) is not None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weights", [0.5, 0.5]),
        ("weights", {"big-0": "much"}),
        ("clients", 3),
        ("domains", [80.0]),
        ("homes", "big"),
        ("homes", {"big-0": ["big"]}),
        ("report", [1]),
        ("report.kept", 0.5),
        ("report.distance", {"big-0": [1]}),
        ("report.kept_by_tensor", [0.5]),
    ],
)
def test_rounds_that_somebody_made_something_else_of_are_refused_by_name(tmp_path, key, value):
    outer, _, inner = key.partition(".")
    run = write_federation(tmp_path / "run", **{outer: lambda t: {inner: value} if inner else value})
    with pytest.raises(ValueError, match=rf"run/rounds.jsonl: line 1: {key}.* must .*, got "):
        diagnose_run(run)


@pytest.mark.parametrize("cut", [lambda text: "garbage\n" + text, lambda text: text[:100], lambda text: ""])
def test_rounds_that_a_finished_run_lacks_are_missed(tmp_path, cut):
    path = run_folder(tmp_path / "made", "fedavg", rounds=6) / "rounds.jsonl"
    path.write_text(cut(path.read_text()))
    damage = " and is damaged in line 1" if path.read_text() else ""
    with pytest.raises(ValueError, match=rf"rounds\.jsonl has 0 rounds{damage}, but the run has 6 rounds: restore"):
        diagnose_run(path.parent)


@pytest.mark.parametrize(
    ("order", "problem"), [([1, 2, 2, 3], "3 is round 2, after"), ([1, 3, 2], "3 is round 2, after")]
)
def test_rounds_that_are_repeated_or_out_of_order_are_refused(tmp_path, order, problem):
    path = run_folder(tmp_path / "made", "fedavg", rounds=3) / "rounds.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[number - 1] for number in order))
    with pytest.raises(ValueError, match=rf"rounds\.jsonl: line {problem} round"):
        diagnose_run(path.parent)


def test_one_is_singular(tmp_path):
    run = run_folder(tmp_path / "made", "fedavg+fedheal", rounds=2)
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"test_sizes": dict.fromkeys(result["test_sizes"], 1)}))
    assert " from 1 test image)" in explain_diagnosis(diagnose_run(run))[0]
    path = run / "rounds.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0])
    with pytest.raises(ValueError, match="has 1 round, but the run has 2 rounds"):
        diagnose_run(run)


def test_a_finished_run_without_its_rounds_is_told_so(tmp_path):
    path = run_folder(tmp_path / "made", "fedavg", rounds=6) / "rounds.jsonl"
    path.unlink()
    with pytest.raises(ValueError, match=r"rounds\.jsonl is missing, but the run has 6 rounds"):
        diagnose_run(path.parent)


def test_a_federation_may_go_on_after_its_result(tmp_path):
    run = run_folder(tmp_path / "made", "fedavg", rounds=6)
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"rounds": 4}))
    assert diagnose_run(run).rounds.tolist() == [1, 2, 3, 4, 5, 6]
    (run / "result.json").write_text(json.dumps(result | {"rounds": "six"}))
    with pytest.raises(ValueError, match=r"result\.json: rounds must be a whole number, got 'six'"):
        diagnose_run(run)


def write_run_without_domain(folder):
    """Write a run in which no client of the weakest domain trained, though all are evaluated."""
    run = run_folder(folder, "fedavg", rounds=6)
    records = [json.loads(line) for line in (run / "rounds.jsonl").read_text().splitlines()]
    for record in records:
        record["weights"] = {c: w for c, w in record["weights"].items() if not c.startswith("syn")}
    (run / "rounds.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    result = json.loads((run / "result.json").read_text())
    trained = {c: home for c, home in result["trained"].items() if home != "syn"}
    (run / "result.json").write_text(json.dumps(result | {"trained": trained, "without": ["syn"]}))
    return run


@pytest.mark.parametrize("finished", [True, False])
def test_whoever_is_judged_is_there_though_it_never_took_part(tmp_path, finished):
    run = write_run_without_domain(tmp_path / "run")
    if not finished:
        (run / "result.json").unlink()
    diagnosis = diagnose_run(run)
    assert [unit.name for unit in diagnosis.units] == ["mnist", "usps", "svhn", "syn"]
    first = dict(zip(*format_diagnosis(diagnosis)[:2], strict=True))
    assert first["domain"] == "syn (5 clients)"
    assert (first["weight"], first["x equal share"], first["rounds present"]) == ("-", "-", "0/6")
    # Its accuracy counts for the mean of all: here the last round's gap, by hand.
    last = json.loads((run / "rounds.jsonl").read_text().splitlines()[-1])["domains"]
    assert diagnosis.gaps[3, -1] == pytest.approx(last["syn"] - sum(last.values()) / 4)
    (sentence,) = (said for said in explain_diagnosis(diagnosis) if said.startswith("syn"))
    assert sentence.endswith("; its clients had no weight in any round.")
    clients = diagnose_run(run, "client")
    assert len(clients.units) == 20
    assert explain_diagnosis(clients)[-1].endswith("; it had no weight in any round.")
    assert draw_diagnosis(clients) is not None


def test_nobody_ever_replied(tmp_path):
    diagnosis = diagnose_run(write_federation(tmp_path / "run", weights=lambda t: {}))
    assert [line[0] for line in format_diagnosis(diagnosis)[1:]] == ["small-0", "small-1", "big-0"]
    assert "No accuracy" not in explain_diagnosis(diagnosis)[0]


def test_a_federation_under_way_says_domains_in_its_lines(tmp_path):
    """One client changes its domain, one has none, and one fails in every round."""

    def get_client_domains(t):
        return {"big-0": "city", "small-0": "city" if t == 0 else "country", "small-1": None, "silent": "island"}

    def get_accuracy(t):
        return {"city": 80.0, "country": 60.0}

    run = write_federation(tmp_path / "run", client_domains=get_client_domains, domains=get_accuracy)
    diagnosis = diagnose_run(run)
    assert diagnosis.kind == "domain"
    assert [line[0] for line in format_diagnosis(diagnosis)[1:]] == [
        "country (1 client)", "city (1 client)", "island (1 client)", "? (1 client)"
    ]  # fmt: skip
    units = {unit.name: unit for unit in diagnosis.units}
    assert units["country"].weight.tolist() == [0.1] * 4
    assert np.isnan(units["island"].accuracy).all()
    assert {name: unit.rounds_present for name, unit in units.items()} == {"city": 4, "country": 4, "island": 0, "?": 4}
    assert {unit.name for unit in diagnose_run(run, "client").units} == {*WEIGHTS, "silent"}


def test_gaps_are_computed_once_for_all_units(tmp_path, monkeypatch):
    calls = []

    def count_calls(values):
        calls.append(1)
        return mean_ignoring_nan(values)

    monkeypatch.setattr("fedheal.report.diagnose.mean_ignoring_nan", count_calls)
    diagnosis = diagnose_run(write_federation(tmp_path / "run"))
    format_diagnosis(diagnosis)
    explain_diagnosis(diagnosis)
    assert calls == [1]


def test_domains_are_taken_from_the_result_or_the_rounds(tmp_path):
    run = run_folder(tmp_path / "made", "fedavg+fedheal", rounds=6)
    diagnosis = diagnose_run(run)
    assert diagnosis.kind == "domain"
    assert [unit.name for unit in diagnosis.units] == ["mnist", "usps", "svhn", "syn"]
    assert format_diagnosis(diagnosis)[1][0] == "syn (5 clients)"  # the made-up runs' last domain lags
    assert diagnosis.find_start(3) is not None
    assert "of their entries were kept" in explain_diagnosis(diagnosis)[0]
    client_domains = diagnose_run(
        write_federation(tmp_path / "run", client_domains=lambda t: {c: c.partition("-")[0] for c in WEIGHTS})
    )
    assert {unit.name: unit.clients for unit in client_domains.units} == {"big": 1, "small": 2}
    assert diagnose_run(run_folder(tmp_path / "open", rounds=3, finished=False)).kind == "domain"


def test_test_images_and_their_errors(tmp_path):
    run = run_folder(tmp_path / "made", "fedavg+fedheal", rounds=6)
    diagnosis = diagnose_run(run)
    first = dict(zip(*format_diagnosis(diagnosis)[:2], strict=True))
    p = float(first["accuracy"]) / 100
    assert first["test images"] == "500"
    assert float(first["standard error"]) == pytest.approx(100 * (p * (1 - p) / 500) ** 0.5, abs=0.06)
    assert f"(standard error {first['standard error']} from 500 test images)" in explain_diagnosis(diagnosis)[0]
    # A simulation deals a domain's images out to its clients; of a federation's clients nothing is known.
    assert {unit.test_images for unit in diagnose_run(run, "client").units} == {100}
    (run / "experiment.toml").rename(run / "federation.toml")
    assert {unit.test_images for unit in diagnose_run(run, "client").units} == {0}


def test_without_accuracy_the_weights_are_shown_and_nobody_is_judged(tmp_path):
    diagnosis = diagnose_run(write_federation(tmp_path / "run", clients=lambda t: None))
    assert explain_diagnosis(diagnosis)[0].startswith("No accuracy by client was recorded")
    assert [line[1] for line in format_diagnosis(diagnosis)[1:]] == ["-", "-", "-"]
    assert save_figure(tmp_path / "picture", lambda: draw_diagnosis(diagnosis))[-1].stat().st_size > 5000


def test_absent_clients_and_unevaluated_rounds(tmp_path):
    def get_weights(t):
        return {c: w for c, w in WEIGHTS.items() if c != "small-1" or t == 1}

    def get_accuracy(t):
        return {"big-0": 80.0, "small-0": 50.0} if t % 2 else None

    diagnosis = diagnose_run(write_federation(tmp_path / "run", weights=get_weights, clients=get_accuracy))
    units = {unit.name: unit for unit in diagnosis.units}
    assert units["small-1"].rounds_present == 1
    assert diagnosis.find_start([*units].index("small-0")) == 2  # the first evaluated round
    assert draw_diagnosis(diagnosis) is not None


def test_everyone_served_alike(tmp_path):
    diagnosis = diagnose_run(write_federation(tmp_path / "run", clients=lambda t: dict.fromkeys(WEIGHTS, 80.0)))
    assert explain_diagnosis(diagnosis) == ["No client lies more than 5 points below the mean of all clients."]


def test_what_cannot_be_diagnosed(tmp_path):
    with pytest.raises(ValueError, match="holds no rounds"):
        diagnose_run(tmp_path)
    run = write_federation(tmp_path / "run")
    with pytest.raises(ValueError, match=f"{tmp_path} holds no rounds: name {run}$"):
        diagnose_run(tmp_path)  # a comparison's folder
    with pytest.raises(ValueError, match="by = continent: use domain or client"):
        diagnose_run(run, "continent")
    with pytest.raises(ValueError, match="does not say which domain"):
        diagnose_run(run, "domain")
