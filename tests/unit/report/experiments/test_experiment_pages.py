"""Pages of experiments show measurements and what is missing, and escape untrusted text."""

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import PacelineError
from paceline.core.run_dir import RunDir
from paceline.core.statistics import Interval
from paceline.report.document import Chart, ChartLine, ChartRow, PageSection, Table, TableCell, TableColumn
from paceline.report.experiment_common import ExperimentReport
from paceline.report.experiment_tables import build_experiment_page
from paceline.report.tuning_page import build_sweep_page
from paceline.report.write import (
    MAX_REPORT_BYTES,
    PageLimit,
    render_report,
    truncate_page,
    write_report,
)


def update(result, **more):
    return type(result).model_validate({**result.model_dump(), **more})


@pytest.fixture
def text_of(made, tmp_path):
    """Return a function that returns the report of a result as text of a kind."""

    def text_of(result, kind="html"):
        folder = made.write_experiment(tmp_path / f"{result.kind}-{len(list(tmp_path.iterdir()))}", result)
        return render_report(RunDir(folder.path), kind)

    return text_of


def visible_text(page):
    """Return the text of a page, without markup and style."""
    body = page.partition("<body>")[2]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def test_a_report_of_an_experiment_is_written_into_its_folder(result, made, tmp_path):
    folder = made.write_experiment(tmp_path / "cpu-20261121-101500", result)
    assert write_report(RunDir(folder.path)) == folder.report
    assert "cpu-20261121-101500" in folder.report.read_text()


def test_no_page_has_markup_from_outside(result, text_of, without_own_scripts):
    page = without_own_scripts(text_of(result))
    assert "<script" not in page and "https://" not in page.replace("https://www.w3.org", "")
    assert "window.hacked" in html.unescape(page)
    assert "<script" not in text_of(result, "md")


def test_every_page_names_its_experiment_and_the_source_of_its_figures(result, text_of):
    page = text_of(result)
    assert "Numbers are those of experiment.json" in page and "Run report" not in page
    assert "batch_size: 128" in page


def test_no_page_shows_escaped_whitespace(result, text_of):
    assert "\\n" not in visible_text(text_of(result))


@pytest.mark.parametrize("kind", ["scale", "batches"])
def test_a_point_without_speed_has_its_reason(made, text_of, kind):
    result = getattr(made, kind)()
    name = "points" if result.points else "batches"
    points = [point.model_copy(update={"images_per_s": None}) for point in getattr(result, name)]
    page = visible_text(text_of(result.model_copy(update={name: tuple(points)})))
    ended = [point for point in points if point.runs]
    note = f"no speed: no run had more steps than the {result.warmup_steps} of measure.warmup_steps (set fewer)"
    assert ended and page.count(note) == len(ended)
    assert "no speed" not in visible_text(text_of(result))


def test_folders_of_runs_are_listed(made, text_of):
    assert "trials/first-1, trials/first-2" in visible_text(text_of(made.ladder()))


def test_unreadable_files_of_the_folder_are_named(made, tmp_path):
    folder = made.write_experiment(tmp_path / "e", made.ladder())
    folder.recipe.write_text("# long\n" + "#" * (300 << 10))
    assert "recipe.yaml: only its first 262,144 bytes are shown" in render_report(RunDir(folder.path), "html")


def test_of_many_rows_the_first_are_open(made, text_of):
    result = made.tune()
    page = text_of(update(result, tried=[update(result.tried[0], parity=None)] * 50))
    assert page.count("<summary>more settings</summary>") == 1
    assert page.partition("<summary>more settings</summary>")[0].count("data.loader=<wbr>resident</code>") == 40
    assert "the first 40 of 50 are drawn" in page and page.count('class="track"') == 42


def test_the_json_report_is_the_result(result, text_of):
    assert json.loads(text_of(result, "json")) == json.loads(result.model_dump_json())


