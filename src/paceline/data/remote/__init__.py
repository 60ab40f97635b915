"""Read packs behind a URL: cache shards on disk as far as they fit, read other samples by range. Torch-free."""

from paceline.data.remote.pack import open_remote

__all__ = ["open_remote"]
