"""Run directories as a run leaves them, written without one: by the core's classes, and the files' own formats."""

import json
import math
import random
import shutil
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from paceline.core.results import CalibrationBin, ClassCount, ClassTable, RunResult
from paceline.core.run_dir import RunDir

BEGIN_S = 1_795_275_073.0
EVIL = '<script>window.hacked=1</script><img src=x onerror="window.hacked=1">|`*[a](javascript:window.hacked=1)'
NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
STAGES = {
    "data_wait": (41.2, 12.6),
    "h2d": (0.91, 3.4),
    "device_augment": (2.2, 6.1),
    "forward": (38.4, 96.3),
    "loss": (1.1, 1.6),
    "backward": (96.9, 171.2),
    "exposed_communication": (22.4, 22.9),
    "optimizer": (14.8, 15.1),
    "other": (3.3, 0.4),
}
PAUSES = {"epoch_boundary": 4.1, "evaluate": 33.7, "checkpoint": 2.3}


@dataclass(frozen=True)
class Shape:
    """How much of everything a run has."""

    names: tuple[str, ...] = NAMES
    evals: int = 12
    steps: int = 600
    nodes: int = 1
    gpus: int = 2
    samples: int = 90
    mistakes: int = 12


SMALL = Shape(names=NAMES[:3], evals=2, steps=6, samples=3, mistakes=2)


