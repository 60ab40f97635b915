"""Jinja templates of scripts, manifests and Markdown; pages in HTML have an environment of their own."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


def text_environment(package: str, **filters: Callable[..., Any]) -> "Environment":
    """Return the environment of the templates in `package`; nothing is escaped unless by `filters`."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # slow to import

    environment = Environment(  # noqa: S701 - escapes HTML, which these are not
        loader=PackageLoader(package),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= filters
    return environment