def test_dropped_and_failed_rungs_have_their_reason(made, text_of):
    page = visible_text(text_of(made.ladder()))
    assert "dropped: slower: 0.75x (0.73 to 0.77)" in page
    assert "left out: one rank has nobody to average with" in page
    assert f"failed: {made.EVIL} failed" in page
    assert "5 of 8 rungs kept" in page


def test_stages_of_a_step_are_a_table_of_milliseconds_beside_the_bars(made, text_of, tmp_path):
    result = made.ladder()
    page = build_experiment_page(made.write_experiment(tmp_path / "found", result), result)
    (steps,) = [section for section in page.sections if section.key == "steps"]
    (table,) = [block for block in steps.blocks if isinstance(block, Table) and "millisec" in block.title]
    headings = [column.title for column in table.columns]
    assert headings == ["rung", "step", "data wait", "copy to device", "forward", "loss", "backward", "optimizer"]
    rung = result.rungs[1]
    row = next(row for row in table.rows if row[0].text == rung.name)
    assert [cell.value for cell in row[1:]] == [
        rung.step_s, *(rung.stages[name] for name in ("data_wait", "h2d", "forward", "loss", "backward", "optimizer"))
    ]  # fmt: skip
    assert row[2].text == f"{1000 * rung.stages['data_wait']:.2f}"
    assert text_of(result, "md").count("Time per step by stage") == 1  # the bars are no table of their own there
    assert "Time per step by stage" in visible_text(text_of(result))


def test_bars_keep_their_width_with_intervals_of_any_length(made, text_of):
    result = made.ladder()
    wide = update(result.rungs[1], images_per_s=Interval(value=190.0, low=-1e5, high=1e5, n=2))
    page = text_of(update(result, rungs=(result.rungs[0], wide, *result.rungs[2:])))
    shares = [float(each) for each in re.findall(r'class="part c-kept" style="width:([\d.]+)%"', page)]
    assert max(shares) == pytest.approx(100 / 1.5, abs=0.01)  # percents are written with three decimals
    assert 'class="within" style="left:0.000%;width:100.000%"' in page


def test_the_command_to_take_has_all_that_was_kept(made, text_of, tmp_path):
    page = visible_text(text_of(made.ladder()))
    kept = "data.loader=resident model.memory_format=channels_last train.compile=true train.threads=2"
    assert f"paceline train {tmp_path}/ladder-0 {kept} --ranks 1" in page


@pytest.mark.parametrize(
    "made_for_it, out, options",
    [
        ("source.pack", "packed.pack", ""),
        ("source-256.pack", "packed.pack", " --resize 256 --quality 90"),
        ("source.lmdb", "packed.lmdb", " --format lmdb"),
    ],
)
def test_data_that_a_ladder_made_are_made_anew_before_they_are_trained_with(
    made, text_of, tmp_path, made_for_it, out, options
):
    """The folder of the experiment has removed them, so that its path would lead nowhere."""
    folder = tmp_path / "ladder-0"
    patch = ("data.source.name=pack", f"data.source.root={folder}/data/{made_for_it}", "train.compile=true")
    section = text_of(update(made.ladder(), best_patch=patch), "md").partition("## Next steps")[2]
    commands = [line for line in section.splitlines() if line.startswith("paceline ")][:2]
    assert commands == [
        f"paceline data pack {folder} {out}{options}",
        f"paceline train {folder} data.source.name=pack data.source.root={out} train.compile=true --ranks 1",
    ]


def test_data_outside_the_experiment_are_used_in_place(made, text_of, tmp_path):
    patch = ("data.source.name=pack", "data.source.root=/photos/data/source.pack")
    page = visible_text(text_of(update(made.ladder(), best_patch=patch)))
    assert "data pack" not in page
    assert f"paceline train {tmp_path}/ladder-0 {' '.join(patch)} --ranks 1" in page


def test_ranks_are_a_column_if_rungs_differ_and_the_command_has_those_of_the_best(made, text_of):
    result = made.ladder()
    assert "| ranks |" not in text_of(result, "md")
    rungs = [update(rung, ranks=4 if rung.name == "threads" else 1) for rung in result.rungs]
    page = text_of(update(result, rungs=rungs), "md")
    assert "| rung | ranks | images/s |" in page and "train.threads=2 --ranks 4\n" in page


