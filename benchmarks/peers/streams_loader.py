"""LitData, MosaicML streaming and WebDataset: files joined into shards, read by worker processes, here around
torchvision's `decode_jpeg` and transforms, uint8 out. The shards hold the JPEGs as they are.

    python benchmarks/peers/streams_loader.py litdata --data FOLDER --cache FOLDER --prepare
    python benchmarks/peers/streams_loader.py litdata --data FOLDER --cache FOLDER
"""

from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contender_options import ContenderOptions, main
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

SHARD_BYTES = 1 << 26


class Decode:
    """From the bytes of a JPEG to uint8 [3, size, size]."""

    def __init__(self, options: ContenderOptions) -> None:
        if options.is_train:
            crop = v2.RandomResizedCrop(options.size, scale=options.scale, antialias=True)
            self.sizing = v2.Compose([crop, v2.RandomHorizontalFlip()])
        else:
            self.sizing = v2.Compose([v2.Resize(options.short_side, antialias=True), v2.CenterCrop(options.size)])

    def __call__(self, content: bytes) -> Tensor:
        """Return the image."""
        encoded = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        return self.sizing(decode_jpeg(encoded, mode=ImageReadMode.RGB))


def litdata(options: ContenderOptions) -> Iterator[int]:
    """Return the batches of a StreamingDataLoader."""
    from litdata import StreamingDataLoader, StreamingDataset, optimize

    shards = options.cache / f"litdata-{key(options.data)}"
    if not shards.exists():
        optimize(
            fn=_read_file, inputs=paths(options.data), output_dir=str(shards), chunk_bytes=SHARD_BYTES, num_workers=1
        )

    class Images(StreamingDataset):
        decode = Decode(options)

        def __getitem__(self, index: Any) -> Tensor:
            return self.decode(super().__getitem__(index))

    dataset = Images(input_dir=str(shards), shuffle=options.is_train)
    # Workers that end with an epoch would take their CPU time with them.
    batches = StreamingDataLoader(
        dataset, batch_size=options.batch, num_workers=options.workers, drop_last=True, persistent_workers=True
    )
    return sizes(batches)


def streaming(options: ContenderOptions) -> Iterator[int]:
    """Return the batches of a DataLoader of MosaicML's StreamingDataset."""
    from streaming import MDSWriter, StreamingDataset

    shards = options.cache / f"streaming-{key(options.data)}"
    if not shards.exists():
        with MDSWriter(out=str(shards), columns={"jpeg": "bytes"}, size_limit=SHARD_BYTES) as writer:
            for path in paths(options.data):
                writer.write({"jpeg": Path(path).read_bytes()})

    class Images(StreamingDataset):
        decode = Decode(options)

        def __getitem__(self, index: Any) -> Tensor:
            return self.decode(super().__getitem__(index)["jpeg"])

    dataset = Images(local=str(shards), shuffle=options.is_train, batch_size=options.batch)
    return sizes(loader(dataset, options))


def webdataset(options: ContenderOptions) -> Iterator[int]:
    """Return the batches of a DataLoader of WebDataset's tar files."""
    import webdataset as wds

    shards = options.cache / f"webdataset-{key(options.data)}"
    if not shards.exists():
        shards.mkdir()
        with wds.ShardWriter(f"{shards}/%04d.tar", maxsize=SHARD_BYTES / 8, verbose=0) as writer:
            for number, path in enumerate(paths(options.data)):
                writer.write({"__key__": f"{number:08}", "jpg": Path(path).read_bytes()})
    images = wds.WebDataset(sorted(map(str, shards.glob("*.tar"))), resampled=True, shardshuffle=False)
    images = (
        (images.shuffle(500) if options.is_train else images).to_tuple("jpg").map(partial(_decode, Decode(options)))
    )
    return sizes(loader(images, options))


def loader(dataset: Any, options: ContenderOptions) -> DataLoader:
    """Return torch's loader of `dataset`."""
    return DataLoader(
        dataset, batch_size=options.batch, num_workers=options.workers, drop_last=True, persistent_workers=True
    )


def sizes(batches: Iterable[Tensor]) -> Iterator[int]:
    """Yield the images of each batch, epoch after epoch."""
    while True:
        yield from map(len, batches)


def paths(data: Path) -> list[str]:
    """Return all files below a folder."""
    return [str(path) for path in sorted(data.rglob("*")) if path.is_file()]


def key(data: Path) -> str:
    """Return by what the shards of `data` are told from others: the files as they are, or those of 256 px."""
    return "256" if "256" in data.parts else "jpeg"


def _read_file(path: str) -> bytes:
    return Path(path).read_bytes()


def _decode(decode: Decode, sample: tuple[bytes]) -> Tensor:
    return decode(sample[0])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main({"litdata": litdata, "streaming": streaming, "webdataset": webdataset})
