"""`paceline data bench`: output for given measurements; `lab` tests how they are made."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from paceline.cli import data_bench
from paceline.cli.data_bench import _conclusions, bench_data
from paceline.cli.options import DataBenchOptions
from paceline.core.errors import DataError
from paceline.data.native import load_native
from paceline.lab.loader_bench import BenchRow, LoaderMeasurement, summarize_measurements

OPTIONS = DataBenchOptions(seconds=0.1, rounds=2, images=100, workers="1", as_json=True)


@pytest.fixture
def photographs(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (8, 16, 24, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        folder = tmp_path / "photos" / ("train", "val")[number % 2] / ("cat", "dog")[number // 4]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
    return tmp_path / "photos"


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """Fake the measurement: a case is as fast as its position. Return the list of turns."""
    calls = []

    def take_turns(turns, rounds, window, *, prepare, progress):
        calls.extend((case.name, cache) for case, cache in turns)
        for case, cache in turns:
            prepare(case, cache)
        return [
            summarize_measurements(
                case, cache, [LoaderMeasurement(100 * (place + 1), 1.0, 0.5, 10_000, 10_000, 5_000_000)] * rounds
            )
            for place, (case, cache) in enumerate(turns)
        ]

    monkeypatch.setattr(data_bench, "run_bench", take_turns)
    return calls


def test_files_and_a_pack_of_them_are_measured_warm_and_cold(photographs, measured, capsys):
    assert bench_data(replace(OPTIONS, src=str(photographs), workers="2", as_json=True)) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["cache"]) for row in printed["rows"]] == measured
    assert {"inline, folder", "threads, folder", "processes, folder", "threads, pack"} <= {name for name, _ in measured}
    assert ("processes, folder", "cold") in measured and ("ceiling: memcpy", "cold") not in measured
    assert printed["images"] == 4 and printed["image_size"] == 224 and printed["rows"][0]["images_per_s"] == 100.0
    assert any(note.startswith("a pack of the images was written at ") for note in printed["notes"])
    assert printed["provenance"]["workers"] == 2
    assert (load_native() is None) == any(row["name"] == "native, pack" for row in printed["left_out"])


def test_tables_fit_a_narrow_terminal(photographs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert bench_data(replace(OPTIONS, src=str(photographs), workers="2", as_json=False)) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert any(line.startswith("files in memory, medians of 2") for line in lines)
    assert "from the disk, from the start of a pass" in lines
    assert max(len(line) for line in lines if line.startswith(("│", "╭"))) <= 80
    assert "not decided: " in printed and "fewer than 3 rounds" in printed.replace("\n", " ")
    assert "paceline data pack SRC OUT.pack" in printed


def row(name, rate, spread=0.0, *, n=3, kind="loader"):
    return BenchRow(name, kind, "warm", 2, n, rate, (rate - spread, rate + spread), rate / 2, 1.0, 0.0, 0.0, 0, 0.0)


@pytest.mark.parametrize(
    ("rows", "printed"),
    [
        ([row("native, pack", 300, 5), row("threads, pack", 100, 5)], "native, pack: 3 times threads, pack"),
        (
            [row("native, pack", 110, 9), row("threads, pack", 100, 9)],
            "not decided: native, pack or threads",
        ),
        ([row("native, pack", 300, n=1), row("threads, pack", 100, n=1)], "not decided: .* fewer than 3 rounds"),
        (
            [row("native, pack", 156), row("threads, pack", 220), row("ceiling: native decode", 91, kind="floor")],
            "faster than decoding alone, so these rates are noise",
        ),
    ],
)
def test_a_loader_is_fastest_only_if_rates_do_not_overlap(rows, printed):
    plan = SimpleNamespace(sources={"pack": None})
    found = dict(_conclusions(plan, rows))
    assert re.search(printed, found.get("fastest", found.get("noise", "")))


def test_without_a_pack_and_the_disk_less_is_measured(photographs, measured, capsys):
    assert bench_data(replace(OPTIONS, src=str(photographs), packs=False, cold=False)) == 0
    assert [cache for _, cache in measured] == ["warm"] * 5
    printed = json.loads(capsys.readouterr().out)
    assert not any("pack" in row["name"] for row in printed["rows"])
    assert not any(note.startswith("a pack") for note in printed["notes"])


def test_a_pack_is_not_made_without_free_space(photographs, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 10}))
    assert bench_data(replace(OPTIONS, src=str(photographs))) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["notes"][-1].startswith("no pack was measured: ") and "has 10 bytes free" in printed["notes"][-1]


def test_a_cold_read_from_memory_is_reported(photographs, capsys, monkeypatch):
    def take_turns(turns, rounds, window, *, prepare, progress):
        return [summarize_measurements(*turn, [LoaderMeasurement(100, 1.0, 0.5, 10_000, 0)]) for turn in turns]

    monkeypatch.setattr(data_bench, "run_bench", take_turns)
    bench_data(replace(OPTIONS, src=str(photographs)))
    assert "cold results are not cold" in json.loads(capsys.readouterr().out)["notes"][-1]


def test_the_result_is_written_to_out(photographs, tmp_path, capsys):
    assert bench_data(replace(OPTIONS, src=str(photographs), out=tmp_path / "a/b")) == 0
    assert json.loads((tmp_path / "a/b/bench.json").read_text()) == json.loads(capsys.readouterr().out)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"^--out: "):
        bench_data(replace(OPTIONS, src=str(photographs), out=tmp_path / "file/x"))
    (tmp_path / "c/bench.json").mkdir(parents=True)
    with pytest.raises(DataError, match=r"^--out: .*c/bench\.json: cannot be written: .*name another folder"):
        bench_data(replace(OPTIONS, src=str(photographs), out=tmp_path / "c"))


def test_pixels_in_memory_are_measured_as_they_are(measured, capsys):
    words = ["data.source.num_images=50", "data.source.image_size=8"]
    assert bench_data(replace(OPTIONS, src="synthetic", overrides=words)) == 0
    assert measured == [("inline, pixels", "warm"), ("device, pixels", "warm"), ("ceiling: memcpy", "warm")]
