"""From the recipe's `data.source` to the two splits it names."""

from typing import assert_never

from paceline.core.dataset import Datasets
from paceline.data.sources.cifar import load_cifar
from paceline.data.sources.digits import load_digits
from paceline.data.sources.fashion_mnist import load_fashion_mnist
from paceline.data.sources.folder import load_folder
from paceline.data.sources.manifest import load_manifest
from paceline.data.sources.synthetic import load_synthetic
from paceline.recipe.schema.source import (
    Cifar10,
    Cifar100,
    Digits,
    FashionMnist,
    Folder,
    Manifest,
    SourceSection,
    Synthetic,
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
    assert_never(section)
