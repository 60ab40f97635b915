"""Find and remove secrets in URLs: user names, passwords, and queries, which may hold a signature.

Recipes, commands and logs are stored, so their URLs must hold no secrets; these come from the environment.
"""

import re
from typing import Final
from urllib.parse import parse_qsl, urlsplit

CREDENTIALS: Final = "PACELINE_URL_CREDENTIALS"
"""Environment variable with the secrets of URLs (read by `data.remote.credentials`)."""
HOW_TO_PASS_CREDENTIALS: Final = f"leave it out: packs take it from {CREDENTIALS} or ~/.netrc"
_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"]+")
_SECRET: Final = re.compile(
    r"(^|[-_.])(sig|signature|token|password|passwd|secret|credential|credentials|api_?key|access_?key)$", re.IGNORECASE
)


def is_url(text: str) -> bool:
    """Return whether `text` begins like a URL."""
    return _URL.match(text) is not None


def public_url(text: str) -> str:
    """Return the URL `text` without user name, password, query and fragment; any other text unchanged."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return text
    authority, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    user = _find_user(text)
    return f"{scheme}://{authority.removeprefix(f'{user}@') if user else authority}{slash}{path}"


def find_secret(text: str, *, any_query: bool = False) -> str:
    """Return the kind of secret that a URL in `text` holds, for a message, or "".

    A query counts if a parameter is named like a secret, such as `X-Amz-Signature`. With `any_query` every query
    counts, and `text` is a single URL.
    """
    for url in [text] if any_query else _URL.findall(text):
        if _find_user(url):
            return "a user name or a password"
        if any_query and re.search(r"[?#]", url):
            return "a query, which may hold a signature"
        query = url.partition("#")[0].partition("?")[2]
        if any(_SECRET.search(name) for name, _ in parse_qsl(query, keep_blank_values=True)):
            return "a signature or a token"
    return ""


def _find_user(url: str) -> str:
    """Return the user name and password in a URL, or ""."""
    # A name without a password is a secret in http(s) only, unlike in abfs://CONTAINER@ACCOUNT/ or sftp://NAME@HOST/.
    scheme, _, rest = url.partition("://")
    user, _, _ = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")
    return user if ":" in user or scheme.lower() in ("http", "https") else ""


def url_origin(url: str) -> str:
    """Return scheme, host and port of `url`, as `https://host:443`. Raise `ValueError` for an invalid port."""
    parts = urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{parts.hostname or ''}{f':{port}' if port else ''}"
