"""Health findings appear on the terminal, in the result, in the HTML and Markdown reports, and in `paceline eval`."""

import json
import os
from pathlib import Path

STALE = """
import torch
from torch import nn


class Stale(nn.Sequential):
    def __init__(self, *, num_classes, in_channels):
        norm = nn.BatchNorm2d(16, momentum=1e-6)  # running statistics stay what they were before the first step
        super().__init__(
            nn.Conv2d(in_channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), norm, nn.Flatten(),
            nn.LazyLinear(num_classes),
        )
        with torch.no_grad():
            self[0].bias.fill_(100)  # which only the statistics of a batch take off
            self(torch.zeros(2, in_channels, 16, 16))
        norm.reset_running_stats()
"""


def test_a_collapsed_model_is_reported_in_every_output(paceline, tmp_path: Path) -> None:
    slow = ("model.width=0.0625", "model.memory_format=contiguous", "data.batch_size=32", "parallel.threads=1")
    absurd = ("optim.lr=5", "schedule.name=constant", "schedule.warmup=0st")
    length = ("train.epochs=auto", "train.steps=60")
    completed = paceline("train", "digits", "--ranks", "1", *slow, *absurd, *length, "--run-dir", "run")
    assert completed.code == 0, completed.err
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert 0.05 < result["eval"]["top1"] < 0.15
    (found,) = [each for each in result["health"] if each["severity"] == "error"]
    assert found["name"] in ("one_class_predicted", "at_chance") and "optim.lr" in found["advice"]
    title = found["name"].replace("_", " ")
    assert f"\n  health       {title}: " in completed.out
    page = (tmp_path / "run" / "report.html").read_text()
    findings = page[page.index('id="findings"') : page.index('id="learning"')].lower()
    assert findings.index(title) < findings.index("bottleneck")
    assert f"## Findings\n\n- **{title}** (health, error)" in paceline("report", "run", "--format", "md").out
    evaluated = paceline("eval", "run", "parallel.threads=1")
    assert f"\n  health       {title}: " in evaluated.out
    assert found["name"] in [each["name"] for each in json.loads(paceline("eval", "run", "--json").out)["health"]]


def test_lagging_batch_norm_statistics_are_measured_on_two_ranks(paceline, tmp_path: Path) -> None:
    (tmp_path / "stale.py").write_text(STALE)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    args = ("digits", "model.name=stale:Stale", "train.epochs=6", "optim.lr=0.01", "data.augment=[]")
    completed = paceline("train", *args, "--ranks", "2", "parallel.device=cpu", "--run-dir", "run", PYTHONPATH=path)
    assert completed.code == 0, completed.err
    found = {each["name"]: each for each in json.loads((tmp_path / "run" / "result.json").read_text())["health"]}
    numbers = found["batch_norm_lags"]["numbers"]
    assert numbers["images"] == 1024 and numbers["running_top1"] < 0.3 and numbers["batch_top1"] > 0.6, found
    assert "batch norm lags" in completed.out and "running statistics" in completed.out
