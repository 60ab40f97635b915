"""`paceline eval --calibrate`: the same temperature on any number of ranks, which `predict` and `export` use."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.data.sources.builtin import load_digits

TRAIN = ("train", "digits", "model.width=0.125", "train.epochs=3", "checkpoint.every=1ep", "checkpoint.keep=9",
         "train.ema=on", "parallel.threads=1", "log.tensorboard=off", "log.report=off", "--run-dir", "run")  # fmt: skip


def test_a_calibrated_run_predicts_calibrated_probabilities(paceline, tmp_path: Path) -> None:
    assert paceline(*TRAIN).code == 0
    image = load_digits().val.images[0]
    Image.fromarray(np.asarray(image)[..., 0]).save(tmp_path / "digit.png")
    predict = ("predict", "run", "digit.png", "--top", "10", "--json")
    before = probabilities(paceline(*predict).result)
    reports = [paceline("eval", "run", "--calibrate", "--ranks", ranks, "--json").result for ranks in ("1", "2")]
    one, two = (report["calibration"] for report in reports)
    assert one["temperature"] == two["temperature"] and one["images"] == 359
    assert one["calibrated_loss"] == pytest.approx(two["calibrated_loss"], rel=1e-6)
    # Of the averaged weights, which the run is evaluated with.
    assert one["loss"] == reports[0]["ema"]["loss"] and one["ece"] == reports[0]["ema"]["ece"]
    (recorded,) = json.loads((tmp_path / "run" / "temperatures.json").read_text()).values()
    assert recorded["calibration"] == two
    after = probabilities(paceline(*predict).result)
    powers = {name: value ** (1 / one["temperature"]) for name, value in before.items()}
    total = math.fsum(powers.values())
    assert after == pytest.approx({name: value / total for name, value in powers.items()}, rel=1e-4)
    assert after != pytest.approx(before, rel=1e-2)

    # Another checkpoint has no temperature, which is said.
    other = paceline(*predict, "--checkpoint", "11")
    assert "step-00000011" in other.err and "--calibrate" in other.err and other.code == 0
    assert "--calibrate" not in paceline(*predict).err
    exported = paceline("export", "run", "--format", "torch", "--out", "digits.pt2", "--json").result
    assert exported["parity"]["difference"] <= 1e-5
    assert f"temperature {one['temperature']}" in (tmp_path / "digits.pt2.md").read_text()


def probabilities(document: dict) -> dict[str, float]:
    (row,) = document["rows"]
    return {each["class"]: each["probability"] for each in row["predictions"]}
