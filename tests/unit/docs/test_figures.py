"""The figures are what their script draws from the records, and can be read by whoever comes to them."""

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from torch.utils.data import DistributedSampler

IMAGES = Path(__file__).parents[3] / "docs" / "images"
EXPLANATION = IMAGES.parent / "explanation"
NAMES = (
    "step",
    "exposed",
    "steps",
    "batches",
    "loaders",
    "formats",
    "batch-size",
    "memory",
    "trace",
    "roofline",
    "rungs",
    "predictions",
    "padding",
)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(IMAGES))
    for name in ("drawing", "make_figures"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("make_figures")


def test_every_figure_is_tested(figures: ModuleType) -> None:
    assert set(figures.FIGURES) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_is_what_its_script_draws(figures: ModuleType, name: str) -> None:
    drawn = figures.FIGURES[name]()
    assert (IMAGES / f"{name}.svg").read_text() == drawn, "run .venv/bin/python docs/images/make_figures.py"


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_has_a_text_description_and_fetches_nothing(name: str) -> None:
    text = (IMAGES / f"{name}.svg").read_text()
    root = ElementTree.fromstring(text)
    assert root.get("role") == "img"
    assert root.get("aria-labelledby") == "title desc"
    title, desc = (root.findtext(f"{SVG}{tag}") or "" for tag in ("title", "desc"))
    assert title
    assert len(desc) > len(title)
    assert len(root.findall(f"{SVG}text")) > 5
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"href|url\(|@import|<image|<script", text)


@pytest.mark.parametrize("name", NAMES)
def test_text_stays_inside_a_figure(figures: ModuleType, name: str) -> None:
    root = ElementTree.fromstring((IMAGES / f"{name}.svg").read_text())
    width, height = (float(number) for number in (root.get("viewBox") or "").split()[2:])
    for text in root.findall(f"{SVG}text"):
        # 0.56 of the font's size a letter is what system fonts have in the mean; a browser's look confirms it
        size = {"head": 16.0, "small": 13.0}.get(text.get("class") or "", 14.0)
        long, x = 0.56 * size * len(text.text or ""), float(text.get("x") or 0)
        begin = {"end": x - long, "middle": x - long / 2}.get(text.get("text-anchor") or "", x)
        assert begin >= 0, text.text
        assert begin + long <= width, text.text
        assert size <= float(text.get("y") or 0) <= height - 4, text.text


@pytest.mark.parametrize(("num_images", "ranks"), [(359, 2), (359, 50), (10000, 16), (10000, 48), (7, 8)])
def test_padding_is_what_torchs_sampler_counts_twice(figures: ModuleType, num_images: int, ranks: int) -> None:
    shards = [list(DistributedSampler(range(num_images), ranks, rank, shuffle=False)) for rank in range(ranks)]
    assert {index for shard in shards for index in shard} == set(range(num_images))
    assert sum(map(len, shards)) - num_images == figures.padded(num_images, ranks)


@pytest.mark.parametrize("ranks", [44, 59, 64])
def test_the_range_of_padding_is_that_of_torchs_sampler(figures: ModuleType, ranks: int) -> None:
    shards = [list(DistributedSampler(range(figures.IMAGES), ranks, rank, shuffle=False)) for rank in range(ranks)]
    counted = [index for shard in shards for index in shard]
    twice = {index for index in counted if counted.count(index) == 2}
    assert len(twice) == figures.padded(figures.IMAGES, ranks)
    by_repeats = sorted(range(figures.IMAGES), key=lambda index: index in twice)
    worst, best = set(by_repeats[: figures.CORRECT]), set(by_repeats[-figures.CORRECT :])
    found = tuple(sum(index in right for index in counted) / len(counted) for right in (worst, best))
    assert found == figures.padded_range(ranks)


def test_the_pages_have_the_recorded_figures_of_batches(figures: ModuleType) -> None:
    page = " ".join((EXPLANATION / "learning-rate-and-batch.md").read_text().split())
    top1 = [found["mean"] for found in figures.record("large-batch-fashion")["top1"].values()]
    compared = figures.record("compare-batch-fashion")["groups"]
    for value in (*top1, *(group["accuracy"]["value"] for group in compared)):
        assert f"{value * 100:.2f}" in page
    hardware, statistical, speedup = (compared[2][name]["value"] for name in ("hardware", "statistical", "speedup"))
    assert f"ran {hardware:.2f} times as many images per second" in page
    assert f"needed {1 / statistical:.1f} times as many: {speedup:.2f} times as fast" in page


