"""Raw pixels give the same batches in memory and in a mapped file."""

import numpy as np
import torch

from paceline.core.dataset import ArraySource, DatasetInfo
from paceline.data.loaders.reader import ArrayReader, load_images
from paceline.data.timing import BatchTimer

INFO = DatasetInfo("made", "train", 9, ("a", "b"), 3, (4, 4), (0.5,) * 3, (0.25,) * 3)


def source() -> ArraySource:
    images = np.random.default_rng(0).integers(0, 256, (9, 4, 4, 3), dtype=np.uint8)
    return ArraySource(INFO, images, np.zeros(9, dtype=np.int64))


def test_a_large_data_set_is_not_copied_and_gives_the_same_batches() -> None:
    arrays = source()
    resident, mapped = load_images(arrays), load_images(arrays, max_copied_bytes=arrays.images.nbytes - 1)
    assert mapped is arrays.images and isinstance(resident, torch.Tensor)
    assert not np.shares_memory(resident.numpy(), arrays.images)
    indices = np.array([8, 0, 8, 3])
    expected = torch.from_numpy(arrays.images[indices].transpose(0, 3, 1, 2).copy())
    for images in (resident, mapped):
        reader = ArrayReader(images, arrays.labels, None, BatchTimer(None))
        gathered = reader.read(indices, np.empty((4, 0)), 4).images
        assert torch.equal(gathered, expected) and gathered.is_contiguous()


def test_a_data_set_at_the_limit_is_copied() -> None:
    assert isinstance(load_images(source(), max_copied_bytes=source().images.nbytes), torch.Tensor)
