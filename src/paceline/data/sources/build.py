"""Build the splits that the recipe's `data.source` describes."""

from typing import assert_never

from paceline.core.dataset import Datasets, Source
from paceline.data.files import expand_path
from paceline.data.pack.reader import open_pack
from paceline.data.sources.builtin import load_digits, load_synthetic
from paceline.data.sources.cifar import load_cifar, load_cifar_validation
from paceline.data.sources.fashion_mnist import load_fashion_mnist
from paceline.data.sources.folder import load_folder, load_folder_validation
from paceline.data.sources.huggingface import load_huggingface
from paceline.data.sources.lmdb import load_lmdb
from paceline.data.sources.manifest import load_manifest
from paceline.data.sources.plugin import load_plugin_source, load_plugin_validation
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


def load_pack(section: Pack) -> Datasets:
    """Open the pack that `section` names. Raise `DataError` if it is missing or incomplete."""
    if "://" not in section.root:
        return open_pack(expand_path(section.root).absolute())  # worker processes may have another working directory
    from paceline.data.remote import open_remote

    return open_remote(section.root, expand_path(section.cache), round(section.cache_gb * 1e9))


def build_datasets(  # noqa: C901 - a case per source
    section: SourceSection, *, may_download: bool, skip_bad: bool = False
) -> Datasets:
    """Build both splits of `section`. Raise `DataError` if the dataset cannot be loaded.

    Image files that a listing shows to be unreadable raise `DataError`; with `skip_bad`, only reading them does.
    """
    # With several ranks, one rank per node calls this with `may_download` before the others, so that each node
    # downloads a dataset once.
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
        case Pack():
            return load_pack(section)
        case Lmdb():
            return load_lmdb(section)
        case WebDataset():
            return load_webdataset(section)
        case HuggingFace():
            return load_huggingface(section)
        case OwnSource():
            return load_plugin_source(section, skip_bad=skip_bad)
    assert_never(section)


def build_validation(section: SourceSection, *, skip_bad: bool = False) -> Source:
    """Build only the validation split of `section`, if possible without scanning the training split.

    Class numbers may differ from the training split's. Raise `DataError` if the split cannot be loaded, and
    `RecipeError` if a plugin is not usable.
    """
    match section:
        case Cifar10() | Cifar100():
            return load_cifar_validation(section)
        case Folder():
            return load_folder_validation(section, skip_bad=skip_bad)
        case OwnSource():
            return load_plugin_validation(section, skip_bad=skip_bad)
        case _:
            return build_datasets(section, may_download=False, skip_bad=skip_bad).val
