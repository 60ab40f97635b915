"""What ranks have measured, put together at the end: rows of equal width, and no pause of rank 0 taken for lateness."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.data.transfer import DeviceTransfer
from paceline.measure import ClockSummary, StageTotal
from paceline.training.measurements import Measurements, RunMeter

NUM_STEPS = 20
QUICK = ClockSummary(
    n=NUM_STEPS,
    images=NUM_STEPS * 8,
    wall_s=NUM_STEPS * 1.0,
    stages={name: StageTotal(NUM_STEPS * 0.5, NUM_STEPS * 0.5, 0.5) for name in ("forward", "exposed_communication")},
    warmup_s=0.0,
    pauses={},
    unfinished_s=0.0,
    step_s=(1.0,) * NUM_STEPS,
    recent=dict.fromkeys(("forward", "exposed_communication"), (0.5,) * NUM_STEPS),
    after_pause=(False,) * NUM_STEPS,
)


class Others:
    """A strategy whose other rank sent rows of the same width: it waited `waited_s` in step number `step`."""

    comm_hook = None

    def __init__(self, step: int, waited_s: float) -> None:
        self._step, self._waited_s = step, waited_s

    def all_gather(self, value: Tensor) -> Tensor:
        other = value.clone()
        if len(other) > NUM_STEPS:  # the row of times; that of CPU times is shorter, and the same
            other[-NUM_STEPS + self._step] = self._waited_s
        return torch.stack([value, other])


@pytest.fixture
def read(tmp_path: Path):
    def of(summary: ClockSummary, others: Others) -> Measurements:
        clock: Any = SimpleNamespace(drain=lambda: summary)
        loader: Any = SimpleNamespace(stats=lambda: None)
        strategy: Any = others
        return RunMeter(
            clock=clock,
            loader=loader,
            transfer=DeviceTransfer(torch.device("cpu"), torch.float32, (0.5,), (0.25,), torch.contiguous_format),
            accumulate=1,
            warmup_steps=0,
            spans=(),
            strategy=strategy,
            world=World(world_size=2),
            device=torch.device("cpu"),
            rundir=RunDir(tmp_path),
            is_traced=False,
            warn=print,
        ).collect()

    return of


def test_a_step_in_which_another_rank_waited_longer_is_lateness(read) -> None:
    found = read(QUICK, Others(step=7, waited_s=5.5))
    assert found.straggler is not None
    assert found.ranks[0].late_s == pytest.approx(5.0 / NUM_STEPS)


def test_a_step_after_a_pause_is_not(read) -> None:
    """Rank 0 alone writes checkpoints: the other one waits for it in the step that follows."""
    after_pause = tuple(step == 7 for step in range(NUM_STEPS))
    found = read(replace(QUICK, after_pause=after_pause), Others(step=7, waited_s=5.5))
    assert found.straggler is not None
    assert (found.straggler.lost_s, found.ranks[0].late_s) == (0.0, 0.0)


def test_a_rank_that_never_waited_sends_as_many_numbers_as_the_others(read) -> None:
    never = replace(QUICK, stages={"forward": QUICK.stages["forward"]}, recent={"forward": (0.5,) * NUM_STEPS})
    found = read(never, Others(step=0, waited_s=0.0))
    assert len(found.ranks) == 2
    assert found.straggler is None and found.communication is None


def test_means_are_of_a_step(read) -> None:
    found = read(QUICK, Others(step=0, waited_s=0.5))
    assert found.ranks[0].step_s == 1.0
    assert found.ranks[0].stages["forward"] == found.ranks[0].stages["exposed_communication"] == 0.5
    assert found.communication is not None and found.communication.share == 0.5
