"""The native core, and records of small photographs; where there is no compiler these tests skip."""

import io

import numpy as np
import pytest
from PIL import Image

from paceline.data.native import NATIVE_MISSING_MESSAGE, NativeExtension, load_native


@pytest.fixture(scope="session")
def core() -> NativeExtension:
    found = load_native()
    if found is None:
        pytest.skip(NATIVE_MISSING_MESSAGE)
    return found


def photograph(height: int, width: int, seed: int) -> bytes:
    """Return a JPEG of a smooth scene with some noise, as photographs have."""
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    scene = [128 + 100 * np.sin(x / draw.uniform(5, 40) + y / draw.uniform(5, 40)) for _ in range(3)]
    pixels = np.clip(np.stack(scene, -1) + draw.normal(0, 8, (height, width, 3)), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


@pytest.fixture(scope="session")
def records(core: NativeExtension) -> list[bytes]:
    """Eight records of different sizes."""
    return [core.index_jpeg(photograph(40 + 8 * seed, 96 - 6 * seed, seed)) for seed in range(8)]
