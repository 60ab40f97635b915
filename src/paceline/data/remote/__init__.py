"""Packs behind a URL: fetched with patience, kept on disk as far as they fit, read by ranges else. Torch-free."""

from paceline.data.remote.opening import is_remote, open_remote

__all__ = ["is_remote", "open_remote"]
