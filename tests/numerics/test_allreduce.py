"""All ranks report the same times of all-reduces."""

import pytest


@pytest.fixture(scope="module")
def timings(run_on_ranks, tmp_path_factory: pytest.TempPathFactory):
    return run_on_ranks("allreduce_script.py", 2, tmp_path_factory.mktemp("reducing"))


def test_an_all_reduce_takes_as_long_as_on_the_slowest_rank(timings):
    assert len(timings) == 2
    # Rank 1 measures two seconds per all-reduce, so seven take the requested 14.
    expected = [[1024, 2, 2, 2, 7], [4096, 2, 2, 2, 7]]
    assert [each["rows"].tolist() for each in timings] == [expected, expected]


def test_sizes_after_one_over_the_time_limit_are_skipped_but_two_are_timed(timings):
    assert [each["brief"].tolist() for each in timings] == [[8, 16], [8, 16]]
