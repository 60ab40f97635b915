"""How far is the memory that `paceline quote` counts without a GPU from what torch's CUDA allocator reports?

Each network is trained by `paceline.train` for three steps on an emulated GPU (tests/emulated/README.md), whose
allocator is torch's own, and `torch.cuda.max_memory_allocated` is read. The same recipe is counted on the meta device:

    python benchmarks/quote_memory.py --json benchmarks/results/quote-memory.json

A GPU's own kernels, cuDNN above all, may allocate workspaces while they run. An emulated GPU does not have them, so
that this judges the tensors of the step, and not what a library adds. Their convolutions and matrix products give
zeros, which take as much memory. For compiled steps Inductor generates its code, whose kernels by Triton are skipped.
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from record import provenance, write

EMULATED = Path(__file__).resolve().parents[1] / "tests" / "emulated" / "run.py"
NETWORKS: dict[str, dict[str, Any]] = {
    "torchvision:resnet18": {},
    "torchvision:resnet50": {},
    "torchvision:resnext50_32x4d": {},
    "torchvision:densenet121": {},
    "torchvision:googlenet": {},
    "torchvision:mobilenet_v3_large": {},
    "torchvision:efficientnet_b0": {},
    "torchvision:shufflenet_v2_x1_0": {},
    "torchvision:convnext_tiny": {},
    "torchvision:vit_b_16": {},
    "torchvision:swin_t": {},
    "timm:resnetv2_50": {},
    "timm:regnety_004": {},
    "timm:ghostnet_100": {},
    "timm:mobilevit_s": {},
    "timm:vit_tiny_patch16_224": {},
    "timm:mixer_s16_224": {},
    "wideresnet_course": {"data.source.image_size": 32},
    "resnet50_nersc": {"data.source.image_size": 32},
    "speednet96": {"data.source.image_size": 32},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {"model.checkpoint_activations": True},
    "compiled": {"train.compile": "default"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {"train.precision": "fp32"},
    "fp16": {"train.precision": "fp16"},
    "bf16_master": {"train.precision": "bf16_master"},
    "contiguous": {"model.memory_format": "contiguous"},
    "adamw": {"optim.name": "adamw", "optim.lr": 0.001},
    "lamb": {"optim.name": "lamb", "optim.lr": 0.001},
    "small batch": {"data.batch_size": 2},
    "accumulate": {"train.accumulate": 4},
    "ema, clipping, mixup": {"train.ema": "on", "train.clip_norm": 1, "data.augment": "[flip, mixup]"},
    "frozen": {"model.freeze": "['conv1.*', 'layer1.*']"},
}
"""Settings of a recipe that change the memory of a step, each of one network."""
SKIPPED = ("convolution", "convolution_backward", "mm", "addmm", "bmm", "baddbmm")
SETTINGS_NETWORK = "torchvision:resnet18"


def list_jobs() -> list[dict[str, Any]]:
    """Return the runs to compare: a name of the comparison and the overrides of the recipe."""
    jobs = [
        {"network": network, "variant": variant, "overrides": {**overrides, **changes}}
        for network, overrides in NETWORKS.items()
        for variant, changes in VARIANTS.items()
    ]
    return jobs + [
        {"network": SETTINGS_NETWORK, "variant": variant, "overrides": changes} for variant, changes in SETTINGS.items()
    ]


def list_words(job: dict[str, Any]) -> list[str]:
    """Return the overrides of the preset `synthetic`."""
    settings = {
        "model.name": job["network"],
        "model.width": 1,
        "data.source.image_size": 64,
        "data.source.num_classes": 100,
        "data.source.num_images": 96,
        "data.source.num_val_images": 1,
        "data.batch_size": 32,
        "data.workers": 0,
        "train.precision": "bf16",
        "train.steps": 3,
        "train.epochs": "auto",
        "train.eval_every": "off",
        "checkpoint.every": "off",
        "log.tensorboard": "off",
        **job["overrides"],
    }
    return [f"{name}={json.dumps(value) if isinstance(value, bool) else value}" for name, value in settings.items()]


def count(job: dict[str, Any]) -> dict[str, Any]:
    """Return the counted bytes at the peak, of what they consist, and how long counting took."""
    from paceline.data.loaders.sampler import count_samples
    from paceline.data.sources.folds import build_run_datasets
    from paceline.lab.quote.memory import MemoryCounter
    from paceline.recipe.load import Patch, load
    from paceline.recipe.plan import Plan

    recipe = load("synthetic", Patch.parse(list_words(job))).recipe
    datasets = build_run_datasets(recipe.data, may_download=False)
    train, val = datasets.train.info, datasets.val.info
    plan = Plan.derive(recipe, 1, train, val, count_samples(recipe.data, train.num_images))
    started = time.perf_counter()
    number_format = recipe.train.precision.partition("_")[0]
    counter = MemoryCounter(recipe, train, val)
    found = counter.count(plan, number_format, plan.micro_batch)
    assert not counter.is_without_compiler
    seconds = round(time.perf_counter() - started, 1)
    return {
        "counted": found.allocated_bytes,
        "parts": found.parts,
        "counted_reserved": found.reserved_bytes,
        "count_s": seconds,
    }


def measure(job: dict[str, Any]) -> dict[str, int]:
    """Train on the GPU of this process, and return the peaks of the allocated and of the reserved bytes."""
    import paceline

    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    # paceline prints, and the results of this process are on its standard output
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        paceline.train("synthetic", *list_words(job), "parallel.device=cuda", run_dir=f"{folder}/run")
    return {"measured": torch.cuda.max_memory_allocated() - before, "reserved": torch.cuda.max_memory_reserved()}


def skip_products() -> None:
    """Let convolutions and matrix products of the emulated GPU give zeros, which take as much memory as results."""
    import emulated_kernels

    compute = emulated_kernels._Call.compute

    def zeros(meta: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype).zero_()

    def compute_or_skip(call: Any) -> Any:
        is_skipped = emulated_kernels._name(call.op) in SKIPPED
        return emulated_kernels._each(zeros, call.sizes()) if is_skipped else compute(call)

    emulated_kernels._Call.compute = compute_or_skip


def serve() -> None:
    """Measure the jobs on standard input, a line each, and print the bytes."""
    import emulated_inductor

    skip_products()
    emulated_inductor.install()
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = measure(json.loads(line))
        except Exception as error:  # a network that cannot run there is reported, and the others go on
            answer = {"measure_error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        print(json.dumps(answer), flush=True)


def main() -> None:
    """Compare all jobs, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--only", default="", help="parts of `network variant`, separated by commas; the record keeps its other rows"
    )
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    parts = options.only.split(",")
    jobs = [job for job in list_jobs() if any(part in f"{job['network']} {job['variant']}" for part in parts)]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    command = [sys.executable, str(EMULATED), sys.executable, str(Path(__file__).resolve()), "--serve"]
    pipe = subprocess.PIPE
    rows: list[dict[str, Any]] = []
    kept = (
        json.loads(options.json.read_text())["rows"] if options.only and options.json and options.json.exists() else []
    )
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as gpu:
        assert gpu.stdin is not None and gpu.stdout is not None
        for job in jobs:
            row = {"network": job["network"], "variant": job["variant"]}
            with contextlib.suppress(BrokenPipeError):  # a process that died has no answer, which is reported below
                gpu.stdin.write(json.dumps(job) + "\n")
                gpu.stdin.flush()
            try:
                row |= count(job)
            except Exception as error:
                row |= {"count_error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
            row |= json.loads(gpu.stdout.readline() or json.dumps({"measure_error": f"exit code {gpu.wait()}"}))
            if "counted" in row and "measured" in row:
                row["error"] = round(row["counted"] / row["measured"] - 1, 5)
            rows.append(row)
            print(json.dumps(row), flush=True)
        with contextlib.suppress(BrokenPipeError):
            gpu.stdin.close()
    done = {(row["network"], row["variant"]) for row in rows}
    rows += [row for row in kept if (row["network"], row["variant"]) not in done]
    order = {(job["network"], job["variant"]): number for number, job in enumerate(list_jobs())}
    rows.sort(key=lambda row: order[row["network"], row["variant"]])
    result: dict[str, Any] = {"unit": "bytes at the peak of a step", "summary": summarize(rows), "rows": rows}
    print(json.dumps(result["summary"], indent=2))
    if options.json:
        write(options.json, {**result, "provenance": provenance()})


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median and the largest absolute error of each variant, and of the networks together."""
    groups = {variant: [row for row in rows if row["variant"] == variant] for variant in VARIANTS}
    groups["settings"] = [row for row in rows if row["variant"] in SETTINGS]
    groups["all"] = [row for row in rows if row["variant"] in VARIANTS]
    summary = {}
    for name, group in groups.items():
        errors = sorted(
            (abs(row["error"]), f"{row['network']} {row['variant']}")
            for row in group
            if "counted" in row and "measured" in row
        )
        if errors:
            summary[name] = {
                "comparisons": len(errors),
                "of": len(group),
                "median_error": statistics.median(error for error, _ in errors),
                "largest_error": errors[-1][0],
                "largest": errors[-1][1],
                "within_5_percent": sum(error <= 0.05 for error, _ in errors),
            }
    return summary


if __name__ == "__main__":
    main()
