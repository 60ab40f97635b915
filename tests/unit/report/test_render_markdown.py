"""The report as Markdown and as JSON: the same figures, and nothing from outside is markup."""

import json
import re

import pytest

from paceline.core.errors import RecipeError
from paceline.report.render import escape_markdown
from paceline.report.write import render_report


@pytest.fixture(scope="module")
def rundir(runs, tmp_path_factory):
    shape = runs.Shape(names=(runs.EVIL, *runs.NAMES[1:]), steps=40, samples=5)
    return runs.write_run(tmp_path_factory.mktemp("runs") / "digits", shape)


@pytest.fixture(scope="module")
def markdown(rundir):
    return render_report(rundir, "md")


def outside_of_code(text):
    return re.sub(r"(?ms)^```.*?^```$", "", text)


def test_markdown_has_the_figures_and_the_sections(markdown):
    assert markdown.startswith("# digits\n")
    for text in (
        "95.00 %",
        "2,713",
        "**Bottleneck: input-bound** (speed, warning)",
        "## Where the time went",
        "| data wait | 41.2 s |",
    ):
        assert text in markdown
    assert re.search(r"(?m)^```sh\npaceline profile \S*digits data.workers=6\n```$", markdown)


def test_untrusted_markup_is_escaped_in_markdown(runs, markdown):
    text = outside_of_code(markdown)
    assert "<" not in text and "](" not in text and "`" not in text
    assert escape_markdown(runs.EVIL) in text


def test_every_row_of_a_markdown_table_has_as_many_cells_as_its_head(markdown):
    rows = [line for line in outside_of_code(markdown).splitlines() if line.startswith("|")]
    heads = [index for index, line in enumerate(rows) if re.fullmatch(r"\|( --- \|)+", line)]
    assert len(heads) > 12
    for begin, end in zip(heads, [*heads[1:], len(rows) + 1], strict=True):
        assert {row.count("|") for row in rows[begin - 1 : end - 1]} == {rows[begin].count("|")}


def test_a_recipe_cannot_end_the_block_it_is_shown_in(runs, tmp_path):
    rundir = runs.write_run(tmp_path / "run", runs.SMALL)
    rundir.recipe.write_text("# recipe 0\nname: |\n```\n# Owned\n````\n")
    assert re.search(r"(?m)^`````yaml\n# recipe 0\nname: \|\n```\n# Owned\n````\n`````$", render_report(rundir, "md"))


@pytest.mark.parametrize("text", ["a_b", "data wait", "12.3 %", "x-y (z)"])
def test_plain_text_is_unchanged(text):
    assert escape_markdown(text) == text


def test_json_has_the_result_as_it_is_and_all_the_page_shows(rundir):
    data = json.loads(render_report(rundir, "json"))
    assert data["result"] == json.loads((rundir.path / "result.json").read_text())
    assert len(data["evals"]) == 12 and data["steps"]["records"] == len(data["steps"]["points"]) == 40
    assert data["classes"][3] == {"class": "cat", "images": 100, "correct": 87, "accuracy": 0.87}
    assert sum(map(sum, data["confusion"])) == 1000
    assert data["warnings"]["total"] == data["bad_images"]["total"] == 1
    assert data["telemetry"][0]["gpus"] == {"0": "NVIDIA H200", "1": "NVIDIA H200"}
    assert data["mistakes"][0]["file"] == "0.jpg" and "picture" not in data["mistakes"][0]
    assert data["profile"]["ceilings"]["free_data"] == 1.2239 and data["problems"] == []


def test_another_format_is_refused(rundir):
    with pytest.raises(RecipeError, match=r"^--format: 'pdf' is unknown \(use html, md or json\)$"):
        render_report(rundir, "pdf")
