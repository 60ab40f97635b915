"""The GPU benchmark runs as a whole on a CPU, on tiny inputs, and its record is complete at any moment."""

import importlib
import json
import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("gpu", "gpu_device", "gpu_loops", "record"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("gpu")


def measured(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, *words: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--tiny", "--json", str(out), *words])
    gpu.main()
    return json.loads(out.read_text())


def missing(package: str, work: object) -> list[float]:
    raise ImportError(f"No module named {package!r}", name=package)


@pytest.mark.long
def test_every_part_is_measured_or_states_why_not(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("Lightning", "Accelerate"):  # which take seconds to import
        monkeypatch.setitem(gpu.LOOPS, name, partial(missing, name.lower()))
    found = measured(gpu, monkeypatch, tmp_path / "gpu.json")
    parts = found["parts"]
    assert set(parts) == {"peaks", "ladder", "networks", "beside"}
    assert [row["name"] for row in parts["ladder"]] == ["the tutorial's own loop", *(name for name, _ in gpu.SC20[:5])]
    assert all(row["times"] > 0 for row in parts["ladder"][1:])
    assert all(row["here"]["share"] > 0 and row["here"]["bound_images_per_s"] > 0 for row in parts["networks"])
    rates = [row for part in ("ladder", "networks", "beside") for row in parts[part]]
    assert len(rates) == 6 + 2 + 2
    assert all(row["images_per_s"] > 0 and 0 < row["p10"] <= row["p90"] and row["n"] > 0 for row in rates)
    skipped = {each["name"]: each["why"] for each in found["skipped"]}
    assert skipped == {
        "resnet18_cifar: Lightning": "not installed: lightning",
        "resnet18_cifar: Accelerate": "not installed: accelerate",
        "cifar10-94": "no data (give --cifar10 DIR)",
    }
    assert found["unit"] == "images/s: of all steps; 10th and 90th percentile over windows of them"
    assert found["machine"]["torch"] and found["clocks"] == {"first": "", "last": ""} and found["elapsed_s"] > 0


def test_what_there_is_no_time_for_is_listed_and_what_is_there_is_kept(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = tmp_path / "gpu.json"
    values: dict[str, Any] = {"clocks": {}, "parts": {}, "skipped": []}
    bench = gpu.Bench(gpu.torch.device("cpu"), False, None, 100.0, out, values)
    bench.take("ladder", "one", 5, lambda: {"images_per_s": 2.0})
    assert json.loads(out.read_text())["parts"]["ladder"][0]["images_per_s"] == 2.0
    bench.take("ladder", "two", 500, lambda: pytest.fail("there is no time for it"))
    with pytest.raises(KeyboardInterrupt):
        bench.take("ladder", "three", 5, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    kept = json.loads(out.read_text())
    assert [row["name"] for row in kept["parts"]["ladder"]] == ["one"]
    assert kept["skipped"][0]["name"] == "two"
    assert re.match(r"no time: \d+ s of 100 are gone, and it may take 500$", kept["skipped"][0]["why"])


def test_a_part_or_a_row_that_raises_anything_loses_no_other(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(*_: object, **__: object) -> Any:
        raise TypeError("another version\nof it")

    def rows(bench: Any) -> None:
        bench.take("ladder", "one", 5, fails)
        bench.take("ladder", "two", 5, lambda: {"images_per_s": 2.0})

    monkeypatch.setattr(gpu, "peaks", fails)
    monkeypatch.setattr(gpu, "ladder", rows)
    found = measured(gpu, monkeypatch, tmp_path / "gpu.json", "--only", "peaks,ladder,cifar10")
    why = "TypeError: another version of it"
    assert found["skipped"] == [
        {"part": "peaks", "name": "peaks", "why": why},
        {"part": "ladder", "name": "one", "why": why},
        {"part": "cifar10", "name": "cifar10-94", "why": "no data (give --cifar10 DIR)"},
    ]
    assert [row["name"] for row in found["parts"]["ladder"]] == ["two"]


def test_no_time_is_kept_for_a_part_that_has_no_data(gpu: ModuleType) -> None:
    assert gpu.fraction(["cifar10"], has_cifar10=False) == 0
    assert gpu.fraction(["beside", "cifar10"], has_cifar10=False) == 1
    assert gpu.fraction(list(gpu.SHARES), has_cifar10=True) == gpu.SHARES["peaks"] / 100
    assert gpu.fraction(list(gpu.SHARES), has_cifar10=False) == gpu.SHARES["peaks"] / (100 - gpu.SHARES["cifar10"])


def test_a_rate_of_windows_is_images_over_seconds(gpu: ModuleType) -> None:
    """Three windows of 100 images take 1 s each, one takes 5 s: 400 images in 8 s, where the median would be 100."""
    found = gpu.rates([100.0, 100.0, 20.0, 100.0])
    assert (found["images_per_s"], found["n"]) == (50.0, 4) and found["p10"] < 50 < found["p90"]


def test_clocks_that_cannot_be_queried_are_nothing(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    device = importlib.import_module("gpu_device")

    def fails(*_: object, **__: object) -> Any:
        raise device.subprocess.TimeoutExpired("nvidia-smi", 20)

    monkeypatch.setattr(device.shutil, "which", lambda name: name)
    monkeypatch.setattr(device.subprocess, "run", fails)
    assert device.clocks(gpu.torch.device("cuda")) == ""


@pytest.mark.long
def test_cifar10_is_trained_once_a_seed_and_capturing_is_left_out_of_its_seconds(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    train, calls = gpu.trained, []
    small = ("data.source.num_images=16", "data.source.image_size=8", "data.source.num_val_images=8", "train.steps=1")
    small += ("data.batch_size=8", "train.epochs=auto", "log.tensorboard=off", "parallel.threads=1")

    def trained(preset: str, words: tuple[str, ...]) -> Any:
        calls.append((preset, words))
        return train("synthetic", (*small, f"seed={len(calls)}"))

    monkeypatch.setattr(gpu, "trained", trained)
    values: dict[str, Any] = {"clocks": {}, "parts": {}, "skipped": []}
    gpu.cifar10(gpu.Bench(gpu.torch.device("cpu"), False, tmp_path, 1000.0, None, values))
    assert [preset for preset, _ in calls] == ["cifar10-94"] * gpu.SEEDS
    assert all(f"data.source.root={tmp_path}" in words and "train.capture=on" in words for _, words in calls)
    assert len({words for _, words in calls}) == gpu.SEEDS
    rows = values["parts"]["cifar10"]
    assert all(row["seconds"] > 0 and row["capture_s"] == 0 for row in rows)
    mean = values["cifar10_mean"]
    assert (mean["n"], mean["target"]) == (gpu.SEEDS, 0.94) and 0 <= mean["runs_that_reach_it"] <= gpu.SEEDS


@pytest.mark.parametrize("name", ["Lightning", "Accelerate"])
def test_the_loops_of_others_run(gpu: ModuleType, name: str) -> None:
    pytest.importorskip(name.lower())
    bench = gpu.Bench(gpu.torch.device("cpu"), True, None, 100.0, None, {})
    rates = gpu.LOOPS[name](bench.work("resnet18_cifar"))
    assert len(rates) == 2 and min(rates) > 0


def test_an_unknown_part_is_one_line(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        measured(gpu, monkeypatch, tmp_path / "gpu.json", "--only", "laddr")
    assert ended.value.code == 2 and "--only: laddr is no part (use some of peaks,ladder" in capsys.readouterr().err