def test_the_pages_have_the_recorded_figures_of_hosts(figures: ModuleType) -> None:
    page = " ".join((EXPLANATION / "exposed-communication.md").read_text().split())
    hosts = figures.record("hosts-cpu")
    rows = [*hosts["seen"].values(), *hosts["unseen_typical"].values()]
    for name in ("step_s", "exposed_s"):
        *before, last = (f"{row[name] * 1000:.0f}" for row in rows)
        assert f"{', '.join(before)} and {last} ms" in page
    errors = [f"{-row['error'] * 100:.1f}" for row in hosts["unseen"].values()]
    assert f"{' and '.join(errors)} % too low" in page
    two = figures.record("scale-cpu")["points"][1]
    assert f"{two['exposed_s'] * 1000:.0f} ms of a step of {two['step_s'] * 1000:.0f}" in page
    wire_s = sum(bucket["num_bytes"] for bucket in hosts["seen"]["2"]["buckets"]) / hosts["network"]["bytes_per_s"]
    hidden_s, waited_s = hosts["seen"]["2"]["buckets"][-1]["ready_s"], hosts["seen"]["2"]["exposed_s"]
    assert f"busy for {wire_s * 1000:.0f} ms, and backward hides the first {hidden_s * 1000:.0f}" in page
    assert f"{waited_s * 1000:.0f} ms of waiting: the remaining {(wire_s - hidden_s) * 1000:.0f}" in page


def test_the_pages_have_the_recorded_figures_of_memory(figures: ModuleType) -> None:
    page = " ".join((EXPLANATION / "memory.md").read_text().split())
    memory = figures.record("memory")
    million = memory["parameters"] / 1e6
    assert f"ResNet-50, {million:.1f} million parameters" in page
    for num_bytes in (2, 4, 8):
        assert re.search(rf"\| {num_bytes} \| {num_bytes * million:.0f} MB", page)
    assert f"12 bytes per parameter, or {12 * million:.0f} MB" in page
    assert f"4 + 4 + 8 + 4 = 20, or {20 * million:.0f} MB" in page
    saved = memory["saved_per_image"]
    assert f"{(1 - saved['compiled'] / saved['eager']) * 100:.0f} % fewer saved activations" in page
    rows = {(row["precision"], row["accumulate"], row["image_size"]): row["peak"] for row in memory["variants"][:4]}
    whole = memory["batches"][-1]
    assert whole["batch"] == 64
    activations = whole["peak"]["activations"]
    assert f"all activations, float32 | {activations / 64 / 1e6:.1f} |" in page
    assert f"all activations, bf16 | {rows['bf16', 1, 224]['activations'] / 64 / 1e6:.1f} |" in page
    assert f"{rows['fp32', 1, 160]['activations'] / activations * 100:.0f} % of the memory at 224 px" in page
    small, large, parts, half = memory["runs"]
    counted, resident = (large[name] - small[name] for name in ("counted", "resident"))
    assert f"{counted / 1e9:.2f} GB in the count and {resident / 1e9:.2f} GB of resident memory" in page
    for name, row in (("train.accumulate=4", parts), ("train.precision=bf16", half)):
        counted, resident = (large[kind] - row[kind] for kind in ("counted", "resident"))
        assert f"`{name}` saves {counted / 1e9:.2f} GB in the count and {resident / 1e9:.2f} GB" in page


