"""All-reduces are timed equally on all ranks."""

import pytest


@pytest.fixture(scope="module")
def found(run_on_ranks, tmp_path_factory: pytest.TempPathFactory):
    return run_on_ranks("allreduce_script.py", 2, tmp_path_factory.mktemp("reducing"))


def test_an_all_reduce_takes_as_long_as_it_takes_the_slowest_rank(found):
    assert len(found) == 2
    # Rank 1 sees every all-reduce take two seconds, so seven fill the 14 that are asked for.
    expected = [[1024, 2, 2, 2, 7], [4096, 2, 2, 2, 7]]
    assert [each["rows"].tolist() for each in found] == [expected, expected]


def test_no_size_follows_one_over_the_time_limit_but_two_are_timed(found):
    assert [each["brief"].tolist() for each in found] == [[8, 16], [8, 16]]
