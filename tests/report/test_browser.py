"""The page in a real browser."""

from __future__ import annotations

import itertools
import json
import shutil

import pytest

from fedheal.report.html_page import render_page
from made_up import load_rows, run_folder
from needs import needs

pytestmark = pytest.mark.slow
PLOTS = ("domains", "differences", "scatter", "measure", "curves", "weights", "layers", "consistency", "seconds")


@pytest.fixture(scope="module")
def tab():
    """One tab for all tests; `problems` collects what the console prints and whatever is requested from a network."""
    needs("browser")
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page()
        page.problems, page.shown = [], None
        page.on("console", lambda message: page.problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: page.problems.append(f"error: {error}"))
        page.on("request", lambda request: page.problems.append(request.url) if request.url != page.shown[0] else None)
        yield page
        browser.close()


@pytest.fixture
def open_page(tab):
    """Open the page of a folder of runs. A page that is open already is used as it is, unless `fresh`."""

    def open_folder(folder, width=1280, theme="light", fresh=False):
        file = folder / "report.html"
        if fresh or tab.shown != (file.as_uri(), width, theme):
            if not file.exists():
                file.write_text(render_page(load_rows(folder)), encoding="utf-8")
            tab.shown = (file.as_uri(), width, theme)
            tab.set_viewport_size({"width": width, "height": 900})
            tab.emulate_media(media="screen", color_scheme=theme)
            tab.goto(file.as_uri())
            tab.wait_for_selector("html[data-ready]")
        return tab

    yield open_folder
    problems, tab.problems[:] = list(tab.problems), []
    assert problems == []


def wait_until_drawn(tab):
    tab.wait_for_selector("html[data-drawn]")


def list_traces(tab, plot):
    return tab.evaluate(f"document.querySelector('[data-plot={plot}]').data.map(t => [t.type, t.name || ''])")


def test_every_figure_is_drawn_without_scrolling(open_page, small_runs):
    tab = open_page(small_runs, fresh=True)
    wait_until_drawn(tab)
    assert tab.evaluate("scrollY") == 0
    assert len(tab.query_selector_all(".js-plotly-plot")) == len(PLOTS)


def test_rounds_have_ticks_at_whole_numbers(open_page, tmp_path):
    run_folder(tmp_path / "short", "fedavg+fedheal", rounds=4)
    tab = open_page(tmp_path)
    wait_until_drawn(tab)
    for plot in ("measure", "curves", "weights", "layers"):
        ticks = [tick.text_content() for tick in tab.query_selector_all(f"[data-plot={plot}] .xtick text")]
        assert ticks, plot
        assert all(tick.isdigit() for tick in ticks), (plot, ticks)


@pytest.mark.parametrize(("width", "is_cut"), [(390, True), (1280, False)])
def test_a_table_wider_than_the_screen_says_that_it_scrolls(open_page, small_runs, width, is_cut):
    tab = open_page(small_runs, width)
    assert tab.locator("text=Scroll the table sideways for more columns.").is_visible() == is_cut


@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (1280, "light")])
def test_every_figure_is_drawn_and_nothing_overflows(open_page, small_runs, width, theme):
    tab = open_page(small_runs, width, theme)
    wait_until_drawn(tab)
    for plot in PLOTS:
        assert list_traces(tab, plot), plot
        box = tab.query_selector(f"[data-plot={plot}]").bounding_box()
        svg = tab.query_selector(f"[data-plot={plot}] .main-svg").bounding_box()
        assert abs(box["height"] - svg["height"]) < 2, plot  # nothing runs into the next figure
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    ink, paper = (tab.evaluate(f"getComputedStyle(document.body).{p}") for p in ("color", "backgroundColor"))
    brightness = [sum(map(int, c[4:-1].split(","))) for c in (ink, paper)]
    assert (brightness[0] < brightness[1]) == (theme == "light")


def test_numbers_within_domains_are_aligned_below_their_headings(open_page, tmp_path):
    path = run_folder(tmp_path / "a", "fedavg", rounds=3) / "result.json"
    result = json.loads(path.read_text())
    counts = {domain: [[8, 10], [2, 10]] for domain in result["domains"]}
    path.write_text(json.dumps(result | {"by_class": counts}))
    tab = open_page(tmp_path)
    cells = tab.locator(".within ~ .scroll").first.locator(":is(th, td):not(:first-child)")
    aligned = cells.evaluate_all("cells => cells.map(cell => getComputedStyle(cell).textAlign)")
    assert aligned == ["right"] * 2 * len(counts)


def test_choices_change_figures(open_page, small_runs):
    tab = open_page(small_runs)
    wait_until_drawn(tab)
    label = "document.querySelector('[data-plot=measure]').layout.yaxis.title.text"
    assert tab.evaluate(label) == "AVG, %"
    tab.select_option("select[data-choice=measure]", "STD")
    assert tab.evaluate(label) == "STD, points"
    tab.select_option("select[data-choice=measure]", "AVG")
    assert tab.query_selector("[data-plot=layers].js-plotly-plot")
    tab.select_option("select[data-choice=method]", "fedavg")
    assert "does not mask updates" in tab.inner_text("[data-plot=layers]")
    assert not tab.is_visible("[data-plot=layers] + figcaption")  # a caption of nothing
    tab.select_option("select[data-choice=method]", "fedavg+fedheal")
    assert list_traces(tab, "layers") == [["heatmap", ""]]


