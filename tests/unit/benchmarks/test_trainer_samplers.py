"""The comparison of samplers: what it counts, and that the page shows the record's numbers."""

import importlib
import json
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "explanation" / "distributed-samplers.md"
RECORD = ROOT / "benchmarks" / "results" / "trainer-samplers.json"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "trainer_samplers", raising=False)
    return importlib.import_module("trainer_samplers")


def steps_of(epoch: int, first: int, *batches: list[int]) -> list[tuple[int, int, Counter[int]]]:
    return [(epoch, first + number, Counter(batch)) for number, batch in enumerate(batches)]


def test_samples_that_are_left_out_and_taken_again_are_counted(benchmark: ModuleType) -> None:
    found = benchmark.count([Counter([0, 1]), Counter([1, 2]), Counter([2, 2])], 5)
    assert found == {"left_out": 2, "repeated": 3}


def test_a_resume_is_compared_with_the_run_that_was_never_stopped(benchmark, monkeypatch) -> None:
    monkeypatch.setattr(benchmark, "NUM_SAMPLES", 4)
    whole = [*steps_of(0, 1, [0, 1], [2, 3]), *steps_of(1, 3, [3, 1], [0, 2]), *steps_of(2, 5, [1, 2], [0, 3])]
    before = whole[:3]
    exact = benchmark.compare(whole, before, whole[3:])
    assert exact == {"left_out": 0, "repeated": 0, "same_steps": True}
    restarted = benchmark.compare(whole, before, [*steps_of(1, 4, [3, 1], [0, 2]), *whole[4:]])
    assert restarted == {"left_out": 0, "repeated": 2, "same_steps": False}
    skipped = benchmark.compare(whole, before, whole[4:])
    assert skipped == {"left_out": 2, "repeated": 0, "same_steps": False}
    assert benchmark.num_orders(whole) == 3 and benchmark.num_orders([*whole[:2], *steps_of(1, 3, [0, 1], [2, 3])]) == 1


def test_a_step_that_one_rank_did_not_reach_does_not_count(benchmark, tmp_path: Path) -> None:
    job = benchmark.Job("PyTorch", "default", tmp_path, "run", world_size=2)
    for rank, steps in enumerate([[[4], [2]], [[1]]]):
        for number, samples in enumerate(steps, start=1):
            benchmark.replace(job, rank=rank).note(0, number, samples)
    assert benchmark.together(tmp_path / f"run.rank{rank}.jsonl" for rank in range(2)) == steps_of(0, 1, [4, 1])


def table_of(rows: dict[str, Any]) -> str:
    """Return the rows of the page's table."""
    lines = []
    for name, found in rows.items():
        trainer, _, sampler = name.partition(", ")
        resumed = [found["resumed_on_2"], found["resumed_on_3"]]
        cells = [trainer, f"`{sampler}`" if sampler != "default" else sampler]
        cells += [str(found["epoch"][field]) for field in ("repeated", "left_out")]
        cells += [str(each[field]) for each in resumed for field in ("repeated", "left_out")]
        same = [each["same_steps"] for each in resumed]
        cells.append("yes" if all(same) else "on 2 only" if same[0] else "no")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_page_has_the_numbers_of_the_record(benchmark: ModuleType) -> None:
    record = json.loads(RECORD.read_text())
    assert list(record["rows"]) == [f"{trainer}, {label}" for trainer, _, label in benchmark.ROWS]
    assert table_of(record["rows"]) in PAGE.read_text()
    exact = [found for name, found in record["rows"].items() if name.endswith("ExactSampler")]
    assert len(exact) == 4 and all(found["as_paceline"] for found in exact)
    assert all(found[f"resumed_on_{ranks}"]["same_steps"] for found in exact for ranks in (2, 3))
