"""The page: its numbers are the result's, all that comes from outside stays text, and it needs nothing else."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paceline import report
from paceline.report.read_run import read_run
from paceline.report.run_page import build_run_page
from paceline.report.write import MAX_REPORT_BYTES, write_report

IN_SENTENCES = {
    "throughput": {"spread", "n", "excluded_s"},
    "time": {"train_s", "to_target_s"},
    "account": {"counted_steps"},
    "communication": {"share"},
    "loader": {"images"},
    "ema": {"top5", "loss", "images"},
    "best": {"top1"},
}
"""Numbers that are part of a sentence."""
LEFT_OUT = {
    "ema": {"ece", "mean_class_accuracy"},
    "best": {"images", "top5", "loss", "ece", "mean_class_accuracy"},
    "account": {"stages_s"},  # a sum
}


class Page(HTMLParser):
    """What a browser would make of a page: tags with their attributes, texts, and the measured values."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self.values = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "data":
            self.values.add(float(dict(attributes)["value"]))

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


@pytest.fixture(scope="module")
def rundir(runs, tmp_path_factory):
    shape = runs.Shape(names=(runs.EVIL, *runs.NAMES[1:]))
    return runs.write_run(tmp_path_factory.mktemp("runs") / "cifar10-20261121-153113", shape)


@pytest.fixture(scope="module")
def page(rundir):
    return Page(write_report(rundir).read_text())


def numbers(value, path=()):
    """Yield the places and values of all numbers of a tree."""
    match value:
        case dict():
            for key, each in value.items():
                yield from numbers(each, (*path, key))
        case list():
            for index, each in enumerate(value):
                yield from numbers(each, (*path, index))
        case bool() | str() | None:
            pass
        case _:
            yield path, value


def test_the_numbers_on_the_page_are_those_of_the_result(rundir, page):
    result = json.loads((rundir.path / "result.json").read_text())
    sections = ("throughput", "time", "stages", "account", "loader", "communication", "ranks", "ema", "best")
    found = dict(numbers({key: result[key] for key in sections}))
    hidden = {path for path, value in found.items() if value not in page.values}
    hidden = {path for path in hidden if path[0] != "stages" or path[-1] != "share"}  # drawn as a bar
    known = {path for path in found if path[1] in IN_SENTENCES.get(path[0], set()) | LEFT_OUT.get(path[0], set())}
    assert hidden <= known, hidden - known
    assert len(found) - len(hidden) > 80
    for text in (
        "2,391 to 2,843 over 461 windows",
        "top-5 99.71 %, loss 0.2472",
        "the mean of 4,682 measured steps",
        "target reached after 4 min 11 s",
        "4.78 ms per step, 10.1 % of it",
        "4,692 batches (300,288 images in total)",
    ):
        assert text in page.text


def test_untrusted_text_stays_text(runs, rundir, page, without_own_scripts):
    tags = {tag for tag, _ in page.tags}
    assert "iframe" not in tags and "b" in tags
    assert without_own_scripts(write_report(rundir).read_text()).count("<script") == 0
    names = {name for _, attributes in page.tags for name in attributes}
    assert not {name for name in names if name.startswith("on")}
    sources = [attributes["src"] for _, attributes in page.tags if "src" in attributes]
    assert sources and all(source.startswith("data:image/") for source in sources)
    links = [attributes["href"] for _, attributes in page.tags if "href" in attributes]
    assert links and all(re.fullmatch(r"#[a-z]+|data:,", link) for link in links)
    assert f"data: class {runs.EVIL} has one image only" in page.text
    assert 'root: "/data/<i>cifar</i>"' in page.text


def test_the_page_forbids_other_scripts_and_the_network(page):
    policy = next(each["content"] for tag, each in page.tags if each.get("http-equiv") == "Content-Security-Policy")
    rest = "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    assert re.fullmatch(rf"default-src 'none'; script-src 'sha256-[\w+/]{{43}}='; {rest}", policy), policy


def test_the_header_names_model_data_and_training(runs, tmp_path):
    rundir = runs.write_run(tmp_path / "run", runs.SMALL, parameters=11_173_962, trained_parameters=5_130)
    recipe = f"{runs.RECIPE}model: {{name: resnet18_cifar}}\noptim: {{name: sgd}}\ntrain: {{precision: bf16}}\n"
    rundir.recipe.write_text(recipe)
    rundir.write_json("plan.json", {**runs.PLAN, "num_classes": 3, "peak_lr": 0.4, "recipe_name": "cifar10-resnet18"})
    header = write_report(rundir).read_text().partition("<dl")[0]
    for text in (
        "recipe cifar10-resnet18",
        "resnet18_cifar, 11.2 M parameters, 5,130 trained",
        "cifar10, 50,000 training and 1,000 validation images, 3 classes",
        "sgd, peak lr 0.4, batch 128, bf16",
    ):
        assert f"<span>{text}</span>" in header


