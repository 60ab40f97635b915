"""The record of quotes is what its page says, and the fit finds constants from which measurements were made."""

import importlib
import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[3]
MODES = ("training", "inference")


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    for name in ("quote", "record"):
        monkeypatch.delitem(importlib.import_module("sys").modules, name, raising=False)
    return importlib.import_module("quote")


def test_documented_figures_are_the_records() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "quote.json").read_text())
    text = (ROOT / "docs" / "explanation" / "quote.md").read_text()
    judged = [each for name, each in record.items() if name != "figures"]
    assert len(judged) >= 6
    for each in judged:
        assert f"| {each['networks']} | {each['median_error']:.1%} | {each['coverage']:.0%} |" in text
    figures = {mode: [each for each in record["figures"].values() if each["mode"] == mode] for mode in MODES}
    for each in figures["training"]:
        assert f"| {each['predicted']:,.0f} | {each['error']:+.0%} |" in text
    assert len(re.findall(r"^\| .* \| [+-]\d+% \|$", text, re.MULTILINE)) == len(figures["training"])
    inferred = figures["inference"]
    error = statistics.median(abs(each["error"]) for each in inferred)
    holds = sum(each["holds"] for each in inferred)
    assert f"median error of {error:.0%}, and the interval holds {holds} of {len(inferred)}" in " ".join(text.split())


def test_the_fit_finds_the_constants_that_made_the_measurements(benchmark: ModuleType) -> None:
    """Two layouts of 60 networks of products and element-wise kernels, whose seconds the model itself states."""
    random = np.random.default_rng(0)
    mean, sigma = benchmark.start()
    truth = mean + 0.5 * sigma * random.standard_normal(len(mean))
    groups = []
    for layout in ("nchw", "nhwc"):
        owner = np.repeat(np.arange(60), 2)
        table = benchmark.KernelTable(
            kind=np.tile([benchmark.KINDS.index("product"), benchmark.KINDS.index("elementwise")], 60),
            flops=np.where(owner >= 0, random.uniform(0, 4e9, 120), 0),
            num_bytes=random.uniform(1e5, 4e7, 120),
            batch_bytes=np.zeros(120),
            sides=np.tile([[64.0, np.inf, np.inf], [np.inf] * 3], (60, 1)),
            count=np.ones(120),
        )
        families = tuple(f"family {number % 12}" for number in range(60))
        names, ones = tuple(map(str, range(60))), np.ones(60)
        blank = benchmark.Samples(
            "training", "3090", layout, names, families, table, owner, 64 * ones, ones, ones, ones
        )
        groups.append(replace(blank, log_s=benchmark.predict(blank, truth)[0]))

    found = benchmark.fit(groups, (mean, sigma))

    for group in groups:
        log_s, slope = benchmark.predict(group, found)
        assert np.median(np.abs(log_s - group.log_s)) < 0.01
        step = 1e-6 * np.eye(len(found))[benchmark.KINDS.index("product")]
        assert benchmark.predict(group, found + step)[0] - log_s == pytest.approx(
            1e-6 * slope[:, benchmark.KINDS.index("product")], abs=1e-10
        )


def test_an_interval_holds_the_share_that_it_states(benchmark: ModuleType) -> None:
    random = np.random.default_rng(0)
    share = random.uniform(0, 1, 4000)
    ratio = 0.1 * (1 + 2 * share) * random.standard_normal(4000)

    bounds = benchmark.find_interval(ratio, share, ["one"] * 4000, 0.05)

    low, high = bounds.of(share)
    assert bounds.spread == pytest.approx(2, rel=0.3)
    assert np.mean((low <= ratio) & (ratio <= high)) == pytest.approx(0.9, abs=0.01)