def write_run(folder: Path, shape: Shape = Shape(), **changes: Any) -> RunDir:
    """Write a finished run of two ranks into a new `folder`; `changes` are fields of its result."""
    shutil.rmtree(folder, ignore_errors=True)
    rundir, draw = RunDir(folder), random.Random(7)
    rundir.create()
    table = class_table(shape.names, draw)
    rundir.write_result(result(table, **changes))
    rundir.write_classes(table)
    rundir.recipe.write_text(RECIPE)
    rundir.write_json("plan.json", {**PLAN, "num_classes": len(shape.names)})
    rundir.write_json("machine.json", MACHINE)
    write_lines(rundir.steps, [step(index, shape.steps, draw) for index in range(1, shape.steps + 1)])
    write_lines(rundir.evals, [evaluation(index, shape.evals) for index in range(1, shape.evals + 1)])
    write_lines(rundir.attempts, ATTEMPTS)
    write_lines(rundir.pauses, PAUSE_ROWS)
    write_lines(rundir.warnings, [{"unix_s": BEGIN_S + 40, "message": f"data: class {EVIL} has one image only"}])
    bad = {"split": "train", "index": 812, "path": "/data/cifar/x|y`<b>.png", "reason": "is empty (0 bytes)"}
    rundir.add_bad_image(bad)
    for node in range(shape.nodes):
        write_lines(rundir.telemetry(node), [sample(index, shape, draw) for index in range(shape.samples)])
    write_worst(rundir, shape, draw)
    rundir.write_json("profile.json", PROFILE)
    return rundir


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def class_table(names: tuple[str, ...], draw: random.Random) -> ClassTable:
    """Return 100 images a class, most of which are right; classes next to one another are confused the most."""
    num, rows = len(names), []
    for true in range(num):
        row = [0] * num
        for _ in range(100):
            near = true + draw.choice((1, -1, 2, num // 2)) if draw.random() < 0.03 + 0.12 * (true % 4 == 3) else true
            row[near % num] += 1
        rows.append(tuple(row))
    counts = tuple(ClassCount(name, 100, rows[index][index]) for index, name in enumerate(names))
    bins = tuple(
        CalibrationBin(each / 15, (each + 1) / 15, 40 * each, 30 * each, (each + 0.5) / 15) for each in range(15)
    )
    return ClassTable(counts, tuple(rows) if num <= 200 else (), bins)


def result(table: ClassTable, **changes: Any) -> RunResult:
    """Return a result all of whose fields are filled, and agree with one another."""
    images = sum(each.images for each in table.classes)
    top1 = sum(each.correct for each in table.classes) / images
    stages_s = sum(host_s for host_s, _ in STAGES.values())
    parts_s = 6.84 + 0.0 + 3.2 + stages_s + sum(PAUSES.values()) + 1.9
    evaluation_values = {
        "images": images,
        "top1": top1,
        "top5": 0.9971,
        "loss": 0.24719,
        "ece": 0.0213,
        "mean_class_accuracy": top1,
    }
    raw = {**evaluation_values, "top1": top1 - 0.0123, "loss": 0.29113}
    values = {
        "status": "target_reached",
        "recipe_hash": "a53258041b55",
        "world_size": 2,
        "epochs": 12.0,
        "steps": 4692,
        "images_seen": 600_576,
        "bad_images": 1,
        "skipped_steps": 2,
        "eval": raw,
        "ema": evaluation_values,
        "train_eval": {**raw, "top1": 0.9812},
        "gap": 0.9812 - raw["top1"],
        "best": {**evaluation_values, "top1": top1 + 0.0011},
        "throughput": {"images_per_s": 2713.4481, "spread": [2391.1, 2842.9], "n": 461, "excluded_s": 43.3},
        "time": {"wall_s": parts_s + 1.7, "startup_s": 6.84, "train_s": 226.2, "eval_s": 33.7, "checkpoint_s": 2.3,
                 "to_target_s": 251.0},
        "goodput": {"share": 0.6631, "wall_s": 402.7, "useful_s": 267.0, "startup_s": 13.9, "data_wait_s": 44.0,
                    "eval_s": 33.7, "checkpoint_s": 2.3, "rework_s": 18.6, "down_s": 21.1, "other_s": 2.1, "starts": 2},
        "checkpoints": {"saved": 13, "failed": 1, "stall_s": 0.0312, "write_s": 0.471, "bytes": 134_733_664},
        "stages": {name: {"host_s": host_s, "device_s": device_s, "share": host_s / (stages_s + 0.9)}
                   for name, (host_s, device_s) in STAGES.items()},
        "account": {"wall_s": parts_s + 1.7, "start_up_s": 6.84, "compile_s": 0.0, "warmup_s": 3.2, "finish_s": 1.9,
                    "stages_s": stages_s, "counted_steps": 4682, "pauses": PAUSES, "residual_s": 1.7,
                    "explained": 1 - 1.7 / (parts_s + 1.7)},
        "loader": {"workers": 4, "batches": 4692, "images": 300_288, "read_s": 12.1, "decode_s": 301.7,
                   "augment_s": 88.2, "collate_s": 9.4, "wait_s": 41.2, "queue_depth": 1.31, "ready": 0.713,
                   "bytes_read": 812_331_008, "bytes_made": 922_484_736, "busy": 0.934},
        "communication": {"exposed_s": 0.00478, "share": 0.1008, "bytes": 44_695_848, "wire_s": 0.0163,
                          "overlap": 0.707,
                          "buckets": [{"bytes": 9_437_184, "ready_s": 0.0041 * each, "wire_s": 0.0039, "n": 4682}
                                      for each in range(5)]},
        "ranks": [{"rank": rank, "step_s": 0.0474, "late_s": late_s,
                   "stages": {name: device_s / 4682 for name, (_, device_s) in STAGES.items()}}
                  for rank, late_s in ((0, -0.0021), (1, 0.0021))],
        "straggler": {"lost_s": 0.0019, "share": 0.0401, "rank": 1, "stage": "backward", "late_s": 0.0042},
        "verdict": {"bottleneck": "input-bound",
                    "evidence": "Waiting for data took 41.2 s of the 222 s of 4,682 steps (19%).",
                    "ceiling": "at most 1.23x without waiting for data, all else unchanged", "try": "data.workers=6"},
        "lr": "0.4 (batch 128, no scaling), 2 epochs of warm-up, then cosine",
        "weights_sha256": "3f92c4bf85dfc3701989e98dd3565be31693ca568b54ca8eb2c4ab40f610b6d1",
        "provenance": {**MACHINE, "device": "cuda", "launcher": "single",
                       "command": ["paceline", "train", "cifar10-resnet18", "data.source.root=/tmp/<b>x", "--ranks=2"]},
    }  # fmt: skip
    return RunResult.model_validate({**values, **changes})


def step(index: int, num_steps: int, draw: random.Random) -> dict[str, Any]:
    part = index / num_steps
    images_per_s = 2700 * (1 - 0.35 * (draw.random() < 0.03)) * draw.uniform(0.96, 1.03)
    rise = min(1.0, part / 0.16)
    return {"step": index * 4, "epoch": 12 * part, "images_seen": index * 512, "trained_s": 226 * part,
            "loss": 2.3 * math.exp(-3.1 * part) + 0.12 + draw.uniform(-0.05, 0.05),
            "lr": 0.4 * (rise if rise < 1 else 0.5 * (1 + math.cos(math.pi * (part - 0.16) / 0.84))),
            "images_per_s": images_per_s}  # fmt: skip


def evaluation(index: int, num_evals: int) -> dict[str, Any]:
    part = index / num_evals
    top1 = 0.93 * (1 - math.exp(-4.5 * part))
    return {
        "step": 4692 * index // num_evals,
        "epoch": 12 * part,
        "images_seen": 50_000 * index,
        "trained_s": 226 * part,
        "images": 10_000,
        "top1": top1,
        "top5": 0.5 + top1 / 2,
        "loss": 0.25 + 1.7 * math.exp(-4 * part),
        "ece": 0.02,
        "mean_class_accuracy": top1,
        "ema_top1": 1.033 * top1,
        "ema_top5": 0.99,
        "ema_loss": 0.21 + 2.0 * math.exp(-4 * part),
        "train_top1": 1.06 * top1,
        "train_loss": 1.1 - part,
        "gap": 0.06 * top1,
    }


def sample(index: int, shape: Shape, draw: random.Random) -> dict[str, Any]:
    wave = 0.5 + 0.4 * math.sin(index / 6)
    gpus = [
        {"index": gpu, "name": "NVIDIA H200", "utilisation": min(1.0, 0.55 + 0.4 * draw.random()),
         "power_w": 380 + 140 * wave + 20 * gpu, "sm_clock_mhz": 1900 - 60 * draw.random(),
         "memory_used_bytes": (21 + gpu) * 2**30, "memory_total_bytes": 139 * 2**30, "temperature_c": 51 + 9 * wave}
        for gpu in range(shape.gpus)
    ]  # fmt: skip
    return {"unix_s": BEGIN_S + 3 * index, "cpu": min(1.0, 0.6 + 0.35 * draw.random()),
            "memory_bytes": round((18 + 4 * index / shape.samples) * 2**30), "memory_total_bytes": 128 * 2**30,
            "ranks_memory_bytes": round((9 + 2 * index / shape.samples) * 2**30),
            "disk_read_bytes_per_s": 3e6 * wave, "disk_written_bytes_per_s": 45e6 if index % 30 == 29 else 2e5,
            "net_sent_bytes_per_s": 1.2e6 * wave, "net_received_bytes_per_s": 0.9e6 * wave, "gpus": gpus}  # fmt: skip


MAPPED = 5
"""Worst images with maps of what the model looks at."""


def write_worst(rundir: RunDir, shape: Shape, draw: random.Random) -> None:
    """Write thumbnails of colored shapes, some of 32 pixels and some of 96."""
    rundir.worst.mkdir()
    rows = []
    for index in range(shape.mistakes):
        side, kind = (32, "png") if index % 2 else (96, "jpg")
        hue = [draw.randrange(256) for _ in range(3)]
        picture = Image.new("RGB", (side, side * 3 // 4), tuple(hue))
        picture.paste(tuple(255 - each for each in hue), (side // 4, side // 5, side // 2, side // 2))
        file = BytesIO()
        picture.save(file, "PNG" if kind == "png" else "JPEG")
        (rundir.worst / f"{index}.{kind}").write_bytes(file.getvalue())
        true, predicted = shape.names[index % len(shape.names)], shape.names[(index + 3) % len(shape.names)]
        rows.append({"index": index, "name": f"val/{true[:40]}/img_{index:04}.{kind}", "true": true,
                     "predicted": predicted, "confidence": 0.99 - index / 100, "loss": 9.1 - index / 3,
                     "file": f"{index}.{kind}"})  # fmt: skip
        if index < MAPPED:
            rows[-1]["maps"] = dict.fromkeys(("predicted", "true"), f"{index}.{kind}")
    (rundir.worst / "worst.json").write_text(json.dumps(rows))


PLAN = {"world_size": 2, "batch_size": 128, "train_images": 50_000, "val_images": 1000, "image_size": 32,
        "total_steps": 4692}  # fmt: skip
MACHINE = {"python": "3.12.3", "platform": "Linux-6.8.0", "paceline": "0.1.0", "torch": "2.11.0+cu130",
           "numpy": "2.4.6", "cpu": "AMD EPYC 9654", "logical_cores": 16, "memory_bytes": 137_438_953_472, "threads": 8,
           "cuda_devices": ["NVIDIA H200", "NVIDIA H200"], "cuda": "13.0", "driver": "580.65.06"}  # fmt: skip
ATTEMPTS = [
    {"event": "start", "number": 1, "started_s": BEGIN_S - 140, "startup_s": 7.1, "from_step": 0, "trained_s": 0.0,
     "world_size": 2, "host": "node07", "pid": 41, "launch": ""},
    {"event": "end", "number": 1, "ended_s": BEGIN_S - 30, "step": 1310, "trained_s": 66.0, "how": "killed"},
    {"event": "start", "number": 2, "started_s": BEGIN_S - 8, "startup_s": 6.84, "from_step": 1173, "trained_s": 59.0,
     "world_size": 2, "host": "node07", "pid": 97, "launch": ""},
    {"event": "end", "number": 2, "ended_s": BEGIN_S + 266, "step": 4692, "trained_s": 226.0, "how": "target_reached"},
]  # fmt: skip
PAUSE_ROWS = [
    {"name": "evaluate", "step": 391, "unix_s": BEGIN_S + 20, "pause_s": 2.8},
    {"name": "checkpoint", "step": 391, "unix_s": BEGIN_S + 23, "pause_s": 0.03},
    {"name": EVIL, "step": 391, "unix_s": BEGIN_S + 23, "pause_s": 9.0},
]
PROFILE = {
    "schema_version": 1,
    "base": {"images_per_s": 2713.4481, "spread": [2391.1, 2842.9], "n": 3},
    "probes": [
        {"name": "free-data", "patch": ["data.replay=4"], "images_per_s": 3321.0, "spread": [3290.0, 3350.0],
         "ratio": 1.2239, "ratio_spread": [1.19, 1.25], "explains": "reading, decoding and augmenting images"},
        {"name": "free-communication", "patch": ["parallel.sync_gradients=false"], "images_per_s": 2822.0,
         "spread": [2800.0, 2841.0], "ratio": 1.04, "ratio_spread": None, "explains": "averaging gradients"},
    ],
    "left_out": [{"name": "free-copy", "reason": "the device is the host"}],
    "ceilings": {"free_data": 1.2239, "free_communication": 1.04},
    "cost": {"parameters": 11_173_962, "flops_per_image": 3.34e9, "achieved_flops_per_s": 9.06e12,
             "peak_flops_per_s": 9.89e14, "peak_source": "NVIDIA H200 data sheet, bf16, dense", "mfu": 0.00916,
             "roofline_images_per_s": 41_233.0, "roofline_share": 0.0658},
    "verdict": {"ceiling": "without data loading: at most 1.22x; without communication: at most 1.04x"},
}  # fmt: skip
RECIPE = """\
# recipe a53258041b55
seed: 0
data:
  source:
    name: cifar10
    root: "/data/<i>cifar</i>"
  batch_size: 128
measure:
  clock: on
  warmup_steps: 10
  telemetry: 3s
log:
  every: 4st
"""
