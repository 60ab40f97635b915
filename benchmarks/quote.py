"""Fit the constants of `paceline quote` to published tables of images per second, and judge it where it was not fitted.

    python benchmarks/quote.py TABLES --cache KERNELS.jsonl --json benchmarks/results/quote.json

TABLES is a folder of timm's tables (huggingface/pytorch-image-models, `results/benchmark-*.csv`). Their networks are
counted on the meta device first, about a second each, and kept in the cache; `--networks` counts no more than so many.
Three judgments: training of networks of families that were left out, inference on a GPU that was left out, and figures
that others have published of other GPUs. A family is a module of `timm.models`. Three baselines see the same data:
FLOPs, parameters, and the roofline of the datasheet for the same kernels, each with the best power of it as the time.
The roofline is also judged as it is.

`--constants FILE` writes the constants of the package. `--no-fit` judges those that the package has, on tables that
they were not fitted to.
"""

import argparse
import csv
import json
import multiprocessing
import random
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from record import write
from scipy.optimize import least_squares, nnls  # type: ignore[import-untyped]

from paceline.lab.quote.gpu import read_gpu
from paceline.lab.quote.step_model import (
    KINDS,
    PARTS,
    SLOW_KINDS,
    SMOOTHNESS,
    Constants,
    FormatConstants,
    KernelTable,
    Layout,
    StepConstants,
    build_step_table,
    find_bounds,
    predict_time,
    read_constants,
    time_kernels,
)
from paceline.lab.quote.update import list_optimizer_kernels
from paceline.models.flops import Kernel, StepKernels

Array = NDArray[np.float64]

SOURCE = "huggingface/pytorch-image-models, results/, commit aa4b5850 of 2026-08-08"
FOLDS = 10
TAIL = {"training": 0.02, "inference": 0.06}
"""Share of errors beyond each end of an interval, chosen so that intervals hold 85 to 95 % in every judgment. It is
below 5 % in training, whose families are few and large: networks of a family err alike."""
# Where the fit starts, and how far it may go: mean and standard deviation of the logarithm of each constant. They hold
# classes of kernels of which the tables have few, and efficiencies near what a GPU can reach. With more freedom the fit
# to one GPU is one percent better, but may give a convolution more than the peak, with twice the error on the other
# GPU. The priors were chosen with `FIGURES` and the GPUs that are left out in view, so those are no blind test.
PRIORS: dict[str, tuple[float, float]] = {
    "compute": (0.85, 0.06),
    "memory": (0.8, 0.1),
    "side": (24.0, 0.3),
    "nchw": (1.1, 0.1),
    "odd": (1.3, 0.3),
    "launch": (1.0, 0.4),
}
SLOW_COMPUTE = {
    "grouped": 0.3,
    "grouped_weights": 0.2,
    "narrow": 0.3,
    "narrow_weights": 0.2,
    "depthwise": 1.5,
    "depthwise_weights": 0.75,
}
"""Priors of `compute` of classes without a fast kernel. That of depthwise convolutions is a fit to inference."""
GROUPED = ("grouped", "grouped_weights", "narrow", "narrow_weights")
"""Classes whose speed depends most on the layout and on the sides."""
SLOW_SIGMA = 0.7
"""Their standard deviation, and that of `side` and `nchw` of grouped convolutions."""
LAYOUT_KINDS = {*SLOW_COMPUTE, "convolution", "convolution_weights", "batch_norm"}
"""Classes that have kernels of their own for NHWC."""
LAYOUT_SIGMA = 0.03
"""Standard deviation of `nchw` of the others."""
NOISE = 0.12
"""Standard deviation of the logarithm of the error that is expected of one network."""
SAME_NETWORK = 0.02
"""Relative difference in parameters up to which today's network of a name is the one of a table."""
OTHER_LAYERS = ("tresnet",)
"""Families whose layers today are others than those measured: TResNet had the in-place norms of inplace_abn, which
NHWC made four times slower."""
FITTED_GPUS = {"training": ("3090",), "inference": ("3090", "4090")}
"""GPUs of the tables that the package's constants were fitted to."""
GPU_SIGMA = {"training": 0.12, "inference": 0.1}
"""Assumed standard deviation of the logarithm of the error that another GPU adds, and in training a later version of
PyTorch."""
HOST_US = {"training": 20.0, "inference": 28.0}
"""Microseconds of the host per kernel, which the tables cannot tell, as their batches are large. At a batch of 1,
NVIDIA's latencies (`FIGURES`) are 27 to 32 us per kernel on a DGX A100 and 44 to 60 on a DGX-1. NERSC's fused optimizer
and gradients set to None save 17 ms of about 950 launches, or 18 us each. Backward launches from C++."""
HOST_SIGMA = 0.5
"""Standard deviation of its logarithm: computers in those figures differ by a factor of 2."""


@dataclass(frozen=True)
class Row:
    """A row of a published table."""

    model: str
    size: int
    batch: int
    images_per_s: float
    params: float


@dataclass(frozen=True)
class Figure:
    """A figure that others have published: `model` is a name of paceline's."""

    source: str
    gpu: str
    model: str
    num_classes: int
    size: int
    batch: int
    precision: str
    layout: Layout
    images_per_s: float
    mode: str = "training"


