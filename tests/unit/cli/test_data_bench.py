"""`paceline data bench`: what it says of measurements; how they are made is tested with `lab`."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from paceline.cli import data_bench
from paceline.cli.data_bench import BenchRequest, _conclusions, bench_data
from paceline.core.errors import DataError
from paceline.data.native import load_native
from paceline.lab.loader_bench import BenchRow, LoaderMeasurement, summarize_measurements

ASKED = BenchRequest(seconds=0.1, rounds=2, images=100, packs=True, cold=True)


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
    """Have every turn measured at once: a contender is as fast as its place says. Return the list of turns."""
    asked = []

    def take_turns(turns, rounds, window, *, prepare, progress):
        asked.extend((contender.name, cache) for contender, cache in turns)
        for contender, cache in turns:
            prepare(contender, cache)
        return [
            summarize_measurements(
                contender, cache, [LoaderMeasurement(100 * (place + 1), 1.0, 0.5, 10_000, 10_000, 5_000_000)] * rounds
            )
            for place, (contender, cache) in enumerate(turns)
        ]

    monkeypatch.setattr(data_bench, "run_bench", take_turns)
    return asked


def test_files_and_a_pack_of_them_are_measured_warm_and_cold(photographs, measured, capsys):
    assert bench_data(str(photographs), [], ASKED, "2", None, as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["cache"]) for row in said["rows"]] == measured
    assert {"inline, folder", "threads, folder", "processes, folder", "threads, pack"} <= {name for name, _ in measured}
    assert ("processes, folder", "cold") in measured and ("ceiling: memcpy", "cold") not in measured
    assert said["images"] == 4 and said["image_size"] == 224 and said["rows"][0]["images_per_s"] == 100.0
    assert any(note.startswith("a pack of the images was written at ") for note in said["notes"])
    assert said["provenance"]["workers"] == 2
    assert (load_native() is None) == any(row["name"] == "native, pack" for row in said["left_out"])


def test_tables_fit_a_narrow_terminal(photographs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert bench_data(str(photographs), [], ASKED, "2", None, as_json=False) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert any(line.startswith("files in memory, medians of 2") for line in lines)
    assert "from the disk, from the start of a pass" in lines
    assert max(len(line) for line in lines if line.startswith(("│", "╭"))) <= 80
    assert "not decided: " in said and "fewer than 3 rounds" in said.replace("\n", " ")
    assert "paceline data pack SRC OUT.pack" in said


def row(name, rate, spread=0.0, *, n=3, kind="loader"):
    return BenchRow(name, kind, "warm", 2, n, rate, (rate - spread, rate + spread), rate / 2, 1.0, 0.0, 0.0, 0, 0.0)


@pytest.mark.parametrize(
    ("rows", "said"),
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
def test_a_loader_is_called_fastest_only_where_the_rates_bear_it(rows, said):
    contest = SimpleNamespace(sources={"pack": None})
    found = dict(_conclusions(contest, rows))
    assert re.search(said, found.get("fastest", found.get("noise", "")))


def test_without_a_pack_and_the_disk_less_is_measured(photographs, measured, capsys):
    asked = replace(ASKED, packs=False, cold=False)
    assert bench_data(str(photographs), [], asked, "1", None, as_json=True) == 0
    assert [cache for _, cache in measured] == ["warm"] * 4
    said = json.loads(capsys.readouterr().out)
    assert not any("pack" in row["name"] for row in said["rows"])
    assert not any(note.startswith("a pack") for note in said["notes"])


def test_a_pack_for_which_there_is_no_room_is_not_made(photographs, capsys, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 10}))
    assert bench_data(str(photographs), [], ASKED, "1", None, as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["notes"][-1].startswith("no pack was measured: ") and "has 10 bytes free" in said["notes"][-1]


def test_what_never_came_from_the_disk_is_told(photographs, capsys, monkeypatch):
    def take_turns(turns, rounds, window, *, prepare, progress):
        return [summarize_measurements(*turn, [LoaderMeasurement(100, 1.0, 0.5, 10_000, 0)]) for turn in turns]

    monkeypatch.setattr(data_bench, "run_bench", take_turns)
    bench_data(str(photographs), [], ASKED, "1", None, as_json=True)
    assert "cold results are not cold" in json.loads(capsys.readouterr().out)["notes"][-1]


def test_the_result_is_written_where_it_was_asked_for(photographs, tmp_path, capsys):
    assert bench_data(str(photographs), [], ASKED, "1", tmp_path / "a/b", as_json=True) == 0
    assert json.loads((tmp_path / "a/b/bench.json").read_text()) == json.loads(capsys.readouterr().out)
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"^--out: "):
        bench_data(str(photographs), [], ASKED, "1", tmp_path / "file/x", as_json=True)


def test_pixels_in_memory_are_measured_as_they_are(measured, capsys):
    words = ["data.source.num_images=50", "data.source.image_size=8"]
    assert bench_data("synthetic", words, ASKED, "1", None, as_json=True) == 0
    assert measured == [("inline, pixels", "warm"), ("device, pixels", "warm"), ("ceiling: memcpy", "warm")]