def test_a_tuned_recipe_is_trained_on_the_ranks_it_was_tuned_for(made, text_of):
    assert "paceline train runs/tune/tuned.yaml --ranks 2" in visible_text(text_of(update(made.tune(), ranks=2)))


def test_a_search_lists_trials_parity_and_bottleneck(made, text_of):
    result = made.tune()
    verdict = {"bottleneck": "compute-bound", "evidence": "backward takes 61 % of a step", "ceiling": "1.02x"}
    tried = update(result.tried[0], explains="the whole set beside the model", parity=made.ladder().rungs[1].parity)
    page = visible_text(
        text_of(update(result, tried=[tried], verdict=verdict, first_verdict={"bottleneck": "input-bound"}))
    )
    assert "the whole set beside the model" in page and "Training parity" in page and "2.3010" in page
    assert "the tuned recipe: compute-bound" in page and "backward takes 61 % of a step" in page
    assert "The recipe as it was: input-bound." in page


@pytest.mark.parametrize("kind", ["ladder", "weak", "batches", "tune"])
def test_a_sum_of_runs_is_not_called_the_time_of_it_all(made, text_of, kind):
    page = visible_text(text_of(made.all_results()[kind]))
    assert "total time of runs" in page and "wall clock of it all" not in page


def test_a_ladder_of_one_rung_has_nothing_to_take(made, text_of):
    result = made.ladder()
    page = visible_text(text_of(update(result, rungs=result.rungs[:1], best="first", best_patch=())))
    assert "No change was kept" in page and "No losses were compared." in page


def test_a_ladder_whose_rungs_all_failed_is_still_a_page(made, text_of):
    result = made.ladder()
    page = visible_text(text_of(update(result, rungs=result.rungs[5:7], best="", best_patch=())))
    assert "0 of 2 rungs kept" in page and "No rung's memory or start-up was measured." in page


def test_scaling_without_intervals_notes_the_single_measurement(made, text_of):
    result = made.scale(ranks=(1, 2), failed=0)
    points = [update(point, images_per_s=Interval(value=point.images_per_s.value)) for point in result.points]
    page = visible_text(text_of(update(result, points=points)))
    assert "measured once" in page and "measured, with a caution" in page


def test_an_interval_of_two_runs_that_reaches_below_zero_is_a_page_too(made, text_of):
    result = made.scale(ranks=(1, 2), failed=0)
    wide = [update(point, images_per_s=made.around(point.images_per_s.value, 1.5, 2)) for point in result.points]
    assert "-500 to 2,500" in visible_text(text_of(update(result, points=wide)))


def test_scaling_whose_points_all_failed_is_still_a_page(made, text_of):
    page = visible_text(text_of(made.scale(ranks=(), failed=2)))
    assert "1 of 1 points failed" in page and "No number of ranks was measured." in page


def test_the_efficiency_of_the_smallest_number_of_ranks_is_drawn_though_it_is_no_measurement(made, text_of):
    page = text_of(made.scale())
    assert "ranks 1: efficiency 100" in page and "ranks 8: efficiency 88.47 (87.15 to 89.80)" in page


def test_a_caution_is_on_the_page(made, text_of):
    assert "Caution: 8 ranks share 2 cores: more machines" in visible_text(text_of(made.scale()))


def test_accuracy_of_whole_runs_is_a_chart_and_a_column(made, text_of):
    result = made.scale(failed=0)
    points = [update(point, top1=made.around(0.9 - 0.01 * point.ranks, 0.01)) for point in result.points]
    gap = Interval(value=-0.01, low=-0.02, high=0.001, n=3)
    points[1:] = [update(point, top1_gap=gap) for point in points[1:]]
    page = visible_text(text_of(update(result, points=points, caution="")))
    assert "Accuracy over ranks" in page and "89.00 %" in page and "88.11 to 89.89" in page
    assert "against the fewest ranks" in page and "-1.00 points" in page and "-2.00 to +0.10" in page
    assert "4 points measured" in page


