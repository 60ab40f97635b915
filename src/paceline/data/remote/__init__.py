"""Packs behind a URL: shards are cached on disk as far as they fit, other samples are read by range. Torch-free."""

from paceline.data.remote.opening import is_remote, open_remote

__all__ = ["is_remote", "open_remote"]
