"""NVIDIA DALI on the CPU: decoding fused with the random crop, so that only what is needed becomes pixels.

python benchmarks/peers/dali_loader.py fused --data FOLDER --cache FOLDER
"""

from collections.abc import Iterator

from contender_options import ContenderOptions, main
from nvidia.dali import fn, pipeline_def, types


def fused(options: ContenderOptions) -> Iterator[int]:
    """Return uint8 [N, H, W, C] of the decoder that crops."""
    pipe = _pipeline(
        options, batch_size=options.batch, num_threads=options.workers, device_id=None, prefetch_queue_depth=2
    )
    pipe.build()
    return iter(()) if options.prepare else _endless(pipe)


def _endless(pipe: object) -> Iterator[int]:
    while True:
        images, _ = pipe.run()
        yield len(images)


@pipeline_def
def _pipeline(options: ContenderOptions) -> tuple[object, object]:
    files, labels = fn.readers.file(file_root=str(options.data), random_shuffle=True, name="files")
    if options.is_train:
        images = fn.decoders.image_random_crop(
            files,
            device="cpu",
            output_type=types.RGB,
            random_area=list(options.scale),
            random_aspect_ratio=[3 / 4, 4 / 3],
        )
        images = fn.resize(
            images, size=[options.size, options.size], interp_type=types.INTERP_TRIANGULAR, antialias=True
        )
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels
    images = fn.decoders.image(files, device="cpu", output_type=types.RGB)
    images = fn.resize(images, resize_shorter=options.short_side, interp_type=types.INTERP_TRIANGULAR, antialias=True)
    return fn.crop(images, crop=[options.size, options.size], dtype=types.UINT8), labels


if __name__ == "__main__":
    main({"fused": fused})
