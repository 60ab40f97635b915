"""Find user names, passwords and signatures of URLs in the environment at request time; nothing is stored."""

import base64
import netrc
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from paceline.core.urls import CREDENTIALS, url_origin
from paceline.data.remote.transport import PermanentError

_FORMAT_HINT: Final = f"separate by blanks URLs such as https://NAME:PASSWORD@HOST/PATH in {CREDENTIALS}"


# `PACELINE_URL_CREDENTIALS` holds URLs separated by blanks, with a user name and a password, a query, or both, such as
# `https://me:secret@host/packs` or `https://bucket.example/a.pack?X-Amz-Signature=...`. Each applies to its scheme,
# host and port, and to its path and everything below; the longest match wins. HTTPS passwords may also be in
# `~/.netrc`, or in the file that `NETRC` names.
@dataclass(frozen=True)
class UrlCredentials:
    """The `Authorization` header and the query for a URL, each "" if there is none."""

    authorization: str = ""
    query: str = ""

    def __repr__(self) -> str:
        return "Credentials()"


def find_credentials(url: str, environ: Mapping[str, str] = os.environ) -> UrlCredentials:
    """Return the credentials for `url`. Raise `PermanentError` if the environment's entries are invalid."""
    wanted = urlsplit(url)
    origin, best, longest = _parse_origin(url), None, -1
    for number, entry in enumerate(environ.get(CREDENTIALS, "").split(), start=1):
        try:
            parts, its_origin = urlsplit(entry), url_origin(entry)
        except ValueError:  # the message may contain a password
            parts, its_origin = urlsplit(""), ""
        if not parts.scheme or not parts.hostname or (parts.username is None and not parts.query):
            raise PermanentError(f"{CREDENTIALS}: entry {number} is not a URL with a password or a query", _FORMAT_HINT)
        if its_origin == origin and _is_below(wanted.path, parts.path) and len(parts.path) > longest:
            best, longest = parts, len(parts.path)
    if best is not None and best.username is not None:
        return UrlCredentials(build_basic_auth(best), best.query)
    return UrlCredentials(_find_netrc_auth(wanted, environ), best.query if best else "")


def build_basic_auth(parts: SplitResult) -> str:
    """Return the basic authorization header for a URL's user name and password, "" without them."""
    if parts.username is None:
        return ""
    return _encode_basic_auth(unquote(parts.username), unquote(parts.password or ""))


def _encode_basic_auth(name: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{name}:{password}'.encode()).decode()}"


def _is_below(path: str, folder: str) -> bool:
    components = re.split(r"[/\\]", unquote(path))
    return path == folder or (path.startswith(f"{folder.rstrip('/')}/") and not {".", ".."} & {*components})


def _parse_origin(url: str) -> str:
    try:
        return url_origin(url)
    except ValueError as error:
        raise PermanentError(f"has no port: {error}", "correct data.source.root") from error


def _find_netrc_auth(parts: SplitResult, environ: Mapping[str, str]) -> str:
    """Return the authorization header from netrc, "" if there is none."""
    # For HTTPS only, as a recipe may name a known host with http. The `default` entry would send a password to any
    # host that a recipe names.
    if parts.scheme != "https":
        return ""
    file = Path(os.path.expanduser(environ.get("NETRC") or "~/.netrc"))  # noqa: PTH111 - raises without a home
    try:
        entry = netrc.netrc(str(file)).hosts.get(parts.hostname or "")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise PermanentError(f"{file} cannot be read: {reason}", f"correct the file, or set {CREDENTIALS}") from error
    except netrc.NetrcParseError as error:  # the message may contain a password
        fix = f"correct it near line {error.lineno}, or set {CREDENTIALS}"
        raise PermanentError(f"{file} cannot be parsed", fix) from None
    return _encode_basic_auth(entry[0], entry[2] or "") if entry else ""
