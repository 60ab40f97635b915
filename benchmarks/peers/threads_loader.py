"""Grain and SPDL: threads that run Python, here around torchvision's `decode_jpeg` and transforms, uint8 out.

python benchmarks/peers/threads_loader.py grain --data FOLDER --cache FOLDER
"""

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import torch
from contender_options import ContenderOptions, main
from torchvision.io import ImageReadMode, decode_jpeg, read_file
from torchvision.transforms import v2


class Load:
    """From the path of a JPEG to uint8 [3, size, size]."""

    def __init__(self, options: ContenderOptions) -> None:
        if options.is_train:
            crop = v2.RandomResizedCrop(options.size, scale=options.scale, antialias=True)
            self.sizing = v2.Compose([crop, v2.RandomHorizontalFlip()])
        else:
            self.sizing = v2.Compose([v2.Resize(options.short_side, antialias=True), v2.CenterCrop(options.size)])

    def __call__(self, path: str) -> torch.Tensor:
        """Return the image."""
        return self.sizing(decode_jpeg(read_file(path), mode=ImageReadMode.RGB))


def grain_threads(options: ContenderOptions) -> Iterator[int]:
    """Return the batches of Grain's threads."""
    import grain

    files = grain.MapDataset.source(paths(options.data)).shuffle(seed=0).repeat().map(Load(options))
    reading = grain.ReadOptions(num_threads=options.workers, prefetch_buffer_size=2 * options.batch)
    batches = files.to_iter_dataset(reading).batch(options.batch, batch_fn=torch.stack)
    return (len(images) for images in batches)


def spdl_threads(options: ContenderOptions) -> Iterator[int]:
    """Return the batches of SPDL's pipeline."""
    from spdl.pipeline import PipelineBuilder

    builder = PipelineBuilder().add_source(cycle(paths(options.data)))
    builder = (
        builder.pipe(Load(options), concurrency=options.workers).aggregate(options.batch).pipe(torch.stack).add_sink(2)
    )
    pipeline = builder.build(num_threads=options.workers)

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
