"""Folds of a cross-validation: each image in one, balanced, groups kept whole; folds keep the fast loaders."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sklearn.model_selection import StratifiedGroupKFold

from paceline.core.dataset import ArraySource, Datasets, Source
from paceline.core.errors import DataError
from paceline.core.units import Duration
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.loaders.build import LoaderOptions, build_eval_loader
from paceline.data.native import load_native
from paceline.data.order import EvalShard
from paceline.data.pack.reader import PackSource, open_pack
from paceline.data.sources.build import build_datasets
from paceline.data.sources.builtin import load_digits
from paceline.data.sources.fingerprint import digest_datasets, get_labels
from paceline.data.sources.folds import assign_folds, build_run_datasets, select_fold
from paceline.data.sources.image_files import ImageFileSource
from paceline.data.sources.statistics import with_measured
from paceline.data.sources.subset import SourceSubset
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.source import Folder
from paceline.recipe.schema.split import Split


def assigned(split: Split, classes: Sequence[int], groups: Sequence[str] | None = None) -> np.ndarray:
    return assign_folds(split, len(classes), np.array(classes, dtype=np.int64), groups)


def counts(folds: np.ndarray, classes: Sequence[int]) -> np.ndarray:
    """Return the images of each fold and class, [folds, classes]."""
    table = np.zeros((folds.max() + 1, max(classes) + 1), dtype=np.int64)
    np.add.at(table, (folds, classes), 1)
    return table


@settings(max_examples=25)
@given(
    classes=st.lists(st.integers(0, 4), min_size=12, max_size=80),
    num_folds=st.integers(2, 12),
    repeat=st.integers(0, 3),
)
def test_folds_differ_by_at_most_one_image_of_each_class(classes: list[int], num_folds: int, repeat: int) -> None:
    split = Split(folds=num_folds, repeat=repeat)
    folds = assigned(split, classes)
    table = counts(folds, classes)
    assert table.shape[0] == num_folds and (table.max(0) - table.min(0) <= 1).all()
    assert np.ptp(table.sum(1)) <= 1
    plain = assigned(split.model_copy(update={"stratified": "off"}), classes)
    assert np.ptp(np.bincount(plain)) <= 1


@settings(max_examples=25)
@given(
    images=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=30, max_size=90),
    num_folds=st.integers(2, 4),
    shuffled=st.randoms(use_true_random=False),
)
def test_a_group_is_in_one_fold_in_whatever_order_images_come(images, num_folds: int, shuffled) -> None:
    images += [(0, group) for group in range(10)]
    split = Split(folds=num_folds, groups="patient")

    def fold_by_group(listed) -> dict[str, int]:
        classes, groups = [each for each, _ in listed], [f"p{group}" for _, group in listed]
        pairs = set(zip(groups, assigned(split, classes, groups).tolist(), strict=True))
        assert len(pairs) == 10 and len({fold for _, fold in pairs}) == num_folds
        return dict(pairs)

    before = fold_by_group(images)
    shuffled.shuffle(images)
    assert fold_by_group(images) == before


def test_groups_are_balanced_about_as_well_as_by_scikit_learn() -> None:
    draw = np.random.default_rng(3)
    groups = np.repeat(np.arange(60), draw.integers(1, 30, 60))
    classes = draw.integers(0, 3, 60)[groups]  # all images of a group are of one class

    def spread(folds: np.ndarray) -> float:
        shares = counts(folds, classes.tolist()) / np.bincount(classes)
        return float(shares.std(axis=0).mean())

    ours = [
        spread(assigned(Split(folds=5, repeat=repeat, groups="g"), classes, [f"{each:02}" for each in groups]))
        for repeat in range(5)
    ]
    theirs = np.empty(len(groups), dtype=np.int64)
    for fold, (_, held) in enumerate(StratifiedGroupKFold(5).split(groups, classes, groups)):
        theirs[held] = fold
    assert max(ours) <= 2 * spread(theirs) + 0.01


def test_folds_are_the_same_everywhere_and_differ_between_repeats_and_seeds() -> None:
    classes = [0, 1] * 6
    assert assigned(Split(folds=3), classes).tolist() == [0, 1, 2, 0, 2, 1, 1, 0, 0, 2, 1, 2]
    divisions = [assigned(Split(folds=3, **more), classes).tolist() for more in ({}, {"repeat": 1}, {"seed": 1})]
    assert len({tuple(each) for each in divisions}) == 3
    sizes = [f"{group}" for group in range(9) for _ in range(group + 1)]
    single = [assigned(Split(folds=3, repeat=repeat), range(8)).tolist() for repeat in range(4)]  # classes of one image
    assert len({tuple(each) for each in single}) == 4
    grouped = [assigned(Split(folds=3, repeat=repeat, groups="g"), [0] * 45, sizes).tolist() for repeat in range(4)]
    assert len({tuple(each) for each in grouped}) == 4


def test_each_group_is_a_fold() -> None:
    split = Split(folds="groups", groups="site")
    assert assigned(split, [0, 0, 1, 1], ["b", "a", "b", "c"]).tolist() == [1, 0, 1, 2]
    with pytest.raises(DataError, match=r"^data.split.folds: groups needs more than 1 group \(name more groups\)$"):
        assigned(split, [0, 1], ["a", "a"])


def test_there_are_as_many_images_as_folds() -> None:
    with pytest.raises(DataError, match=r"^data.split.folds: 5 needs more than 4 images \(lower it\)$"):
        assigned(Split(folds=5), [0, 1, 0, 1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"folds": 3, "fold": 3}, "fold 3 is not one of 3 folds"),
        ({"folds": "groups"}, "set groups=COLUMN"),
        ({"groups_file": "a.csv"}, "groups_file a.csv has no effect without groups"),
        ({"folds": "groups", "groups": "g", "repeat": 1}, "repeat has no effect with folds groups"),
    ],
)
def test_a_split_without_effect_is_refused(values, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Split(**values)


def folds_of(datasets: Datasets, split: Split, source=None) -> list[Datasets]:
    assert split.folds != "groups"
    data = Data(split=split) if source is None else Data(split=split, source=source)
    each = (split.model_copy(update={"fold": fold}) for fold in range(split.folds))
    return [select_fold(datasets, data.model_copy(update={"split": one})) for one in each]


def names(source: Source) -> list[str]:
    return [source.name_of(index) for index in range(len(source))]


def test_folds_of_pixels_are_pixels_normalized_by_their_training_images() -> None:
    digits = load_digits()
    assert isinstance(digits.train, ArraySource)
    folds = folds_of(digits, Split(folds=4))
    validated: list[str] = []
    for each in folds:
        assert isinstance(each.train, ArraySource) and isinstance(each.val, ArraySource)
        assert each.val.info.split == "val" and each.train.info.num_images + len(each.val) == len(digits.train)
        assert not set(names(each.train)) & set(names(each.val))
        for source in (each.train, each.val):
            assert source.positions is not None
            assert np.array_equal(source.images, digits.train.images[source.positions])
            assert np.array_equal(source.labels, digits.train.labels[source.positions])
        measured = with_measured(each, skip_bad=False)
        alone = replace(each.train, info=replace(each.train.info, mean=(), std=()))
        assert measured.val.info.mean == with_measured(Datasets(alone, alone), skip_bad=False).train.info.mean
        validated += names(each.val)
    assert sorted(validated) == sorted(f"digits[{index}]" for index in range(len(digits.train)))
    assert "fold 0 of 4" in folds[0].train.info.notes[-1] and "359 validation images" in folds[0].train.info.notes[-1]
    assert len({digest_datasets(each) for each in folds}) == 4

    pooled = folds_of(digits, Split(folds=2, pool="all"))
    assert sum(len(each.val) for each in pooled) == len(digits.train) + len(digits.val)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory) -> Path:
    """Return a folder of 40 JPEGs in two classes for training, and 6 for validation."""
    root = tmp_path_factory.mktemp("photographs")
    draw = np.random.default_rng(0)
    for number in range(46):
        folder = root / ("train" if number < 40 else "val") / ("cat" if number % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = draw.integers(0, 256, (20 + number, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg", quality=70)
    rows = [f"{'cat' if number % 2 else 'dog'}/{number}.jpg,p{number // 5}" for number in range(40)]
    (root / "patients.csv").write_text("\n".join(["path,patient", *rows]) + "\n")
    return root


def batches(source: Source, loader: str) -> tuple[np.ndarray, np.ndarray]:
    shard, data = EvalShard(len(source), 8), Data(worker_timeout=Duration.parse("1min"))
    options = LoaderOptions(workers=1, pin_memory=False, loader=loader)  # type: ignore[arg-type]
    made = build_eval_loader(data, source, shard, 16, options)
    parts = list(made.batches(0, shard.num_batches))
    made.close()
    return tuple(np.concatenate([getattr(each, name).numpy() for each in parts]) for name in ("images", "labels"))


def test_folds_of_files_and_packs_keep_their_loader_and_their_pixels(photographs: Path, tmp_path: Path) -> None:
    section = Folder(root=str(photographs))
    files = build_datasets(section, may_download=False)
    write_pack(files, tmp_path / "photographs.pack", PackOptions(), lambda done, total: None, 1)
    packed = open_pack(tmp_path / "photographs.pack")
    split = Split(folds=2, groups="patient", groups_file=str(photographs / "patients.csv"))
    for from_files, from_pack in zip(folds_of(files, split, section), folds_of(packed, split), strict=True):
        assert isinstance(from_files.val, ImageFileSource) and isinstance(from_pack.val, PackSource)
        assert digest_datasets(from_files) == digest_datasets(from_pack)
        assert from_files.train.info.mean == files.train.info.mean  # ImageNet's, which are no leak
        patients = [{int(Path(each).stem) // 5 for each in names(part)} for part in (from_files.train, from_files.val)]
        assert not patients[0] & patients[1] and len(patients[0] | patients[1]) == 8
        assert from_pack.val.rows is not None
        for loader in ("threads", *(["native"] if load_native() else [])):
            for of_fold, of_all in zip(batches(from_pack.val, loader), batches(packed.train, loader), strict=True):
                assert np.array_equal(of_fold, of_all[from_pack.val.rows])
        for one, other in zip(batches(from_files.val, "inline"), batches(from_pack.val, "processes"), strict=True):
            assert np.array_equal(one, other)
    pooled = folds_of(packed, Split(folds=3, pool="all"))[0]
    assert isinstance(pooled.val, PackSource) and len(pooled.val) + len(pooled.train) == 46
    joined = folds_of(files, Split(folds=3, pool="all"), section)[0]
    assert isinstance(joined.val, ImageFileSource) and {Path(each).exists() for each in names(joined.val)} == {True}
    for one, other in zip(batches(joined.val, "inline"), batches(pooled.val, "inline"), strict=True):
        assert np.array_equal(one, other)


def test_other_sources_are_subsets(photographs: Path) -> None:
    whole = build_datasets(Folder(root=str(photographs)), may_download=False).train
    labels = get_labels(whole)
    assert labels is not None
    subset = SourceSubset(replace(whole.info, num_images=2), (whole,), np.array([3, 1]))
    again = SourceSubset(replace(whole.info, num_images=1), (subset,), np.array([1]))
    assert again.read(0) == whole.read(1) and again.name_of(0) == whole.name_of(1)
    assert np.array_equal(get_labels(again), labels[[1]])  # type: ignore[arg-type]
    assert digest_datasets(Datasets(subset, again)) != digest_datasets(Datasets(again, subset))


def test_a_group_column_is_read_from_a_list(photographs: Path, tmp_path: Path) -> None:
    rows = [f"{'cat' if number % 2 else 'dog'}/{number}.jpg,{number % 2},p{number // 8}" for number in range(40)]
    (tmp_path / "train.csv").write_text("\n".join(["path,label,patient", *rows]) + "\n")
    source = {"name": "manifest", "train": str(tmp_path / "train.csv"), "root": str(photographs / "train")}
    data = Data.model_validate({"source": source, "split": {"folds": "groups", "groups": "patient", "fold": 4}})
    held = build_run_datasets(data, may_download=False).val
    assert {int(Path(each).stem) // 8 for each in names(held)} == {4}
    beyond = data.model_copy(update={"split": data.split.model_copy(update={"fold": 5})})  # type: ignore[union-attr]
    with pytest.raises(DataError, match=r"^data.split.fold: 5 is not one of 5 groups \(set data.split.fold=0 to 4\)$"):
        build_run_datasets(beyond, may_download=False)
    unknown = data.model_copy(update={"split": Split(groups="site")})
    with pytest.raises(DataError, match=r"^data.split.groups: .*has no column 'site'"):
        build_run_datasets(unknown, may_download=False)
    (tmp_path / "train.csv").write_text("\n".join(["path,label,patient", *rows[:-1], "cat/39.jpg,1, "]) + "\n")
    with pytest.raises(DataError, match=r"^data.split.groups: .*39.jpg has no value in 'patient' \(name its group"):
        build_run_datasets(data, may_download=False)


def test_a_group_column_of_a_huggingface_dataset_needs_no_validation_split(tmp_path: Path) -> None:
    hf = pytest.importorskip("datasets", reason="the package datasets is not installed: pip install datasets")
    rows = {"image": [Image.new("L", (2, 2))] * 4, "label": [0, 1, 0, 1], "site": ["b", "a ", "b", "a"]}
    features = hf.Features({"image": hf.Image(), "label": hf.ClassLabel(names=["x", "y"]), "site": hf.Value("string")})
    saved = hf.Dataset.from_dict(rows, features=features)
    hf.DatasetDict({"train": saved, "val": saved}).save_to_disk(str(tmp_path / "saved"))
    source = {"name": "huggingface", "root": str(tmp_path / "saved")}
    data = Data.model_validate({"source": source, "split": {"folds": "groups", "groups": "site"}})
    held = build_run_datasets(data, may_download=False).val
    assert [held.read(index)[1] for index in range(len(held))] == [1, 1]
    data = Data.model_validate({"source": source, "split": {"folds": 2, "groups": "site", "pool": "all"}})
    with pytest.raises(DataError, match=r"^data.source.val: auto .*\(set data.source.val=NAME\)$"):
        build_run_datasets(data, may_download=False)
    named = data.model_copy(update={"source": data.source.model_copy(update={"val": "val"})})
    assert len(build_run_datasets(named, may_download=False).val) == 4
