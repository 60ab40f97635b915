"""The recipe's section `data.source`: one variant per source, chosen by `name`."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, field_validator, model_validator

from paceline.core.pixels import MAX_CHANNELS, PixelFormat, PixelType
from paceline.core.urls import HOW_TO_PASS_CREDENTIALS, find_secret, public_url
from paceline.recipe.schema.base import Auto, ByName, ImportPath, Off, PluginSection, Section


class Digits(Section):
    """scikit-learn's 1,797 handwritten digits, 8x8 gray; a fifth of each class is held out."""

    name: Literal["digits"] = "digits"


class Synthetic(Section):
    """Synthetic images with learnable classes, for tests and for measurements without data."""

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
    """Color channels."""


class Cifar10(Section):
    """CIFAR-10: 50,000 + 10,000 color images, 32x32. Reads torchvision's layout or class folders in `root`."""

    name: Literal["cifar10"] = "cifar10"
    root: str = "~/.cache/paceline/data"
    """Folder with `cifar-10-batches-py`, or with `train/` and `test/` class folders."""
    download: bool = True
    """Download the dataset into `root` if it is not there. The first rank of each node does, and the others wait."""


class Cifar100(Section):
    """CIFAR-100: 50,000 + 10,000 color images, 32x32, 100 classes. Layouts as for `cifar10`."""

    name: Literal["cifar100"] = "cifar100"
    root: str = "~/.cache/paceline/data"
    """Folder with `cifar-100-python`, or with `train/` and `test/` class folders."""
    download: bool = True
    """Download the dataset into `root` if it is not there. The first rank of each node does, and the others wait."""


class FashionMnist(Section):
    """Fashion-MNIST: 60,000 + 10,000 gray images, 28x28. Reads the four IDX files, gzipped or not."""

    name: Literal["fashion_mnist"] = "fashion_mnist"
    root: str = "~/.cache/paceline/data"
    """Folder with the IDX files, or with torchvision's `FashionMNIST/raw` in it."""
    download: bool = True
    """Download the dataset into `root` if it is not there. The first rank of each node does, and the others wait."""


class Folder(Section):
    """Image files in one folder per class. The class names come from the training split."""

    added: ClassVar = ("pixels",)

    name: Literal["folder"] = "folder"
    root: str | Auto = "auto"
    """Folder with `train/` and `val/` (or `valid/`, `validation/`, `test/`), or class folders to split."""
    train_root: str | Auto = "auto"
    """Folder with the training class folders, if they are not in `root`."""
    val_root: str | Auto = "auto"
    """Folder with the validation class folders, if they are not in `root`."""
    val_fraction: float = Field(0.1, gt=0, lt=1)
    """Fraction of each class to hold out for validation if there is no validation folder."""
    split_seed: int = Field(0, ge=0)
    """Seed of the choice of held-out images."""
    channels: int = Field(3, ge=1, le=MAX_CHANNELS)
    """Decode 8-bit images to color (3) or gray (1). For other numbers and other types, the channels of the files."""
    pixels: PixelType = "uint8"
    """Type of the pixels: 8-bit, or those of 16-bit and float files, which then stay as they are."""

    @property
    def pixel_format(self) -> PixelFormat:
        """Channels and type of the pixels."""
        return PixelFormat(self.channels, self.pixels)


class Manifest(Section):
    """Files listed with their labels: CSV (`path,label`, with a header) or a pickled {path: label} dict.

    `separator` or `class_columns` give an image [several labels or soft labels](../how-to/labels.md)."""

    added: ClassVar = ("separator", "class_columns", "pixels")

    name: Literal["manifest"] = "manifest"
    train: str
    """List of the training split, `.csv` or `.pkl`."""
    val: Off | str = "off"
    """List of the validation split, `.csv` or `.pkl`; not needed with `train.eval_every=off`."""
    root: str | Auto = "auto"
    """Base folder of relative paths; `auto` is the folder of each list."""
    separator: Off | Annotated[str, Field(min_length=1)] = "off"
    """Text between the labels of one image, such as `;`. An empty cell is an image without any label."""
    class_columns: Off | Auto | Annotated[tuple[str, ...], Field(min_length=1)] = "off"
    """Columns of a CSV list, one per class, in place of `label`: 1 and 0 for several labels, or shares from 0 to 1 for
    soft labels. A blank cell is 0; `auto` is every column but `path`."""
    channels: int = Field(3, ge=1, le=MAX_CHANNELS)
    """Decode 8-bit images to color (3) or gray (1). For other numbers and other types, the channels of the files."""
    pixels: PixelType = "uint8"
    """Type of the pixels: 8-bit, or those of 16-bit and float files, which then stay as they are."""

    @property
    def pixel_format(self) -> PixelFormat:
        """Channels and type of the pixels."""
        return PixelFormat(self.channels, self.pixels)

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        if self.separator != "off" and self.class_columns != "off":
            raise ValueError("separator has no effect with class_columns (set one of them to off)")
        columns = () if isinstance(self.class_columns, str) else self.class_columns
        repeated = next((name for name in columns if columns.count(name) > 1), None)
        if repeated is not None:
            raise ValueError(f"class_columns has {repeated!r} twice (list each column once)")
        return self

    @property
    def has_one_label(self) -> bool:
        """Whether each image has exactly one label."""
        return self.separator == "off" and self.class_columns == "off"


