"""What `paceline data pack` has written: opened from this machine, or from behind a URL."""

from paceline.core.dataset import Datasets
from paceline.data.pack.reader import open_pack
from paceline.data.sources.places import expanded
from paceline.recipe.schema.source import Pack


def load_pack(section: Pack) -> Datasets:
    """Return the splits of the pack that `section` names. Raise `DataError` for one that is not there or not whole."""
    if "://" not in section.root:
        return open_pack(expanded(section.root).absolute())  # a worker process may have another working directory
    from paceline.data.remote import open_remote

    return open_remote(section.root, expanded(section.cache), round(section.cache_gb * 1e9))
