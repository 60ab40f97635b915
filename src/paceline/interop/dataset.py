"""Metadata of a loader's split, named as in torchvision's data sets."""

from dataclasses import dataclass

from paceline.core.dataset import DatasetInfo


@dataclass(frozen=True)
class Dataset:
    """Metadata of a split. It holds no images.

    `num_images` counts the whole split, over all ranks. `image_size` is the height and width of finished images in
    pixels (for training images, at the end of `data.progressive`). `mean` and `std` are per channel, of pixels in [0,
    1]: those of the training images, which normalise both splits. A label is an index into `classes`.
    """

    classes: tuple[str, ...]
    num_images: int
    channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        """Return the number of images of the split, over all ranks."""
        return self.num_images

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def class_to_idx(self) -> dict[str, int]:
        """Label of each class, by its name."""
        return {name: label for label, name in enumerate(self.classes)}


def build_dataset(info: DatasetInfo, image_size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Dataset:
    """Return the metadata of a split whose finished images are `image_size` pixels squared; see `Dataset`."""
    return Dataset(info.class_names, info.num_images, info.channels, image_size, mean, std)
