"""Results as CSV, whose numbers are those that were measured, and as Markdown, which nothing from outside breaks."""

import csv
import io
import json
from pathlib import Path

import pytest

from paceline.core.csv_cells import from_cell
from paceline.core.errors import PacelineError
from paceline.core.experiments.experiment_dir import ExperimentDir
from paceline.core.experiments.results import LearnResult, LearnTrial
from paceline.report.document import Table
from paceline.report.experiment_tables import build_experiment_page, to_csv, to_markdown_table, write_tables


def records_of(result):
    return list(csv.DictReader(io.StringIO(to_csv(result))))


def test_every_row_has_a_field_for_every_column(result):
    columns, *rows = csv.reader(io.StringIO(to_csv(result)))
    assert len(columns) == len(set(columns)) > 9 and rows
    assert {len(row) for row in rows} == {len(columns)}


def test_numbers_of_the_csv_are_those_that_were_measured(made):
    result = made.ladder()
    row = records_of(result)[1]
    rung = result.rungs[1]
    assert float(row["images_per_s"]) == rung.images_per_s.value
    assert [float(row["over_below_low"]), float(row["over_below_high"])] == [rung.over_below.low, rung.over_below.high]
    assert float(row["stage_forward_s"]) == rung.stages["forward"]
    assert float(row["loss_gap"]) == rung.parity.gap.value and row["parity"] == "same"
    assert int(row["host_bytes"]) == rung.host_bytes


def test_the_csv_of_a_search_has_each_value_once():
    trial = LearnTrial(
        name="a", patch=(), rung=1, share=1.0, seed=0, metric="top1", is_minimized=False, value=0.91234, error="",
        run="", wall_s=1.0,
    )  # fmt: skip
    result = LearnResult(
        recipe="digits", recipe_hash="0", ranks=1, metric="top1", is_minimized=False, seeds=1, budget="1", space=(),
        trials=(trial,), best="a", best_patch=(), best_value=None, recipe_value=None, gain=None, sentence="",
        recipe_file="", spent=1.0, wall_s=1.0, command=(), provenance={},
    )  # fmt: skip
    (row,) = records_of(result)
    assert [name for name, text in row.items() if text.startswith("0.91")] == ["value"]
    assert not any(text.startswith("91") for text in row.values())


def test_ranks_gaps_and_losses_are_in_the_csv(made):
    ladder, scale, tune = made.ladder(), made.scale(), made.tune()
    rung = ladder.rungs[1].model_copy(update={"ranks": 2})
    assert records_of(ladder.model_copy(update={"rungs": (rung,)}))[0]["ranks"] == "2"
    point = scale.points[1].model_copy(update={"top1_gap": made.around(-0.01)})
    assert records_of(scale.model_copy(update={"points": (point,)}))[0]["top1_gap"] == "-0.01"
    tried = tune.tried[0].model_copy(update={"parity": ladder.rungs[1].parity, "explains": "what it is"})
    row = records_of(tune.model_copy(update={"tried": (tried,)}))[0]
    assert (row["parity"], row["loss"], row["explains"]) == ("same", "2.301", "what it is")


def test_seconds_of_an_epoch_and_of_the_counted_steps_are_in_both_tables(made):
    rung = made.ladder().rungs[1].model_copy(update={"epoch_s": 78.5, "steps_s": 12.0})
    point = made.scale().points[1].model_copy(update={"epoch_s": 33.1, "steps_s": 5.1, "speedup": made.around(1.92)})
    batch = made.batches().batches[0].model_copy(update={"epoch_s": 25.8})
    for result, name, found, expected in (
        (made.ladder(), "rungs", rung, {"per epoch": "1 min 18 s", "measured steps": "12.0 s"}),
        (made.scale(), "points", point, {"per epoch": "33.1 s", "speed-up": "2.00x"}),
        (made.batches(), "batches", batch, {"per epoch": "25.8 s"}),
    ):
        result = result.model_copy(update={name: (found,)})
        assert float(records_of(result)[0]["epoch_s"]) == found.epoch_s
        assert name == "batches" or float(records_of(result)[0]["steps_s"]) == found.steps_s
        heading, _, row = (
            [cell.strip() for cell in line.split("|")] for line in to_markdown_table(result).splitlines()
        )
        shown = dict(zip(heading, row, strict=True))
        assert expected.items() <= shown.items()
    assert float(records_of(made.scale().model_copy(update={"points": (point,)}))[0]["speedup"]) == 1.92


