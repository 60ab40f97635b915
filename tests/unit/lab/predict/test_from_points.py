"""Predictions from a table of points, their notes, and figures of published tables."""

from pathlib import Path
from random import Random

import pytest

from paceline.core.experiments.results import PredictionResult, are_speeds
from paceline.lab.predict.from_points import build_request, predict_from_points
from paceline.lab.predict.points import ScalingPoint, read_points

PUBLISHED = Path(__file__).parents[4] / "benchmarks" / "results" / "published"


def first(name: str, up_to: int) -> tuple[ScalingPoint, ...]:
    """Return the points of a published table with at most so many ranks."""
    points = read_points(PUBLISHED / f"{name}.csv")
    kept = tuple(point for point in points if point.ranks <= up_to)
    assert 0 < len(kept) < len(points)
    return kept


def predicted(
    points: tuple[ScalingPoint, ...], at: tuple[int, ...], ranks_per_node: int, **said: float
) -> PredictionResult:
    return predict_from_points(
        points, build_request(points, at, ranks_per_node=ranks_per_node, **said), source="a table"
    )  # type: ignore[arg-type]


def took(name: str, ranks: int) -> float:
    return next(point.time_s for point in read_points(PUBLISHED / f"{name}.csv") if point.ranks == ranks)


def test_the_juelich_table_predicts_64_and_128_ranks() -> None:
    """Within 6 and 9.5 %, from 1, 4, 16 and 32; the intervals hold what they took."""
    at_64, at_128 = predicted(first("jsc", 32), (64, 128), 4).predictions
    for each, error in ((at_64, 0.06), (at_128, 0.095)):
        true_s = took("jsc", each.ranks)
        assert abs(each.time_s / true_s - 1) < error
        assert each.low_s < true_s < each.high_s
    assert (at_64.nodes, at_128.nodes, at_64.rank_batch, at_64.images) == (16, 32, 128, 12811670)


def test_the_nersc_table_predicts_the_speed_of_16_ranks_on_two_nodes() -> None:
    """Within 2 %, from 1, 4 and 8 on one; with the efficiency of 81.4 % that was read off, within 2 points."""
    (at_16,) = predicted(first("nersc", 8), (16,), 8).predictions
    assert abs(at_16.images_per_s / 34205 - 1) < 0.02
    assert abs(at_16.efficiency - 0.814) < 0.02
    assert at_16.low_s < at_16.images / 34205 < at_16.high_s


def test_the_study_in_fp16_predicts_a_second_node() -> None:
    """Within 4 %, from 1 and 4 ranks: the error that is documented."""
    (at_8,) = predicted(first("quant", 4), (8,), 4, rank_batch=64).predictions
    assert abs(at_8.time_s / took("quant", 8) - 1) < 0.04


def test_the_post_is_predicted_too_fast_and_its_interval_shows_it() -> None:
    """2 ranks cost more of a step than 4 do there, which points of 1 and 2 ranks cannot show."""
    (at_4,) = predicted(first("ddp-post", 2), (4,), 4).predictions
    assert -0.25 < at_4.time_s / took("ddp-post", 4) - 1 < 0
    assert at_4.low_s < took("ddp-post", 4) < at_4.high_s


def test_a_batch_and_images_that_are_not_given_are_those_of_the_most_ranks() -> None:
    points = (ScalingPoint(4, 1, 64, 500.0, 3.0), ScalingPoint(1, 1, 128, 1000.0, 9.0))
    assert (
        build_request(points, [8], ranks_per_node=4).rank_batch,
        build_request(points, [8], ranks_per_node=4).images,
    ) == (64, 500.0)
    asked = build_request(points, [8], ranks_per_node=4, rank_batch=32, images=7.0)
    assert (asked.rank_batch, asked.images) == (32, 7.0)


@pytest.mark.parametrize(
    ("name", "percent"),
    [
        ("jsc", [(1, 100.0), (4, 95.8), (16, 86.2), (32, 81.1), (64, 77.0), (128, 55.6)]),
        ("nersc", [(1, 100.0), (4, 79.0), (8, 80.6), (8, 82.8), (16, 81.4)]),
        ("ddp-post", [(1, 100.0), (2, 67.3), (4, 54.1)]),
    ],
)
def test_points_have_the_efficiency_that_their_documents_print(name: str, percent: list[tuple[int, float]]) -> None:
    """Of whole runs over one rank; `dataparallel-post.md` and `jsc.md` print the same figures."""
    found = predicted(read_points(PUBLISHED / f"{name}.csv"), (256,), 4)
    assert [(point.ranks, round(100 * (point.efficiency or 0), 1)) for point in found.points] == percent
    assert all(point.speedup == point.ranks * (point.efficiency or 0) for point in found.points)
    (each,) = found.predictions
    assert each.speedup == pytest.approx(256 * each.efficiency)


def test_efficiency_is_over_the_fewest_ranks_that_were_measured() -> None:
    """Images per second and rank: a point of other images counts for what it did with them."""
    points = (ScalingPoint(8, 2, 8, 160.0, 2.0), ScalingPoint(4, 1, 8, 80.0, 1.0), ScalingPoint(4, 1, 8, 80.0, 2.0))
    found = predicted(points, (16,), 4).points
    assert [point.efficiency for point in found] == [0.5, 1.0, 0.5]
    assert [point.speedup for point in found] == [4.0, 4.0, 2.0]


