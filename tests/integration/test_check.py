"""`paceline check` on a real recipe and on folders with problems, and the estimate that a run records of itself."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

TINY = ("digits", "model.width=0.1", "data.batch_size=32", "parallel.threads=1", "measure.warmup_steps=1")


def write_images(root: Path, split: str, name: str, seeds: range, **options: int) -> None:
    folder = root / split / name
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        rough = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
        image = Image.fromarray(rough).resize((96, 96), Image.Resampling.BICUBIC)
        image.save(folder / f"{seed}.jpg", **options)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_a_check_estimates_the_whole_run_and_leaves_nothing_behind(paceline, tmp_path: Path, ranks) -> None:
    args = (*TINY, "train.epochs=2000", "train.eval_every=1000ep", "checkpoint.every=500ep")
    found = paceline("check", *args, "--ranks", str(ranks), "--seconds", "5", "--images", "200", "--json").result
    assert (found["state"], found["recipe"], found["ranks"]) == ("ok", "digits", ranks)
    assert set(found) == {"state", "recipe", "recipe_hash", "ranks", "data", "run"}
    assert {each["name"] for each in found["data"]["findings"]} >= {
        "images",
        "classes",
        "unreadable",
        "leaks",
        "copies",
    }
    assert (found["data"]["copies"]["images"], found["data"]["copies"]["total"]) == (200, 1797)
    run, estimate = found["run"], found["run"]["estimate"]
    assert [each["name"] for each in run["findings"]] == ["time", "memory", "disk"]
    forecast = estimate["forecast"]
    assert (forecast["steps"], forecast["evaluations"], forecast["checkpoints"]) == (2000 * 44, 2, 4)
    assert forecast["low_s"] < forecast["predicted_s"] < forecast["high_s"]
    assert 0 < forecast["step_s"] * 88_000 < forecast["predicted_s"] and forecast["eval_s"] > 0
    assert 0 < estimate["memory_bytes"] < estimate["memory_total_bytes"]
    assert 0 < run["disk_bytes"] < run["free_bytes"] and run["startup_s"] > 0
    assert not list(tmp_path.iterdir())


def test_a_leak_is_an_error_with_both_paths_and_labels(paceline, tmp_path: Path) -> None:
    root = tmp_path / "photos"
    write_images(root, "train", "cat", range(10))
    write_images(root, "train", "dog", range(10, 20))
    write_images(root, "val", "cat", range(20, 25))
    write_images(root, "val", "dog", range(3, 4), quality=50)
    done = paceline("check", "folder", f"data.source.root={root}", "--seconds", "0")
    assert done.code == 1
    assert "1 error" in done.out.splitlines()[-1]
    flat = "".join(line.strip(" │") for line in done.out.splitlines())
    assert "train/cat/3.jpg" in flat.replace(" ", "") and "val/dog/3.jpg" in flat.replace(" ", "")
    values = json.loads(paceline("check", "folder", f"data.source.root={root}", "--seconds", "0", "--json").out)
    (pair,) = values["data"]["copies"]["pairs"]
    assert (pair["first"]["label"], pair["second"]["label"], pair["in_both_splits"]) == ("cat", "dog", True)
    assert values["state"] == "error" and "run" not in values


def test_a_run_records_its_estimate_and_names_wrong_labels(paceline, tmp_path: Path) -> None:
    root = tmp_path / "photos"
    for split, seeds in (("train", range(40)), ("val", range(40, 60))):
        for name, color in (("dark", 40), ("light", 210)):
            folder = root / split / name
            folder.mkdir(parents=True)
            for seed in seeds:
                noise = np.random.default_rng(seed + color).integers(-30, 30, (16, 16, 3))
                Image.fromarray((color + noise).astype(np.uint8)).save(folder / f"{seed}.png")
    (root / "val" / "dark" / "45.png").rename(root / "val" / "light" / "wrong.png")
    args = ("folder", f"data.source.root={root}", "model.name=resnet18_cifar", "model.width=0.1", "data.image_size=16")
    done = paceline(
        "train", *args, "data.batch_size=8", "train.steps=200", "train.eval_every=40st", "parallel.threads=1",
        "log.tensorboard=off", "log.worst=0", "--run-dir", "run", "--json",
    )  # fmt: skip
    estimate = done.result["estimate"]
    assert 0 < estimate["step"] < 200 and estimate["actual_s"] > 0
    predicted_s = estimate["forecast"]["predicted_s"]
    assert estimate["error"] == pytest.approx(predicted_s / estimate["actual_s"] - 1)
    assert estimate["forecast"]["evaluations"] + estimate["step"] // 40 == 5
    assert "predicted at step" in (tmp_path / "run" / "report.html").read_text()
    values = json.loads(paceline("check", "run", "--seconds", "0", "--json").out)
    assert [Path(each["image"]).name for each in values["labels"]["likely_wrong"]] == ["wrong.png"]
    assert values["labels"]["likely_wrong"][0] == {
        **values["labels"]["likely_wrong"][0], "label": "light", "likely": "dark"
    }  # fmt: skip
    assert values["labels"]["findings"][0]["state"] == "warning" and "run" in values["labels"]["findings"][0]["found"]
