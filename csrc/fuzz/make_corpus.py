"""Write what the fuzzers start from: small JPEGs of every form, and the records of those that have one.

    .venv/bin/python csrc/fuzz/make_corpus.py

Behind each stand the 16 bytes that say what is asked of it (check.h). The same files come out each time, with the same
release of Pillow.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from paceline.data.native import native

CORPUS = Path(__file__).parent / "corpus"
NUM_PARAMETERS = 16


def picture(height: int, width: int, mode: str, seed: int) -> Image.Image:
    """Return a smooth scene with some noise."""
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    channels = len(Image.new(mode, (1, 1)).getbands())
    scene = np.stack([128 + 100 * np.sin(x / (3 + 4 * c) + y / (5 + 2 * c)) for c in range(channels)], -1)
    pixels = np.clip(scene + draw.normal(0, 12, scene.shape), 0, 255).astype(np.uint8)
    return Image.fromarray(pixels.squeeze(), mode=None if channels != 4 else "CMYK")


def jpegs() -> Iterator[tuple[str, bytes]]:
    """Yield the name and bytes of each JPEG."""

    def jpeg(height: int, width: int, mode: str = "RGB", **options: Any) -> bytes:
        file = io.BytesIO()
        picture(height, width, mode, height * width).save(file, "JPEG", **{"quality": 75, **options})
        return file.getvalue()

    for subsampling in (0, 1, 2):
        for height, width in ((1, 1), (8, 8), (17, 33), (40, 23), (64, 48)):
            yield f"chroma{subsampling}-{height}x{width}", jpeg(height, width, subsampling=subsampling)
    for height, width in ((1, 9), (24, 31)):
        yield f"grey-{height}x{width}", jpeg(height, width, "L")
        yield f"grey-progressive-{height}x{width}", jpeg(height, width, "L", progressive=True)
    for orientation in range(2, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        yield f"orientation{orientation}", jpeg(18, 27, exif=exif)
    for quality in (1, 30, 95, 100):
        yield f"quality{quality}", jpeg(25, 34, quality=quality, subsampling=2)
    yield "optimised", jpeg(32, 40, optimize=True)
    yield "restarts-row", jpeg(50, 40, restart_marker_rows=1)
    yield "restarts-blocks", jpeg(33, 60, restart_marker_blocks=3)
    for subsampling in (0, 1, 2):
        yield f"progressive{subsampling}", jpeg(33, 41, progressive=True, subsampling=subsampling)
    yield "progressive-restarts", jpeg(33, 41, progressive=True, restart_marker_blocks=2)
    yield "comment", jpeg(9, 9, comment=b"\xff\xd8\xff\xd9")
    yield "rgb", jpeg(16, 20, keep_rgb=True)
    yield "cmyk", jpeg(12, 12, "CMYK")
    yield "wide", jpeg(3, 700)
    # Sampling that Pillow does not write: as many blocks in as many MCUs, so the header alone says other things.
    yield "chroma440", resampled(jpeg(24, 64, subsampling=1), 0x12, 64, 24)
    yield "chroma411", resampled(jpeg(32, 48, subsampling=2), 0x41, 16, 96)
    yield "chroma4x1-tall", resampled(jpeg(32, 48, subsampling=2), 0x14, 64, 24)


def resampled(data: bytes, luma: int, height: int, width: int) -> bytes:
    """Return a JPEG whose frame header says other sampling factors of the luma, and another size."""
    frame = data.index(b"\xff\xc0") + 4  # here stand precision, height, width, 3, 1, factors
    changed = bytearray(data)
    changed[frame + 1 : frame + 5] = height.to_bytes(2, "big") + width.to_bytes(2, "big")
    changed[frame + 7] = luma
    return bytes(changed)


def main() -> None:
    """Write the files, and say how many and how large they are."""
    core = native()
    if core is None:
        raise SystemExit("error: the native core was not built (run make native)")
    draw = np.random.default_rng(0)
    for kind in ("jpeg", "record"):
        (CORPUS / kind).mkdir(parents=True, exist_ok=True)
        for old in (CORPUS / kind).iterdir():
            if not old.name.startswith("found-"):  # what a fuzzer has found stays
                old.unlink()
    for name, data in jpegs():
        asked = draw.integers(0, 256, NUM_PARAMETERS, dtype=np.uint8).tobytes()
        (CORPUS / "jpeg" / name).write_bytes(data + asked)
        for every in (1, 8):
            try:
                record = core.index_jpeg(data, every)
            except ValueError:
                continue
            (CORPUS / "record" / f"{name}-every{every}").write_bytes(record + asked)
    written = [path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()]
    print(f"{len(written)} files, {sum(written):,} bytes, in {CORPUS}")


if __name__ == "__main__":
    main()