def test_figures_in_large_print_are_numbers_or_a_dash_with_the_reason_below(runs, tmp_path):
    silent = {"images_per_s": 0.0, "spread": [0.0, 0.0], "n": 0, "excluded_s": 0.0}
    rundir = runs.write_run(tmp_path / "run", runs.SMALL, eval=None, ema=None, best=None, throughput=silent)
    figures = build_run_page(read_run(rundir)).figures
    dashes = [(figure.label, figure.note.partition(":")[0]) for figure in figures if figure.cell.value is None]
    assert dashes == [("top-1", "not evaluated"), ("images/s", "not measured")]
    assert all(figure.cell.text == "–" for figure in figures if figure.cell.value is None)  # noqa: RUF001


def test_the_planned_learning_rate_is_drawn_with_the_end_of_the_run(runs, tmp_path):
    planned = [[0, 0.085], [1, 0.17], [99, 0.0]]
    rundir = runs.write_run(tmp_path / "run", runs.SMALL, steps=40, status="preempted")
    rundir.write_json("plan.json", {**runs.PLAN, "steps_per_epoch": 10, "lr_schedule": planned})
    (chart,) = [chart for chart in charts_of(rundir) if chart.title == "Learning rate"]
    assert chart.note == "peak 0.17, ended at step 40 of 100"
    assert [(line.name, line.points[0], line.points[-1]) for line in chart.lines] == [
        ("lr", (0.0, 0.085), (0.1, 0.17)),
        ("planned", (0.1, 0.17), (9.9, 0.0)),
    ]


def test_bars_and_cells_have_the_contrast_that_wcag_requires():
    css = (Path(report.__file__).parent / "templates" / "page.css").read_text()
    themes = [
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6}|#[0-9a-f]{3})", part))
        for part in re.findall(r":root \{.*?\}", css, re.S)
    ]
    checked = 0
    for colours in themes:
        for name in ("right", "wrong", "line-1", "line-2", "line-3", "line-4"):
            for ground in ("page", "raised"):
                assert contrast(colours[name], colours[ground]) >= 3, (name, ground, colours[name])
                checked += 1
    assert checked == 36  # light, dark and printed


def contrast(one, other):
    """Return the contrast ratio of two colors (WCAG 2.2, relative luminance)."""
    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def charts_of(rundir):
    blocks = [block for section in build_run_page(read_run(rundir)).sections for block in section.blocks]
    return [chart for block in blocks if block.kind == "charts" for chart in block.charts]


def test_every_link_within_the_page_has_a_target(page):
    ids = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    links = [attributes["href"][1:] for tag, attributes in page.tags if tag == "a"]
    assert len(links) > 6 and set(links) <= ids


def test_the_finding_about_speed_is_labelled_bottleneck(page):
    assert "Bottleneck: input-bound" in page.text and "Verdict" not in page.text


def test_the_command_to_try_can_be_pasted(rundir, page):
    assert f"paceline profile {rundir.path} data.workers=6" in page.text


@pytest.mark.parametrize("overrides", ["train.epochs=3; rm -rf ~", "$(reboot)=1", "x=`reboot`"])
def test_an_override_of_a_stranger_is_quoted_or_no_command(runs, tmp_path, overrides):
    verdict = {"bottleneck": "input-bound", "evidence": "", "ceiling": "", "try": overrides}
    page = Page(write_report(runs.write_run(tmp_path / "run", runs.SMALL, verdict=verdict)).read_text())
    commands = [text for text in page.texts if text.startswith("paceline profile")]
    assert all(re.search(r" '\$\(reboot\)=1'$| 'x=`reboot`'$", text) for text in commands), commands
    assert commands or f"To try: {overrides}" in page.text


def test_the_largest_run_fits(runs, tmp_path):
    """A thousand classes, a hundred mistakes, six nodes of eight GPUs and long names."""
    names = tuple(f"{index:04} {'x' * 200}" for index in range(1000))
    shape = runs.Shape(names=names, nodes=6, gpus=8, samples=40, mistakes=100, steps=1200, evals=300)
    rundir = runs.write_run(tmp_path / "large", shape)
    for index in range(100):
        (rundir.worst / f"{index}.{'png' if index % 2 else 'jpg'}").write_bytes(b"\xff\xd8\xff" + bytes(16_000))
    path = write_report(rundir)
    assert path == rundir.report and path.stat().st_size < MAX_REPORT_BYTES
    text = path.read_text()
    assert "no thumbnail" in text and "data:image/jpeg" in text and names[999][:60] in text


def test_the_same_run_gives_the_same_page(rundir):
    assert write_report(rundir).read_bytes() == write_report(rundir).read_bytes()