DLE = "NVIDIA DeepLearningExamples"
NERSC = "NERSC sc20-dl-tutorial, with its loader"
RESNET50, RESNEXT101, SE_RESNEXT101 = "torchvision:resnet50", "timm:resnext101_32x4d", "timm:seresnext101_32x4d"
B0, B4 = "timm:efficientnet_b0", "timm:efficientnet_b4"
# Batches are of DeepLearningExamples' configs.yml, and of its tables of latency.
FIGURES = (
    Figure(DLE, "v100", RESNET50, 1000, 224, 256, "fp16", "nhwc", 1200),
    Figure(DLE, "v100", RESNET50, 1000, 224, 112, "fp32", "nchw", 367),
    Figure(DLE, "a100", RESNET50, 1000, 224, 256, "fp16", "nhwc", 2470),
    Figure(DLE, "a100", RESNET50, 1000, 224, 256, "tf32", "nchw", 938),
    Figure(DLE, "v100", RESNEXT101, 1000, 224, 128, "fp16", "nhwc", 534.9),
    Figure(DLE, "v100", RESNEXT101, 1000, 224, 64, "fp32", "nchw", 150.1),
    Figure(DLE, "a100-40", RESNEXT101, 1000, 224, 128, "fp16", "nhwc", 908.4),
    Figure(DLE, "a100-40", RESNEXT101, 1000, 224, 128, "tf32", "nchw", 300.4),
    Figure(DLE, "v100", SE_RESNEXT101, 1000, 224, 112, "fp16", "nhwc", 443),
    Figure(DLE, "v100", SE_RESNEXT101, 1000, 224, 64, "fp32", "nchw", 132),
    Figure(DLE, "a100", SE_RESNEXT101, 1000, 224, 128, "fp16", "nhwc", 855),
    Figure(DLE, "a100", SE_RESNEXT101, 1000, 224, 128, "tf32", "nchw", 395),
    Figure(DLE, "v100", B0, 1000, 224, 128, "fp16", "nhwc", 1301),
    Figure(DLE, "v100", B0, 1000, 224, 64, "fp32", "nhwc", 655),
    Figure(DLE, "a100", B0, 1000, 224, 256, "fp16", "nhwc", 2489),
    Figure(DLE, "a100", B0, 1000, 224, 256, "tf32", "nhwc", 1078),
    Figure(DLE, "v100", B4, 1000, 380, 32, "fp16", "nhwc", 204),
    Figure(DLE, "v100", B4, 1000, 380, 16, "fp32", "nhwc", 83),
    Figure(DLE, "a100", B4, 1000, 380, 128, "fp16", "nhwc", 331),
    Figure(DLE, "a100", B4, 1000, 380, 64, "tf32", "nhwc", 157),
    Figure("timm issue 1491, synthetic", "a100", RESNET50, 1000, 224, 256, "fp16", "nhwc", 2600),
    Figure("DLPerf, NGC PyTorch", "v100", RESNET50, 1000, 224, 256, "fp16", "nchw", 803),
    Figure(NERSC, "v100", "resnet50_nersc", 100, 32, 256, "fp32", "nchw", 680),
    Figure(NERSC, "v100", "resnet50_nersc", 100, 32, 256, "fp16", "nchw", 1795),
    Figure(NERSC, "v100", "resnet50_nersc", 100, 32, 256, "fp16", "nhwc", 2180),
    Figure("DDP post, with its loader", "a100-40", RESNET50, 10, 32, 256, "tf32", "nchw", 3788),
    Figure("JSC course, with its loader", "a100-40", RESNET50, 1000, 256, 256, "tf32", "nchw", 624),
    Figure(DLE, "v100", RESNET50, 1000, 224, 256, "fp16", "nhwc", 3382, "inference"),
    Figure(DLE, "v100", RESNET50, 1000, 224, 256, "fp32", "nchw", 1261, "inference"),
    Figure(DLE, "t4", RESNET50, 1000, 224, 256, "fp16", "nhwc", 1198, "inference"),
    Figure(DLE, "t4", RESNET50, 1000, 224, 256, "fp32", "nchw", 415, "inference"),
    Figure(DLE, "v100", SE_RESNEXT101, 1000, 224, 256, "fp16", "nhwc", 1576, "inference"),
    Figure(DLE, "v100", SE_RESNEXT101, 1000, 224, 256, "fp32", "nchw", 508, "inference"),
    Figure(DLE, "t4", SE_RESNEXT101, 1000, 224, 256, "fp16", "nhwc", 527, "inference"),
    Figure(DLE, "t4", SE_RESNEXT101, 1000, 224, 128, "fp32", "nchw", 165, "inference"),
    Figure(DLE, "a100", B0, 1000, 224, 256, "fp16", "nhwc", 10239, "inference"),
    Figure(DLE, "a100", B0, 1000, 224, 256, "tf32", "nhwc", 5154, "inference"),
    Figure(DLE, "a100", B4, 1000, 380, 256, "fp16", "nhwc", 1442, "inference"),
    Figure(DLE, "a100", B4, 1000, 380, 256, "tf32", "nhwc", 702, "inference"),
    Figure(DLE, "v100", B0, 1000, 224, 256, "fp32", "nhwc", 2968, "inference"),
    Figure(DLE, "v100", B4, 1000, 380, 128, "fp32", "nhwc", 376, "inference"),
    Figure(DLE, "v100", RESNET50, 1000, 224, 1, "fp16", "nhwc", 78, "inference"),
    Figure(DLE, "v100", RESNET50, 1000, 224, 1, "fp32", "nchw", 96, "inference"),
    Figure(DLE, "t4", RESNET50, 1000, 224, 1, "fp16", "nhwc", 79, "inference"),
    Figure(DLE, "t4", RESNET50, 1000, 224, 1, "fp32", "nchw", 98, "inference"),
    Figure(DLE, "v100", SE_RESNEXT101, 1000, 224, 1, "fp16", "nhwc", 29, "inference"),
    Figure(DLE, "v100", SE_RESNEXT101, 1000, 224, 1, "fp32", "nchw", 40, "inference"),
    Figure(DLE, "a100", B0, 1000, 224, 1, "fp16", "nhwc", 105, "inference"),
    Figure(DLE, "a100", B0, 1000, 224, 1, "tf32", "nhwc", 130, "inference"),
    Figure(DLE, "a100", B4, 1000, 380, 1, "fp16", "nhwc", 53, "inference"),
    Figure(DLE, "a100", B4, 1000, 380, 1, "tf32", "nhwc", 69, "inference"),
    Figure(DLE, "v100", B0, 1000, 224, 1, "fp32", "nhwc", 83, "inference"),
    Figure(DLE, "v100", B4, 1000, 380, 1, "fp32", "nhwc", 45, "inference"),
)
"""One GPU each, by PyTorch."""


