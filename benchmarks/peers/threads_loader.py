"""Grain and SPDL: threads that run Python, here around torchvision's `decode_jpeg` and transforms, uint8 out.

python benchmarks/peers/threads_loader.py grain --data FOLDER --cache FOLDER
"""

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import torch
from asked import Asked, main
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2


class Load:
    """From the path of a JPEG to uint8 [3, size, size]."""

    def __init__(self, asked: Asked) -> None:
        if asked.is_train:
            crop = v2.RandomResizedCrop(asked.size, scale=asked.scale, antialias=True)
            self.sizing = v2.Compose([crop, v2.RandomHorizontalFlip()])
        else:
            self.sizing = v2.Compose([v2.Resize(asked.short_side, antialias=True), v2.CenterCrop(asked.size)])

    def __call__(self, path: str) -> torch.Tensor:
        """Return the image."""
        return self.sizing(decode_jpeg(read_file(path), mode=ImageReadMode.RGB))


def grain_threads(asked: Asked) -> Iterator[int]:
    """Return the batches of Grain's threads."""
    import grain

    files = grain.MapDataset.source(paths(asked.data)).shuffle(seed=0).repeat().map(Load(asked))
    options = grain.ReadOptions(num_threads=asked.workers, prefetch_buffer_size=2 * asked.batch)
    batches = files.to_iter_dataset(options).batch(asked.batch, batch_fn=torch.stack)
    return (len(images) for images in batches)


def spdl_threads(asked: Asked) -> Iterator[int]:
    """Return the batches of SPDL's pipeline."""
    from spdl.pipeline import PipelineBuilder

    builder = PipelineBuilder().add_source(cycle(paths(asked.data)))
    builder = builder.pipe(Load(asked), concurrency=asked.workers).aggregate(asked.batch).pipe(torch.stack).add_sink(2)
    pipeline = builder.build(num_threads=asked.workers)

    def sizes() -> Iterator[int]:
        with pipeline.auto_stop():
            yield from (len(images) for images in pipeline)

    return sizes()


def paths(data: Path) -> list[str]:
    """Return all files below a folder."""
    return [str(path) for path in sorted(data.rglob("*")) if path.is_file()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main({"grain": grain_threads, "spdl": spdl_threads})
