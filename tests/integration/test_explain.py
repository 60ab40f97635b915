"""Maps of what the model looks at: in the report they change nothing else, and predictions get a page of their own."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SMALL = (
    "model.width=0.1",
    "train.steps=2",
    "parallel.threads=1",
    "data.workers=0",
    "log.tensorboard=off",
    "log.worst=3",
)


@pytest.mark.parametrize(
    "change",
    [pytest.param((), marks=pytest.mark.long), ("train.ema.decay=0.9", "--ranks", "2")],
    ids=["plain", "average"],
)
def test_maps_of_the_worst_images_change_nothing_else(paceline, tmp_path: Path, change: tuple[str, ...]) -> None:
    with_maps = paceline("train", "digits", *SMALL, *change, "--run-dir", "on", "--json").result
    without = paceline("train", "digits", *SMALL, *change, "log.explain=off", "--run-dir", "off", "--json").result
    assert with_maps["weights_sha256"] == without["weights_sha256"]
    assert (with_maps["eval"], with_maps["ema"]) == (without["eval"], without["ema"])
    on, off = (json.loads((tmp_path / run / "worst" / "worst.json").read_text()) for run in ("on", "off"))
    files = [row.pop("maps", {}) for row in on]
    assert on == off and files[0].keys() == {"predicted", "true"}
    for name in files[0].values():
        with Image.open(tmp_path / "on" / "worst" / name) as image:
            assert image.mode == "RGB"
    page = (tmp_path / "on" / "report.html").read_text()
    assert page.count('class="mapped"') == sum(map(bool, files)) > 0
    assert 'class="mapped"' not in (tmp_path / "off" / "report.html").read_text()


def test_predictions_are_explained_on_a_page(paceline, tmp_path: Path, opened) -> None:
    paceline("train", "digits", *SMALL, "log.report=off", "--run-dir", "run")
    draw = np.random.default_rng(0)
    for name in ("a<b>.png", "b.png"):
        Image.fromarray(draw.integers(0, 255, (20, 30), dtype=np.uint8)).save(tmp_path / name)
    names = ("a<b>.png", "missing.png", "b.png")
    plain = paceline("predict", "run", *names)
    explained = paceline("predict", "run", *names, "--explain", "out")
    assert explained.code == plain.code == 1 and explained.out == plain.out
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"index.html", "001.1.png", "002.1.png"}
    page, requests, errors = opened((tmp_path / "out" / "index.html").as_uri())
    assert [url for url in requests if not url.startswith("data:")] == [page.url] and errors == []
    assert page.locator("img").count() == 4 and page.evaluate("[...document.images].every(each => each.naturalWidth)")
    assert page.locator("figcaption .name").all_inner_texts() == ["a<b>.png", "b.png"]
    paceline("predict", "run", "b.png", "--explain", "out").assert_error(
        "--explain: out exists already", "(name another"
    )
    layer = paceline("predict", "run", "b.png", "--explain", "other", "--layer", "nowhere")
    layer.assert_error("--layer: 'nowhere'", "choose one of")
    assert not (tmp_path / "other").exists()
    paceline("predict", "run", "b.png", "--layer", "stages").assert_error("--layer: stages", "(add --explain FOLDER)")