@dataclass(frozen=True)
class Published:
    """A table: what was measured, on which GPU, in which layout, by which versions."""

    name: str
    mode: str
    gpu: str
    layout: Layout
    rows: tuple[Row, ...]


def read_table(path: Path) -> Published:
    """Read a table; its name states the rest."""
    match = re.fullmatch(r"benchmark-(train|infer)-amp-(nchw|nhwc)-(\w+)-(\w+)-(?:rtx)?(\w+)", path.stem)
    assert match, f"{path.name} is not named as timm's tables are"
    kind, layout, _, _, gpu = match.groups()
    with path.open(encoding="utf-8", newline="") as file:
        rows = tuple(
            Row(
                each["model"],
                int(each[f"{kind}_img_size"]),
                int(each[f"{kind}_batch_size"]),
                float(each[f"{kind}_samples_per_sec"]),
                float(each["param_count"]),
            )
            for each in csv.DictReader(file)
        )
    return Published(path.stem, "training" if kind == "train" else "inference", gpu, layout, rows)


# --- kernels of the networks -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """The kernels of a network, its parameters, and its family."""

    family: str
    step: StepKernels

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Counted":
        """Read what `count_network` has written."""
        forward, backward = (
            tuple(
                Kernel(row[0], row[1], row[2], row[3], tuple(row[4]))
                for *row, number in values[part]
                for _ in range(number)
            )
            for part in ("forward", "backward")
        )
        step = StepKernels(values["params"], values["tensors"], forward, backward)
        return cls(values["family"], step)


