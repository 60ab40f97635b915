"""Pages of experiments: what was measured is told, what is missing is told too, and nothing from outside is markup."""

import html
import json
import re

import pytest

from paceline.core.errors import PacelineError
from paceline.core.interval import Interval
from paceline.core.rundir import RunDir
from paceline.report import report_text, write_report


def update(result, **more):
    return type(result).model_validate({**result.model_dump(), **more})


@pytest.fixture
def text_of(made, tmp_path):
    """Return a function that returns the report of a result as text of a kind."""

    def text_of(result, kind="html"):
        folder = made.write_experiment(tmp_path / f"{result.kind}-{len(list(tmp_path.iterdir()))}", result)
        return report_text(RunDir(folder.path), kind)

    return text_of


def words_of(page):
    """Return what a page says, without its markup and style."""
    body = page.partition("<body>")[2]
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


def test_a_report_of_an_experiment_is_written_into_its_folder(result, made, tmp_path):
    folder = made.write_experiment(tmp_path / "cpu-20261121-101500", result)
    assert write_report(RunDir(folder.path)) == folder.report
    assert "cpu-20261121-101500" in folder.report.read_text()


def test_no_page_has_markup_from_outside(result, text_of):
    page = text_of(result)
    assert "<script" not in page and "https://" not in page.replace("https://www.w3.org", "")
    assert "window.hacked" in html.unescape(page)
    assert "<script" not in text_of(result, "md")


def test_every_page_says_what_it_is_of_and_where_its_figures_are_from(result, text_of):
    page = text_of(result)
    assert "Figures are those of experiment.json" in page and "Run report" not in page
    assert "batch_size: 128" in page


def test_the_json_report_is_the_result(result, text_of):
    assert json.loads(text_of(result, "json")) == json.loads(result.model_dump_json())


def test_rungs_that_lost_or_failed_are_told_with_the_reason(made, text_of):
    page = words_of(text_of(made.ladder()))
    assert "dropped: slower: 0.75x (0.73 to 0.77)" in page
    assert "left out: one rank has nobody to average with" in page
    assert f"failed: {made.EVIL} failed" in page
    assert "5 of 8 rungs kept" in page


def test_an_interval_of_any_length_leaves_room_for_the_bars(made, text_of):
    result = made.ladder()
    wide = update(result.rungs[1], images_per_s=Interval(value=190.0, low=-1e5, high=1e5, n=2))
    page = text_of(update(result, rungs=(result.rungs[0], wide, *result.rungs[2:])))
    shares = [float(each) for each in re.findall(r'class="part c-kept" style="width:([\d.]+)%"', page)]
    assert max(shares) == pytest.approx(100 / 1.5, abs=0.01)  # percents are written with three decimals
    assert 'class="within" style="left:0.000%;width:100.000%"' in page


def test_the_command_to_take_has_all_that_was_kept(made, text_of, tmp_path):
    page = words_of(text_of(made.ladder()))
    kept = "data.loader=resident model.memory_format=channels_last train.compile=true train.threads=2"
    assert f"paceline train {tmp_path}/ladder-0 {kept}" in page


def test_a_ladder_of_one_rung_has_nothing_to_take(made, text_of):
    result = made.ladder()
    page = words_of(text_of(update(result, rungs=result.rungs[:1], best="first", best_patch=())))
    assert "No change was kept" in page and "No two rungs' losses were compared." in page


def test_a_ladder_whose_rungs_all_failed_is_still_a_page(made, text_of):
    result = made.ladder()
    page = words_of(text_of(update(result, rungs=result.rungs[5:7], best="", best_patch=())))
    assert "0 of 2 rungs kept" in page and "No rung's memory or start-up was measured." in page


def test_scaling_without_intervals_says_that_it_was_measured_once(made, text_of):
    result = made.scale(ranks=(1, 2), failed=0)
    points = [update(point, images_per_s=Interval(value=point.images_per_s.value)) for point in result.points]
    page = words_of(text_of(update(result, points=points)))
    assert "measured once" in page and "ranks share what they would each have" in page


