"""From runs to rows: parts of bounds find each other and nothing else, and no run vanishes."""

from __future__ import annotations

import json

import pytest

from fedheal.report.rows import build_rows, find_rows, write_method_order
from fedheal.report.tables import build_tables
from made_up import load_rows, run_folder

HIGH, LOW = {"a": 90.0, "b": 50.0}, {"a": 10.0, "b": 20.0}


def make_run(data="toy", domains=HIGH, method="fedavg", **more):
    """Return the result of a run on two domains with a client each."""
    plain = {"seed": 0, "rounds": 5, "only": [], "without": [], "pool": False}
    trained = {f"{domain}-0": domain for domain in domains}
    clients = dict.fromkeys(trained, 50.0)
    sizes = dict.fromkeys(domains, 100)
    summary = plain | {"method": method, "data": data, "domains": domains, "trained": trained, "clients": clients}
    return summary | {"test_sizes": sizes, "folder": f"{data}-{method}-{more}"} | more


def make_leave_one_out_runs(**more):
    return [make_run(without=[domain], **more) for domain in ("a", "b")]


def make_standalone_runs(**more):
    return [make_run(only=[f"{domain}-0"], trained={f"{domain}-0": domain}, **more) for domain in ("a", "b")]


def summarise_rows(found_rows):
    return [(row.summaries[0]["data"], row.method, dict(row.domains)) for row in found_rows]


@pytest.mark.parametrize(
    ("bound", "parts"), [("leave-one-domain-out", make_leave_one_out_runs), ("standalone", make_standalone_runs)]
)
def test_bounds_of_several_data_sets_are_rows_of_their_own(bound, parts):
    both = summarise_rows(build_rows([*parts(), *parts(data="other", domains=LOW)]))
    assert both == [("toy", bound, HIGH), ("other", bound, LOW)]


def test_only_parts_with_the_same_settings_make_a_bound(tmp_path):
    first, second = make_leave_one_out_runs()
    # Another number of rounds, another method, another seed: a part of each is not a bound.
    for other in (second | {"rounds": 9}, second | {"method": "fedavg+fedheal"}, second | {"seed": 1}):
        assert "leave-one-domain-out" not in {row.method for row in build_rows([first, other])}
    # So it is for settings that only the description has; one that changes no result does not count.
    for name, line, bound in (("lr", "lr = 0.5", False), ("workers", "workers = 4", True)):
        folder = tmp_path / name
        for domain in ("photo", "sketch", "paint"):
            part = run_folder(folder / domain, "fedavg", "own")
            summary = json.loads((part / "result.json").read_text())
            (part / "result.json").write_text(json.dumps(summary | {"without": [domain]}))
        description = folder / "photo" / "experiment.toml"
        lines = [old for old in description.read_text().splitlines() if not old.startswith(name)]
        description.write_text("\n".join([*lines, line]) + "\n")
        assert ([row.method for row in load_rows(folder)] == ["leave-one-domain-out"]) is bound


def test_a_part_that_comes_twice_is_refused_by_name():
    doubled = [*make_leave_one_out_runs(), make_run(domains=LOW, without=["a"], folder="again")]
    assert "leave-one-domain-out" not in {row.method for row in build_rows(doubled)}
    with pytest.raises(ValueError, match=r"fedavg without=a with seed 0 was run twice .*again\)"):
        build_tables(build_rows(doubled))
    with pytest.raises(ValueError, match=r"fedavg only=b-0 with seed 0 was run twice"):
        build_tables(build_rows([*make_standalone_runs(), *make_standalone_runs()[1:]]))
    with pytest.raises(ValueError, match=r"leave-one-domain-out with seed 0 was run twice"):
        build_tables(build_rows([*make_leave_one_out_runs(), *make_leave_one_out_runs(rounds=9)]))


def test_runs_without_everyone_are_shown_under_names_of_their_own():
    """Such runs are an incomplete bound, a bound of another method, or other choices of clients."""
    own = {
        "fedavg without=a": make_run(without=["a"]),
        "fedavg only=a-0": make_standalone_runs()[0],
        "fedavg+fedheal without=b": make_run(method="fedavg+fedheal", without=["b"]),
        "fedavg without=a-0": make_run(without=["a-0"]),
        "fedavg only=a": make_run(only=["a"]),
        "fedavg only=a,b-0 without=a-0 pool=true": make_run(only=["a", "b-0"], without=["a-0"], pool=True),
        "fedavg+fedheal pool=true": make_run(method="fedavg+fedheal", pool=True),
    }
    for name, summary in own.items():
        assert [row.method for row in build_rows([summary])] == [name]
    everyone = [*own.values(), make_run(), make_run(pool=True)]
    assert {row.method for row in build_rows(everyone)} == {*own, "fedavg", "centralised"}


def test_rows_keep_the_order_of_their_comparison(tmp_path):
    for method in ("fedavg", "scaffold", "fedavg+uniform", "moon"):
        run_folder(tmp_path / "runs" / method, method, rounds=2)
    folder = tmp_path / "runs"
    assert [row.method for row in find_rows([folder])] == ["fedavg", "fedavg+uniform", "moon", "scaffold"]
    compared = {row.method: row for row in find_rows([folder])}
    write_method_order(folder, [compared[name] for name in ("scaffold", "fedavg", "fedavg+uniform")])
    for paths in ([tmp_path], [folder], sorted(folder.glob("*/"))):
        assert [row.method for row in find_rows(paths)] == ["scaffold", "fedavg", "fedavg+uniform", "moon"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"methods": 5}', "does not hold a list of methods: remove it, or repeat the comparison"),
        ("{}", "does not hold a list of methods"),
        ("[]", "does not hold a JSON object"),
        ("{", "is not JSON"),
    ],
)
def test_a_damaged_order_of_methods_is_refused_by_name(tmp_path, text, sentence):
    run_folder(tmp_path / "fedavg", "fedavg", rounds=2)
    (tmp_path / "comparison.json").write_text(text)
    with pytest.raises(ValueError, match=f"{tmp_path / 'comparison.json'} {sentence}"):
        find_rows([tmp_path])
