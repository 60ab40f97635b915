"""URLs of packs: what lies beside one, and what may be printed of it."""

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from paceline.data.sources.places import printable


@dataclass(frozen=True)
class Address:
    """The URL of a file. Name and password in it, and its query, which may hold a signature, are never printed."""

    url: str

    def __repr__(self) -> str:
        return f"Address({self.shown})"

    @property
    def parts(self) -> SplitResult:
        """The URL, taken apart."""
        return urlsplit(self.url)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.parts.path.rstrip("/").rpartition("/")[2]

    @property
    def shown(self) -> str:
        """The URL as it may be printed."""
        parts = self.parts
        return printable(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")

    def below(self, name: str) -> "Address":
        """Return the file `name` in this folder, asked for with the same query."""
        path = f"{self.parts.path.rstrip('/')}/{name}"
        return Address(self.parts._replace(path=path).geturl())

    def beside(self, name: str) -> "Address":
        """Return the file `name` in the folder that this file is in."""
        path = self.parts.path.rstrip("/").rpartition("/")[0]
        return Address(self.parts._replace(path=f"{path}/{name}").geturl())