def test_a_study_that_reached_no_target_is_still_a_page(made, text_of):
    result = made.batches()
    points = [update(point, reached=0, to_target_s=None, to_target_epochs=None) for point in result.batches]
    page = visible_text(text_of(update(result, batches=points)))
    assert "soonest" not in page and "0 of 18" in page


def test_the_findings_of_a_study_are_on_its_page(made, text_of):
    sentences = ("Batch 2048 reaches 75 % in 0.14 of the time of batch 128.", made.EVIL)
    page = visible_text(text_of(update(made.batches(), sentences=sentences)))
    assert f"{sentences[0]} {made.EVIL}" in page


def test_a_study_names_the_command_that_draws_its_learning_curves(made, tmp_path):
    folder = made.write_experiment(tmp_path / "a study", made.batches())
    page = build_experiment_page(folder, made.batches())
    (command,) = [block.text for section in page.sections if section.key == "curves" for block in section.blocks[1:]]
    quoted = f"'{tmp_path}/a study'"
    assert command == f"paceline compare {quoted}/trials/* --target 0.75 --out {quoted}/curves.html"
    none = update(made.batches(), batches=[update(each, runs=()) for each in made.batches().batches])
    assert not [section for section in build_experiment_page(folder, none).sections if section.key == "curves"]


def test_a_study_without_a_target_does_not_mention_one(made, text_of, tmp_path):
    result = made.batches()
    points = [update(point, reached=0, to_target_s=None, to_target_epochs=None) for point in result.batches]
    page = visible_text(text_of(update(result, batches=points, target=None))).replace(str(tmp_path), "")
    assert "reached" not in page and "target" not in page and "400" in page


def test_a_recipe_without_warm_up_or_rule_is_called_after_its_batch(made, text_of):
    result = made.batches()
    points = [update(point, warmup="", lr_rule="any") for point in result.batches[:1]]
    page = visible_text(text_of(update(result, batches=points)))
    assert "batch 128, peak 0.1" in page and "warm-up ," not in page and "any LR" not in page


def test_a_batch_with_the_same_rate_by_all_rules_starts_every_line(made, text_of):
    result = made.batches()
    first, *others = [point for point in result.batches if point.warmup == "5ep"]
    rules = [update(point, lr_rule=rule) for rule in ("sqrt", "linear") for point in others]
    page = text_of(update(result, batches=[update(first, lr_rule="any"), *rules]), "md")
    lines = [line for line in page.splitlines() if line.startswith("| Speed, ")]
    assert [line.split(" | ")[0] for line in lines] == ["| Speed, sqrt, 5ep", "| Speed, linear, 5ep"]
    assert {line.split(" | ")[2] for line in lines} == {"416"}


def test_an_unbounded_interval_is_text_only(made, text_of):
    page = text_of(made.prediction())
    assert "1 min 33 s or more" in page and "inf" not in visible_text(page).replace("info", "")
    drawn = re.findall(r'class="bounds line-0" d="([^"]*)"', page)
    assert [bars.count("M") for bars in drawn] == [3] * 3  # of four numbers of ranks, as time, speed-up, efficiency


def test_a_prediction_names_its_basis(made, text_of):
    page = visible_text(text_of(made.prediction()))
    assert "T = images/(N b) [b t + c1 [N>1] + c2 2(n-1)/n] + F" in page and "-0.99 %" in page
    assert f"No point tells c1 from c2: {made.EVIL}." in page