class Pack(Section):
    """The output of `paceline data pack`: one file or a folder of shards, local or behind a URL."""

    name: Literal["pack"] = "pack"
    root: str
    """The `.pack` file, the folder of shards, or its URL: http(s)://, s3://, gs://, gcs://, abfs://, az:// or hf://.
    Passwords and signatures come from [the
    environment](../how-to/data.md#packs-that-need-a-password-or-a-signature)."""
    cache: str = "~/.cache/paceline/shards"
    """Cache folder for shards behind a URL."""
    cache_gb: PositiveFloat = 50.0
    """Size limit of the cache in GB (10^9 bytes); samples that do not fit are read one by one."""

    @field_validator("root")
    @classmethod
    def _refuse_secret_url(cls, root: str) -> str:
        secret = find_secret(root, any_query=True) if "://" in root else ""
        if secret:
            raise ValueError(f"{public_url(root)}: the URL holds {secret} ({HOW_TO_PASS_CREDENTIALS})")
        return root


class Lmdb(Section):
    """An LMDB written by `paceline data pack --format lmdb`."""

    name: Literal["lmdb"] = "lmdb"
    root: str
    """Folder with `data.mdb`."""


class WebDataset(Section):
    """Tar files of images and labels in WebDataset's layout: `KEY.jpg` with `KEY.cls` or `KEY.json`."""

    name: Literal["webdataset"] = "webdataset"
    train: str
    """Tars of the training split: a path with `*`, or with a range of numbers such as `train-{0000..0127}.tar`."""
    val: str
    """Tars of the validation split."""
    classes: str | Auto = "auto"
    """File with one class name per line, in the order of the labels; `auto` names classes by their numbers."""
    label: str = "cls"
    """Member that holds the label: `cls` for a number as text, or `json:FIELD` for a field of `KEY.json`."""
    channels: Literal[1, 3] = 3
    """Decode to color (3) or gray (1)."""


class HuggingFace(Section):
    """A local dataset read by the `datasets` library, if that is installed: a folder of parquet files, an
    `imagefolder` with metadata, or the output of `save_to_disk`."""

    name: Literal["huggingface"] = "huggingface"
    root: str
    """Folder on this machine; nothing is downloaded."""
    train: str = "train"
    """Name of the training split."""
    val: str = "auto"
    """Name of the validation split; `auto` is the first of `validation`, `val`, `valid` and `test` that exists."""
    image: str = "auto"
    """Column of images; `auto` is the only column that holds images."""
    label: str = "auto"
    """Column of labels; `auto` is the only column that holds classes, or else `label`."""
    channels: Literal[1, 3] = 3
    """Decode to color (3) or gray (1)."""


class OwnSource(PluginSection):
    """Your own data: `MyDataset(split="train", **args)`, and the same with "val", returns a split ([the
    interface](../how-to/extend.md#custom-datasets))."""

    name: ImportPath
    """Module and name of the class or function, such as `mypkg.plugins:MyDataset`."""
    channels: Annotated[int, Field(ge=1, le=MAX_CHANNELS)] | Auto = "auto"
    """Channels of encoded images: color (3), gray (1), or those of the files; `auto` is color. Pixels keep their number
    of channels with `auto`."""


SourceSection = Annotated[
    Digits
    | Synthetic
    | Cifar10
    | Cifar100
    | FashionMnist
    | Folder
    | Manifest
    | Pack
    | Lmdb
    | WebDataset
    | HuggingFace
    | OwnSource,
    ByName(),
]
