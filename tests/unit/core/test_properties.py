"""Properties of any duration and any random key."""

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.random import Stream, permutation, step_seed, uniform
from paceline.core.units import Duration, Unit

VALUES = st.one_of(
    st.integers(0, 10**18).map(float),
    st.floats(0, 1e300, allow_subnormal=True),
    st.floats(0, 1e6).map(lambda v: round(v, 3)),
)
SEEDS = st.integers(0, 2**63 - 1)


@given(VALUES, st.sampled_from(get_args(Unit)))
def test_a_duration_reads_back_from_its_text_to_itself(value: float, unit: Unit) -> None:
    duration = Duration(value, unit)
    assert Duration.parse(str(duration)) == duration
    assert str(Duration.parse(str(duration))) == str(duration)


@given(st.text())
def test_any_text_is_a_duration_or_refused_as_one(text: str) -> None:
    try:
        duration = Duration.parse(text)
    except ValueError as refused:
        assert str(refused).startswith(f"{text!r} is not a duration (write 5ep")
    else:
        assert duration.value >= 0 and text.strip().endswith(duration.unit)


@given(
    st.integers(0, 10**6),
    st.sampled_from(["ep", "st", "img", "%"]),
    st.integers(1, 10**5),
    st.integers(1, 10**4),
    st.integers(1, 10**7),
)
def test_steps_grow_with_the_amount_and_an_epoch_is_its_steps(value, unit, steps_per_epoch, batch_size, total) -> None:
    sizes = {"steps_per_epoch": steps_per_epoch, "batch_size": batch_size, "total_steps": total}
    steps = Duration(float(value), unit).steps(**sizes)
    assert 0 <= steps <= Duration(float(value + 1), unit).steps(**sizes)
    assert Duration(1.0, "ep").steps(**sizes) == steps_per_epoch
    assert Duration(100.0, "%").steps(**sizes) == total
    assert Duration(float(value), "st").steps(**sizes) == value
    assert Duration(float(value * batch_size), "img").steps(**sizes) == pytest.approx(value, abs=1e-9 * value)


@given(SEEDS, st.integers(0, 2**31), st.integers(0, 300))
def test_an_epoch_visits_everything_once(seed: int, epoch: int, n: int) -> None:
    assert sorted(permutation(seed, epoch, n).tolist()) == list(range(n))


@given(SEEDS, st.sampled_from(Stream), st.integers(0, 2**31), st.lists(st.integers(0, 2**40), max_size=20), st.data())
def test_the_draws_of_a_sample_are_its_own(seed: int, stream: Stream, epoch: int, indices: list[int], data) -> None:
    """They depend neither on which samples are asked for beside it, nor on how many draws are."""
    num_draws = data.draw(st.integers(1, 9))
    together = uniform(seed, stream, epoch, np.array(indices, dtype=np.int64), num_draws)
    assert together.shape == (len(indices), num_draws) and ((together >= 0) & (together < 1)).all()
    for index, row in zip(indices, together, strict=True):
        alone = uniform(seed, stream, epoch, np.array([index]), num_draws + data.draw(st.integers(0, 5)))
        assert alone[0, :num_draws].tolist() == row.tolist()


@given(SEEDS, st.integers(0, 2**40), st.integers(0, 2**20))
def test_the_seed_of_a_step_is_one_that_torch_takes(seed: int, step: int, rank: int) -> None:
    assert 0 <= step_seed(seed, step, rank) < 2**63
    assert step_seed(seed, step, rank) == step_seed(seed, step, rank)
    assert step_seed(seed, step, rank) != step_seed(seed, step + 1, rank)