def test_measurements_are_drawn_beside_predictions_and_the_ideal(made, tmp_path):
    points = [update(point, efficiency=1 - 0.01 * point.ranks, speedup=point.ranks - 0.01 * point.ranks**2,
                     fitted_efficiency=0.97) for point in made.prediction().points]  # fmt: skip
    result = update(made.prediction(), points=points)
    page = build_experiment_page(made.write_experiment(tmp_path / "found", result), result)
    (time,) = [section for section in page.sections if section.key == "time"]
    drawn, *_, table = time.blocks
    by_title = {chart.title: {line.name: dict(line.points) for line in chart.lines} for chart in drawn.charts}
    assert by_title["Efficiency"]["measured"] == pytest.approx({1: 99.0, 2: 98.0, 4: 96.0})
    assert by_title["Efficiency"]["fitted"] == pytest.approx(dict.fromkeys((1, 2, 4), 97.0))
    assert set(by_title["Efficiency"]["predicted"]) == {8, 64, 512, 4096}
    assert by_title["Speed-up"]["measured"] == pytest.approx({1: 0.99, 2: 1.96, 4: 3.84})
    assert by_title["Speed-up"]["ideal"] == {ranks: ranks for ranks in (1, 2, 4, 8, 64, 512, 4096)}
    assert {chart.title: chart.rule for chart in drawn.charts}["Efficiency"] == (100.0, "ideal")
    assert [row[0].text for row in table.rows] == ["1", "2", "4", "8", "64", "512", "4,096"]
    assert [row[3].note for row in table.rows][:4] == ["measured"] * 3 + ["1 h 00 min to 1 h 17 min"]


def test_an_older_prediction_without_speed_up_is_still_a_page(made, text_of):
    page = visible_text(text_of(made.prediction()))
    assert "Measured and predicted" in page and "None" not in page


def test_a_prediction_from_a_run_has_no_points(made, text_of):
    result = update(made.prediction(), basis="run", points=(), network="ndr, 50 GB/s", notes=())
    page = visible_text(text_of(result))
    assert "Collective times follow ndr, 50 GB/s." in page
    assert "1 min 33 s or more is likely" in page and "95 %" not in page


def test_a_search_without_gain_reports_it(made, text_of):
    page = visible_text(text_of(update(made.tune(), best_patch=(), gain=None, recipe_file="", tried=())))
    assert "nothing faster was found" in page and "keep the recipe" in page


@pytest.mark.parametrize("kind", ["html", "md"])
def test_a_search_names_trials_that_ran_out_of_memory(made, text_of, kind):
    assert "out of memory" in text_of(made.tune(), kind)


def test_an_experiment_that_has_not_ended_has_no_report(made, tmp_path):
    folder = made.write_experiment(tmp_path / "e", made.ladder())
    folder.trials.mkdir()
    folder.result.unlink()
    with pytest.raises(PacelineError, match="has not ended"):
        render_report(RunDir(folder.path), "html")


def test_numbers_that_are_no_measurement_make_no_page_fail(made, text_of):
    nan = float("nan")
    result = made.scale(ranks=(1, 2), failed=0)
    points = [update(point, images_per_s=Interval(value=nan, low=nan, high=nan)) for point in result.points]
    assert "nan" in visible_text(text_of(update(result, points=points)))
    assert "1,920" in visible_text(text_of(update(result, points=[points[0], result.points[1]])))
    predicted = [update(each, time_s=float("inf"), efficiency=0.0) for each in made.prediction().predictions]
    assert "or more" in visible_text(text_of(update(made.prediction(), predictions=predicted, points=())))


MANY = 1000
ROWS = ("rungs", "predictions", "points", "batches", "tried")
AXIS = {"batches": "batch_size", "points": "ranks", "predictions": "ranks"}


def with_many(result):
    """Return a result with a thousand rows, and of a study with a sentence each."""
    name = next(name for name in ROWS if getattr(result, name, ()))
    rows = getattr(result, name)
    many = [rows[place % len(rows)] for place in range(MANY)]
    if name in AXIS:
        many = [row.model_copy(update={AXIS[name]: place + 1}) for place, row in enumerate(many)]
    more = {"sentences": ("x" * 500,) * MANY} if name == "batches" else {}
    return result.model_copy(update={name: tuple(many), **more})