def test_the_page_has_the_recorded_figures_of_batch_sizes(figures: ModuleType) -> None:
    page = " ".join((EXPLANATION / "batch-size-and-throughput.md").read_text().split())
    models = {row["width"]: row["variants"] for row in figures.record("batch-size-cpu")["models"]}
    for variants in models.values():
        fitted = variants["alone"]["fit"]
        fixed_s, per_image_s, knee = (fitted[name] for name in ("fixed_s", "per_image_s", "knee"))
        row = f"{fixed_s * 1000:.1f} ms | {per_image_s * 1000:.3g} ms | {1 / per_image_s:,.0f}/s | {knee:.0f} |"
        assert f"{row} {9 * knee:.0f} | {fitted['errors']['256'] * 100:.0f} % at 256 |" in page
        errors = [abs(fitted["errors"][str(2**power)]) for power in range(1, 8)]
        assert max(errors[:6]) < 0.07
        assert max(errors) < 0.1
    steps = {name: {row["batch"]: row for row in models[0.25][name]["steps"]} for name in ("alone", "beside", "ddp")}
    added_ms = []
    for size in (4, 16, 64, 256):
        alone_s, beside_s, ddp_s = (steps[name][size]["median_s"] for name in steps)
        added_ms.append((ddp_s - beside_s) * 1000)
        times = " | ".join(f"{seconds * 1000:.1f} ms" for seconds in (alone_s, beside_s, ddp_s, ddp_s - beside_s))
        assert f"| {size} | {times} | {alone_s / ddp_s * 100:.0f} % |" in page
    assert f"adds {min(added_ms):.0f} to {max(added_ms):.0f} ms" in page
    ddp_knee, beside_knee = (models[0.25][name]["fit"]["knee"] for name in ("ddp", "beside"))
    assert f"knee at {ddp_knee:.1f} images instead of {beside_knee:.1f}" in page
    small = models[0.0625]["alone"]
    parts_ms = [f"{small['fit']['parts'][part]['fixed_s'] * 1000:.1f}" for part in ("forward", "backward", "optimizer")]
    assert "forward takes {}, backward {} and the optimizer {}".format(*parts_ms) in page
    rates = {row["batch"]: row["images_per_s"] for row in small["steps"]}
    large = {size: row["images_per_s"] for size, row in steps["alone"].items()}
    assert (
        f"{large[64]:.0f} images/s at 64 to {large[256]:.0f}, and from {rates[128]:,.0f} at 128 to {rates[256]:,.0f}"
        in page
    )
    one_s, two_s = (row["median_s"] for row in small["steps"][:2])
    assert f"it takes {one_s * 1000:.1f} ms, and two images take {two_s * 1000:.1f}" in page


def test_the_pages_have_the_computed_figures_of_padding(figures: ModuleType) -> None:
    page = " ".join((EXPLANATION / "evaluation.md").read_text().split())
    low, fewest = min((figures.padded_range(ranks)[0], ranks) for ranks in range(1, figures.RANKS + 1))
    high, most = max((figures.padded_range(ranks)[1], ranks) for ranks in range(1, figures.RANKS + 1))
    assert f"on {fewest} ranks it reaches down to {100 * low:.2f} %, on {most} up to {100 * high:.2f} %" in page
    for ranks in (1, 4, 8, 16):  # batches of 128 a rank, the last of which is dropped where it is short
        assert f"| {10000 // ranks:,} |" in page
        assert f"| {10000 // ranks // 128 * 128 * ranks:,} |" in page


def test_the_page_has_the_recorded_figures_of_the_trace_and_the_roofline(figures: ModuleType) -> None:
    page = " ".join((EXPLANATION / "trace-and-roofline.md").read_text().split())
    late, early = (
        {name: round(s * 1e3) for name, _, s in each["stages"]} for each in figures.record("trace-cpu")["ranks_of_step"]
    )
    assert f"rank 0 needs {late['backward']} ms for it and rank 1 {early['backward']} ms" in page
    assert (
        f"exposed for {early['exposed_communication']} ms on rank 1 and {late['exposed_communication']} ms on rank 0"
        in page
    )
    recorded = figures.record("roofline-cpu")
    peak, rows = recorded["peak"], {(row["name"], row["layout"]): row for row in recorded["operators"]}
    assert f"{peak['flops_per_s'] / 1e9:.0f} GFLOP/s and {peak['bytes_per_s'] / 1e9:.0f} GB/s" in page
    assert f"{peak['ridge_flops_per_byte']:.1f} FLOP per byte" in page
    layouts = [rows["conv 1x1, 64 to 256", layout]["flops_per_s"] / 1e9 for layout in ("contiguous", "channels_last")]
    assert "from {:.0f} to {:.0f} GFLOP/s".format(*layouts) in page
    batches = [rows[f"linear, batch {batch}", ""] for batch in (4, 256)]
    assert "from {:.0f} to {:.0f} FLOP per byte".format(*(row["flops_per_byte"] for row in batches)) in page
    assert "from {:.0f} to {:.0f} GFLOP/s".format(*(row["flops_per_s"] / 1e9 for row in batches)) in page
    assert f"`torch.mm` reaches {rows['product 2,048, torch.mm', '']['flops_per_s'] / 1e9:.0f} GFLOP/s" in page
