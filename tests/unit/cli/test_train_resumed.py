"""`paceline train --resume` of a run that has ended: it says so, and leaves its files as they are."""

from pathlib import Path

import pytest

from paceline.cli.options import TrainOptions
from paceline.cli.train import train

SMALL = (
    *("data.source.num_images=16", "data.source.num_val_images=8", "data.source.image_size=8", "data.batch_size=8"),
    *("model.width=0.1", "train.steps=9", "parallel.device=cpu", "parallel.threads=1", "log.tensorboard=off"),
    *("data.workers=0", "measure.telemetry=off"),
)


def test_a_run_whose_time_is_up_says_so_and_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(TrainOptions(args=["synthetic", *SMALL, "train.max_time=0.001s"], run_dir=run, ranks="1"))
    before = {path: path.read_bytes() for path in (run / "result.json", run / "report.html")}
    capsys.readouterr()
    train(TrainOptions(args=[str(run)], resume=True))
    assert "run: its time is up, so nothing was done (set train.max_time=...)" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in before} == before
    train(TrainOptions(args=[str(run), "train.max_time=off"], resume=True))
    assert "nothing was done" not in capsys.readouterr().out
