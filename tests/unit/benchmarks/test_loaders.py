"""The arithmetic of the loader benchmark, and the stopwatch for all contenders."""

import importlib
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("loaders", FOLDER, monkeypatch)


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return imported("stopwatch", FOLDER / "peers", monkeypatch)


def imported(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def run(images: int, wall_s: float, cpu_s: float, **more: object) -> dict:
    return {"images": images, "wall_s": wall_s, "cpu_s": cpu_s, "images_per_s": images / wall_s, **more}


def test_a_summary_has_the_rate_by_the_clock_and_by_the_cpu_time_that_two_cores_have(benchmark: ModuleType) -> None:
    found = benchmark.summary([run(100, 1.0, 1.0), run(100, 2.0, 2.0), run(100, 4.0, 2.0)], cores=2)
    assert found["images_per_s"] == {"median": 50.0, "low": 25.0, "high": 100.0, "n": 3}
    assert found["images_per_s_by_cpu"] == {"median": 100.0, "low": 100.0, "high": 200.0, "n": 3}
    assert found["cpu_ms"] == 20.0


def test_the_share_of_decoding_alone_is_of_the_same_process(benchmark: ModuleType) -> None:
    runs = [run(90, 1.0, 2.0, alone=run(100, 1.0, 2.0)), run(40, 1.0, 1.0, alone=run(50, 1.0, 1.0))]
    found = benchmark.summary(runs, cores=2)
    assert found["of_alone"] == {"median": 0.85, "low": 0.8, "high": 0.9, "n": 2}
    assert found["of_alone_by_cpu"]["median"] == 0.85


def test_a_loader_beside_python_is_reported_by_what_it_keeps_and_costs(benchmark: ModuleType) -> None:
    found = benchmark.summary([run(9, 1.0, 0.0, idle_images_per_s=10.0, kept=0.9, cost=0.02)], cores=1)
    assert (found["kept"]["median"], found["cost"]["median"]) == (0.9, 0.02)
    assert "cpu_ms" not in found


def test_a_claim_is_the_median_of_the_rounds_ratios(benchmark: ModuleType) -> None:
    section, ours, theirs, times = benchmark.CLAIMS[0]
    runs = {
        ours: [run(600, 1.0, 2.0), run(300, 1.0, 1.0), run(800, 1.0, 2.0)],
        theirs: [run(100, 1.0, 2.0), run(100, 1.0, 2.0), run(100, 1.0, 2.0)],
    }
    (row,) = benchmark.claims({section: runs})
    assert row["ratio"] == {"median": 6.0, "low": 3.0, "high": 8.0, "n": 3}
    assert row["ratio_by_cpu"]["median"] == 6.0 and row["claimed"] == times


def test_what_was_not_measured_is_not_claimed(benchmark: ModuleType) -> None:
    assert benchmark.claims({}) == []


def test_every_claim_is_about_contenders_that_take_part(benchmark: ModuleType) -> None:
    every = [*benchmark.TORCHVISION, *benchmark.PEERS, *benchmark.OURS, *benchmark.PIXELS, *benchmark.BESIDE]
    keys = [each.key for each in every]
    assert len(set(keys)) == len(keys)
    assert {name for _, ours, theirs, _ in benchmark.CLAIMS for name in (ours, theirs)} <= set(keys)
    assert set(benchmark.MAIN) <= set(keys)
    assert all((FOLDER / each.program).is_file() for each in every)


def test_the_stopwatch_leaves_out_the_warm_up_and_ends_with_a_batch(stopwatch: ModuleType) -> None:
    found = stopwatch.measure(iter([1, 1, 5, 7]), seconds=0.0, warmup_batches=2)
    assert (found["images"], found["batches"]) == (5, 1)
    assert found["images_per_s"] == found["images"] / found["wall_s"]
    assert stopwatch.measure(iter([1, 2, 3]), seconds=1e9, warmup_batches=1)["images"] == 5


def test_the_stopwatch_counts_cpu_time(stopwatch: ModuleType) -> None:
    before_s, began_s = stopwatch.tree_cpu_s(), time.process_time()
    while time.process_time() < began_s + 0.05:
        pass
    assert stopwatch.tree_cpu_s() - before_s >= 0.03  # the kernel counts in steps of 0.01 s, at either end


def test_peers_need_no_paceline() -> None:
    others = [path for path in (FOLDER / "peers").glob("*.py") if path.name not in ("ours.py", "beside.py")]
    assert len(others) >= 6
    assert [path.name for path in others if "paceline" in path.read_text().partition('"""\n')[2]] == []
