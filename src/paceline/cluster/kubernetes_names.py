"""Names and words as Kubernetes takes them: DNS labels, and text in which nothing is expanded."""

import hashlib
import re
from typing import Final

from paceline.core.errors import RecipeError

_LONGEST: Final = 40
"""Leaves room for what controllers append to the 63 characters of a label: `-node-0-1023-x7k2p` for a TrainJob."""
_HASH: Final = 6


def dns_label(text: str) -> str:
    """Return `text` as lower-case letters, digits and single hyphens, at most 33, a letter first; `job` for nothing.

    It is a label of RFC 1035, which Services and TrainJobs ask for.
    """
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")
    return words[: _LONGEST - _HASH - 1].strip("-") or "job"


def file_key(text: str) -> str:
    """Return `text` as the name of a file in a ConfigMap: of letters, digits, `-`, `_` and `.`."""
    return re.sub(r"[^-._A-Za-z0-9]+", "-", text)


def unique_label(text: str, key: str) -> str:
    """Return `text` as a DNS label of at most 40 characters: another for each key, and always the same for one."""
    return f"{dns_label(text)}-{digest(text, key)}"


def digest(*texts: str) -> str:
    """Return 6 hex digits that tell texts apart."""
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()[:_HASH]


def literal(text: str) -> str:
    """Return `text` so that a container gets it as it is: Kubernetes makes a value of `$(NAME)`, and of `$$` `$`.

    Raise `RecipeError` for what neither YAML nor a command line can hold. The rule of expansion is that of `command`
    in https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/.
    """
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise RecipeError(f"{text!r}: is not text, and cannot be part of a manifest (write it as UTF-8)")
    return text.replace("$", "$$")
