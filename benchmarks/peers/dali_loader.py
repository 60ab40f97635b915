"""NVIDIA DALI on the CPU: decoding fused with the random crop, so that only what is needed becomes pixels.

python benchmarks/peers/dali_loader.py fused --data FOLDER --cache FOLDER
"""

from collections.abc import Iterator

from asked import Asked, main
from nvidia.dali import fn, pipeline_def, types


def fused(asked: Asked) -> Iterator[int]:
    """Return uint8 [N, H, W, C] of the decoder that crops."""
    pipe = _pipeline(asked, batch_size=asked.batch, num_threads=asked.workers, device_id=None, prefetch_queue_depth=2)
    pipe.build()
    return iter(()) if asked.prepare else _endless(pipe)


def _endless(pipe: object) -> Iterator[int]:
    while True:
        images, _ = pipe.run()
        yield len(images)


@pipeline_def
def _pipeline(asked: Asked) -> tuple[object, object]:
    files, labels = fn.readers.file(file_root=str(asked.data), random_shuffle=True, name="files")
    if asked.is_train:
        images = fn.decoders.image_random_crop(
            files,
            device="cpu",
            output_type=types.RGB,
            random_area=list(asked.scale),
            random_aspect_ratio=[3 / 4, 4 / 3],
        )
        images = fn.resize(images, size=[asked.size, asked.size], interp_type=types.INTERP_TRIANGULAR, antialias=True)
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels
    images = fn.decoders.image(files, device="cpu", output_type=types.RGB)
    images = fn.resize(images, resize_shorter=asked.short_side, interp_type=types.INTERP_TRIANGULAR, antialias=True)
    return fn.crop(images, crop=[asked.size, asked.size], dtype=types.UINT8), labels


if __name__ == "__main__":
    main({"fused": fused})
