"""The trainer on a GPU has the losses of a CPU, up to rounding, and does not synchronize in steps without logs."""

from pathlib import Path

import pytest
import torch

from paceline.core.run_dir import RunDir, read_lines
from paceline.core.world import World
from paceline.recipe.load import Patch, load
from paceline.training.process import Invocation
from paceline.training.run import run
from paceline.training.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # torch warns once that the synchronization debug mode is a prototype
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]


def train(folder: Path, name: str, *args: str) -> RunDir:
    base = ["data.source.num_images=512", "data.source.num_val_images=100", "model.width=0.25", "train.steps=16"]
    options = ["data.augment=[pad_crop,flip]", "optim.lr=0.01", "log.every=1st", "log.tensorboard=off"]
    rundir = RunDir(folder / name)
    recipe = load("synthetic", Patch.parse([*base, *options, *args])).recipe
    run(recipe, World.single(), rundir, invocation=Invocation())
    return rundir


def losses(rundir: RunDir) -> list[float]:
    return [record["loss"] for record in read_lines(rundir.steps)]


def test_a_gpu_has_the_losses_of_a_cpu(tmp_path: Path) -> None:
    on_cpu = train(tmp_path, "cpu", "parallel.device=cpu")
    on_gpu = train(tmp_path, "gpu", "parallel.device=cuda")
    assert losses(on_gpu)[:4] == pytest.approx(losses(on_cpu)[:4], rel=2e-2)
    result = on_gpu.read_result()
    assert result.eval is not None and result.eval.images == 100
    assert result.provenance["device"] == "cuda"
    assert result.stages["backward"].device_s > 0


def test_bfloat16_with_workers_trains(tmp_path: Path) -> None:
    result = train(tmp_path, "half", "train.precision=bf16", "data.workers=2", "train.accumulate=2").read_result()
    assert result.eval is not None and result.eval.images == 100


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("data.augment=[pad_crop, flip, cutout, random_erasing, mixup, cutmix]", "train.ema=on", "train.clip_norm=1"),
        *[
            (f"optim.name={name}",)
            for name in ("adamw", "rmsprop", "novograd", "lars", "lamb", "muon", "schedule_free")
        ],
    ],
    ids=lambda args: args[0] if args else "plain",
)
def test_a_step_without_log_does_not_synchronise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args) -> None:
    step = Trainer.train_step

    def watched(self, batch, state):
        torch.cuda.set_sync_debug_mode("error" if state.step >= 4 else "default")
        try:
            return step(self, batch, state)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Trainer, "train_step", watched)
    train(tmp_path, "run", "log.every=8st", *args)
