"""Draw the figures of the explanation pages from the records in benchmarks/results.

    .venv/bin/python docs/images/make_figures.py

Two figures need no record: the step of data parallel training is an example, and the padding of validation sets is
computed from its definition. A test redraws all figures and compares.
"""

import json
from collections.abc import Callable, Mapping
from math import ceil, log2, log10
from pathlib import Path
from typing import Any, Final, Literal

from drawing import WIDTH, Drawing, Kind, Scale

FOLDER: Final = Path(__file__).parent
RESULTS: Final = FOLDER.parents[1] / "benchmarks" / "results"


def record(name: str) -> Any:
    """Return the content of benchmarks/results/`name`.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def step() -> str:
    """Draw one step of four ranks on two nodes: shards of a batch, copies of the model, and the mean gradient."""
    drawing = Drawing(
        "A step of data parallel training",
        "Four columns, one for each GPU, two on each of two nodes. Each GPU has 64 of the 256 images of the batch and "
        "a copy of the network, and computes a gradient. One bar across all columns is the all-reduce, which gives "
        "every GPU the mean of the four gradients. Below it every GPU moves its copy by the same step.",
        306,
    )
    drawing.heading("256 images on two nodes with two GPUs each")
    places, width, across = (16, 106, 212, 302), 82, (16, 384)
    for x, rank in zip(places, range(4), strict=True):
        drawing.text(x, 74, f"rank {rank}", "small")
        drawing.line(x + width / 2, 84, x + width / 2, 258)
        for y, text, kind in _RANK_BOXES:
            drawing.bar(x, y, width, 32, kind)
            drawing.text(x + width / 2, y + 21, text, "on", anchor="middle")
    drawing.bar(across[0], 204, across[1] - across[0], 32, "b")
    drawing.text(sum(across) / 2, 225, "all-reduce: the mean of all gradients", "on", anchor="middle")
    drawing.line(200, 62, 200, 196, "grid")
    drawing.text(106, 298, "node 0", "small", anchor="middle")
    drawing.text(298, 298, "node 1", "small", anchor="middle")
    return drawing.svg()


# From top to bottom of a column: y, text and color.
_RANK_BOXES: Final[tuple[tuple[int, str, Kind], ...]] = (
    (84, "64 images", "c"),
    (124, "network", "a"),
    (164, "gradient", "b"),
    (244, "same step", "a"),
)


def exposed() -> str:
    """Draw the exposed time of sending three buckets on two hosts behind a slow link."""
    hosts = record("hosts-cpu")
    seen, bytes_per_s = hosts["seen"]["2"], hosts["network"]["bytes_per_s"]
    sent, free_s = [], 0.0
    for bucket in seen["buckets"]:
        begin_s = max(bucket["ready_s"], free_s)
        free_s = begin_s + bucket["num_bytes"] / bytes_per_s  # over two ranks a ring sends each byte once
        sent.append((begin_s, free_s))
    ready_s, waited_s = seen["buckets"][-1]["ready_s"], seen["exposed_s"]
    drawing = Drawing(
        "What backward hides, and what is left",
        f"Two bars over one time axis. The rank computes gradients until {_ms(ready_s)} after its first bucket is "
        f"ready, and then waits for {_ms(waited_s)}. Meanwhile three buckets are sent one after the other, until "
        f"{_ms(free_s)}.",
        262,
    )
    drawing.heading("Two hosts, 40 Mbit/s between them; time since the", "first bucket of gradients was ready")
    axis = Scale(0, 0.45, 16, WIDTH - 16)
    _draw_grid(drawing, axis, [0, 0.1, 0.2, 0.3, 0.4], 84, 222, lambda value: f"{value * 1000:.0f}")
    drawing.text(axis.at(0.45), 240, "ms", "small", anchor="end")
    drawing.text(16, 98, "this rank")
    drawing.bar(axis.at(0), 106, axis.at(ready_s) - axis.at(0), 34, "a")
    drawing.text(axis.at(0) + 8, 128, "backward goes on", "on")
    drawing.bar(axis.at(ready_s), 106, axis.at(ready_s + waited_s) - axis.at(ready_s), 34, "b")
    drawing.text(axis.at(ready_s) + 8, 128, f"exposed: {_ms(waited_s)}", "on")
    drawing.text(16, 168, "on the wire")
    for bucket, (begin_s, end_s) in zip(seen["buckets"], sent, strict=True):
        drawing.bar(axis.at(begin_s) + 1, 176, axis.at(end_s) - axis.at(begin_s) - 2, 34, "c")
        drawing.text(axis.at(begin_s) + 8, 198, f"{bucket['num_bytes'] / 1000:.0f} kB", "on")
    return drawing.svg()


def steps() -> str:
    """Draw the computing and the exposed time per step on one to four hosts."""
    hosts = record("hosts-cpu")
    rows = {**hosts["seen"], **hosts["unseen_typical"]}
    predicted_s = {number: row["predicted_s"] for number, row in hosts["unseen"].items()}
    parts = ", ".join(
        f"{number}: {_ms(row['step_s'])}, of which {_ms(row['exposed_s'])} exposed" for number, row in rows.items()
    )
    predictions_text = ", ".join(f"{number}: {_ms(seconds)}" for number, seconds in predicted_s.items())
    drawing = Drawing(
        "A step on one to four hosts",
        f"A bar for each number of hosts. {parts}. Predicted before they were run: {predictions_text}.",
        270,
    )
    drawing.heading("64 images a host, 40 Mbit/s between them;", "a mark is what was predicted from 1 and 2")
    axis = Scale(0, 0.8, 74, WIDTH - 20)
    _draw_grid(drawing, axis, [0, 0.2, 0.4, 0.6, 0.8], 76, 228, lambda value: f"{value * 1000:.0f}")
    drawing.text(16, 246, "ms", "small")
    for place, (number, row) in enumerate(rows.items()):
        y = 84 + 36 * place
        busy_s = row["step_s"] - row["exposed_s"]
        drawing.text(16, y + 18, "1 host" if number == "1" else f"{number} hosts")
        drawing.bar(axis.at(0), y, axis.at(busy_s) - axis.at(0), 26, "a")
        drawing.text(axis.at(0) + 8, y + 18, f"{busy_s * 1000:.0f} {'by itself' if place == 0 else ''}".strip(), "on")
        if row["exposed_s"]:
            drawing.bar(axis.at(busy_s), y, axis.at(row["step_s"]) - axis.at(busy_s), 26, "b")
            shown = f"{row['exposed_s'] * 1000:.0f} {'exposed' if place > 1 else ''}".strip()
            drawing.text(axis.at(busy_s) + 8, y + 18, shown, "on")
        if number in predicted_s:
            x = axis.at(predicted_s[number])
            drawing.line(x, y - 4, x, y + 30)
    return drawing.svg()


def batches() -> str:
    """Draw the accuracy of large batches, with and without LR warm-up, beside that of a small one."""
    top1 = {name: values["mean"] for name, values in record("large-batch-fashion")["top1"].items()}
    small, root, root_cold = (group["accuracy"]["value"] for group in record("compare-batch-fashion")["groups"])
    assert small == top1["sgd at 128"], "the two records are not of the same reference"
    rows: dict[str, list[float]] = {"128: SGD, 0.1": [top1["sgd at 128"]]}
    rows["2,048: SGD, 1.6"] = [top1[f"sgd at 2048, lr 1.6, {how}"] for how in ("warm-up", "no warm-up")]
    rows["2,048: SGD, 0.4"] = [root, root_cold]
    rows["2,048: LARS, 4"] = [top1[f"lars at 2048, lr 4, {how}"] for how in ("warm-up", "no warm-up")]
    rows["2,048: NovoGrad, 4"] = [top1[f"novograd at 2048, lr 4, {how}"] for how in ("warm-up", "no warm-up")]
    description = "; ".join(f"{name}: {' and '.join(map(_percent, values))}" for name, values in rows.items())
    drawing = Drawing(
        "What a batch of 2,048 costs",
        "Top-1 accuracy on Fashion-MNIST by batch, optimizer and learning rate, with and without warm-up. "
        f"{description}.",
        308,
    )
    drawing.heading("Top-1 on Fashion-MNIST after three epochs, one", "seed; by batch: optimizer, peak learning rate")
    drawing.dot(22, 84, "a")
    drawing.text(34, 89, "with an epoch of warm-up", "small")
    drawing.dot(222, 84, "b", hollow=True)
    drawing.text(234, 89, "without", "small")
    axis = Scale(0.875, 0.93, 156, WIDTH - 24)
    _draw_grid(drawing, axis, [0.88, 0.89, 0.9, 0.91, 0.92, 0.93], 106, 270, lambda value: f"{value * 100:.0f} %")
    for place, (name, values) in enumerate(rows.items()):
        y = 124 + 32 * place
        drawing.text(16, y + 5, name)
        if len(values) == 1:
            drawing.dot(axis.at(values[0]), y, "b", hollow=True)
        else:
            drawing.line(axis.at(min(values)), y, axis.at(max(values)), y, "grid")
            drawing.dot(axis.at(values[1]), y, "b", hollow=True)
            drawing.dot(axis.at(values[0]), y, "a")
    return drawing.svg()


# Rows of the record `loaders-train-cpu`, with their labels here.
LOADERS: Final = {
    "torchvision PIL uint8 (jpeg)": "torchvision ImageFolder, PIL",
    "DALI fused (jpeg)": "DALI on the CPU",
    "torchvision decode_jpeg uint8 (jpeg)": "torchvision decode_jpeg",
    "FFCV jpeg q90 (jpeg)": "FFCV, JPEG",
    "paceline folder, native, epoch 1 (jpeg)": "paceline, image folder, first epoch",
    "FFCV max 500 raw (jpeg)": "FFCV, raw, at most 500 px",
    "paceline folder, native, indexed (jpeg)": "paceline, image folder, later epochs",
    "paceline pack, native (jpeg)": "paceline pack",
    "FFCV raw (256)": "FFCV, raw, 256 px",
    "paceline pack, native (256)": "paceline pack, 256 px",
}


def loaders() -> str:
    """Draw the images per second of loaders on two CPU cores."""
    rates = record("loaders-train-cpu")["sections"]["train"]
    rows = {label: rates[name]["images_per_s"] for name, label in LOADERS.items()}
    description = "; ".join(f"{label}: {rate['median']:,.0f}" for label, rate in rows.items())
    drawing = Drawing(
        "Images per second on two CPU cores",
        f"Random crops of 500 ImageNet photographs, resized to 224 pixels. {description}.",
        112 + 36 * len(rows),
    )
    drawing.heading("Random-resized crops of photographs to 224 pixels,", "uint8; the line is the range of 3 rounds")
    axis = Scale(0, 15_000, 16, WIDTH - 16)
    bottom = 82 + 36 * len(rows)
    _draw_grid(drawing, axis, [0, 4000, 8000, 12_000], 74, bottom, lambda value: f"{value:,.0f}")
    for place, (label, rate) in enumerate(rows.items()):
        y = 92 + 36 * place
        drawing.text(16, y, label)
        drawing.text(WIDTH - 16, y, f"{rate['median']:,.0f}", anchor="end")
        kind: Kind = "a" if label.startswith("paceline") else "c"
        drawing.bar(axis.at(0), y + 6, axis.at(rate["median"]) - axis.at(0), 12, kind)
        drawing.line(axis.at(rate["low"]), y + 12, axis.at(rate["high"]), y + 12)
    return drawing.svg()


MEMORY_FORMATS: Final = {"contiguous": "NCHW", "channels_last": "NHWC"}
PRECISIONS: Final = {"fp32": "float32", "bf16": "bfloat16"}


def formats() -> str:
    """Draw the CPU time per step of models in two memory formats and two precisions."""
    models = [row for row in record("memory-format-cpu")["networks"] if row["model"] in SHOWN_MODELS]
    models = [row for row in models if row["width"] == SHOWN_MODELS[row["model"]]]
    description = "; ".join(
        f"{row['model']}: "
        + ", ".join(
            f"{_variant(each)} {each['median_s'] / row['variants'][0]['median_s']:.2f}" for each in row["variants"]
        )
        for row in models
    )
    drawing = Drawing(
        "CPU time per step by format",
        f"Relative to float32 in NCHW, medians of 10. {description}.",
        70 + 102 * len(models),
    )
    drawing.heading("Relative to float32 in NCHW; medians of 10")
    axis = Scale(0, 1.05, 150, WIDTH - 60)
    for place, row in enumerate(models):
        top = 74 + 102 * place
        drawing.text(16, top, f"{row['model']}, {row['image_size']} px, batch {row['batch']}")
        for number, each in enumerate(row["variants"]):
            y, share = top + 8 + 19 * number, each["median_s"] / row["variants"][0]["median_s"]
            drawing.text(16, y + 12, _variant(each), "small")
            drawing.bar(axis.at(0), y + 1, axis.at(share) - axis.at(0), 13, "a" if each["precision"] == "bf16" else "c")
            drawing.text(axis.at(share) + 6, y + 12, f"{share:.2f}", "small")
    return drawing.svg()


SHOWN_MODELS: Final = {
    "resnet18_cifar": 1.0,
    "wideresnet_course": 0.25,
    "torchvision:resnet18": 1.0,
    "resnet50_nersc": 1.0,
}


def _variant(measured: Mapping[str, Any]) -> str:
    return f"{PRECISIONS[measured['precision']]}, {MEMORY_FORMATS[measured['memory_format']]}"


# Kinds of the record `memory`, with the color of their bar.
KEPT: Final[Mapping[Kind, tuple[str, ...]]] = {
    "c": ("weights", "gradients", "optimizer", "weights_16_bit"),
    "a": ("activations",),
    "b": ("input", "other"),
}


def memory() -> str:
    """Draw the peak memory of a training step by kind, for several batches and settings."""
    counted = record("memory")
    batches = {_count_images(row["batch"]): row for row in counted["batches"]}
    variants = {_changed(row): row for row in counted["variants"] if row["optimizer"] == "sgd"}
    description = "; ".join(
        f"{name}: {_gigabytes(row['total'])}, of which activations {_gigabytes(row['peak']['activations'])}"
        for name, row in {**batches, **variants}.items()
    )
    drawing = Drawing(
        "Peak memory of a training step",
        f"ResNet-50 in float32 at 224 pixels with SGD, by the number of images, then settings at 64 images. "
        f"{description}.",
        186 + 26 * (len(batches) + len(variants)),
    )
    drawing.heading("ResNet-50, 224 px, float32, SGD with momentum")
    for y, kind, text in ((64, "c", "weights, gradients and optimizer state"), (84, "a", "activations")):
        drawing.bar(16, y, 12, 12, kind)
        drawing.text(36, y + 11, text, "small")
    drawing.bar(136, 84, 12, 12, "b")
    drawing.text(156, 95, "images and temporary results", "small")
    axis = Scale(0, 6e9, 120, WIDTH - 66)
    variants_top = 118 + 26 * len(batches) + 24
    bottom = variants_top + 26 * len(variants) + 4
    _draw_grid(drawing, axis, [0, 2e9, 4e9, 6e9], 108, bottom, lambda value: f"{value / 1e9:.0f} GB")
    drawing.text(16, variants_top - 4, "64 images with", "small")
    tops = [118 + 26 * place for place in range(len(batches))]
    tops += [variants_top + 6 + 26 * place for place in range(len(variants))]
    for y, (name, row) in zip(tops, {**batches, **variants}.items(), strict=True):
        drawing.text(16, y + 13, name, "small")
        start = 0
        for kind, names in KEPT.items():
            end = start + sum(row["peak"][each] for each in names)
            drawing.bar(axis.at(start), y, axis.at(end) - axis.at(start), 16, kind)
            start = end
        drawing.text(axis.at(start) + 6, y + 13, _gigabytes(start), "small")
    return drawing.svg()


def _changed(row: Mapping[str, Any]) -> str:
    """Return what differs from float32 in one micro-batch at 224 pixels."""
    changes = [
        "bf16" if row["precision"] == "bf16" else "",
        f"accumulate={row['accumulate']}" if row["accumulate"] > 1 else "",
        f"{row['image_size']} px" if row["image_size"] != 224 else "",
    ]
    changes = [*filter(None, changes)]
    return changes[0] if len(changes) == 1 else "both"


def _count_images(number: int) -> str:
    return "1 image" if number == 1 else f"{number} images"


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB"


# Stages that compute and that wait, with the color of their bars; the others are short.
STAGE_KINDS: Final[Mapping[str, Kind]] = {
    "forward": "a",
    "backward": "a",
    "optimizer": "a",
    "data_wait": "b",
    "exposed_communication": "b",
}


def trace() -> str:
    """Draw the stages and the communication of two ranks in one step, from the reduced trace."""
    recorded = record("trace-cpu")
    ranks = recorded["ranks_of_step"]
    end_s = max(start_s + length_s for rank in ranks for _, start_s, length_s in (rank["span"], *rank["stages"]))
    parts = "; ".join(
        f"rank {rank['rank']}: " + ", ".join(f"{name} {_short_ms(length_s)}" for name, _, length_s in rank["stages"])
        for rank in ranks
    )
    drawing = Drawing(
        "One step of two ranks",
        f"Two rows for each of two ranks over one time axis: the stages of the step, and the messages between the "
        f"ranks. {parts}.",
        318,
    )
    drawing.heading(f"Step {recorded['step']} of a trace on two CPU cores")
    for x, kind, text in ((16, "a", "computing"), (122, "b", "waiting"), (210, "c", "messages, other stages")):
        drawing.bar(x, 62, 12, 12, kind)
        drawing.text(x + 18, 73, text, "small")
    axis = Scale(0, end_s, 16, WIDTH - 16)
    ticks = [0.1 * number for number in range(int(end_s / 0.1) + 1)]
    _draw_grid(drawing, axis, ticks, 86, 280, lambda value: f"{value * 1000:.0f}")
    drawing.text(WIDTH - 16, 310, "ms", "small", anchor="end")
    for rank, top in zip(ranks, (100, 198), strict=True):
        drawing.text(16, top, f"rank {rank['rank']}")
        for name, start_s, length_s in rank["stages"]:
            x, width = axis.at(start_s), axis.at(length_s) - axis.at(0)
            drawing.bar(x, top + 8, max(width - 2, 0.2), 30, STAGE_KINDS.get(name, "c"))
            shown = name.partition("_")[0]
            if width > 8 * len(shown) + 6:
                drawing.text(x + 6, top + 28, shown, "on")
        for _, start_s, length_s in rank["communication"]:
            shown_s = min(length_s, end_s - start_s)  # the last one lasts into the next step
            if shown_s > 0:
                drawing.bar(axis.at(start_s), top + 44, max(axis.at(shown_s) - axis.at(0) - 2, 0.2), 14, "c")
    return drawing.svg()


def _short_ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


# Operators of the record `roofline-cpu` in the figure: label, its place beside the dot, and its anchor.
Anchor = Literal["start", "middle", "end"]
ON_ROOFLINE: Final[Mapping[str, tuple[str, float, float, Anchor]]] = {
    "ReLU": ("ReLU", 10, 12, "start"),
    "SGD, momentum": ("SGD", 10, 16, "start"),
    "batch norm": ("batch norm", 10, 10, "start"),
    "linear, batch 4": ("linear, batch 4", 10, 10, "start"),
    "linear, batch 32": ("batch 32", -10, 10, "end"),
    "linear, batch 256": ("batch 256", 0, 22, "middle"),
    "conv 1x1, 64 to 256": ("1x1", 10, -6, "start"),
    "conv 3x3, 64": ("", 0, 0, "start"),
    "conv 3x3, 256": ("3x3 conv", 24, 20, "end"),
}


def roofline() -> str:
    """Draw operators of ResNet-50 below the roofs of one CPU core."""
    recorded = record("roofline-cpu")
    peak = {name: float(value) for name, value in recorded["peak"].items()}
    rows = [row for row in recorded["operators"] if row["name"] in ON_ROOFLINE]
    ceiling = next(row for row in recorded["operators"] if row["name"].endswith("torch.mm"))["flops_per_s"] / 1e9
    roof, bytes_per_s, ridge = peak["flops_per_s"] / 1e9, peak["bytes_per_s"] / 1e9, peak["ridge_flops_per_byte"]
    description = "; ".join(
        f"{row['name']}{', contiguous' if row['layout'] == 'contiguous' else ''}: {row['flops_per_byte']:.2g} "
        f"FLOP/byte, {row['flops_per_s'] / 1e9:.1f} GFLOP/s"
        for row in rows
    )
    drawing = Drawing(
        "A roofline of one CPU core",
        f"GFLOP/s over FLOP per byte, both logarithmic. A slope of {bytes_per_s:.0f} GB/s meets a flat roof of "
        f"{roof:.0f} GFLOP/s at {ridge:.1f} FLOP per byte. {description}.",
        402,
    )
    drawing.heading("float32, forward, 32 images; GFLOP/s by FLOP/byte")
    drawing.dot(22, 70, "a")
    drawing.text(34, 75, "channels-last, or no layout", "small")
    drawing.dot(232, 70, "b", hollow=True)
    drawing.text(244, 75, "contiguous", "small")
    across, down = Scale(-1, 3, 56, WIDTH - 28), Scale(0, log10(500), 352, 96)
    for value in (0.1, 1, 10, 100, 1000):
        drawing.line(across.at(log10(value)), 96, across.at(log10(value)), 352, "grid")
        drawing.text(across.at(log10(value)), 370, f"{value:,g}", "small", anchor="middle")
    drawing.text(WIDTH - 28, 388, "FLOP/byte", "small", anchor="end")
    for value in (1, 10, 100):
        drawing.line(56, down.at(log10(value)), WIDTH - 28, down.at(log10(value)), "grid")
        drawing.text(48, down.at(log10(value)) + 5, f"{value}", "small", anchor="end")
    corner, top = across.at(log10(ridge)), down.at(log10(roof))
    drawing.line(56, down.at(log10(0.1 * bytes_per_s)), corner, top)
    drawing.line(corner, top, WIDTH - 28, top)
    drawing.text(corner, top - 10, f"arithmetic: {roof:.0f} GFLOP/s", "small")
    drawing.text(across.at(0) - 16, down.at(log10(bytes_per_s)) - 20, "memory:", "small", anchor="end")
    drawing.text(across.at(0) - 16, down.at(log10(bytes_per_s)) - 4, f"{bytes_per_s:.0f} GB/s", "small", anchor="end")
    left, lower_top = across.at(log10(ceiling / bytes_per_s)), down.at(log10(ceiling))
    drawing.line(left, lower_top, WIDTH - 28, lower_top)
    drawing.text(left + 14, lower_top - 6, "torch.mm", "small")
    for row in sorted(rows, key=lambda each: each["layout"] != "contiguous"):
        x, y = across.at(log10(row["flops_per_byte"])), down.at(log10(row["flops_per_s"] / 1e9))
        is_hollow = row["layout"] == "contiguous"
        drawing.dot(x, y, "b" if is_hollow else "a", hollow=is_hollow)
        text, right, lower, anchor = ON_ROOFLINE[row["name"]]
        # The label is beside the lower dot of two.
        if text and (is_hollow or not any(r is not row and r["name"] == row["name"] for r in rows)):
            drawing.text(x + right, y + lower, text, "small", anchor=anchor)
    return drawing.svg()


# Width and image size of the models in the record `batch-size-cpu`, with their names here.
BATCH_SIZE_MODELS: Final[Mapping[tuple[float, int], str]] = {
    (0.25, 32): "ResNet-18 of 1/4 width, 32 px",
    (0.0625, 16): "ResNet-18 of 1/16 width, 16 px",
}


def batch_size() -> str:
    """Draw the throughput of two models by batch size, as a share of the fitted peak, and the fitted curves."""
    recorded = record("batch-size-cpu")
    models = {(row["width"], row["image_size"]): row["variants"]["alone"] for row in recorded["models"]}
    rows = {name: models[key] for key, name in BATCH_SIZE_MODELS.items()}
    description = "; ".join(
        f"{name}: fitted peak {1 / row['fit']['per_image_s']:,.0f} images/s, knee at {row['fit']['knee']:.0f} images, "
        + ", ".join(f"{each['batch']}: {each['images_per_s']:,.0f}" for each in row["steps"])
        for name, row in rows.items()
    )
    drawing = Drawing(
        "Images per second by batch size",
        f"One CPU core; images/s at each batch size, and the curve B / (a + b B) fitted to them. {description}.",
        356,
    )
    drawing.heading("One CPU core; dots: measured; lines: fitted,", "B / (a + b B); 50 % is at the knee, B = a / b")
    for y, (name, row), is_hollow in zip((92, 112), rows.items(), (False, True), strict=True):
        drawing.dot(22, y - 5, "b" if is_hollow else "a", hollow=is_hollow)
        drawing.text(34, y, f"{name}: 1/b = {1 / row['fit']['per_image_s']:,.0f}/s", "small")
    sizes = [each["batch"] for each in next(iter(rows.values()))["steps"]]
    across, down = Scale(0, log2(sizes[-1]), 74, WIDTH - 24), Scale(0, 1.2, 308, 120)
    for share in (0, 0.25, 0.5, 0.75, 1):
        drawing.line(74, down.at(share), WIDTH - 24, down.at(share), "grid")
        drawing.text(60, down.at(share) + 5, f"{share * 100:.0f} %", "small", anchor="end")
    for size in sizes:
        drawing.text(across.at(log2(size)), 326, str(size), "small", anchor="middle")
    drawing.text(WIDTH - 24, 344, "images per step", "small", anchor="end")
    drawing.text(16, 344, "share of 1/b", "small")
    for row, is_hollow in zip(rows.values(), (False, True), strict=True):
        kind: Kind = "b" if is_hollow else "a"
        per_image_s, knee = row["fit"]["per_image_s"], row["fit"]["knee"]
        start = log2(recorded["fitted_from"])
        places = [start + (log2(sizes[-1]) - start) * number / 48 for number in range(49)]
        drawing.curve([(across.at(place), down.at(2**place / (2**place + knee))) for place in places])
        for each in row["steps"]:
            x, peak = across.at(log2(each["batch"])), each["batch"] * per_image_s
            drawing.line(x, down.at(peak / each["p90_s"]), x, down.at(peak / each["p10_s"]))
            drawing.dot(x, down.at(peak / each["median_s"]), kind, hollow=is_hollow)
    return drawing.svg()


def rungs() -> str:
    """Draw the rungs of the ladder `cpu`: images/s with intervals, and the speed-up of each."""
    ladder = record("ladder-cpu")["rungs"]
    description = "; ".join(f"{rung['name']}: {rung['images_per_s']['value']:.0f}, {rung['status']}" for rung in ladder)
    drawing = Drawing(
        "A ladder on two CPU cores",
        f"Images a second on each rung, each over the last one that was kept. {description}.",
        114 + 44 * len(ladder),
    )
    drawing.heading("Images/s of a quarter-width ResNet-18 on CIFAR-10;", "the lines are 95 % intervals of 5 runs")
    axis = Scale(0, 1100, 16, WIDTH - 16)
    bottom = 84 + 44 * len(ladder)
    _draw_grid(drawing, axis, [0, 250, 500, 750, 1000], 78, bottom, lambda value: f"{value:,.0f}")
    for place, rung in enumerate(ladder):
        y, speed, ratio = 98 + 44 * place, rung["images_per_s"], rung["over_below"]
        speedup = "the start" if ratio is None else f"{ratio['value']:.2f}x, {rung['status']}"
        drawing.text(16, y, f"{rung['name']}: {speed['value']:.0f}")
        drawing.text(WIDTH - 16, y, speedup, anchor="end")
        kind: Kind = "a" if rung["status"] == "kept" else "c"
        drawing.bar(axis.at(0), y + 6, axis.at(speed["value"]) - axis.at(0), 14, kind)
        drawing.line(axis.at(speed["low"]), y + 13, axis.at(speed["high"]), y + 13)
        for end in (speed["low"], speed["high"]):
            drawing.line(axis.at(end), y + 9, axis.at(end), y + 17)
    return drawing.svg()


# Rows of the table in prediction.md with their labels here, without DLPerf, on which the formula was chosen.
PREDICTED: Final = {
    "jsc, 1 4 to 128": "JSC, 1-4 to 128",
    "jsc, 1 4 16 to 32": "JSC, 1-16 to 32",
    "jsc, 1 4 16 to 64": "JSC, 1-16 to 64",
    "jsc, 1 4 16 to 128": "JSC, 1-16 to 128",
    "jsc, 1 4 16 32 to 64": "JSC, 1-32 to 64",
    "jsc, 1 4 16 32 to 128": "JSC, 1-32 to 128",
    "jsc, 1 4 16 32 64 to 128": "JSC, 1-64 to 128",
    "nersc, 1 4 to 16": "NERSC, 1-4 to 16",
    "nersc, 1 4 8 to 16": "NERSC, 1-8 to 16",
    "quant, 1 4 to 8": "study, 1-4 to 8",
    "ddp-post, 1 2 to 4": "post, 1-2 to 4",
}


def predictions() -> str:
    """Draw the errors of predictions, with the predicted intervals."""
    errors = record("prediction")
    own_errors = {f"our hosts, 1-2 to {number}": row["error"] for number, row in record("hosts-cpu")["unseen"].items()}
    rows: dict[str, Mapping[str, float]] = {short: errors[name] for name, short in PREDICTED.items()}
    rows |= {name: {"error": error} for name, error in own_errors.items()}
    description = "; ".join(f"{name}: {row['error'] * 100:+.1f} %" for name, row in rows.items())
    drawing = Drawing(
        "Predicted, over what it took",
        f"Errors of predictions for more ranks than were measured. {description}.",
        120 + 26 * len(rows),
    )
    drawing.heading(
        "Dot: prediction. Line: the interval that was told.",
        "0: what was measured. Orange: the interval does",
        "not hold it. Ring: our runs, without an interval.",
    )
    axis = Scale(-0.45, 0.55, 160, WIDTH - 12)
    bottom = 92 + 26 * len(rows)
    _draw_grid(
        drawing, axis, [-0.4, -0.2, 0, 0.2, 0.4], 94, bottom, lambda value: f"{value * 100:+.0f} %" if value else "0"
    )
    drawing.line(axis.at(0), 94, axis.at(0), bottom)
    for place, (name, row) in enumerate(rows.items()):
        y = 108 + 26 * place
        drawing.text(16, y + 5, name)
        if "low" in row:
            kind: Kind = "a" if row["low"] <= 0 <= row["high"] else "b"
            drawing.bar(axis.at(row["low"]), y - 2, axis.at(row["high"]) - axis.at(row["low"]), 4, kind)
            drawing.dot(axis.at(row["error"]), y, kind)
        else:
            drawing.dot(axis.at(row["error"]), y, "a", hollow=True)
    return drawing.svg()


IMAGES: Final = 359  # the validation split of digits
CORRECT: Final = 323  # for a model of 90 %
WRONG: Final = IMAGES - CORRECT
RANKS: Final = 64


def padded(num_images: int, ranks: int) -> int:
    """Return the number of images counted twice if all of `ranks` get equally many."""
    return ceil(num_images / ranks) * ranks - num_images


def padded_range(ranks: int) -> tuple[float, float]:
    """Return the lowest and the highest accuracy possible if `IMAGES` are padded for `ranks`."""
    # The sampler repeats an image once at most, as long as there are fewer ranks than images.
    extra = padded(IMAGES, ranks)
    low = CORRECT + max(0, extra - WRONG)  # most of the repeated images are wrong
    high = CORRECT + min(extra, CORRECT)  # most of the repeated images are right
    return low / (IMAGES + extra), high / (IMAGES + extra)


def padding() -> str:
    """Draw the accuracies that padding can give one model, by the number of ranks."""
    lows, highs = zip(*map(padded_range, range(1, RANKS + 1)), strict=True)
    drawing = Drawing(
        "One network, several accuracies",
        f"For 1 to {RANKS} ranks, the range of accuracies that a validation set of {IMAGES} images, of which {CORRECT} "
        f"are right, can have once it is padded: {_percent(min(lows))} to {_percent(max(highs))}, where the exact one "
        f"is {_percent(CORRECT / IMAGES)}.",
        300,
    )
    drawing.heading(f"{IMAGES} images, {CORRECT} of them right: what a count can", "say that is padded to equal shards")
    across, down = Scale(1, RANKS, 62, WIDTH - 22), Scale(0.81, 0.925, 252, 84)
    for value in (0.82, 0.84, 0.86, 0.88, 0.9, 0.92):
        drawing.line(62, down.at(value), WIDTH - 22, down.at(value), "grid")
        drawing.text(54, down.at(value) + 5, f"{value * 100:.0f} %", "small", anchor="end")
    for ranks in (1, 8, 16, 32, 48, 64):
        drawing.text(across.at(ranks), 270, str(ranks), "small", anchor="middle")
    drawing.text(across.at(RANKS), 288, "ranks", "small", anchor="end")
    top = [(across.at(number), down.at(value)) for number, value in enumerate(highs, start=1)]
    low = [(across.at(number), down.at(value)) for number, value in enumerate(lows, start=1)]
    drawing.band([*top, *reversed(low)], "b")
    drawing.line(62, down.at(CORRECT / IMAGES), WIDTH - 22, down.at(CORRECT / IMAGES))
    drawing.text(70, down.at(0.825), f"line: exact, {_percent(CORRECT / IMAGES)}", "small")
    return drawing.svg()


FIGURES: Final[Mapping[str, Callable[[], str]]] = {
    "step": step,
    "exposed": exposed,
    "steps": steps,
    "batches": batches,
    "loaders": loaders,
    "formats": formats,
    "batch-size": batch_size,
    "memory": memory,
    "trace": trace,
    "roofline": roofline,
    "rungs": rungs,
    "predictions": predictions,
    "padding": padding,
}


def _draw_grid(
    drawing: Drawing, axis: Scale, values: list[float], top: float, bottom: float, shown: Callable[[float], str]
) -> None:
    """Draw vertical grid lines at `values`, with labels below."""
    for value in values:
        drawing.line(axis.at(value), top, axis.at(value), bottom, "grid")
        drawing.text(axis.at(value), bottom + 18, shown(value), "small", anchor="middle")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def _percent(share: float) -> str:
    return f"{share * 100:.2f} %"


def main() -> None:
    """Write all figures."""
    for name, draw in FIGURES.items():
        (FOLDER / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
