"""The page in a real browser."""

from __future__ import annotations

import itertools
import json
import shutil
import time

import pytest

from fedheal.report.html_page import render_page
from made_up import load_rows, run_folder
from needs import needs

PLOTS = ("domains", "scatter", "measure", "curves", "weights", "layers", "consistency", "seconds")


@pytest.fixture(scope="module")
def browser():
    needs("browser")
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser, tmp_path):
    """Open rows as a page; whatever the console says and whatever is asked of a network ends up in `troubles`."""
    contexts, troubles = [], []

    def open_(rows, width=1280, theme="light"):
        file = tmp_path / "report.html"
        file.write_text(render_page(rows), encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: troubles.append(f"console: {message.text}"))
        tab.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        tab.on("request", lambda request: troubles.append(request.url) if request.url != file.as_uri() else None)
        tab.goto(file.as_uri())
        tab.wait_for_selector("html[data-ready]")
        return tab

    yield open_
    for context in contexts:
        context.close()
    assert troubles == []


def scroll(tab):
    for plot in tab.query_selector_all(".plot"):
        plot.scroll_into_view_if_needed()
        tab.wait_for_function("node => node.matches('.js-plotly-plot, .none')", arg=plot)


def traces(tab, plot):
    return tab.evaluate(f"document.querySelector('[data-plot={plot}]').data.map(t => [t.type, t.name || ''])")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_figure_is_drawn_and_nothing_overflows(opened, few, width, theme):
    tab = opened(load_rows(few), width, theme)
    scroll(tab)
    for plot in PLOTS:
        assert traces(tab, plot), plot
        box = tab.query_selector(f"[data-plot={plot}]").bounding_box()
        drawn = tab.query_selector(f"[data-plot={plot}] .main-svg").bounding_box()
        assert abs(box["height"] - drawn["height"]) < 2, plot  # nothing runs into the next figure
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    ink, paper = (tab.evaluate(f"getComputedStyle(document.body).{p}") for p in ("color", "backgroundColor"))
    brightness = [sum(map(int, c[4:-1].split(","))) for c in (ink, paper)]
    assert (brightness[0] < brightness[1]) == (theme == "light")


@pytest.mark.parametrize("shape", ["bars", "dots"])
def test_on_a_phone_every_name_is_there_and_runs_into_no_other(opened, tmp_path, shape):
    names = ["fedavg", "fedavg+uniform", "fedavg+fedheal:variant=released,tau=0.4", "fedprox:mu=0.1+fedheal",
             "scaffold+qffl", "moon+afl", "fedavg+fedheal without=svhn"]  # fmt: skip
    for method in names:
        run_folder(tmp_path / method.replace(":", "_"), method, rounds=3)
    tab = opened(load_rows(tmp_path), 390)
    scroll(tab)
    tab.click(f"button[value={shape}]")
    for plot in ("domains", "seconds"):
        labels = tab.query_selector_all(f"[data-plot={plot}] .ytick text")
        said = [label.text_content() for label in labels]
        assert sorted(word.replace(" ", "") for word in said) == sorted(name.replace(" ", "") for name in names)
        boxes = sorted((box["y"], box["y"] + box["height"]) for box in (label.bounding_box() for label in labels))
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(boxes)), plot
        legend = tab.query_selector(f"[data-plot={plot}] .legend").bounding_box()
        figure = tab.query_selector(f"[data-plot={plot}]").bounding_box()
        assert legend["height"] < 40  # one line of it
        assert legend["y"] >= figure["y"]
        assert legend["y"] + legend["height"] <= boxes[0][0] + 8  # and not over the first row


def test_bounds_alone_leave_figures_empty_without_an_error(opened, tmp_path):
    folder = run_folder(tmp_path / "pooled", "fedavg")
    summary = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(summary | {"pool": True}))
    tab = opened(load_rows(tmp_path))
    scroll(tab)
    assert tab.inner_text("[data-plot=curves]") == "Not recorded by these runs."
    assert traces(tab, "domains")


def test_figures_wait_until_they_are_in_view(opened, few):
    tab = opened(load_rows(few))
    assert tab.query_selector("[data-plot=seconds].js-plotly-plot") is None
    scroll(tab)
    assert tab.query_selector("[data-plot=seconds].js-plotly-plot")


def test_choices_change_figures(opened, few):
    tab = opened(load_rows(few))
    scroll(tab)
    assert {kind for kind, _ in traces(tab, "domains")} == {"bar"}
    tab.click("button[value=dots]")
    assert {kind for kind, _ in traces(tab, "domains")} == {"scatter"}
    label = "document.querySelector('[data-plot=measure]').layout.yaxis.title.text"
    assert tab.evaluate(label) == "AVG, %"
    tab.select_option("select[data-choice=measure]", "STD")
    assert tab.evaluate(label) == "STD, points"
    assert tab.query_selector("[data-plot=layers].js-plotly-plot")
    tab.select_option("select[data-choice=method]", "fedavg")
    assert "does not mask updates" in tab.inner_text("[data-plot=layers]")
    tab.select_option("select[data-choice=method]", "fedavg+fedheal")
    assert traces(tab, "layers") == [["heatmap", ""]]


def test_the_theme_can_be_switched(opened, few):
    tab = opened(load_rows(few))
    scroll(tab)
    colour = "document.querySelector('[data-plot=curves]').data.at(-1).line.color"
    before, ground = tab.evaluate(colour), tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.click("#theme")
    assert tab.evaluate(colour) != before
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != ground
    tab.click("#theme")
    assert tab.evaluate(colour) == before


def test_tables_sort_by_any_column_and_back(opened, few):
    tab = opened(load_rows(few))

    def column(number):
        cells = tab.query_selector_all(f"table.sortable tbody td:nth-child({number})")
        return [float(cell.get_attribute("data-value")) for cell in cells]

    head = tab.query_selector("table.sortable thead").inner_text().split()
    std, avg = head.index("STD") + 1, head.index("AVG") + 1
    original = column(avg)
    tab.click(f"table.sortable th:nth-child({std}) button")
    assert column(std) == sorted(column(std))  # the most even first
    tab.click(f"table.sortable th:nth-child({avg}) button")
    assert column(avg) == sorted(column(avg), reverse=True)  # the highest first
    tab.click(f"table.sortable th:nth-child({avg}) button")
    assert column(avg) == sorted(column(avg))
    tab.click(f"table.sortable th:nth-child({avg}) button")
    assert column(avg) == original


def test_tables_can_be_copied(opened, few):
    tab = opened(load_rows(few))
    tab.click("text=Copy LaTeX")
    tab.wait_for_selector("text=Copied")
    tab.evaluate("document.body.insertAdjacentHTML('beforeend', '<textarea id=here></textarea>')")
    tab.focus("#here")
    tab.keyboard.press("Control+V")
    assert tab.input_value("#here").startswith(r"\begin{tabular}")


def test_on_paper_everything_is_drawn_in_light(opened, few):
    tab = opened(load_rows(few), theme="dark")
    tab.emulate_media(media="print", color_scheme="dark")
    assert len(tab.pdf()) > 50_000
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert len(tab.query_selector_all(".js-plotly-plot")) == len(PLOTS)
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


@pytest.mark.slow
def test_56_runs_of_200_rounds_open_quickly(opened, table1):
    rows = load_rows(table1)
    began = time.monotonic()
    tab = opened(rows)
    assert (
        time.monotonic() - began < 30
    )  # with making the page; a busy machine takes several times what an idle one does
    shown = tab.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
    assert shown < 10_000
    scroll(tab)
    assert len(tab.query_selector_all(".js-plotly-plot")) == 2 * len(PLOTS)