def test_an_interval_of_two_runs_that_reaches_below_zero_is_a_page_too(made, text_of):
    result = made.scale(ranks=(1, 2), failed=0)
    wide = [update(point, images_per_s=made.around(point.images_per_s.value, 1.5, 2)) for point in result.points]
    assert "-500 to 2,500" in words_of(text_of(update(result, points=wide)))


def test_scaling_whose_points_all_failed_is_still_a_page(made, text_of):
    page = words_of(text_of(made.scale(ranks=(), failed=2)))
    assert "1 of 1 points failed" in page and "No number of ranks could be measured." in page


def test_the_efficiency_of_the_smallest_number_of_ranks_is_drawn_though_it_is_no_measurement(made, text_of):
    page = text_of(made.scale())
    assert "ranks 1: efficiency 100" in page and "ranks 8: efficiency 88.47 (87.15 to 89.80)" in page


def test_a_caution_is_told(made, text_of):
    assert "Caution: 8 ranks share 2 cores: more machines" in words_of(text_of(made.scale()))


def test_accuracy_of_whole_runs_is_a_chart_and_a_column(made, text_of):
    result = made.scale(failed=0)
    points = [update(point, top1=made.around(0.9 - 0.01 * point.ranks, 0.01)) for point in result.points]
    page = words_of(text_of(update(result, points=points, caution="")))
    assert "Accuracy over ranks" in page and "89.00 %" in page and "88.11 to 89.89" in page
    assert "4 points measured" in page


def test_a_study_that_reached_no_target_is_still_a_page(made, text_of):
    result = made.batches()
    points = [update(point, reached=0, to_target_s=None, to_target_epochs=None) for point in result.batches]
    page = words_of(text_of(update(result, batches=points)))
    assert "soonest" not in page and "0 of 18" in page


def test_an_interval_without_an_end_is_told_and_not_drawn(made, text_of):
    page = text_of(made.prediction())
    assert "1:33 min or more" in page and "inf" not in words_of(page).replace("info", "")
    assert page.count('class="bounds line-0" d="') == 1
    (bars,) = re.findall(r'class="bounds line-0" d="([^"]*)"', page)
    assert bars.count("M") == 3


def test_a_prediction_says_what_it_rests_on(made, text_of):
    page = words_of(text_of(made.prediction()))
    assert "T = images/(N b) [b t + c1 [N>1] + c2 2(n-1)/n] + F" in page and "-1.0 %" in page
    assert f"No point tells c1 from c2: {made.EVIL}." in page


def test_a_prediction_from_a_run_has_no_points(made, text_of):
    result = update(made.prediction(), basis="run", points=(), network="ndr, 50 GB/s", notes=())
    assert "Collectives are reckoned with ndr, 50 GB/s." in words_of(text_of(result))


def test_a_search_that_found_nothing_says_so(made, text_of):
    page = words_of(text_of(update(made.tune(), best_patch=(), gain=None, recipe_file="", tried=())))
    assert "nothing faster was found" in page and "keep the recipe" in page


@pytest.mark.parametrize("kind", ["html", "md"])
def test_a_search_tells_what_was_out_of_memory(made, text_of, kind):
    assert "out of memory" in text_of(made.tune(), kind)


def test_an_experiment_that_has_not_ended_has_no_report(made, tmp_path):
    folder = made.write_experiment(tmp_path / "e", made.ladder())
    folder.trials.mkdir()
    folder.result.unlink()
    with pytest.raises(PacelineError, match="has not ended"):
        report_text(RunDir(folder.path), "html")


def test_numbers_that_are_no_measurement_make_no_page_fail(made, text_of):
    nan = float("nan")
    result = made.scale(ranks=(1, 2), failed=0)
    points = [update(point, images_per_s=Interval(value=nan, low=nan, high=nan)) for point in result.points]
    assert "nan" in words_of(text_of(update(result, points=points)))
    assert "1,920" in words_of(text_of(update(result, points=[points[0], result.points[1]])))
    predicted = [update(each, time_s=float("inf"), efficiency=0.0) for each in made.prediction().predictions]
    assert "or more" in words_of(text_of(update(made.prediction(), predictions=predicted, points=())))
