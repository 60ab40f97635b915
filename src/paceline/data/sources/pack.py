"""Load a data set that `paceline data pack` has written, from a local path or a URL."""

from paceline.core.dataset import Datasets
from paceline.data.pack.reader import open_pack
from paceline.data.sources.places import expand_path
from paceline.recipe.schema.source import Pack


def load_pack(section: Pack) -> Datasets:
    """Load the splits of the pack that `section` names. Raise `DataError` if it is missing or incomplete."""
    if "://" not in section.root:
        return open_pack(expand_path(section.root).absolute())  # worker processes may have another working directory
    from paceline.data.remote import open_remote

    return open_remote(section.root, expand_path(section.cache), round(section.cache_gb * 1e9))
