"""Every shipped preset trains two steps on two ranks, with synthetic images of its dataset's shape.

Run as a program, this file is a rank that trains all presets in a row, so that two processes start, not 94. The test
hosts the store, as torchrun's agent does, and each preset is a new attempt in it.
"""

import json
import math
import os
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.run_dir import RunDir
from paceline.parallel.environ import world_from_environ
from paceline.recipe.load import Patch, load, preset_names
from paceline.recipe.schema import Recipe

pytestmark = pytest.mark.long
NAMES = preset_names()
NUM_PRESETS = 52
RANKS = 2
STEPS = 2
VAL_IMAGES = 13  # odd, so that the ranks evaluate different numbers of images
REFUSED = "ddp-post/dataparallel"
LIMIT_S = 540
# (classes, pixels, channels) of each source's data. ImageNet-sized images are shrunk to the smallest size that the
# models and the recipes' multiples of 32 can process.
KINDS = {
    "digits": (10, 8, 1),
    "synthetic": (10, 32, 3),
    "cifar10": (10, 32, 3),
    "cifar100": (100, 32, 3),
    "fashion_mnist": (10, 28, 1),
    "folder": (1000, 64, 3),
    "manifest": (1000, 64, 3),
}


def small(name: str, weights: Path) -> Recipe:
    """Return the preset on synthetic data, shortened, with its own optimizer, schedule, precision and options."""
    recipe = load(name).recipe
    classes, pixels, channels = KINDS[recipe.data.source.name]
    if recipe.model.weights != "off":
        classes = 10  # not the 1000 of the weights, so that the classification layer is new
    synthetic = {"num_images": 16, "num_val_images": VAL_IMAGES, "num_classes": classes}
    patch: list[tuple[str, Any]] = [
        ("data.source", {"name": "synthetic", **synthetic, "image_size": pixels, "channels": channels}),
        ("data.batch_size", 8),
        ("train.steps", STEPS),
        ("train.eval_every", "100%"),
        ("checkpoint.every", "off"),
        ("log.every", "1st"),
        ("log.tensorboard", "off"),
        ("parallel.threads", 1),
        ("parallel.timeout", "60s"),
    ]
    if recipe.data.source.name in ("folder", "manifest"):
        patch.append(("data.image_size", pixels))
        patch += [("data.eval_image_size", 96)] if recipe.data.eval_image_size != "auto" else []
        patch += [("data.eval_crop", 0.875)] if recipe.data.is_set("eval_crop") else []  # of photographs alone
        patch += [("data.progressive.start_size", 32)] if recipe.data.progressive != "off" else []
    if recipe.train.precision.startswith("fp16"):
        patch.append(
            ("train.precision", recipe.train.precision.replace("fp16", "bf16"))
        )  # as the error message on a CPU advises
    if recipe.measure.nvtx == "on":
        patch.append(("measure.nvtx", "off"))  # needs torch with CUDA
    if recipe.data.workers != "auto":
        patch.append(("data.workers", 0))  # synthetic images need no decoding, and processes start slowly
    if ":" not in recipe.model.name:
        patch.append(("model.width", min(recipe.model.width, 0.25)))
    if recipe.model.weights != "off":
        patch.append(("model.weights", str(weights)))
    return load(name, Patch(tuple(patch))).recipe


def write_weights(path: Path) -> None:
    """Write a stand-in for torchvision's pretrained ResNet-18: a state dict with its 1000 classes."""
    from safetensors.torch import save_file
    from torchvision import models

    save_file(models.resnet18(weights=None).state_dict(), path)


def train_all(folder: Path) -> None:
    """Run as a rank: train every preset and write one JSON line per preset to `rankN.jsonl`."""
    import torch.distributed as dist

    from paceline.training.process import Invocation
    from paceline.training.run import run

    world = world_from_environ(os.environ)
    with (folder / f"rank{world.rank}.jsonl").open("w", encoding="utf-8") as lines:
        for number, name in enumerate(NAMES):
            try:
                recipe = small(name, folder / "resnet18.safetensors")
                result = run(
                    recipe, replace(world, attempt=number), RunDir(folder / "runs" / name), invocation=Invocation()
                )
                line = {"preset": name, **result.model_dump(mode="json")}
            except Exception as error:
                line = {"preset": name, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
                # A failed run leaves its process group for the process to destroy, which continues here
                if dist.is_initialized():
                    dist.destroy_process_group()
            print(json.dumps(line), file=lines, flush=True)


@pytest.fixture(scope="module")
def lines_by_preset(forking, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Return the line of each rank, by preset, with the run directory."""
    from torch.distributed import TCPStore

    folder = tmp_path_factory.mktemp("presets")
    write_weights(folder / "resnet18.safetensors")
    store = TCPStore("127.0.0.1", 0, RANKS, True, wait_for_workers=False)
    address = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    address |= {"LOCAL_WORLD_SIZE": str(RANKS), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [
        forking.start(
            [str(Path(__file__).resolve()), str(folder)],
            folder,
            {**address, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(RANKS)
    ]
    try:
        output = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * RANKS, output
    lines_by_preset: dict[str, list[dict[str, Any]]] = {}
    for rank in range(RANKS):
        for text in (folder / f"rank{rank}.jsonl").read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            lines_by_preset.setdefault(line["preset"], []).append({"run": folder / "runs" / line["preset"], **line})
    return lines_by_preset


def test_all_52_presets_are_run(lines_by_preset):
    assert len(NAMES) == len(set(NAMES)) == NUM_PRESETS
    assert sorted(lines_by_preset) == NAMES
    assert all(len(lines) == RANKS for lines in lines_by_preset.values())


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("name", [name for name in NAMES if name != REFUSED])
def test_a_preset_trains_on_two_ranks_and_evaluates_every_image_once(name, lines_by_preset):
    for line in lines_by_preset[name]:
        assert "error" not in line, f"{line['error']}\n{line['trace']}"
        assert (line["status"], line["steps"], line["world_size"]) == ("completed", STEPS, RANKS)
        assert line["eval"]["images"] == VAL_IMAGES
        assert math.isfinite(float(line["eval"]["loss"]))
    steps = (lines_by_preset[name][0]["run"] / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    losses = [float(json.loads(step)["loss"]) for step in steps]
    assert len(losses) == STEPS and all(math.isfinite(loss) for loss in losses)


def test_dataparallel_on_two_ranks_is_refused_with_the_strategy_to_use(lines_by_preset):
    errors = [line["error"] for line in lines_by_preset[REFUSED]]
    assert any("parallel.strategy=ddp" in error for error in errors), errors


if __name__ == "__main__":
    train_all(Path(sys.argv[1]))
