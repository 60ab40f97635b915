"""User names, passwords and signatures of URLs: taken from the environment when a request is sent, and kept nowhere.

`PACELINE_URL_CREDENTIALS` holds URLs, separated by blanks, with a user name and a password, a query, or both, such as
`https://me:secret@host/packs` or `https://bucket.example/a.pack?X-Amz-Signature=...`. Each is for its own scheme, host
and port, and for its path and all below; of several that fit, the longest counts. A user name and a password for https
may also stand in `~/.netrc`, or in the file that `NETRC` names.
"""

import base64
import netrc
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from paceline.core.urls import CREDENTIALS, origin_of
from paceline.data.remote.transport import LastingError

_FORM: Final = f"separate by blanks URLs such as https://NAME:PASSWORD@HOST/PATH in {CREDENTIALS}"


@dataclass(frozen=True)
class Credentials:
    """What to send to the server of a URL: the header `Authorization`, and the query. Both are "" for nothing."""

    authorization: str = ""
    query: str = ""

    def __repr__(self) -> str:
        return "Credentials()"


def credentials_for(url: str, environ: Mapping[str, str] = os.environ) -> Credentials:
    """Return what the environment has for `url`. Raise `LastingError` where that cannot be understood."""
    wanted = urlsplit(url)
    origin, best, longest = _origin(url), None, -1
    for number, entry in enumerate(environ.get(CREDENTIALS, "").split(), start=1):
        try:
            parts, its_origin = urlsplit(entry), origin_of(entry)
        except ValueError:  # whose message may quote a password
            parts, its_origin = urlsplit(""), ""
        if not parts.scheme or not parts.hostname or (parts.username is None and not parts.query):
            raise LastingError(f"{CREDENTIALS}: entry {number} is no URL with a password or a query", _FORM)
        if its_origin == origin and _is_below(wanted.path, parts.path) and len(parts.path) > longest:
            best, longest = parts, len(parts.path)
    if best is not None and best.username is not None:
        return Credentials(basic(best), best.query)
    return Credentials(_of_netrc(wanted, environ), best.query if best else "")


def basic(parts: SplitResult) -> str:
    """Return the header for the user name and the password in a URL; "" where it has none."""
    if parts.username is None:
        return ""
    return _basic(unquote(parts.username), unquote(parts.password or ""))


def _basic(name: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"


def _is_below(path: str, folder: str) -> bool:
    """Whether `path` is `folder`, or a file below it for any server: one with `..` in it may lead out of it again."""
    steps = re.split(r"[/\\]", unquote(path))
    return path == folder or (path.startswith(f"{folder.rstrip('/')}/") and not {".", ".."} & {*steps})


def _origin(url: str) -> str:
    try:
        return origin_of(url)
    except ValueError as error:
        raise LastingError(f"has no port: {error}", "correct data.source.root") from error


def _of_netrc(parts: SplitResult, environ: Mapping[str, str]) -> str:
    """Return the header that netrc has for a host; for https alone, as a recipe may name http to a known host.

    Its `default` entry is not used: it would go to any host that a recipe names.
    """
    if parts.scheme != "https":
        return ""
    file = Path(os.path.expanduser(environ.get("NETRC") or "~/.netrc"))  # noqa: PTH111 - raises without a home
    try:
        found = netrc.netrc(str(file)).hosts.get(parts.hostname or "")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise LastingError(f"{file} cannot be read: {reason}", f"correct the file, or set {CREDENTIALS}") from error
    except netrc.NetrcParseError as error:  # its message may quote a password
        fix = f"correct it near line {error.lineno}, or set {CREDENTIALS}"
        raise LastingError(f"{file} is not understood", fix) from None
    return _basic(found[0], found[2] or "") if found else ""
