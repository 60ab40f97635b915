"""What a loader's split says about itself, under the names that torchvision's data sets have."""

from dataclasses import dataclass

from paceline.core.dataset import DatasetInfo


@dataclass(frozen=True)
class Dataset:
    """Facts of a split. It holds no images: they come from the loader, in batches.

    `num_images` counts the whole split, over all ranks. `image_size` is the height and width in pixels that images have
    when they are finished (of training images, at the end of `data.progressive`). `mean` and `std` are per channel, of
    pixels in [0, 1], and what floats were normalised by: those of the training images for both splits. A label is a
    place in `classes`.
    """

    classes: tuple[str, ...]
    num_images: int
    channels: int
    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        """How many images the split has, over all ranks."""
        return self.num_images

    @property
    def num_classes(self) -> int:
        """How many classes there are."""
        return len(self.classes)

    @property
    def class_to_idx(self) -> dict[str, int]:
        """The label of each class, by its name."""
        return {name: label for label, name in enumerate(self.classes)}


def build_dataset(info: DatasetInfo, image_size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Dataset:
    """Return the facts of a split whose finished images have `image_size` pixels squared; see `Dataset`."""
    return Dataset(info.class_names, info.num_images, info.channels, image_size, mean, std)