def count_network(task: tuple[str, str, int]) -> dict[str, Any]:
    """Count a network of timm for a mode and an image size; the reason instead if that fails."""
    import timm
    import torch
    from timm.layers import set_fused_attn

    from paceline.models.flops import count_kernels

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    mode, name, size = task
    # PyTorch 1.12, of the training tables, has no fused attention.
    set_fused_attn(mode == "inference")
    found: dict[str, Any] = {"key": "/".join(map(str, task))}
    try:
        model = _create(timm.create_model, name, size)
        step = count_kernels(
            model,
            3,
            size,
            size,
            training=mode == "training",
            autocast=torch.float16,
            fused_attention=mode == "inference",
        )
    except Exception as error:  # any of a library's constructors
        return found | {"failed": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    return found | {
        "family": type(model).__module__.rpartition(".")[2],
        "params": step.params,
        "tensors": step.tensors,
        "forward": _merge(step.forward),
        "backward": _merge(step.backward),
    }


def _create(create: Any, name: str, size: int) -> Any:
    import torch

    def build(**args: Any) -> Any:
        try:
            with torch.device("meta"):
                return create(name, **args)
        except Exception:  # some constructors read values, which the meta device does not have
            return create(name, **args)

    model = build()
    config = model.pretrained_cfg
    if config["input_size"][-1] != size and config.get("fixed_input_size"):
        return build(img_size=size)
    return model


def _merge(kernels: Iterable[Kernel]) -> list[list[Any]]:
    counts: dict[Kernel, int] = defaultdict(int)
    for kernel in kernels:
        counts[kernel] += 1
    return [[*kernel, number] for kernel, number in counts.items()]


def architecture(task: tuple[str, str, int]) -> tuple[Any, ...]:
    """Return what the kernels of a task depend on: many names of timm are weights of the same network."""
    import timm
    from timm.models import get_deprecated_models

    mode, name, size = task
    current = get_deprecated_models().get(name) or name
    try:
        config = timm.get_pretrained_cfg(current)
    except RuntimeError:  # a name without configuration is a network of its own
        return task
    return mode, current.partition(".")[0], config and config.num_classes, size


def family_of(name: str) -> str:
    """Return the module of `timm.models` that a name belongs to."""
    import timm
    from timm.models import get_deprecated_models

    current = (get_deprecated_models().get(name) or name).partition(".")[0]
    return str(timm.model_entrypoint(current).__module__) if timm.is_model(current) else ""


def count_networks(tables: Iterable[Published], cache: Path, limit: int, jobs: int) -> None:
    """Count the networks that the cache lacks, one of each family in turn, so that a part of them is a sample."""
    known = {json.loads(line)["key"] for line in cache.open(encoding="utf-8")} if cache.exists() else set()
    tasks = sorted({(each.mode, row.model, row.size) for each in tables for row in each.rows})
    random.Random(0).shuffle(tasks)
    turns: Counter[tuple[str, str]] = Counter()
    turn_of = {}
    for task in tasks:
        family = (task[0], family_of(task[1]))
        turn_of[task] = turns[family]
        turns[family] += 1
    tasks.sort(key=turn_of.__getitem__)
    same: dict[tuple[Any, ...], list[tuple[str, str, int]]] = defaultdict(list)
    for task in tasks:
        if "/".join(map(str, task)) not in known:
            same[architecture(task)].append(task)
    wanted = {"/".join(map(str, each[0])): each for each in list(same.values())[:limit]}
    with multiprocessing.get_context("spawn").Pool(jobs) as workers, cache.open("a", encoding="utf-8") as file:
        firsts = [each[0] for each in wanted.values()]
        for number, counted in enumerate(workers.imap_unordered(count_network, firsts), 1):
            for task in wanted[counted["key"]]:
                file.write(json.dumps(counted | {"key": "/".join(map(str, task))}) + "\n")
            file.flush()
            if number % 50 == 0:
                print(f"counted {number} of {len(wanted)}", flush=True)


def read_cache(cache: Path) -> dict[str, Counted]:
    """Return the counted networks by `MODE/MODEL/SIZE`; those that failed are left out."""
    found = {}
    for line in cache.open(encoding="utf-8"):
        values = json.loads(line)
        if "failed" not in values:
            found[values["key"]] = Counted.from_json(values)
    return found


# --- fit --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Samples:
    """Measurements of a table with the kernels of their networks: `owner` is the row of each kernel, from 0."""

    mode: str
    gpu: str
    layout: Layout
    names: tuple[str, ...]
    families: tuple[str, ...]
    table: KernelTable
    owner: NDArray[np.int64]
    batch: Array
    log_s: Array
    flops: Array
    params: Array

    def __len__(self) -> int:
        return len(self.names)

    def select(self, chosen: NDArray[np.bool_]) -> "Samples":
        """Return some of the rows."""
        kept = chosen[self.owner]
        columns = {name: value[kept] for name, value in vars(self.table).items()}
        number = np.cumsum(chosen) - 1
        pick = np.flatnonzero(chosen)
        return Samples(
            self.mode,
            self.gpu,
            self.layout,
            tuple(self.names[i] for i in pick),
            tuple(self.families[i] for i in pick),
            KernelTable(**columns),
            number[self.owner[kept]],
            *(each[chosen] for each in (self.batch, self.log_s, self.flops, self.params)),
        )


def build_samples(published: Published, counted: Mapping[str, Counted]) -> Samples:
    """Return the measurements of a table of which the network is counted, and is the one that was measured."""
    tables, owner, rows, found = [], [], [], []
    for row in published.rows:
        each = counted.get(f"{published.mode}/{row.model}/{row.size}")
        if each is None or each.family in OTHER_LAYERS:
            continue
        if abs(each.step.params / 1e6 - row.params) > SAME_NETWORK * row.params + 0.01:
            continue
        # Timm's optimizer is a loop over the tensors in the version of the tables.
        update = list_optimizer_kernels(each.step, "sgd", "loop") if published.mode == "training" else ()
        tables.append(build_step_table(each.step, update))
        owner += [len(rows)] * len(tables[-1].kind)
        rows.append(row)
        found.append(each)
    columns = {name: np.concatenate([getattr(each, name) for each in tables]) for name in vars(tables[0])}
    owners = np.array(owner)
    flops = np.bincount(owners, columns["flops"] * columns["count"])
    batch = np.array([row.batch for row in rows], dtype=np.float64)
    return Samples(
        published.mode,
        published.gpu,
        published.layout,
        tuple(row.model for row in rows),
        tuple(each.family for each in found),
        KernelTable(**columns),
        owners,
        batch,
        np.log(batch / np.array([row.images_per_s for row in rows])),
        flops,
        np.array([float(each.step.params) for each in found]),
    )


Vector = NDArray[np.float64]
NUM_KINDS = len(KINDS)


def start() -> tuple[Vector, Vector]:
    """Return mean and standard deviation of the logarithms of all constants: parts by kind, then the launch."""
    means, sigmas = [], []
    for part in PARTS:
        mean, sigma = PRIORS[part]
        means += [np.log(find_mean(part, kind, mean)) for kind in KINDS]
        sigmas += [find_sigma(part, kind, sigma) for kind in KINDS]
    return np.array([*means, np.log(PRIORS["launch"][0])]), np.array([*sigmas, PRIORS["launch"][1]])


def find_mean(part: str, kind: str, usual: float) -> float:
    """Return the mean of the prior of a constant."""
    if has_no_effect(part, kind):
        return 1.0
    return SLOW_COMPUTE.get(kind, usual) if part == "compute" else usual


def find_sigma(part: str, kind: str, usual: float) -> float:
    """Return the standard deviation of the prior of a constant."""
    if has_no_effect(part, kind):
        return LAYOUT_SIGMA
    is_free = kind in SLOW_COMPUTE and part in ("compute", *(("side", "nchw") if kind in GROUPED else ()))
    return SLOW_SIGMA if is_free else usual


def has_no_effect(part: str, kind: str) -> bool:
    """Return whether kernels of a class are as fast in both layouts, or with sides that are not aligned."""
    return (part == "nchw" and kind not in LAYOUT_KINDS) or (part == "odd" and kind not in ("product", "attention"))


def unpack(vector: Vector) -> StepConstants:
    """Return the constants of a vector of logarithms."""
    values = np.exp(vector)
    return StepConstants(*values[:-1].reshape(len(PARTS), NUM_KINDS), float(values[-1]))


def predict(samples: Samples, vector: Vector) -> tuple[Array, Array]:
    """Return the logarithm of the seconds of each row, and its derivatives by the vector."""
    gpu = read_gpu_once(samples.gpu)
    times = time_kernels(samples.table, samples.batch[samples.owner], gpu, "fp16", samples.layout, unpack(vector))
    gpu_s = np.bincount(samples.owner, times.work_s + times.launch_s)
    host_s = 1e-6 * HOST_US[samples.mode] * np.bincount(samples.owner, samples.table.count)
    total = (gpu_s**SMOOTHNESS + host_s**SMOOTHNESS) ** (1 / SMOOTHNESS)
    share = (times.compute_s / np.where(times.work_s > 0, times.work_s, 1)) ** SMOOTHNESS
    place = samples.owner * NUM_KINDS + samples.table.kind
    gain = (gpu_s / total) ** SMOOTHNESS / gpu_s  # of the logarithm of the whole per second of the GPU

    def by_kind(values: Array) -> Array:
        sums = np.bincount(place, values, minlength=len(total) * NUM_KINDS)
        return sums.reshape(len(total), NUM_KINDS) * gain[:, None]

    computed = times.work_s * share
    columns = [
        by_kind(-computed),
        by_kind(computed - times.work_s),
        by_kind(computed * times.loss),
        by_kind(times.work_s * (samples.layout == "nchw")),
        by_kind(computed * times.is_odd),
        (np.bincount(samples.owner, times.launch_s) * gain)[:, None],
    ]
    return np.log(total), np.concatenate(columns, axis=1)


_GPUS: dict[str, Any] = {}


def read_gpu_once(name: str) -> Any:
    """Return a specification."""
    if name not in _GPUS:
        _GPUS[name] = read_gpu(name)
    return _GPUS[name]


def fit(groups: Sequence[Samples], prior: tuple[Vector, Vector]) -> Vector:
    """Return the constants that explain the measurements, robustly, each family with the root of its size."""
    mean, sigma = prior
    sizes: dict[str, int] = defaultdict(int)
    for group in groups:
        for family in group.families:
            sizes[family] += 1
    weights = [np.array([sizes[family] ** -0.25 for family in group.families]) for group in groups]
    scale = np.sqrt(sum(len(group) for group in groups) / sum(np.sum(each**2) for each in weights)) / NOISE

    def residuals(vector: Vector) -> tuple[Array, Array]:
        parts = []
        for group, weight in zip(groups, weights, strict=True):
            log_s, slope = predict(group, vector)
            error = (log_s - group.log_s) * weight * scale
            # Of a residual r, the root of the pseudo-Huber loss, so that a few outliers do not steer the fit.
            loss = np.sqrt(2 * (np.sqrt(1 + error**2) - 1)) * np.sign(error)
            gain = np.where(np.abs(error) < 1e-4, 1.0, error / (np.sqrt(1 + error**2) * np.where(loss == 0, 1, loss)))
            parts.append((loss, slope * (weight * scale * gain)[:, None]))
        parts.append(((vector - mean) / sigma, np.diag(1 / sigma)))
        return np.concatenate([each[0] for each in parts]), np.concatenate([each[1] for each in parts])

    found = least_squares(lambda x: residuals(x)[0], mean, jac=lambda x: residuals(x)[1], method="trf", max_nfev=60)
    return np.asarray(found.x)


# --- baselines --------------------------------------------------------------------------------------------------------


def baseline_inputs(samples: Samples) -> dict[str, Array]:
    """Return the logarithm of what each baseline takes the time to be a power of."""
    gpu = read_gpu_once(samples.gpu)
    kernels = samples.table
    seconds = np.maximum(
        samples.batch[samples.owner] * kernels.flops / gpu.flops_per_s("fp16"),
        (samples.batch[samples.owner] * kernels.num_bytes + kernels.batch_bytes) / (gpu.gb_per_s * 1e9),
    )
    peak = gpu.flops_per_s("fp16")
    roofline = np.log(np.bincount(samples.owner, seconds * kernels.count))
    return {
        "FLOPs": np.log(samples.batch * samples.flops / peak),
        "parameters": np.log(samples.batch * samples.params / peak),
        "roofline": roofline,
        "roofline, not fitted": roofline,
    }


def fit_line(groups: Sequence[Samples], name: str) -> tuple[float, float]:
    """Return slope and intercept of the logarithm of the time."""
    if name.endswith("not fitted"):
        return 1.0, 0.0
    x = np.concatenate([baseline_inputs(each)[name] for each in groups])
    y = np.concatenate([each.log_s for each in groups])
    slope, intercept = np.polyfit(x, y, 1)
    return float(slope), float(intercept)


# --- judgment ---------------------------------------------------------------------------------------------------------


def slow_share(slope: Array) -> Array:
    """Return the share of the time of each row that is kernels of `SLOW_KINDS`, from the derivatives of `predict`."""
    # The time of a class is what grows as its two efficiencies fall.
    slow = [KINDS.index(kind) for kind in SLOW_KINDS]
    return -np.sum(slope[:, slow] + slope[:, [NUM_KINDS + index for index in slow]], axis=1)


@dataclass(frozen=True)
class Bounds:
    """An interval of the logarithm of an error: `low` and `high` times 1 + `spread` times the share of slow kernels."""

    low: float
    high: float
    spread: float

    def of(self, share: Array, sigma: float = 0.0) -> tuple[Array, Array]:
        """Return the bounds of rows; `sigma` is another error, in squares."""
        scale = 1 + self.spread * share
        middle, half = scale * (self.low + self.high) / 2, scale * (self.high - self.low) / 2
        half = np.hypot(half, 1.645 * sigma)
        return middle - half, middle + half


@dataclass(frozen=True)
class Errors:
    """Logarithms of measured over predicted seconds, and the interval that was predicted for each."""

    names: tuple[str, ...]
    families: tuple[str, ...]
    log_ratio: Array
    share: Array
    low: Array
    high: Array
    baselines: dict[str, Array]

    def summary(self) -> dict[str, Any]:
        """Return the numbers of the record; errors are of images/s."""
        absolute = np.abs(np.expm1(self.log_ratio))  # predicted over measured images/s, less one
        inside = (self.low <= self.log_ratio) & (self.log_ratio <= self.high)
        by_family: dict[str, list[int]] = defaultdict(list)
        for index, family in enumerate(self.families):
            by_family[family].append(index)
        medians = {family: float(np.median(absolute[indexes])) for family, indexes in sorted(by_family.items())}
        return {
            "networks": len(self.names),
            "families": len(by_family),
            "median_error": float(np.median(absolute)),
            "p90_error": float(np.quantile(absolute, 0.9)),
            "median_of_families": float(np.median([*medians.values()])),
            "bias": float(np.expm1(np.median(self.log_ratio))),
            "coverage": float(np.mean(inside)),
            "coverage_of_families": float(np.mean([np.mean(inside[indexes]) for indexes in by_family.values()])),
            "interval": [float(np.exp(np.median(self.low))), float(np.exp(np.median(self.high)))],
            "baselines": {name: float(np.median(np.abs(np.expm1(each)))) for name, each in self.baselines.items()},
            "by_family": medians,
        }


def split_families(groups: Sequence[Samples]) -> list[set[str]]:
    """Return the families in folds of about the same number of networks."""
    sizes: dict[str, int] = defaultdict(int)
    for group in groups:
        for family in group.families:
            sizes[family] += 1
    folds: list[set[str]] = [set() for _ in range(FOLDS)]
    for family in sorted(sizes, key=lambda each: (-sizes[each], each)):
        min(folds, key=lambda fold: (sum(sizes[each] for each in fold), len(fold))).add(family)
    return folds


def among(samples: Samples, families: set[str]) -> NDArray[np.bool_]:
    """Return which rows are of some families."""
    return np.array([family in families for family in samples.families])


def leave_families_out(groups: Sequence[Samples], prior: tuple[Vector, Vector]) -> list[Errors]:
    """Return the errors of each group, of networks whose families the fit did not see."""
    folds = split_families(groups)
    ratio, share = ([np.zeros(len(group)) for group in groups] for _ in range(2))
    baselines = [{name: np.zeros(len(group)) for name in baseline_inputs(group)} for group in groups]
    fold_of = [np.zeros(len(group), dtype=int) for group in groups]
    for number, fold in enumerate(folds):
        held = [among(group, fold) for group in groups]
        kept = [group.select(~each) for group, each in zip(groups, held, strict=True)]
        vector = fit(kept, prior)
        lines = {name: fit_line(kept, name) for name in baselines[0]}
        for index, (group, chosen) in enumerate(zip(groups, held, strict=True)):
            if not chosen.any():
                continue
            part = group.select(chosen)
            log_s, slope = predict(part, vector)
            ratio[index][chosen] = part.log_s - log_s
            share[index][chosen] = slow_share(slope)
            fold_of[index][chosen] = number
            for name, x in baseline_inputs(part).items():
                slope, intercept = lines[name]
                baselines[index][name][chosen] = part.log_s - (slope * x + intercept)
    results = []
    for index, group in enumerate(groups):
        low, high = np.zeros(len(group)), np.zeros(len(group))
        for number in range(FOLDS):  # the interval of a fold is from the errors of the others
            others, here = fold_of[index] != number, fold_of[index] == number
            families = np.array(group.families)[others]
            bounds = find_interval(ratio[index][others], share[index][others], families, TAIL[group.mode])
            low[here], high[here] = bounds.of(share[index][here])
        results.append(Errors(group.names, group.families, ratio[index], share[index], low, high, baselines[index]))
    return results


def find_interval(ratio: Array, share: Array, families: Sequence[str], tail: float) -> Bounds:
    """Return the interval that leaves out `tail` at each end, each family with the root of its size."""
    sizes = Counter(families)
    weight = np.array([sizes[family] ** -0.5 for family in families])
    # The size of an error as a line over the share of slow kernels, by weighted least squares.
    columns = np.stack([np.ones(len(ratio)), share], axis=1) * np.sqrt(weight)[:, None]
    (base, slope), _ = nnls(columns, np.abs(ratio) * np.sqrt(weight))
    spread = slope / base
    scaled = ratio / (1 + spread * share)
    order = np.argsort(scaled)
    position = (np.cumsum(weight[order]) - weight[order] / 2) / np.sum(weight)
    low, high = np.interp([tail, 1 - tail], position, scaled[order])
    return Bounds(float(low), float(high), float(spread))


def leave_gpu_out(fitted: Samples, judged: Samples, vector: Vector, bounds: Bounds) -> Errors:
    """Return the errors on one GPU of constants that were fitted on another."""
    log_s, slope = predict(judged, vector)
    baselines = {}
    for name, x in baseline_inputs(judged).items():
        line, intercept = fit_line([fitted], name)
        baselines[name] = judged.log_s - (line * x + intercept)
    share = slow_share(slope)
    low, high = bounds.of(share, GPU_SIGMA[judged.mode])
    return Errors(judged.names, judged.families, judged.log_s - log_s, share, low, high, baselines)


def count_figure(figure: Figure) -> KernelTable:
    """Count the network of a figure."""
    import torch

    from paceline.models.build import build_model
    from paceline.models.flops import count_kernels
    from paceline.recipe.schema.model import Model

    with torch.device("meta"):
        network = build_model(
            Model(name=figure.model), num_classes=figure.num_classes, channels=3, image_size=figure.size
        )
    autocast = torch.float16 if figure.precision == "fp16" else None
    is_training = figure.mode == "training"
    step = count_kernels(network, 3, figure.size, figure.size, training=is_training, autocast=autocast)
    return build_step_table(step, list_optimizer_kernels(step, "sgd", "loop") if is_training else ())


def count_figures() -> dict[Figure, KernelTable]:
    """Count the networks of all figures, each once."""
    counted: dict[tuple[Any, ...], KernelTable] = {}
    found = {}
    for each in FIGURES:
        key = (each.model, each.num_classes, each.size, each.precision == "fp16", each.mode)
        if key not in counted:
            counted[key] = count_figure(each)
        found[each] = counted[key]
    return found


def fit_formats(constants: Constants, figures: Mapping[Figure, KernelTable]) -> dict[str, FormatConstants]:
    """Return how much longer steps in other formats than fp16 take, by figures of large batches without a loader.

    The factor is the median of those in NCHW, which have no depthwise convolutions, and its error is that of all.
    """
    ratios: dict[str, list[tuple[Figure, float]]] = defaultdict(list)
    for figure, table in figures.items():
        if figure.precision != "fp16" and figure.batch > 1 and figure.source == DLE:
            ratio = float(np.log(predict_figure(figure, table, constants)[0] / figure.images_per_s))
            ratios[figure.precision].append((figure, ratio))
    found = {}
    for name, each in sorted(ratios.items()):
        middle = np.median([ratio for figure, ratio in each if figure.layout == "nchw"] or [ratio for _, ratio in each])
        sigma = np.sqrt(np.mean([(ratio - middle) ** 2 for _, ratio in each]))
        found[name] = FormatConstants(time=round(float(np.exp(middle)), 3), sigma=round(float(sigma), 3))
    return found


def predict_figure(figure: Figure, table: KernelTable, constants: Constants) -> tuple[float, float, float]:
    """Return images per second and their bounds."""
    gpu = read_gpu_once(figure.gpu)
    time = predict_time(table, figure.batch, gpu, figure.precision, figure.layout, constants)
    low, high = find_bounds(constants, figure.layout, figure.precision, time, is_fitted=False)
    rate = figure.batch / time.seconds
    return rate, rate / float(np.exp(high)), rate / float(np.exp(low))


def judge_figures(constants: Constants, figures: Mapping[Figure, KernelTable]) -> dict[str, Any]:
    """Return what is predicted of each figure, and by how much too fast."""
    found = {}
    for each, table in figures.items():
        predicted, low, high = predict_figure(each, table, constants)
        title = (
            f"{each.source}: {each.model} of {each.size} px on {each.gpu}, {each.precision} {each.layout}, "
            f"batch {each.batch}" + (", inference" if each.mode == "inference" else "")
        )
        found[title] = {
            "mode": each.mode,
            "images_per_s": each.images_per_s,
            "predicted": round(predicted, 1),
            "error": predicted / each.images_per_s - 1,
            "holds": low <= each.images_per_s <= high,
        }
    return found


def pool(errors: Sequence[Errors], mode: str) -> Bounds:
    """Return the interval of all errors together."""
    ratio, share = (np.concatenate([getattr(each, name) for each in errors]) for name in ("log_ratio", "share"))
    return find_interval(ratio, share, [family for each in errors for family in each.families], TAIL[mode])


def layout_prior(vector: Vector, prior: tuple[Vector, Vector]) -> tuple[Vector, Vector]:
    """Return a prior of inference, whose convolutions have the factors of the layout of a fit to training.

    A table of inference has one layout. Batch norms of inference are element-wise, without a kernel for NHWC, and later
    versions of the library have kernels for groups that the one of training lacks.
    """
    mean, sigma = (each.copy() for each in prior)
    for index, kind in enumerate(KINDS):
        place = PARTS.index("nchw") * NUM_KINDS + index
        if kind == "batch_norm":
            mean[place], sigma[place] = 0.0, LAYOUT_SIGMA
        elif kind in LAYOUT_KINDS and kind not in GROUPED:
            mean[place], sigma[place] = vector[place], 0.05
    return mean, sigma


def pool_by_layout(groups: Sequence[Samples], errors: Sequence[Errors]) -> dict[str, Bounds]:
    """Return the interval of the errors in each layout."""
    layouts = [group.layout for group in groups]
    return {
        layout: pool([each for each, other in zip(errors, layouts, strict=True) if other == layout], groups[0].mode)
        for layout in sorted(set(layouts))
    }


def to_constants(vector: Vector, mode: str, source: str, bounds: Mapping[str, Bounds]) -> Constants:
    """Return the constants as the package keeps them."""
    constants = unpack(vector)
    kinds = {
        kind: {part: float(f"{getattr(constants, part)[index]:.3g}") for part in PARTS}
        for index, kind in enumerate(KINDS)
    }
    errors = {
        layout: {"low": round(each.low, 4), "high": round(each.high, 4), "slow_spread": round(each.spread, 3)}
        for layout, each in bounds.items()
    }
    return Constants.model_validate(
        {
            "source": source,
            "kinds": kinds,
            "launch": float(f"{constants.launch:.3g}"),
            "host_us": HOST_US[mode],
            "host_sigma": HOST_SIGMA,
            "formats": {},
            "errors": errors,
            "gpu_sigma": GPU_SIGMA[mode],
        }
    )


def from_constants(constants: Constants) -> Vector:
    """Return the vector of constants."""
    values = StepConstants.build(constants)
    parts = [getattr(values, part) for part in PARTS]
    return np.log(np.concatenate([*parts, [values.launch]]))


def judge_package(tables: Sequence[Published], counted: Mapping[str, Counted]) -> Iterator[tuple[str, Any]]:
    """Yield the errors on each table of the constants of the package, which were fitted on others."""
    for each in tables:
        constants = read_constants()[each.mode]
        samples = build_samples(each, counted)
        log_s, slope = predict(samples, from_constants(constants))
        share, is_fitted = slow_share(slope), each.gpu in FITTED_GPUS[each.mode]
        errors = constants.errors[each.layout]
        bounds = Bounds(errors.low, errors.high, errors.slow_spread)
        low, high = bounds.of(share, 0.0 if is_fitted else constants.gpu_sigma)
        yield (
            f"{each.name}, the package's constants",
            Errors(samples.names, samples.families, samples.log_s - log_s, share, low, high, {}).summary(),
        )


def judge(tables: Sequence[Published], counted: Mapping[str, Counted], source: str) -> Iterator[tuple[str, Any]]:
    """Yield each judgment under its name, and the constants at last."""
    samples = {each.name: build_samples(each, counted) for each in tables}
    training = [samples[each.name] for each in tables if each.mode == "training"]
    errors = leave_families_out(training, start())
    for group, each in zip(training, errors, strict=True):
        yield f"training, families left out, {group.gpu} {group.layout}", each.summary()
    trained = fit(training, start())
    fitted = {"training": (trained, pool_by_layout(training, errors))}
    prior = layout_prior(trained, start())
    inference = {each.name: samples[each.name] for each in tables if each.mode == "inference"}
    for name, group in inference.items():
        within = leave_families_out([group], prior)
        yield f"inference, families left out, {name}", within[0].summary()
        vector, bounds = fit([group], prior), pool(within, group.mode)
        for other, judged in inference.items():
            if judged.gpu != group.gpu:
                yield f"inference, {name} to {other}", leave_gpu_out(group, judged, vector, bounds).summary()
    if inference:
        within = leave_families_out([*inference.values()], prior)
        fitted["inference"] = (
            fit([*inference.values()], prior),
            pool_by_layout([*inference.values()], within),
        )
    figures = count_figures()
    judged_figures: dict[str, Any] = {}
    package = {}
    for mode, (vector, bounds) in fitted.items():
        names = ", ".join(each.name for each in tables if each.mode == mode)
        own = {figure: table for figure, table in figures.items() if figure.mode == mode}
        constants = to_constants(vector, mode, f"{source}: {names}", bounds)
        constants = constants.model_copy(update={"formats": fit_formats(constants, own)})
        judged_figures |= judge_figures(constants, own)
        package[mode] = constants.model_dump(mode="json")
    yield "figures", judged_figures
    yield "constants", package


def main() -> None:
    """Count, fit, judge, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path, metavar="TABLES")
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--networks", type=int, default=10_000, help="count at most so many that the cache lacks")
    parser.add_argument("--jobs", type=int, default=1, help="processes that count")
    parser.add_argument("--no-fit", action="store_true", help="judge the constants of the package")
    parser.add_argument("--source", default=SOURCE, help="where the tables are from, for the constants")
    parser.add_argument("--constants", type=Path, help="write the constants")
    parser.add_argument("--json", type=Path, help="write the record")
    options = parser.parse_args()
    tables = [read_table(path) for path in sorted(options.tables.glob("benchmark-*.csv"))]
    assert tables, f"{options.tables} holds no table"
    count_networks(tables, options.cache, options.networks, options.jobs)
    counted = read_cache(options.cache)
    record = dict(judge_package(tables, counted) if options.no_fit else judge(tables, counted, options.source))
    constants = record.pop("constants", None)
    for title, each in record.get("figures", {}).items():
        print(f"{title}: {each['predicted']:,.0f} against {each['images_per_s']:,} images/s, {each['error']:+.1%}")
    for name, values in record.items():
        if name == "figures":
            continue
        baselines = ", ".join(f"{each} {error:.1%}" for each, error in values["baselines"].items())
        low, high = values["interval"]
        print(
            f"{name}: {values['networks']} networks of {values['families']} families: median error "
            f"{values['median_error']:.1%} (bias {values['bias']:+.1%}, 90 % below {values['p90_error']:.1%}), "
            f"coverage {values['coverage']:.1%} by {low:.2f} to {high:.2f}; {baselines}"
        )
    if options.constants and constants:
        from paceline.recipe.yaml import to_yaml_text

        options.constants.write_text(to_yaml_text(constants), encoding="utf-8")
    if options.json:
        write(options.json, record)


if __name__ == "__main__":
    main()
