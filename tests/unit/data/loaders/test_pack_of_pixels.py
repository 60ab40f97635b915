"""Pixels of one size have the same batches in memory, in a pack of one file and in shards, with every loader."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.core.dataset import ArraySource, DatasetInfo, Datasets, Source
from paceline.core.pixels import PixelType
from paceline.data.batch import Batch
from paceline.data.convert.pack_writer import PackOptions, write_pack
from paceline.data.loaders.build import LoaderOptions, build_eval_loader, build_train_loader
from paceline.data.order import EvalShard, TrainOrder
from paceline.data.pack.reader import PackSource, open_pack
from paceline.data.sources.folds import select_fold
from paceline.data.timing import LoaderName
from paceline.recipe.schema.data import Data
from paceline.training.trained_dataset import TrainedDataset

NUM = 24
LOADERS: tuple[LoaderName, ...] = ("inline", "threads", "processes")
RECIPES = {
    "plain": Data(),
    "stretch": Data(eval_resize="stretch"),
    "pad and flip": Data.model_validate({"augment": ["pad_crop", "flip"]}),
    "random crop": Data.model_validate({"augment": ["random_resized_crop", "flip"]}),
}
PackAs = Callable[[PixelType], dict[str, Datasets]]


@pytest.fixture
def pack_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackAs:
    """Return a function that returns the same images in memory, in a pack of one file, and in shards."""
    monkeypatch.setattr("paceline.data.convert.pack_writer._MIN_SHARD_BYTES", 1)

    def of(pixels: PixelType) -> dict[str, Datasets]:
        drawn = np.random.default_rng(0).integers(0, 256, (2 * NUM, 16, 16, 3))
        images = (drawn / 255).astype(np.float32) if pixels == "float32" else drawn.astype(pixels)
        labels = np.arange(2 * NUM) % 2
        info = DatasetInfo("made", "train", NUM, ("a", "b"), 3, (16, 16), (0.5,) * 3, (0.25,) * 3, pixels=pixels)
        val = ArraySource(replace(info, split="val"), images[NUM:], labels[NUM:])
        made = {"memory": Datasets(ArraySource(info, images[:NUM], labels[:NUM]), val)}
        for name, shard_bytes in (("file", None), ("shards", 4 * images[0].nbytes)):
            options = PackOptions(shard_bytes=shard_bytes)
            write_pack(made["memory"], tmp_path / name, options, lambda done, total: None, 1)
            made[name] = open_pack(tmp_path / name)
        assert isinstance(made["file"].train, ArraySource) and isinstance(made["shards"].train, PackSource)
        return made

    return of


def read_train(data: Data, source: Source, loader: LoaderName, size: int) -> list[Batch]:
    order = TrainOrder(seed=1, num_images=len(source), batch_size=5)
    options = LoaderOptions(0 if loader == "inline" else 2, False, loader=loader)
    made = build_train_loader(data, source, order, lambda step: size, options)
    batches = list(made.batches(0, 4))
    made.close()
    return batches


def read_eval(data: Data, source: Source, loader: LoaderName, size: int) -> list[Batch]:
    options = LoaderOptions(0 if loader == "inline" else 2, False, loader=loader)
    made = build_eval_loader(data, source, EvalShard(len(source), 5), size, options)
    batches = list(made.batches(0, -(-len(source) // 5)))
    made.close()
    return batches


def are_equal(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) > 0 and all(
        torch.equal(each.images, same.images) and torch.equal(each.labels, same.labels)
        for each, same in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("size", [16, 24])
@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_have_the_batches_of_a_pack_of_one_file(pack_as: PackAs, recipe: str, size: int) -> None:
    made, data = pack_as("uint8"), RECIPES[recipe]
    for loader in LOADERS if size == 24 else LOADERS[:1]:
        train = [read_train(data, each.train, loader, size) for each in made.values()]
        assert are_equal(train[0], train[1]) and are_equal(train[0], train[2])
        evaluated = [read_eval(data, each.val, loader, size) for each in made.values()]
        assert are_equal(evaluated[0], evaluated[1]) and are_equal(evaluated[0], evaluated[2])


@pytest.mark.parametrize("pixels", ["uint16", "float32"])
def test_shards_of_wide_pixels_have_the_batches_of_one_file(pack_as: PackAs, pixels: PixelType) -> None:
    made = pack_as(pixels)
    assert are_equal(*(read_train(Data(), made[name].train, "inline", 16) for name in ("file", "shards")))
    assert are_equal(*(read_eval(Data(), made[name].val, "inline", 24) for name in ("file", "shards")))


@pytest.mark.parametrize("pool", ["train", "all"])
def test_a_fold_of_shards_has_the_batches_of_a_fold_of_one_file(pack_as: PackAs, pool: str) -> None:
    data = Data.model_validate({"split": {"folds": 3, "fold": 1, "pool": pool}})
    folds = [select_fold(each, data) for each in pack_as("uint8").values()]
    for splits in ([fold.train for fold in folds], [fold.val for fold in folds]):
        memory, one_file, shards = (read_eval(Data(), each, "inline", 16) for each in splits)
        assert are_equal(memory, one_file) and are_equal(memory, shards)


def test_a_run_on_shards_is_described_as_one_on_a_file(pack_as: PackAs) -> None:
    """By which `predict`, `export` and an evaluation on other images choose how to resize."""
    memory, one_file, shards = (TrainedDataset.from_source(each.train) for each in pack_as("uint8").values())
    assert memory.to_dict() == one_file.to_dict() == shards.to_dict()
    assert shards.is_pixels and shards.are_one_size