def test_a_value_not_measured_is_an_empty_field(made):
    failed = records_of(made.ladder())[5]
    assert failed["status"] == "failed" and failed["rung"] == made.EVIL
    assert (failed["images_per_s"], failed["over_below_low"], failed["stage_forward_s"]) == ("", "", "")
    first = records_of(made.scale())[0]
    assert (first["efficiency"], first["exposed_share"]) == ("", "")


def test_measured_points_stand_before_predicted_ones(made):
    rows = records_of(made.prediction())
    assert [row["basis"] for row in rows] == ["measured"] * 3 + ["predicted"] * 4
    assert float(rows[-1]["high_s"]) == float("inf")
    assert rows[0]["fitted_s"] and not rows[-1]["fitted_s"]
    assert float(rows[-1]["part_fixed_s"]) == 12.0


def test_batches_are_the_rows_of_a_study_of_batches(made):
    rows = records_of(made.batches())
    assert [(row["batch_size"], row["warmup"]) for row in rows[:3]] == [("128", "5ep"), ("512", "5ep"), ("2048", "5ep")]
    assert rows[-1]["reached"] == "0" and rows[-1]["to_target_s"] == ""


def test_arguments_of_a_patch_can_be_parsed_from_the_table(made):
    import shlex

    for row, rung in zip(records_of(made.ladder()), made.ladder().rungs, strict=True):
        assert tuple(shlex.split(from_cell(row["patch"]))) == rung.patch


def test_a_markdown_table_has_a_line_for_each_row_and_no_markup_from_outside(result, made):
    lines = to_markdown_table(result).splitlines()
    widths = {line.count("|") for line in lines}
    assert len(widths) == 1 and set(lines[1]) == set("| -")
    assert "<script>" not in to_markdown_table(result)


def test_a_markdown_table_has_ratios_with_their_intervals(made):
    line = to_markdown_table(made.ladder()).splitlines()[3]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["resident", "data.loader=resident", "190 (184 to 196)", "1.88x (1.84 to 1.92)",
                     "1.88x (1.81 to 1.96)", "410 MB", "2.90 s", "same", "kept"]  # fmt: skip


def test_names_and_sentences_align_left_and_numbers_right(made):
    (table,) = [
        block
        for section in build_experiment_page(ExperimentDir(Path("e")), made.tune()).sections
        for block in section.blocks
        if isinstance(block, Table) and block.title == "Tried"
    ]
    assert [column.title for column in table.columns if not column.is_number] == [
        "settings", "changes", "over", "outcome"
    ]  # fmt: skip


def test_both_tables_are_written_into_the_folder(result, made, tmp_path):
    folder = made.write_experiment(tmp_path / "experiment", result)
    write_tables(folder, result)
    assert folder.table.read_text() == to_csv(result)
    assert folder.markdown.read_text() == to_markdown_table(result)


def test_a_result_that_was_read_back_gives_the_same_tables(result, made, tmp_path):
    folder = made.write_experiment(tmp_path / "experiment", result)
    assert to_csv(folder.read()) == to_csv(result)
    assert to_markdown_table(folder.read()) == to_markdown_table(result)
    assert json.loads(folder.result.read_text())["kind"] == result.kind


def test_a_missing_folder_is_a_one_line_error(result, made, tmp_path):
    folder = made.write_experiment(tmp_path / "experiment", result)
    folder.table.mkdir()
    with pytest.raises(PacelineError, match=r"table\.csv: cannot be written"):
        write_tables(folder, result)