def test_the_theme_can_be_switched(open_page, small_runs):
    tab = open_page(small_runs)
    wait_until_drawn(tab)
    colour = "document.querySelector('[data-plot=curves]').data.at(-1).line.color"
    before, ground = tab.evaluate(colour), tab.evaluate("getComputedStyle(document.body).backgroundColor")
    tab.click("#theme")
    assert tab.evaluate(colour) != before
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") != ground
    tab.click("#theme")
    assert tab.evaluate(colour) == before


def test_tables_sort_by_any_column_and_back(open_page, small_runs):
    tab = open_page(small_runs)

    def read_column(number):
        cells = tab.query_selector_all(f"table.sortable tbody td:nth-child({number})")
        return [float(cell.get_attribute("data-value")) for cell in cells]

    head = tab.query_selector("table.sortable thead").inner_text().split()
    std, avg = head.index("STD") + 1, head.index("AVG") + 1
    original = read_column(avg)
    tab.click(f"table.sortable th:nth-child({std}) button")
    assert read_column(std) == sorted(read_column(std))  # the most even first
    tab.click(f"table.sortable th:nth-child({avg}) button")
    assert read_column(avg) == sorted(read_column(avg), reverse=True)  # the highest first
    tab.click(f"table.sortable th:nth-child({avg}) button")
    assert read_column(avg) == sorted(read_column(avg))
    tab.click(f"table.sortable th:nth-child({avg}) button")
    assert read_column(avg) == original


def test_tables_can_be_copied(open_page, small_runs):
    tab = open_page(small_runs)
    tab.click("text=Copy LaTeX")
    tab.wait_for_selector("text=Copied")
    tab.evaluate("document.body.insertAdjacentHTML('beforeend', '<textarea id=here></textarea>')")
    tab.focus("#here")
    tab.keyboard.press("Control+V")
    assert tab.input_value("#here").startswith(r"\begin{tabular}")


def test_on_paper_everything_is_drawn_in_light(open_page, small_runs):
    tab = open_page(small_runs, theme="dark", fresh=True)
    tab.emulate_media(media="print", color_scheme="dark")
    assert len(tab.pdf()) > 50_000
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert len(tab.query_selector_all(".js-plotly-plot")) == len(PLOTS)
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_on_a_phone_every_name_is_shown_and_overlaps_no_other(open_page, tmp_path):
    names = ["fedavg", "fedavg+uniform", "fedavg+fedheal:variant=released,tau=0.4", "fedprox:mu=0.1+fedheal",
             "scaffold+qffl", "moon+afl", "fedavg+fedheal without=svhn"]  # fmt: skip
    for method in names:
        run_folder(tmp_path / method.replace(":", "_"), method, rounds=3)
    tab = open_page(tmp_path, 390)
    wait_until_drawn(tab)
    expected = {"domains": ["mnist", "usps", "svhn", "syn"], "seconds": names}
    for plot, words in expected.items():
        labels = tab.query_selector_all(f"[data-plot={plot}] .ytick text")
        texts = [label.text_content() for label in labels]
        assert sorted(word.replace(" ", "") for word in texts) == sorted(word.replace(" ", "") for word in words)
        boxes = sorted((box["y"], box["y"] + box["height"]) for box in (label.bounding_box() for label in labels))
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(boxes)), plot
        legend = tab.query_selector(f"[data-plot={plot}] .legend").bounding_box()
        figure = tab.query_selector(f"[data-plot={plot}]").bounding_box()
        assert legend["y"] >= figure["y"]
        assert legend["y"] + legend["height"] <= boxes[0][0] + 8  # and not over the first row
    right = max(tab.query_selector(f"table.sortable th:nth-child({k})").bounding_box()["x"] for k in (2, 3, 4))
    assert right < 330  # AVG, STD and worst are in view without scrolling


def test_bounds_alone_have_one_figure(open_page, tmp_path):
    folder = run_folder(tmp_path / "pooled", "fedavg")
    summary = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(summary | {"pool": True}))
    tab = open_page(tmp_path)
    wait_until_drawn(tab)
    assert [plot.get_attribute("data-plot") for plot in tab.query_selector_all(".plot")] == ["domains"]
    assert list_traces(tab, "domains")


def test_56_runs_of_200_rounds_open_quickly(open_page, table1_page):
    tab = open_page(table1_page.parent)
    # A busy machine takes several times what an idle one does.
    loaded = tab.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
    assert loaded < 10_000
    wait_until_drawn(tab)
    assert len(tab.query_selector_all(".js-plotly-plot")) == 2 * len(PLOTS)
