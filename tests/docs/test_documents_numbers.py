"""Numbers of the five documents that follow from others are recomputed with paceline's functions.

Speeds and times are the documents' own. Speed-ups, efficiencies, images/s and learning rates on a page are recomputed
here from the page's tables.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from paceline.core.experiments.results import MeasuredPoint, PredictionResult
from paceline.data.order import TrainOrder
from paceline.lab.predict.from_points import build_request, predict_from_points
from paceline.lab.predict.points import parse_points, read_points
from paceline.models.build import build_model
from paceline.recipe.load import load
from paceline.recipe.plan import lr_factor, resolve_batch
from paceline.recipe.schema import Recipe

from .commands import ROOT, read_blocks

FOLDER = ROOT / "docs" / "coming-from"
RESULTS = ROOT / "benchmarks" / "results"
FIVE = "the-five-documents"
CIFAR = 50_000
"""Training images of both CIFARs."""


@cache
def text_of(page: str) -> str:
    return (FOLDER / f"{page}.md").read_text(encoding="utf-8")


def flat(page: str) -> str:
    """Return the text of a page on one line."""
    return " ".join(text_of(page).split())


def table(page: str, *columns: str) -> list[dict[str, str]]:
    """Return the rows of the table of a page that has `columns`; an empty first cell repeats the one above."""
    for block in re.findall(r"(?:^\|.*\n)+", text_of(page), re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        if all(any(heading.startswith(column) for heading in head) for column in columns):
            found = [dict(zip(head, row, strict=True)) for row in rows]
            for above, below in pairwise(found):
                below[head[0]] = below[head[0]] or above[head[0]]
            return found
    raise AssertionError(f"{page} has no table of {columns}")


def number(cell: str) -> float:
    """Return the first number of a cell; minutes and seconds become seconds."""
    if timed := re.match(r"(\d+) min (\d+) s", cell):
        return 60.0 * int(timed[1]) + int(timed[2])
    found = re.search(r"\d[\d,]*(?:\.\d+)?", cell)
    assert found, cell
    return float(found[0].replace(",", ""))


def rounded(value: float, cell: str) -> bool:
    """Whether a cell shows `value`, rounded to its number of digits."""
    digits = len(re.search(r"\d[\d,]*(?:\.(\d+))?", cell)[1] or "")  # type: ignore[index]
    return number(cell) == float(f"{value:.{digits}f}")


@cache
def predict(name: str, *, ranks: int = 0) -> PredictionResult:
    """Return the predictions from a published table, for one more number of ranks or for its own."""
    points = read_points(RESULTS / "published" / f"{name}.csv")
    return predict_from_points(
        points, build_request(points, [ranks or points[-1].ranks], ranks_per_node=8), source=name
    )


def our_records(record: str) -> Mapping[str, Any]:
    return json.loads((RESULTS / f"{record}.json").read_text())


def test_throughput_gains_of_the_sc20_tutorial_are_those_of_its_page() -> None:
    rungs = [row for row in table("nersc-sc20", "rung", "images/s there") if row["seconds of an epoch there"]]
    speeds = [number(row["images/s there (one V100)"]) for row in rungs]
    assert speeds == [680, 1795, 2180, 2530]
    assert [row["over the one before"] for row in rungs[1:]] == [
        f"{fast / slow:.2f}x" for slow, fast in pairwise(speeds)
    ]
    steps = TrainOrder(0, CIFAR, load("sc20/bs256").recipe.data.global_batch_size).steps_per_epoch
    alone_s = [steps * 256 / speed for speed in speeds]
    assert f"{steps} steps of 256 images alone take {alone_s[0]:.1f} s at 680" in flat("nersc-sc20")
    assert f"and {alone_s[-1]:.1f} s at 2,530" in text_of("nersc-sc20")
    whole_s = [number(row["seconds of an epoch there"]) for row in rungs]
    assert all(alone < whole for alone, whole in zip(alone_s, whole_s, strict=True))
    theirs = [row for row in table(FIVE, "document", "step", "theirs") if row["document"].startswith("SC20")]
    assert [(number(row["theirs"]), number(row["images/s"]), row["over the one before"]) for row in theirs] == [
        (seconds, speed, row["over the one before"]) for seconds, speed, row in zip(whole_s, speeds, rungs, strict=True)
    ]


EFFICIENCIES = {
    "nersc-sc20": ("nersc", "GPUs", "images/s there"),
    "jsc": ("jsc", "A100", "wall clock there"),
}
"""Pages with a table of points, the published table, and their columns of GPUs and of times or speeds."""


def points_of(page: str) -> list[tuple[dict[str, str], MeasuredPoint]]:
    """Return each row of a page's table of points with paceline's results for it."""
    name, gpus, _ = EFFICIENCIES[page]
    # Of two rows with the same number, the first
    points = {point.ranks: point for point in reversed(predict(name).points)}
    rows = table(page, gpus, "speed-up", "efficiency")
    assert {int(row[gpus]) for row in rows} == points.keys()
    return [(row, points[int(row[gpus])]) for row in rows]


@pytest.mark.parametrize("page", EFFICIENCIES)
def test_speed_ups_and_efficiencies_are_those_of_the_table(page: str) -> None:
    _, gpus, measured = EFFICIENCIES[page]
    for row, point in points_of(page):
        assert point.speedup is not None
        assert point.efficiency is not None
        took = point.images if point.time_s == 1 else point.time_s
        assert number(row[measured]) == round(took)
        assert rounded(point.speedup, row["speed-up"]), row
        assert rounded(100 * point.efficiency, row["efficiency"]), row
        batch = row.get("data.batch_size") or row.get("`data.batch_size`") or row["images a step"]
        assert number(batch) == int(row[gpus]) * point.rank_batch


@pytest.mark.parametrize("page", ["nersc-sc20", "jsc", "dataparallel-post"])
def test_a_table_to_type_has_the_points_of_the_published_one(page: str) -> None:
    name = {"nersc-sc20": "nersc", "dataparallel-post": "ddp-post"}.get(page, page)
    block = next(block for block in read_blocks(FOLDER / f"{page}.md") if "cat > " in block.text)
    typed = re.search(r"<<'END'\n(.*)^END$", block.text, re.MULTILINE | re.DOTALL)
    assert typed
    published = read_points(RESULTS / "published" / f"{name}.csv")
    assert set(parse_points(typed[1], page)) <= set(published)


def test_compared_efficiencies_are_those_of_the_pages() -> None:
    rows = table(FIVE, "document", "GPUs", "efficiency")
    alone = 0.0
    for row in rows:
        gpus, took = int(row["GPUs"]), number(row["theirs"])
        if gpus == 1:
            alone = took
        elif "DataParallel" in row["document"]:
            alone = {"post": 13.2, "study": 161.0}[row["document"].partition(",")[0]]
        speedup = took / alone if "images/s" in row["theirs"] else alone / took
        # From minutes and whole seconds, for which the page of the document has three more digits.
        assert number(row["speed-up"]) == pytest.approx(speedup, rel=2e-3, abs=0.005), row
        assert number(row["efficiency"]) == pytest.approx(100 * speedup / gpus, abs=0.15), row
    assert len(rows) == 17
    for page, document in (("nersc-sc20", "SC20"), ("jsc", "JSC")):
        _, gpus, measured = EFFICIENCIES[page]
        theirs = [row for row in rows if row["document"].startswith(document)]
        assert [(row["GPUs"], number(row["theirs"]), row["speed-up"], row["efficiency"]) for row in theirs] == [
            (row[gpus], number(row[measured]), row["speed-up"], row["efficiency"]) for row, _ in points_of(page)
        ]


def test_speed_ups_of_the_post_are_those_of_its_page() -> None:
    points = {point.ranks: point for point in predict("ddp-post").points}
    rows = table("dataparallel-post", "the post's script", "speed-up")
    gpus = [1, 4, 2, 4, 4]
    for row, ranks in zip(rows, gpus, strict=True):
        took = number(row["time there (A100)"])
        assert rounded(13.2 / took, row["speed-up"])
        assert rounded(100 * 13.2 / took / ranks, row["efficiency"])
        assert number(row["images a step"]) == 256 * ranks
        if "/ddp " in row["here"] or "/single" in row["here"]:
            assert points[ranks].time_s == took
    assert points[4].efficiency == pytest.approx(0.541, abs=5e-4)
    assert f"{number(rows[0]['time there (A100)'])} s an epoch | {CIFAR / 13.2:,.0f} |" in text_of(FIVE)


def test_images_per_second_of_the_study_are_those_of_its_page() -> None:
    rows = [row for row in table("acceleration-study", "the study's rung", "there") if row["images/s there"]]
    assert len(rows) == 9
    for row in rows:
        assert rounded(300 * number(row["images a step"]) / number(row["there"]), row["images/s there"]), row
    published = {point.ranks: point for point in predict("quant").points}
    assert published[4].images / published[4].time_s == pytest.approx(number(rows[-2]["images/s there"]), abs=0.5)
    theirs = [row for row in table(FIVE, "document", "step", "theirs") if row["document"].startswith("study")]
    for before, row in zip([None, *theirs], theirs, strict=False):
        assert rounded(300 * 256 / number(row["theirs"]), row["images/s"]), row
        if before:
            assert rounded(number(before["theirs"]) / number(row["theirs"]), row["over the one before"]), row


def test_the_bytes_of_a_batch_are_those_of_the_page() -> None:
    recipe = load("quant/resnet18-imagenet").recipe
    size, images = recipe.data.image_size, recipe.data.global_batch_size
    assert size != "auto"
    pixels = images * 3 * size * size
    page = text_of("acceleration-study")
    assert f"{4 * pixels:,} of a batch of {images} in 13.6 ms, {4 * pixels / 13.6e-3 / 1e9:.1f} GB/s" in page
    assert f"{pixels:,}, a quarter of that" in page


def test_learning_rates_of_the_sc20_tutorial_follow_the_square_root() -> None:
    batches = {f"sc20/bs{size}{'-opt' if size > 256 else ''}": size for size in (128, 256, 512, 1024, 2048)}
    rates = []
    for name, size in batches.items():
        recipe = load(name).recipe
        assert recipe.data.global_batch_size == size
        rates.append(recipe.optim.lr * lr_factor(recipe.optim, recipe.data.global_batch_size))
        assert rates[-1] == pytest.approx(0.1 * (size / 128) ** 0.5)
    # The tutorial writes two digits, and 0.14 for 0.1414.
    assert [round(rate, 2) for rate in rates] == [0.1, 0.14, 0.2, 0.28, 0.4]
    text = ", ".join(f"{rate:.4g}" for rate in rates[:-1])
    assert f"{text} and {rates[-1]:.4g} for 128 to 2,048" in flat("nersc-sc20")


def test_models_have_the_parameter_counts_of_the_documents() -> None:
    counts = {
        ("sc20/bs128", 100, 3): 23_712_932,
        ("course/wideresnet-fashion", 10, 1): 17_117_466,
        ("ddp-post/single", 10, 3): 23_528_522,  # with 10 classes, and the documents' 1,000 below
        ("jsc/resnet50-imagenet", 1000, 3): 25_557_032,
        ("quant/resnet18-imagenet", 1000, 3): 11_689_512,
    }
    for (name, classes, channels), expected in counts.items():
        with torch.device("meta"):
            model = build_model(load(name).recipe.model, num_classes=classes, channels=channels)
        assert sum(each.numel() for each in model.parameters()) == expected, name
    assert "23,712,932 parameters" in text_of("nersc-sc20")
    assert "17,117,466 parameters" in text_of("ddp-course")
    assert "23,528,522 parameters for 25,557,032" in text_of("dataparallel-post")


PRINTED: dict[str, dict[str, Any]] = {
    "sc20/bs128": {
        "data.batch_size": 128,
        "optim.lr": 0.1,
        "optim.momentum": 0.9,
        "optim.nesterov": False,
        "optim.weight_decay": 5e-4,
        "train.epochs": 100,
        "train.precision": "fp32",
        "data.workers": 6,
        "data.augment_on": "host",
    },
    "sc20/bs128-opt": {"data.batch_size": 128, "train.epochs": 100, "model.memory_format": "channels_last"},
    "sc20/bs256-amp": {"data.batch_size": 256, "train.epochs": 100, "train.precision": "amp"},
    "sc20/bs1024-opt": {"data.batch_size": 1024, "train.epochs": 120},
    "sc20/bs2048-warmup-opt": {
        "data.batch_size": 2048,
        "train.epochs": 120,
        "schedule.warmup": "16ep",
        "schedule.warmup_by": "epoch",
    },
    "course/wideresnet-fashion": {
        "optim.lr": 0.01,
        "optim.momentum": 0.0,
        "optim.weight_decay": 0.0,
        "train.epochs": 40,
        "train.precision": "torch_default",
        "train.stop.top1": 0.85,
        "train.stop.patience": 2,
        "data.mean": [0.0],
        "data.std": [1.0],
    },
    "course/wideresnet-fashion-momentum": {"optim.momentum": 0.9, "model.norm": "batch"},
    "course/wideresnet-fashion-warmup": {"schedule.warmup": "5ep", "schedule.warmup_by": "epoch"},
    "course/wideresnet-fashion-novograd": {"optim.name": "novograd", "optim.lr": 0.01, "optim.grad_averaging": True},
    "course/wideresnet-cifar10-assessment": {"optim.lr": 0.15, "train.epochs": 40, "model.norm": "sync_batch"},
    "ddp-post/single": {
        "optim.lr": 0.001,
        "optim.momentum": 0.9,
        "optim.weight_decay": 0.0,
        "train.epochs": 1,
        "data.mean": [0.5] * 3,
        "data.std": [0.5] * 3,
        "data.workers": 10,
        "train.precision": "torch_default",
        "train.cudnn_benchmark": "off",
    },
    "jsc/resnet50-imagenet": {
        "optim.name": "adam",
        "optim.lr": 0.02,
        "train.epochs": 10,
        "data.image_size": 256,
        "data.eval_resize": "stretch",
        "data.mean": [0.0] * 3,
        "data.std": [1.0] * 3,
        "train.precision": "torch_default",
        "train.cudnn_benchmark": "off",
        "model.memory_format": "contiguous",
    },
    "quant/resnet18-imagenet": {"data.batch_size": 256, "train.steps": 300, "data.image_size": 224},
}
RANK_BATCH = {
    "course/wideresnet-fashion": 32,
    "course/wideresnet-fashion-novograd": 32,
    "course/wideresnet-cifar10-assessment": 256,
    "ddp-post/single": 256,
    "ddp-post/ddp": 256,
}
"""Images per GPU, if the document counts those."""


def value_of(recipe: Recipe, path: str) -> Any:
    found: Any = recipe.to_dict()
    for name in path.split("."):
        found = found[name]
    return found


@pytest.mark.parametrize("name", PRINTED)
def test_presets_have_the_hyperparameters_of_the_documents(name: str) -> None:
    recipe = load(name).recipe
    assert {path: value_of(recipe, path) for path in PRINTED[name]} == PRINTED[name]
    if name in RANK_BATCH:
        assert resolve_batch(recipe, 1).data.global_batch_size == RANK_BATCH[name]


def test_an_epoch_of_the_post_has_one_step_fewer() -> None:
    batch = RANK_BATCH["ddp-post/single"]
    steps = TrainOrder(0, CIFAR, batch).steps_per_epoch
    assert f"{steps} steps of {batch}, not {-(-CIFAR // batch)}" in text_of("dataparallel-post")
    assert CIFAR - (-(-CIFAR // batch) - 1) * batch == 80  # images of its last batch


def test_images_omitted_from_evaluation_by_the_documents_are_those_of_the_pages() -> None:
    """Each rank has a share, from which full batches are taken."""

    def num_evaluated(ranks: int, batch: int, images: int = 10_000) -> int:
        return images // ranks // batch * batch * ranks

    sc20, course = flat("nersc-sc20"), flat("ddp-course")
    assert (
        f"{num_evaluated(1, 128):,} of 10,000 images are evaluated on one GPU and {num_evaluated(16, 128):,} on sixteen"
        in sc20
    )
    assert f"4 GPUs and 256 images each, {num_evaluated(4, 256):,} of 10,000" in course


def test_speed_ups_of_the_time_to_the_target_are_those_of_the_page() -> None:
    rows = table("nersc-sc20", "there", "best top-1", "to 75 %")
    first_s = number(rows[0]["to 75 %"])
    assert f"{first_s / 60:.0f}" == "31"  # "about 32 min" in the document
    for row in rows[1:]:
        if not row["to 75 %"].startswith("never"):
            assert rounded(first_s / number(row["to 75 %"]), row["over batch 128"])
    theirs = [row for row in table(FIVE, "document", "run", "target") if row["document"].startswith("SC20")]
    assert [(row["best top-1"], row["reached after"]) for row in theirs] == [
        (row["best top-1"], "never, in 120 epochs" if "never" in row["to 75 %"] else row["to 75 %"]) for row in rows
    ]


def test_predictions_on_pages_are_those_of_the_record() -> None:
    record = our_records("prediction")
    for page, name in (
        ("jsc", "jsc, 1 4 16 32 to 64"),
        ("jsc", "jsc, 1 4 16 32 to 128"),
        ("nersc-sc20", "nersc, 1 4 8 to 16"),
    ):
        assert f"to {abs(100 * record[name]['error']):.1f} %" in text_of(page)
    result = predict("jsc")
    start_up_s = result.start_up_s
    assert start_up_s is not None
    share = round(100 * start_up_s / result.points[-1].time_s)
    minutes = f"{int(start_up_s // 60)} min {start_up_s % 60:.0f} s"
    assert f"{minutes} of every job is start-up, {share} % of the one on 128" in flat("jsc")


def test_our_numbers_are_those_of_the_records() -> None:
    ladders = {"ladder-cpu": "all cores", "ladder-quant": "JPEG from disk"}
    checked = 0
    for row in table(FIVE, "record", "step", "images/s"):
        name = re.match(r"\[([\w-]+)\]", row["record"])[1]  # type: ignore[index]
        rungs = {rung["images_per_s"]["value"]: rung for rung in our_records(name)["rungs"] if rung["images_per_s"]}
        (speed,) = (speed for speed in rungs if round(speed) == number(row["images/s"]))
        if rungs[speed]["name"] == ladders[name]:
            assert row["over the one before"] == ""
        else:
            assert rounded(rungs[speed]["over_below"]["value"], row["over the one before"])
            assert ("dropped" in row["over the one before"]) == (rungs[speed]["status"] == "dropped")
        checked += 1
    points = {point["ranks"]: point for point in our_records("scale-cpu")["points"]}
    for row in table(FIVE, "ranks", "speed-up"):
        ranks, speed = int(row["ranks"]), points[int(row["ranks"])]["images_per_s"]["value"]
        assert number(row["images/s"]) == round(speed)
        assert rounded(speed / points[1]["images_per_s"]["value"], row["speed-up"])
        assert rounded(100 * (points[ranks]["efficiency"] or {"value": 1})["value"], row["efficiency"])
        checked += 1
    groups = {group["name"]: group for group in our_records("compare-batch-fashion")["groups"]}
    names = ("batch 128", "batch 2048 without warm-up", "batch 2048 with warm-up")
    *compared, course = table(FIVE, "record", "run", "target")
    for row, name in zip(compared, names, strict=True):
        assert rounded(100 * groups[name]["best"]["value"], row["best top-1"])
        assert rounded(groups[name]["to_target_s"]["value"], row["reached after"])
        checked += 1
    evals = our_records("course-wideresnet-fashion")["evals"]
    assert rounded(100 * max(each["top1"] for each in evals), course["best top-1"])
    assert rounded(evals[-1]["trained_s"] / 60, course["reached after"])
    assert checked == 14