def test_a_page_of_a_thousand_rows_is_truncated_below_a_megabyte_with_a_note(result, made, tmp_path):
    """Quotes of a recipe take five bytes each in a page."""
    folder = made.write_experiment(tmp_path / "many", with_many(result))
    folder.recipe.write_text(("a: " + '"' * 40 + "\n") * 6000, encoding="utf-8")
    page = render_report(RunDir(folder.path), "html")
    assert len(page.encode()) < MAX_REPORT_BYTES
    assert "Truncated to" in visible_text(page) and "(recipe.yaml has the rest)" in visible_text(page)
    few = made.write_experiment(tmp_path / "few", result)
    assert "Truncated to" not in visible_text(render_report(RunDir(few.path), "html"))


def test_truncation_keeps_the_first_rows_and_both_ends_of_a_line():
    points = [(float(x), 2.0 * x) for x in range(11)]
    table = Table("t", [TableColumn("a")], [[TableCell(str(row))] for row in range(9)])
    blocks = [table, ChartRow([Chart("c", "x", "y", [ChartLine("l", points)])])]
    page = ExperimentReport(Path("e")).build_page(
        "About", ("ended", "good"), (), (), [PageSection("rungs", "S", blocks)]
    )
    assert truncate_page(page, PageLimit(11, 10, 0)) == page
    (section,) = truncate_page(page, PageLimit(3, 10, 0)).sections
    table, charts, note = section.blocks
    assert [row[0].text for row in table.rows] == ["0", "1", "2"]
    assert list(charts.charts[0].lines[0].points) == [(0.0, 0.0), (5.0, 10.0), (10.0, 20.0)]
    assert note.text.endswith("3 rows per table: paceline report --format json has all.")


def test_a_file_that_is_cut_is_no_truncated_table(result, made, tmp_path):
    folder = made.write_experiment(tmp_path / "e", result)
    folder.recipe.write_text("seed: 0\n" * 99, encoding="utf-8")
    whole = build_experiment_page(folder, result)
    few = truncate_page(
        replace(whole, sections=[each for each in whole.sections if each.key == "origin"]), PageLimit(9999, 50, 0)
    )
    assert [each.kind for each in few.sections[0].blocks] == [each.kind for each in whole.sections[-1].blocks]


def test_a_part_of_a_prediction_has_one_name_on_the_whole_page(made, text_of):
    parts = {"compute": 40.0, "several_ranks": 5.0, "start_up": 12.0}
    predicted = [update(each, parts=parts, dominates="start_up") for each in made.prediction().predictions]
    page = visible_text(text_of(update(made.prediction(), predictions=predicted)))
    assert "start-up" in page and "several ranks" in page
    for other in ("start_up", "start up", "several-ranks", "several_ranks"):
        assert other not in page, other


def test_no_heading_of_a_scaling_page_is_repeated_by_its_first_chart(made, text_of):
    text = text_of(made.all_results()["weak"])
    headings = re.findall(r"<h2[^>]*>(.*?)</h2>", text)
    charts = re.findall(r"<figcaption><b>(.*?)</b>", text)
    assert "Waiting per step" in headings and charts
    assert not set(headings) & set(charts)


def test_numbers_that_are_swept_are_a_curve_and_names_are_bars(made):
    report = ExperimentReport(Path("runs/profile-vary-digits"))
    page = experiment_charts(build_sweep_page(report, made.sweep(("1", "2", "8", "64"))))
    assert [chart.title for chart in page] == ["Speed", "Seconds per epoch", "Step time"]
    assert [list(chart.lines[0].points) for chart in page[:2]] == [
        [(1, 200), (2, 300), (8, 400)], [(1, 250), (2, 500 / 3), (8, 125)],
    ]  # fmt: skip
    assert all(chart.log_x for chart in page)
    assert not any(
        chart.log_x for chart in experiment_charts(build_sweep_page(report, made.sweep(("0", "2", "8", "9"))))
    )
    assert (
        experiment_charts(build_sweep_page(report, made.sweep(("native", "threads", "processes"), "data.loader"))) == []
    )


def experiment_charts(page):
    blocks = [block for section in page.sections for block in section.blocks]
    return [chart for block in blocks if isinstance(block, ChartRow) for chart in block.charts]
