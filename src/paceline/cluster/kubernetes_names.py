"""Convert names and text for Kubernetes: DNS labels, and text without variable expansion."""

import hashlib
import re
from typing import Final

from paceline.core.errors import RecipeError

_MAX_LABEL_LENGTH: Final = 40
"""Leaves room in the 63 characters of a label for suffixes: `-node-0-1023-x7k2p` of a TrainJob."""
_DIGEST_LENGTH: Final = 6


def dns_label(text: str) -> str:
    """Return `text` as an RFC 1035 label of at most 33 characters, `job` if nothing remains.

    Services and TrainJobs require it: lower-case letters, digits and single hyphens, a letter first.
    """
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")
    return label[: _MAX_LABEL_LENGTH - _DIGEST_LENGTH - 1].strip("-") or "job"


def file_key(text: str) -> str:
    """Return `text` as a file name in a ConfigMap: letters, digits, `-`, `_` and `.`."""
    return re.sub(r"[^-._A-Za-z0-9]+", "-", text)


def unique_label(text: str, key: str) -> str:
    """Return `text` as a DNS label of at most 40 characters, unique per `key` and deterministic."""
    return f"{dns_label(text)}-{short_digest(text, key)}"


def short_digest(*texts: str) -> str:
    """Return 6 hex digits of the hash of `texts`."""
    return hashlib.sha256("\0".join(texts).encode("utf-8", "surrogateescape")).hexdigest()[:_DIGEST_LENGTH]


def escape_expansion(text: str) -> str:
    """Return `text` escaped so that Kubernetes does not expand `$(NAME)` or `$$` in it.

    Raise `RecipeError` for text that neither YAML nor a command line can hold. Expansion rules: `command` in
    https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/.
    """
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise RecipeError(f"{text!r}: is not text, and cannot be part of a manifest (write it as UTF-8)")
    return text.replace("$", "$$")