def test_where_the_formula_goes_through_all_points_it_has_their_efficiency() -> None:
    for point in predicted(first("jsc", 32), (64,), 4).points:
        assert point.fitted_efficiency == pytest.approx(point.efficiency, rel=1e-6)  # up to rounding of the fit


def test_hours_price_and_parts_follow_from_the_time() -> None:
    (each,) = predicted(first("jsc", 32), (64,), 4, price=2.5).predictions
    assert each.gpu_hours == pytest.approx(64 * each.time_s / 3600)
    assert each.cost == pytest.approx(2.5 * each.gpu_hours)
    assert sum(each.parts.values()) == pytest.approx(each.time_s)
    assert each.dominates == "start_up"
    steps = each.images / (64 * 128)
    assert each.step_s == pytest.approx((each.time_s - each.parts["start_up"]) / steps)
    assert each.images_per_s == pytest.approx(64 * 128 / each.step_s)


def test_one_rank_is_efficient_and_costs_nothing_more() -> None:
    (each,) = predicted(first("nersc", 8), (1,), 8).predictions
    assert (each.efficiency, each.dominates, each.cost) == (pytest.approx(1.0), "", None)


def test_speeds_have_no_start_up_and_it_is_noted() -> None:
    speeds = first("nersc", 8)
    assert are_speeds(speeds)
    found = predicted(speeds, (16,), 8)
    assert "f_s" not in found.terms
    assert any(note.startswith("f_s: none, as points of equal time are speeds") for note in found.notes)
    assert not are_speeds(first("jsc", 32))
    assert not are_speeds([ScalingPoint(1, 1, 8, 80.0, 4.0)] * 2)


@pytest.mark.parametrize(
    ("points", "note"),
    [
        ((ScalingPoint(1, 1, 8, 80.0, 4.0),), "c1_s: left out"),
        (
            (ScalingPoint(1, 1, 8, 80.0, 4.0), ScalingPoint(2, 1, 8, 80.0, 2.2)),
            "c2_s: left out, as the points do not identify it",
        ),
        (
            (ScalingPoint(2, 1, 8, 80.0, 2.2), ScalingPoint(4, 1, 8, 80.0, 1.2)),
            "c1_s: included in t_s, as no point has one rank",
        ),
        ((ScalingPoint(1, 1, 8, 80.0, 4.0), ScalingPoint(1, 1, 8, 80.0, 8.0)), "the points scatter by"),
        (
            (ScalingPoint(1, 1, 8, 80.0, 4.0), ScalingPoint(2, 1, 8, 160.0, 4.4)),
            "the points differ in images; the prediction is for 160",
        ),
    ],
)
def test_what_the_points_leave_open_is_reported(points: tuple[ScalingPoint, ...], note: str) -> None:
    notes = predicted(points, (4,), 2).notes
    assert any(each.startswith(note) for each in notes), notes


def test_far_off_is_called_a_guess() -> None:
    points = first("jsc", 32)
    assert any("rough extrapolation" in note for note in predicted(points, (512,), 4).notes)
    assert not any("rough extrapolation" in note for note in predicted(points, (256,), 4).notes)


def test_times_that_do_not_fall_give_a_number_all_the_same() -> None:
    """More ranks that save nothing at all: all but the hundredth that has to be computing is a fixed cost."""
    points = tuple(ScalingPoint(ranks, 1, 8, 80.0, 100.0) for ranks in (1, 2, 4))
    (each,) = predicted(points, (8,), 8).predictions
    assert each.low_s <= each.time_s <= each.high_s
    assert each.time_s == pytest.approx(100.0, rel=0.01)
    assert each.images_per_s > 0


def test_a_result_is_written_and_read_back() -> None:
    found = predicted(first("jsc", 32), (64,), 4)
    assert PredictionResult.model_validate_json(found.model_dump_json()) == found
    assert [point.time_s for point in found.points] == [point.time_s for point in first("jsc", 32)]
    # four points, four terms: the formula goes through all of them, up to rounding
    assert [point.fitted_s for point in found.points] == pytest.approx(
        [point.time_s for point in found.points], rel=1e-6
    )


def test_any_points_at_all_give_finite_numbers_within_their_bounds() -> None:
    """Points that contradict one another, of wild sizes, in which more ranks are slower: 12 tables of up to 8."""
    random = Random(3)
    for _ in range(12):
        points = []
        for _ in range(random.randint(1, 8)):
            nodes = random.choice([1, 2, 8, 10**6])
            ranks, batch = nodes * random.choice([1, 4, 1000]), random.choice([1, 32, 10**9])
            images, time_s = (10 ** random.uniform(-9, 15) for _ in range(2))
            points.append(ScalingPoint(ranks, nodes, batch, images, time_s))
        for each in predicted(tuple(points), (1, 3, 64, 10**6), 4).predictions:
            assert 0 < each.low_s <= each.time_s <= each.high_s < float("inf")
            assert each.images_per_s > 0
            assert each.efficiency > 0
