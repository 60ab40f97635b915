"""From the recipe's `data.source` to the two splits it names."""

from typing import assert_never

from paceline.core.dataset import Datasets, Source
from paceline.data.sources.cifar import load_cifar, load_validation_cifar
from paceline.data.sources.digits import load_digits
from paceline.data.sources.fashion_mnist import load_fashion_mnist
from paceline.data.sources.folder import load_folder, load_validation_folder
from paceline.data.sources.huggingface import load_huggingface
from paceline.data.sources.lmdb import load_lmdb
from paceline.data.sources.manifest import load_manifest
from paceline.data.sources.own import load_own, load_own_validation
from paceline.data.sources.pack import load_pack
from paceline.data.sources.synthetic import load_synthetic
from paceline.data.sources.webdataset import load_webdataset
from paceline.recipe.schema.source import (
    Cifar10,
    Cifar100,
    Digits,
    FashionMnist,
    Folder,
    HuggingFace,
    Lmdb,
    Manifest,
    OwnSource,
    Pack,
    SourceSection,
    Synthetic,
    WebDataset,
)


def build_datasets(section: SourceSection, *, may_download: bool, skip_bad: bool = False) -> Datasets:
    """Return the training and the validation split of `section`. Raise `DataError` when they cannot be had.

    Image files that can be seen to be bad without opening them are refused here, unless `skip_bad` leaves them to
    whoever reads them.

    With many ranks, one rank of each node calls this with `may_download` first, and the others without it once
    that has returned: so a data set is fetched once a node.
    """
    match section:
        case Digits():
            return load_digits()
        case Synthetic():
            return load_synthetic(section)
        case Cifar10() | Cifar100():
            return load_cifar(section, may_download=may_download)
        case FashionMnist():
            return load_fashion_mnist(section, may_download=may_download)
        case Folder():
            return load_folder(section, skip_bad=skip_bad)
        case Manifest():
            return load_manifest(section, skip_bad=skip_bad)
        case Pack() | Lmdb() | WebDataset() | HuggingFace():
            return _build_packed(section)
        case OwnSource():
            return load_own(section, skip_bad=skip_bad)
    assert_never(section)


def build_validation(section: SourceSection, *, skip_bad: bool = False) -> Source:
    """Return the validation split alone, of what is here, without reading the training split where it is large.

    Its classes may be numbered otherwise than the training split's. Raise `DataError` where it cannot be had, and
    `RecipeError` for a user's own code that cannot be used.
    """
    match section:
        case Cifar10() | Cifar100():
            return load_validation_cifar(section)
        case Folder():
            return load_validation_folder(section, skip_bad=skip_bad)
        case OwnSource():
            return load_own_validation(section, skip_bad=skip_bad)
        case _:
            return build_datasets(section, may_download=False, skip_bad=skip_bad).val


def _build_packed(section: Pack | Lmdb | WebDataset | HuggingFace) -> Datasets:
    """Return what is kept in few large files."""
    match section:
        case Pack():
            return load_pack(section)
        case Lmdb():
            return load_lmdb(section)
        case WebDataset():
            return load_webdataset(section)
        case HuggingFace():
            return load_huggingface(section)
    assert_never(section)
