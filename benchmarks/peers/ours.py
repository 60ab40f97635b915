"""Paceline's loaders, measured as the others are; of the native one also what decoding alone does in this process.

python benchmarks/peers/ours.py native --data FILE.pack
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from contender_options import WARMUP_BATCHES, ContenderOptions, parse
from stopwatch import measure

from paceline.core.dataset import ArraySource, DatasetInfo, Source
from paceline.data.loaders.build import Loader, LoaderOptions, build_eval_loader, build_train_loader
from paceline.data.native import load_native
from paceline.data.order import TrainOrder
from paceline.data.pack.reader import PackSource
from paceline.data.sources.build import build_datasets
from paceline.lab.loader_bench import DecodeCeiling, MeasurementWindow
from paceline.recipe.schema.augment import Flip, PadCrop, RandomResizedCrop
from paceline.recipe.schema.data import Data
from paceline.recipe.schema.source import Folder, Pack

NAMES = ("inline", "device", "threads", "processes", "native", "files", "indexed_files")
"""Loaders of paceline. `files` is the native one of plain JPEG files without an index, as in a first epoch, and
`indexed_files` that with the index of an earlier epoch, which `--prepare` writes."""
NATIVE = ("native", "files", "indexed_files")
OF_PIXELS = ("inline", "device")
ENDLESS = 1 << 40
TURNS = 4
"""Windows of the loader and of decoding alone, in turns, when both are measured in one process."""


@dataclass(frozen=True)
class Endless:
    """The samples of an evaluation over and over, as a shard of one that has no end."""

    num_images: int
    batch_size: int

    def indices(self, number: int) -> np.ndarray:
        """Return the samples of a batch."""
        return (np.arange(self.batch_size, dtype=np.int64) + number * self.batch_size) % self.num_images


def data_of(options: ContenderOptions) -> Data:
    """Return the part of a recipe that is measured."""
    if options.name in OF_PIXELS:
        return Data(augment=(PadCrop(), Flip()))
    is_pack = options.data.suffix == ".pack"
    root = str(options.data)
    source = Pack(root=root) if is_pack else Folder(train_root=root, val_root=root)
    index = {"files": {"cache": "off"}, "indexed_files": {"cache": str(options.cache / "jpeg-index")}}
    augment = (RandomResizedCrop(scale=options.scale), Flip())
    return Data(source=source, augment=augment, **index.get(options.name, {}))


def source_of(options: ContenderOptions, data: Data) -> Source:
    """Return the training images, or made-up pixels of CIFAR's shape."""
    if options.name not in OF_PIXELS:
        return build_datasets(data.source, may_download=False).train
    images = np.random.default_rng(0).integers(0, 256, (50_000, 32, 32, 3), dtype=np.uint8)
    info = DatasetInfo("pixels", "train", 50_000, ("a", "b"), 3, (32, 32), (0.5,) * 3, (0.25,) * 3)
    return ArraySource(info, images, np.zeros(50_000, dtype=np.int64))


def loader_of(options: ContenderOptions, data: Data, source: Source) -> Loader:
    """Return the loader that is measured, of uint8 batches."""
    name = "native" if options.name in NATIVE else options.name
    loader_options = LoaderOptions(options.workers, pin_memory=False, loader=name)
    size = 32 if options.name in OF_PIXELS else options.size
    if options.is_train:
        order = TrainOrder(0, len(source), min(options.batch, len(source)))
        return build_train_loader(data, source, order, lambda step: size, loader_options)
    return build_eval_loader(data, source, Endless(len(source), options.batch), size, loader_options)


def sizes_of(loader: Loader) -> Iterator[int]:
    """Yield the images of each batch, endlessly."""
    return (len(batch) for batch in loader.batches(0, ENDLESS))


def decoding_alone(options: ContenderOptions, data: Data, source: PackSource) -> Iterator[int]:
    """Yield the images of each batch that the native decoder has done, endlessly, with nothing around it."""
    window = MeasurementWindow(options.seconds, min(options.batch, len(source)), options.size, len(source))
    return DecodeCeiling("alone", options.workers, 0, source, data, load_native()).iter_batch_sizes(window)


def main() -> None:
    """Measure what the command line names, and print what was found as JSON on a line."""
    options = parse(NAMES)
    data = data_of(options)
    source = source_of(options, data)
    loader = loader_of(options, data, source)
    if options.prepare:
        for _ in loader.batches(0, -(-len(source) // options.batch) + 1):
            pass
        loader.close()  # which writes the index
        print(json.dumps({"prepared": options.name}))
        return
    if options.name == "native" and options.is_train:
        found = in_turns(options, data, source, loader)
    else:
        found = measure(sizes_of(loader), options.seconds, WARMUP_BATCHES)
    print(json.dumps(found), flush=True)


def in_turns(options: ContenderOptions, data: Data, source: PackSource, loader: Loader) -> dict[str, object]:
    """Return what windows of the loader came to, and in `alone` windows of decoding alone between them."""
    ours, alone = [], []
    for _ in range(TURNS):
        batches = loader.batches(0, ENDLESS)
        ours.append(measure((len(batch) for batch in batches), options.seconds / TURNS, WARMUP_BATCHES))
        batches.close()
        loader.close()
        floor = decoding_alone(options, data, source)
        alone.append(measure(floor, options.seconds / TURNS, WARMUP_BATCHES))
        floor.close()
    return {**total(ours), "alone": total(alone)}


def total(windows: list[dict[str, float]]) -> dict[str, float]:
    """Return several windows as one."""
    found = {name: sum(window[name] for window in windows) for name in ("images", "batches", "wall_s", "cpu_s")}
    return {**found, "images_per_s": found["images"] / found["wall_s"]}


if __name__ == "__main__":
    main()
