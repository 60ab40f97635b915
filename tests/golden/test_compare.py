"""A difference between two records is reported with its place."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .compare import differences
from .values import Record, flatten

COMPARE = Path(__file__).with_name("compare.py")


def test_differences_are_reported_with_their_places() -> None:
    old = {"train/ema loss": 0.5, "codes/ok": 0, "run/full file plan.json": "there", "same": [1]}
    new = {"train/ema loss": 0.25, "codes/ok": False, "options/train --new": "there", "same": [1]}
    assert list(differences(old, new)) == [
        "codes/ok: 0 -> false",
        'options/train --new: only in NEW: "there"',
        'run/full file plan.json: only in OLD: "there"',
        "train/ema loss: 0.5 -> 0.25",
    ]


def test_values_that_vary_are_recorded_as_types() -> None:
    result = {"weights_sha256": "ab12", "startup_s": 1.5, "eval": {"top1": 0.5, "took_s": 2.0}, "note": "two words"}
    result |= {"throughput": {"images": 9}, "rows": [{"wait_s": 1.0}, {"wait_s": None}]}
    assert flatten(result) == {
        "weights_sha256": "ab12",
        "startup_s": "float",
        "eval.top1": 0.5,
        "eval.took_s": "float",
        "note": "text",
        "throughput.images": "int",
        "rows[].wait_s": "float|null",
    }
    assert flatten({"a": [1, {"b": "c"}], "d": {}}, exact=True) == {"a[0]": 1, "a[1].b": "c", "d": "{}"}


def test_a_changed_loss_or_sample_of_a_run_is_reported(tmp_path: Path) -> None:
    records = []
    for name, loss, sample in (("old", 1.5, 7), ("new", 1.25, 8)):
        run = tmp_path / name / "runs"
        run.mkdir(parents=True)
        (run / "steps.jsonl").write_text(json.dumps({"step": 1, "loss": loss, "images_per_s": 100 * loss}) + "\n")
        samples = {"step": 0, "samples": [3, sample], "crc32": [1, 2]}
        (run / "steps.rank0.jsonl").write_text(json.dumps(samples) + "\n")
        record = Record({str(tmp_path / name): "WORK"})
        record.put_run("run", run)
        record.put("folder", f"{tmp_path / name}/runs")
        records.append(record.values)
    assert [line.split(":")[0] for line in differences(*records)] == [
        "run/steps.jsonl line 0 loss",
        "run/steps.rank0.jsonl step 0 samples",
    ]


@pytest.mark.parametrize(
    ("place", "value", "code", "output"),
    [
        ("a", 1, 0, "identical: 1 values"),
        ("a", 2, 1, "a: 1 -> 2"),
        ("timing/a", 2, 0, "1 more depend on how busy the machine was, and do not count (--timing shows them)"),
    ],
)
def test_the_exit_code_shows_whether_records_differ(
    tmp_path: Path, place: str, value: int, code: int, output: str
) -> None:
    for name, each in (("old", 1), ("new", value)):
        (tmp_path / name).write_text(json.dumps({"format": 1, "commit": "", "values": {place: each}}))
    done = subprocess.run(
        [sys.executable, COMPARE, "old", "new"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout.splitlines()[0]) == (code, output)
