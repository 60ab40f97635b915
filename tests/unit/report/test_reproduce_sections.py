"""How to reproduce a run: the command as typed, and the changes to its recipe."""

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.report.document import Command, Paragraph, Table
from paceline.report.read_run import RunData, read_run
from paceline.report.reproduce_sections import override_chips, reproduce_section

CHANGES = [
    {"field": "optim.lr", "base": 0.1, "value": 0.05, "typed": True},
    {"field": "data.source.root", "base": None, "value": "<b>x</b>", "typed": True},
    {"field": "optim.momentum", "base": 0.9, "value": None, "typed": False},
]


def run_of(changes: object) -> RunData:
    return RunData(Path("runs/first"), plan={"recipe_name": "digits", "changes": changes})


def blocks_of(run, kind):
    return [block for block in reproduce_section(run).blocks if isinstance(block, kind)]


def test_changes_are_listed_with_the_value_of_the_base_recipe() -> None:
    (table,) = blocks_of(run_of(CHANGES), Table)
    assert table.title == "Changes to the recipe digits"
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["optim.lr", "0.1", "0.05", "command line"],
        ["data.source.root", "-", "<b>x</b>", "command line"],
        ["optim.momentum", "0.9", "-", "follows"],
    ]


def test_chips_are_the_overrides_that_were_typed() -> None:
    assert override_chips(run_of(CHANGES)) == ["optim.lr=0.05", "data.source.root=<b>x</b>"]
    many = [{"field": f"a.b{number}", "value": number, "typed": True} for number in range(11)]
    assert override_chips(run_of(many))[7:] == ["a.b7=7", "3 more"]


def test_a_whole_number_of_a_float_field_reads_as_it_is_typed() -> None:
    changes = [{"field": "train.epochs", "base": 16.0, "value": 8.0, "typed": True}]
    assert override_chips(run_of(changes)) == ["train.epochs=8"]


@pytest.mark.parametrize("changes", [None, 7, "x", [7, None, {}, {"field": 3}], {"field": "a"}])
def test_records_of_another_form_are_no_error(changes) -> None:
    assert override_chips(run_of(changes)) == [] and not blocks_of(run_of(changes), Table)


def test_an_unchanged_recipe_is_said_to_be_so() -> None:
    assert any("digits, without changes" in each.text for each in blocks_of(run_of([]), Paragraph))
    assert not any("without changes" in each.text for each in blocks_of(RunData(Path("run")), Paragraph))


def test_command_and_citation(runs, tmp_path) -> None:
    run = read_run(runs.write_run(tmp_path / "run", runs.SMALL))
    typed, again = blocks_of(replace(run, path=Path("runs/my run")), Command)
    assert typed.text == "paceline train cifar10-resnet18 'data.source.root=/tmp/<b>x' --ranks=2"
    assert again.text == "paceline train 'runs/my run'"
    (cited,) = [each.text for each in blocks_of(run, Paragraph) if each.text.startswith("Cite this run: run; top-1 ")]
    assert "recipe a53258041b55; weights sha256 3f92c4bf85df; paceline 0.1.0; torch 2.11.0+cu130" in cited
