"""Reports in a real browser: complete without network access, in both themes, in print and on a phone."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import report
from paceline.core.run_dir import RunDir
from paceline.report.compare_model import read_compared_run
from paceline.report.compare_page import build_compare_page
from paceline.report.compare_runs import compare_runs
from paceline.report.quote_page import build_quote_page
from paceline.report.write import render_page, write_report

RUNS = Path(__file__).parents[1] / "unit" / "report" / "runs.py"
RESULTS = RUNS.with_name("experiments") / "results.py"
COMPARED = RUNS.with_name("compare") / "made.py"
QUOTED = RUNS.with_name("quoted.py")
KINDS = ("ladder", "weak", "batches", "prediction", "tune")
DESKTOP_WIDTH, PHONE_WIDTH = 1280, 390
# The contrast by WCAG 2.2 (https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio) of every visible text.
LOW_CONTRAST = """
() => {
  const channels = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const linear = (value) => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const over = (top, under) => [0, 1, 2].map((i) => top[i] * (top[3] ?? 1) + under[i] * (1 - (top[3] ?? 1)));
  const behind = (element) => {
    if (!element) return [255, 255, 255];
    const style = getComputedStyle(element), color = channels(style.backgroundColor);
    if (style.backgroundImage !== "none") return null;
    if ((color[3] ?? 1) === 1) return color;
    const under = behind(element.parentElement);
    return under && over(color, under);
  };
  const found = [];
  let words = 0;
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const element = texts.currentNode.parentElement, style = getComputedStyle(element);
    if (!texts.currentNode.data.trim() || element.closest("title") || !element.checkVisibility()) continue;
    const cell = element.closest("g")?.querySelector(":scope > rect[fill-opacity]");
    let ground = behind(element.closest("svg") ?? element);
    if (!ground) continue;
    if (element.tagName === "text" && cell) {
      const fill = getComputedStyle(cell);
      ground = over([...channels(fill.fill).slice(0, 3), Number(fill.fillOpacity)], ground);
    }
    const ink = channels(element.tagName === "text" ? style.fill : style.color);
    const [bright, dark] = [light(ink), light(ground)].sort((a, b) => b - a);
    words += 1;
    if ((bright + 0.05) / (dark + 0.05) < 4.5) found.push([texts.currentNode.data.trim(), ink, ground]);
  }
  return {words, found};
}
"""


def module_at(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runs():
    return module_at(RUNS)


@pytest.fixture(scope="module")
def rundir(runs, tmp_path_factory):
    """Return a run with a malicious class name, and its report."""
    shape = runs.Shape(names=(runs.EVIL, *runs.NAMES[1:]))
    rundir = runs.write_run(tmp_path_factory.mktemp("runs") / "cifar10-resnet18-20261121-153113", shape)
    write_report(rundir)
    return rundir


@pytest.fixture(scope="module")
def experiments(tmp_path_factory):
    """Return the reports of one experiment per kind, whose results contain a malicious name."""
    results_module, folder = module_at(RESULTS), tmp_path_factory.mktemp("experiments")
    results = results_module.all_results()
    return {
        kind: write_report(RunDir(results_module.write_experiment(folder / kind, results[kind]).path))
        for kind in (*KINDS, "sweep")
    }


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """Return the report of a comparison of two groups of runs."""
    made, folder = module_at(COMPARED), tmp_path_factory.mktemp("comparison")
    first = made.Made(train_gap=0.05)
    paths = [
        *made.seeds(folder, first, [0.8, 0.7, 0.75]),
        *made.seeds(folder, replace(first, batch=64, warmup="5ep"), [0.82, 0.81]),
    ]
    runs = [read_compared_run(path, "top1") for path in paths]
    report = folder / "report.html"
    report.write_text(render_page(folder, build_compare_page(compare_runs(runs, target=0.6), runs)))
    return report


@pytest.fixture(scope="module")
def quote(tmp_path_factory):
    """Return the page of a quote whose GPU has a malicious name."""
    folder = tmp_path_factory.mktemp("quote")
    report = folder / "quote.html"
    report.write_text(render_page(folder, build_quote_page(module_at(QUOTED).priced_result())))
    return report


@pytest.fixture
def opened(opened, rundir):
    """Return a function that opens a report and returns the page, its requests and its errors."""

    def open_page(width=1200, theme="light", report=rundir.report):
        return opened(report.as_uri(), width, theme)

    return open_page


def test_a_report_makes_no_other_request_and_logs_no_error(opened, rundir):
    page, requests, errors = opened()
    assert [url for url in requests if not url.startswith("data:")] == [rundir.report.as_uri()]
    assert errors == []
    assert page.title() == "cifar10-resnet18-20261121-153113: 95.11 % in 4 min 35 s"


def test_malicious_names_are_shown_as_text(opened, runs):
    page, _, errors = opened()
    assert page.evaluate("window.hacked") is None and errors == []
    check_scripts(page)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    seen = page.inner_text("body")
    assert f"data: class {runs.EVIL} has one image only" in seen and runs.EVIL[:79] in seen


def test_the_numbers_shown_are_those_of_the_result(opened, rundir):
    page, *_ = opened()
    result = json.loads((rundir.path / "result.json").read_text())
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    shown = page.eval_on_selector_all("data", "all => all.map((each) => [each.value, each.innerText])")
    texts = {}
    for value, text in shown:
        texts.setdefault(float(value), set()).add(text)
    assert "95.00 %" in texts[result["ema"]["top1"]]
    assert "2,713" in texts[result["throughput"]["images_per_s"]]
    assert texts[result["account"]["explained"]] == {"99.4 %"}
    for stage in result["stages"].values():
        assert stage["host_s"] in texts and stage["device_s"] in texts
    assert {"4 min 35 s"} <= texts[result["account"]["wall_s"]]


@pytest.mark.parametrize("width", [1200, PHONE_WIDTH])
def test_every_chart_is_completely_visible(opened, width):
    page, *_ = opened(width)
    charts = page.locator(".chart > svg, .heatmap svg, .stack > .bar, .gallery img")
    boxes = [charts.nth(index).bounding_box() for index in range(charts.count())]
    assert len(boxes) == 13 + 1 + 3 + 12 + 2 * 5  # five images have two maps
    for box in boxes:
        assert box["width"] > 90 and box["height"] > 40, box  # three of 8.5rem share two columns
        assert box["x"] >= 0 and box["x"] + box["width"] <= width, box
    drawn = page.eval_on_selector_all(".chart > svg polyline", "all => all.map((each) => each.getBBox().width)")
    assert len(drawn) >= 20 and min(drawn) > 100
    texts_of_charts = page.eval_on_selector_all(
        ".chart svg",
        "all => all.flatMap((svg) => [...svg.querySelectorAll('text')].map((each) => [each, each.getBBox()]))"
        ".map(([each, box]) => [each.textContent, box.x, box.y, box.x + box.width, box.y + box.height])",
    )
    assert len(texts_of_charts) > 100
    # The boxes have room for accents and descenders; what is outside of the drawing by less than its margin is shown.
    assert [each for each in texts_of_charts if min(each[1:3]) < -4 or each[3] > 444 or each[4] > 240] == []


def test_a_phone_scrolls_only_vertically(opened):
    page, *_ = opened(PHONE_WIDTH)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE_WIDTH
    assert page.evaluate("document.documentElement.scrollHeight") > 5000


@pytest.mark.parametrize("theme, is_dark", [("light", False), ("dark", True)])
def test_every_text_has_enough_contrast_in_both_themes(opened, theme, is_dark):
    page, *_ = opened(theme=theme)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(","))) < 150) == is_dark
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    contrast = page.evaluate(LOW_CONTRAST)
    assert contrast["words"] > 600
    assert contrast["found"] == []


def test_a_report_prints_on_few_pages_with_a_white_background(opened, tmp_path):
    page, *_ = opened(theme="dark")
    path = tmp_path / "report.pdf"
    page.pdf(path=str(path), format="A4")
    assert path.read_bytes().startswith(b"%PDF")
    assert 5 <= path.read_bytes().count(b"/Type /Page\n") <= 15
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator("nav").is_hidden()


@pytest.mark.parametrize("kind", KINDS)
def test_an_experiment_report_is_visible_legible_and_safe_at_any_width(opened, experiments, kind):
    page, requests, errors = opened(report=experiments[kind])
    assert "window.hacked=1</script>" in page.inner_text("body")
    for width, theme in ((1400, "dark"), (800, "light"), (360, "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=theme)
        check_layout(page, width)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme)
        contrast = page.evaluate(LOW_CONTRAST)
        assert contrast["words"] > 100 and contrast["found"] == []
    assert [url for url in requests if not url.startswith("data:")] == [experiments[kind].as_uri()]
    assert errors == [] and page.evaluate("window.hacked") is None
    check_scripts(page)


def check_scripts(page):
    """Assert that the page has no script but its own, inside of it."""
    own = (Path(report.__file__).parent / "templates" / "page.js").read_text()
    assert page.locator("script").evaluate_all("all => all.map((each) => [each.src, each.text])") == [["", own]]
    assert page.locator("iframe, object, embed").count() == 0


def check_layout(page, width):
    """Assert that a page of this width scrolls only vertically and that everything drawn lies within it."""
    assert page.evaluate("document.documentElement.scrollWidth") == width
    drawn = page.locator(".chart svg, .bars .track")
    boxes = [drawn.nth(index).bounding_box() for index in range(drawn.count())]
    assert len(boxes) >= 4
    for box in boxes:
        assert box["width"] > 100 and box["x"] >= 0 and box["x"] + box["width"] <= width, box
    outside = page.eval_on_selector_all(
        ".bars .track > *",
        "all => all.map((each) => [each.getBoundingClientRect(), each.parentElement.getBoundingClientRect()])"
        ".filter(([part, track]) => part.left < track.left - 0.5 || part.right > track.right + 0.5).length",
    )
    assert outside == 0  # browsers round by half a pixel


def test_intervals_are_visible_on_both_sides_of_the_measured_value(opened, experiments):
    page, *_ = opened(report=experiments["ladder"])
    sides = page.eval_on_selector_all(
        ".bars .rows li:has(.within)",
        "all => all.map((row) => [row.querySelector('.within'), row.querySelector('.part')]"
        ".map((each) => each.getBoundingClientRect())).map(([within, bar]) => [within.left, bar.right, within.right])",
    )
    assert len(sides) == 6
    assert all(low < value < high for low, value, high in sides)
    page, *_ = opened(report=experiments["batches"])
    heights = page.eval_on_selector_all("path.bounds", "all => all.map((each) => each.getBBox().height)")
    assert len(heights) == 8 and min(heights) > 1


def test_the_page_of_a_quote_is_visible_and_safe_at_any_width(opened, quote):
    page, requests, errors = opened(report=quote)
    for width in (DESKTOP_WIDTH, PHONE_WIDTH):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") == width
        box = page.locator(".chart svg[role=img]").bounding_box()
        assert box["width"] > 300 and box["x"] >= 0 and box["x"] + box["width"] <= width
    assert "window.hacked=1</script>" in page.inner_text("body") and page.evaluate("window.hacked") is None
    assert [url for url in requests if not url.startswith("data:")] == [quote.as_uri()] and errors == []
    check_scripts(page)


@pytest.mark.parametrize("kind", ["run", "comparison", "quote", "sweep", *KINDS])
def test_a_report_has_no_barriers_for_assistive_technology(
    opened, rundir, comparison, quote, experiments, barriers, kind
):
    report = {"run": rundir.report, "comparison": comparison, "quote": quote, **experiments}[kind]
    for width, theme in ((DESKTOP_WIDTH, "light"), (PHONE_WIDTH, "dark")):
        page, *_ = opened(width, theme, report)
        # Most contrasts in the dark have a test of their own, which is faster and reads charts too.
        left_out = ["color-contrast"] if theme == "dark" and kind in ("run", *KINDS) else []
        assert barriers(page, *left_out) == [], (kind, width, theme)
