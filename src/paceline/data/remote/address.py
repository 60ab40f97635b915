"""Validate and print URLs of packs."""

from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urlsplit

from paceline.core.errors import DataError
from paceline.core.urls import public_url, url_origin
from paceline.data.sources.places import printable

HTTP_SCHEMES: Final = ("http", "https")
# Schemes that fsspec reads. All others are refused, as a recipe may be untrusted: fsspec also has schemes that run
# templates, open SSH connections or read local files.
BUCKET_SCHEMES: Final = ("s3", "gs", "gcs", "abfs", "az", "hf")
_MAX_SHOWN_CHARS: Final = 40


@dataclass(frozen=True)
class RemoteUrl:
    """The URL of a file, without user name, password and query, which `credentials` adds to requests.

    Raise `DataError` for an unsupported scheme, and for a chained URL (`a::b`), which fsspec would follow.
    """

    url: str

    def __post_init__(self) -> None:
        scheme = self.url.partition("://")[0]
        shown = printable(scheme[:_MAX_SHOWN_CHARS])
        if "::" in scheme or ("::" in self.url and scheme.lower() not in HTTP_SCHEMES):
            raise DataError(f"data.source.root: {shown}://...: is a chain of URLs (name one URL, without ::)")
        if scheme.lower() not in (*HTTP_SCHEMES, *BUCKET_SCHEMES):
            known = ", ".join(f"{each}://" for each in (*HTTP_SCHEMES, *BUCKET_SCHEMES))
            raise DataError(f"data.source.root: {shown}://...: packs are not read from there (use {known} or a path)")
        try:
            self.parts.port  # noqa: B018 - raises for an invalid port or host
        except ValueError as error:
            raise DataError(f"data.source.root: {shown}://...: is not a URL: {error} (correct it)") from None

    def __repr__(self) -> str:
        return f"Address({self.display_url})"

    @property
    def parts(self) -> SplitResult:
        """The parsed URL."""
        return urlsplit(self.url)

    @property
    def file_name(self) -> str:
        """The last component of the path."""
        return self.parts.path.rstrip("/").rpartition("/")[2]

    @property
    def display_url(self) -> str:
        """The URL as printed."""
        return printable(public_url(self.url))

    @property
    def url_path(self) -> str:
        """Scheme, host, port and path. Raise `ValueError` for an invalid port."""
        return f"{url_origin(self.url)}{self.parts.path}"

    def join(self, name: str) -> "RemoteUrl":
        """Return the URL of the file `file_name` in this folder."""
        path = f"{self.parts.path.rstrip('/')}/{name}"
        return RemoteUrl(self.parts._replace(path=path).geturl())

    def sibling(self, name: str) -> "RemoteUrl":
        """Return the URL of the file `file_name` in the folder of this file."""
        path = self.parts.path.rstrip("/").rpartition("/")[0]
        return RemoteUrl(self.parts._replace(path=f"{path}/{name}").geturl())
