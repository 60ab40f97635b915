"""Long series become a few hundred points that keep their mean, and their extents are of all records."""

import math

import pytest

from paceline.report.series import downsample


@pytest.mark.parametrize("num", [0, 1, 499, 500, 501, 12_345])
def test_no_series_has_more_points_than_allowed_and_few_have_less_than_half(num):
    series = downsample(({"x": index} for index in range(num)), 500)
    assert series.num_records == num
    assert len(series.points) <= 500
    assert len(series.points) == num if num <= 500 else len(series.points) >= 250


def test_points_are_the_means_of_as_many_records():
    series = downsample(({"x": index, "y": index % 2} for index in range(64)), 16)
    assert series.per_point == 4 and len(series.points) == 16
    assert series.xy_points("x", "y") == tuple((1.5 + 4 * index, 0.5) for index in range(16))


def test_extents_cover_all_records_even_if_points_are_means():
    series = downsample(({"y": 100 if index == 41 else 1} for index in range(1000)), 10)
    extent = series.extents["y"]
    assert (extent.lowest, extent.highest, extent.last) == (1, 100, 1)
    assert math.isclose(extent.mean, 1.099)  # sums of hundreds of floats round
    assert max(point["y"] for point in series.points) < 100


def test_invalid_values_are_skipped_in_their_own_line_only():
    series = downsample([{"x": 1, "y": math.nan, "z": "a"}, {"x": 2, "y": 5, "z": None}, {"x": "3", "y": 6}])
    assert series.xy_points("x", "y") == ((2.0, 5.0),)
    assert not series.has_key("z") and series.num_records == 3
