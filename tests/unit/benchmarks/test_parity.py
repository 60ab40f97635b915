"""The parity benchmark: its arithmetic, its order of runs, and the folders that it makes."""

import importlib
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def parity(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.delitem(sys.modules, "parity", raising=False)
    return importlib.import_module("parity")


def run(top1: float, weights: str, loader: str = "processes") -> dict[str, Any]:
    """What `accuracy.trained` returns, as far as it is read."""
    result = {"loader": {"loader": loader}, "weights_sha256": weights}
    return {"judged": {"top1": top1, "loss": 1 - top1}, "evals": [], "result": result}


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def photographs(root: Path, counts: dict[str, int]) -> None:
    for name, num_images in counts.items():
        (root / name).mkdir(parents=True)
        for number in range(num_images):
            (root / name / f"{name}_{number:03}.JPEG").touch()


def test_the_difference_is_paired_and_has_both_standard_errors(parity: ModuleType) -> None:
    found = parity.difference([0.5, 0.6, 0.7], [0.6, 0.6, 0.9])
    assert (found["mean"], found["n"]) == (pytest.approx(0.1), 3)
    # By hand: variances 0.01 and 0.03, and differences 0.1, 0, 0.2 with a variance of 0.01; approx is for rounding.
    assert found["standard_error"] == pytest.approx(math.sqrt(0.04 / 3))
    assert found["paired_standard_error"] == pytest.approx(math.sqrt(0.01 / 3))


def test_one_seed_has_a_difference_and_no_error(parity: ModuleType) -> None:
    found = parity.difference([0.5], [0.75])
    assert found == {"mean": 0.25, "n": 1, "standard_error": None, "paired_standard_error": None}


def test_contenders_take_turns_forwards_and_then_backwards(parity: ModuleType) -> None:
    assert list(parity.turns([7, 8, 9], equal_seeds=1)) == [
        (parity.FOLDER, 7),
        (parity.PACK, 7),
        (parity.NATIVE, 7),
        (parity.NATIVE, 8),
        (parity.FOLDER, 8),
        (parity.FOLDER, 9),
        (parity.NATIVE, 9),
    ]


def test_contenders_differ_in_source_and_loader_alone(parity: ModuleType) -> None:
    folder, pack, native = (
        parity.source_arguments(each, Path("a")) for each in (parity.FOLDER, parity.PACK, parity.NATIVE)
    )
    assert folder == ["data.source.name=folder", "data.source.root=a", "data.loader=processes"]
    assert pack == ["data.source.name=pack", "data.source.root=a.pack", "data.loader=processes"]
    assert native == [*pack[:2], "data.loader=native"]


@pytest.mark.parametrize(("packed", "equal"), [({0: "a"}, True), ({0: "a", 1: "c"}, False), ({}, False)])
def test_weights_are_equal_when_they_are_at_every_seed_that_was_tried(
    parity: ModuleType, packed: dict[int, str], equal: bool
) -> None:
    runs = {
        parity.FOLDER: {0: run(0.5, "a"), 1: run(0.7, "b")},
        parity.PACK: {seed: run(0.5, weights) for seed, weights in packed.items()},
        parity.NATIVE: {0: run(0.6, "d", "native"), 1: run(0.8, "e", "native")},
    }
    found = parity.summary(runs)
    assert found["weights_equal"] is equal
    assert found["difference"]["top1"]["mean"] == pytest.approx(0.1)  # of floats that are no tenths
    assert found["contenders"][parity.NATIVE]["loader"] == ["native"]
    assert found["contenders"][parity.FOLDER]["top1"] == [0.5, 0.7]


def test_cifar10_is_the_first_images_of_each_class(parity: ModuleType, tmp_path: Path) -> None:
    for split, num_images in (("train", 6), ("test", 4)):
        (tmp_path / "all" / split / "cat").mkdir(parents=True)
        for number in range(num_images):
            (tmp_path / "all" / split / "cat" / f"{number:04}.jpg").write_text(split)
    parity.link_cifar10(tmp_path / "all", tmp_path / "some", num_train=5, num_val=3)
    made = files(tmp_path / "some")
    assert made == {f"train/cat/{n:04}.jpg" for n in range(5)} | {f"val/cat/{n:04}.jpg" for n in range(3)}
    assert (tmp_path / "some/val/cat/0002.jpg").read_text() == "test"


def test_photographs_are_split_by_what_they_show_and_every_fifth_is_for_validation(
    parity: ModuleType, tmp_path: Path
) -> None:
    photographs(tmp_path / "all", {"n02655020": 10, "n02666196": 10})  # the last animal, the first thing
    parity.link_photographs(tmp_path / "all", tmp_path / "some", num_images=10)
    made = files(tmp_path / "some")
    sizes = {name: len(files(tmp_path / "some" / name)) for name in ("train", "val", "train/animal", "val/animal")}
    assert sizes == {"train": 8, "val": 2, "train/animal": 4, "val/animal": 1}
    assert len({Path(name).name for name in made}) == len(made) == 10  # none is in both splits
    assert all((Path(name).parent.name == "animal") == Path(name).name.startswith("n02655020") for name in made)


def test_too_few_photographs_are_refused(parity: ModuleType, tmp_path: Path) -> None:
    photographs(tmp_path / "all", {"n02655020": 2})
    with pytest.raises(SystemExit, match="has 2 photographs"):
        parity.link_photographs(tmp_path / "all", tmp_path / "some")


def test_nothing_to_train_on_is_refused(
    parity: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["parity.py"])
    with pytest.raises(SystemExit) as ended:
        parity.main()
    assert ended.value.code == 2
    assert "set --cifar10, --photographs or both" in capsys.readouterr().err
