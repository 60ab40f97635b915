"""The weights of images follow their losses, and a run that is stopped while it measures them goes on exactly."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from paceline.core.errors import RecipeError
from paceline.core.run_dir import RunDir, read_lines
from paceline.core.world import World
from paceline.data.hard_sampler import ImageWeights
from paceline.interop import loaders
from paceline.parallel.strategy import SingleDevice
from paceline.recipe.load import Patch, load
from paceline.recipe.schema.sampler import Hard
from paceline.training.coordinator import StepCoordinator
from paceline.training.hard_images import ImageWeigher, LossMeter, weigh_losses
from paceline.training.process import Invocation
from paceline.training.run import run

CPU = torch.device("cpu")
UNUSED: dict[str, Any] = {"section": Hard(), "evaluator": None, "new_meter": None, "is_main": True, "log": None}
LOSSES = np.array([0.0, 1.0, 2.0, 5.0])
SMALL = (
    *("data.source.num_images=48", "data.source.num_val_images=8", "data.source.image_size=8", "model.width=0.1"),
    *("data.batch_size=12", "train.epochs=4", "train.eval_every=3st", "checkpoint.every=off", "log.samples=true"),
    *("log.tensorboard=off", "log.report=off", "parallel.threads=1", "data.augment=[flip]"),
    "log.explain=off",
    "data.sampler={name: hard, after: 1, every: 2}",
)


def relative(section: Hard, losses: np.ndarray = LOSSES) -> list[float]:
    weights = weigh_losses(losses, section)
    return list(weights / weights.mean())


def test_a_share_of_the_draws_goes_by_the_loss() -> None:
    assert relative(Hard(share=1)) == pytest.approx([0, 0.5, 1, 2.5], abs=1e-5)
    assert relative(Hard(share=0.5)) == pytest.approx([0.5, 0.75, 1, 1.75], abs=1e-5)
    assert relative(Hard(share=1, power=2)) == pytest.approx([0, 4 / 30, 16 / 30, 100 / 30], abs=1e-5)
    assert min(weigh_losses(LOSSES, Hard(share=1))) > 0


def test_the_highest_weights_are_limited_and_losses_may_be_0_or_not_finite() -> None:
    losses = np.array([1.0] * 99 + [901.0])  # 1/10 of the mean, and 90 times the mean
    assert relative(Hard(share=1, limit=2), losses) == pytest.approx([0.981] * 99 + [2.881], abs=1e-5)
    assert relative(Hard(share=0.5, limit=2), losses) == pytest.approx([0.9905] * 99 + [1.9405], abs=1e-5)
    assert relative(Hard(), np.zeros(3)) == relative(Hard(), np.array([np.nan, np.inf, np.nan])) == [1, 1, 1]
    assert relative(Hard(share=1), np.array([1.0, 3.0, np.nan])) == pytest.approx([3 / 7, 9 / 7, 9 / 7], abs=1e-5)


def test_the_losses_are_those_of_torch() -> None:
    logits, labels = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 0, 1])
    shares = torch.tensor([[0.2, 0.8, 0, 0], [1, 0, 0, 0], [0.25] * 4, [0, 1, 1, 0]])
    tables = {
        "one label": (None, False, functional.cross_entropy(logits.double(), labels, reduction="none")),
        "shares": (shares, False, functional.cross_entropy(logits.double(), shares[labels].double(), reduction="none")),
        "several": (
            shares,
            True,
            functional.binary_cross_entropy_with_logits(
                logits.double(), shares[labels].double(), reduction="none"
            ).mean(dim=1),
        ),
    }
    for targets, is_multi_label, expected in tables.values():
        meter = LossMeter(8, CPU, targets, is_multi_label=is_multi_label)
        for rows in (slice(0, 4), slice(4, 6)):
            meter.add(logits[rows], labels[rows], np.array([7, 2, 0, 5, 1, 4])[rows])
        assert meter.sum_over_ranks(SingleDevice()) == 6
        assert meter.losses()[[7, 2, 0, 5, 1, 4]] == pytest.approx(expected.numpy(), rel=1e-12)
        assert list(meter.losses()[[3, 6]]) == [0, 0]  # which could not be read


def test_loaders_start_anew_at_each_measurement() -> None:
    steps = Hard(after=5, every=3).steps(steps_per_epoch=2, total_steps=25)
    weigher = ImageWeigher(steps=steps, weights=ImageWeights(), **UNUSED)
    due = [step for step in range(30) if weigher.is_due(step)]
    assert due == [10, 16, 22]
    for first, stop in ((0, 25), (3, 10), (10, 11), (12, 22), (16, 25), (24, 25), (25, 25)):
        legs = list(weigher.split(first, stop))
        assert [step for leg in legs for step in leg] == list(range(first, stop))
        assert [leg.start for leg in legs[1:]] == [step for step in due if first < step < stop]
    weigher.weights.update(np.ones(3, dtype=np.int64), step=16)
    assert not weigher.is_due(16)  # a resumed run has these weights


def trained(tmp_path: Path, name: str, *overrides: str, resume: bool = False) -> RunDir:
    recipe = load("synthetic", Patch.parse([*SMALL, *overrides])).recipe
    rundir = RunDir(tmp_path / name)
    run(recipe, World.single(), rundir, resume=resume, invocation=Invocation())
    return rundir


def samples(rundir: RunDir) -> list[object]:
    return [(record["samples"], record["crc32"]) for record in read_lines(rundir.samples(0))]


def test_a_run_that_stops_while_it_measures_goes_on_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained(tmp_path, "whole")
    assert [record["step"] for record in read_lines(whole.hard_images)] == [4, 12]
    pauses = [(pause["name"], pause["step"]) for pause in read_lines(whole.pauses)]
    assert [step for name, step in pauses if name == "weigh"] == [4, 12] and ("evaluate", 12) in pauses
    measure, stops = ImageWeigher.__call__, [12, 4]

    def stop_once(weigher: ImageWeigher, model: torch.nn.Module, step: int) -> bool:
        return measure(weigher, model, step) if step not in stops or stops.remove(step) else False

    monkeypatch.setattr(ImageWeigher, "__call__", stop_once)
    for number, step in enumerate((4, 12, 16)):
        stopped = trained(tmp_path, "stopped", "checkpoint.every=100st", resume=number > 0)
        assert stopped.read_result().steps == step
    assert stopped.read_result().weights_sha256 == whole.read_result().weights_sha256
    assert samples(stopped) == samples(whole)
    assert list(read_lines(stopped.hard_images)) == list(read_lines(whole.hard_images))
    hard = [sample for drawn, _ in samples(whole)[4:8] for sample in drawn]
    assert len(set(hard)) < len(hard) == 48 == len({sample for drawn, _ in samples(whole)[:4] for sample in drawn})


def test_a_run_whose_time_is_up_measures_when_it_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, poll = trained(tmp_path, "whole"), StepCoordinator.poll
    with monkeypatch.context() as patch:
        patch.setattr(StepCoordinator, "poll", lambda *args: poll(*args)._replace(is_time_up=args[1] == 4))
        stopped = trained(tmp_path, "stopped", "checkpoint.every=100st")
    assert stopped.read_result().status == "time_reached" and not list(read_lines(stopped.hard_images))
    trained(tmp_path, "stopped", "checkpoint.every=100st", resume=True)
    assert stopped.read_result().weights_sha256 == whole.read_result().weights_sha256
    assert list(read_lines(stopped.hard_images)) == list(read_lines(whole.hard_images))


def test_another_trainer_has_no_losses_to_draw_by() -> None:
    with pytest.raises(RecipeError, match=r"data\.sampler: hard .*\(use another sampler\)"):
        loaders("digits", "data.sampler=hard")
