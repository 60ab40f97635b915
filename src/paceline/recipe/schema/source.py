"""Where samples come from: one typed variant a source, chosen by `data.source.name`."""

from typing import Annotated, Literal

from pydantic import Field

from paceline.recipe.schema.section import Auto, Section


class Digits(Section):
    """scikit-learn's 1,797 handwritten digits, 8x8 grey; a fifth of each class is held out."""

    name: Literal["digits"] = "digits"


class Synthetic(Section):
    """Made-up images whose class can be learnt, for tests and for measuring without data."""

    name: Literal["synthetic"] = "synthetic"
    num_images: int = Field(4096, ge=1)
    """Images in the training split."""
    num_val_images: int = Field(512, ge=1)
    """Images in the validation split."""
    num_classes: int = Field(10, ge=2)
    """Classes, equally frequent."""
    image_size: int = Field(32, ge=1)
    """Height and width in pixels."""
    channels: Literal[1, 3] = 3
    """Colour channels."""


class Cifar10(Section):
    """CIFAR-10: 50,000 + 10,000 colour images, 32x32. Reads torchvision's layout or class folders in `root`."""

    name: Literal["cifar10"] = "cifar10"
    root: str = "~/.cache/paceline/data"
    """Folder with `cifar-10-batches-py`, or with `train/` and `test/` class folders."""
    download: bool = True
    """Fetch the set into `root` when it is not there (the first rank of each node does, the others wait)."""


class Cifar100(Section):
    """CIFAR-100: 50,000 + 10,000 colour images, 32x32, 100 classes. Layouts as for `cifar10`."""

    name: Literal["cifar100"] = "cifar100"
    root: str = "~/.cache/paceline/data"
    """Folder with `cifar-100-python`, or with `train/` and `test/` class folders."""
    download: bool = True
    """Fetch the set into `root` when it is not there (the first rank of each node does, the others wait)."""


class FashionMnist(Section):
    """Fashion-MNIST: 60,000 + 10,000 grey images, 28x28. Reads the four IDX files, gzipped or not."""

    name: Literal["fashion_mnist"] = "fashion_mnist"
    root: str = "~/.cache/paceline/data"
    """Folder with the IDX files, or with torchvision's `FashionMNIST/raw` below it."""
    download: bool = True
    """Fetch the set into `root` when it is not there (the first rank of each node does, the others wait)."""


class Folder(Section):
    """Class sub-folders of image files. The training split names the classes; the others follow it."""

    name: Literal["folder"] = "folder"
    root: str | Auto = "auto"
    """Folder with `train/` and `val/` (or `valid/`, `validation/`, `test/`), or class folders to split."""
    train_root: str | Auto = "auto"
    """Training class folders, when they are not in `root`."""
    val_root: str | Auto = "auto"
    """Validation class folders, when they are not in `root`."""
    val_fraction: float = Field(0.1, gt=0, lt=1)
    """Share of each class held out for validation when there is no validation folder."""
    split_seed: int = Field(0, ge=0)
    """Chooses which images are held out."""
    channels: Literal[1, 3] = 3
    """Decode to colour (3) or grey (1)."""


class Manifest(Section):
    """Files listed with their labels: CSV (`path,label`, a header line) or a pickled {path: label} dict."""

    name: Literal["manifest"] = "manifest"
    train: str
    """List of the training split, `.csv` or `.pkl`."""
    val: str
    """List of the validation split, `.csv` or `.pkl`."""
    root: str | Auto = "auto"
    """Folder that relative paths start from; `auto` is each list's own folder."""
    channels: Literal[1, 3] = 3
    """Decode to colour (3) or grey (1)."""


SourceSection = Annotated[
    Digits | Synthetic | Cifar10 | Cifar100 | FashionMnist | Folder | Manifest, Field(discriminator="name")
]
