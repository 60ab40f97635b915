"""Write manifests as YAML that means the same under YAML 1.1 (kubectl) and 1.2.

Text is quoted unless it is a plain word in both. Keys keep their order; multi-line text is a readable block where that
is lossless.
"""

import re
from collections.abc import Iterable, Mapping
from io import StringIO
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.scalarstring import DoubleQuotedScalarString, LiteralScalarString

_PLAIN_SCALAR: Final = re.compile(r"[A-Za-z/][-A-Za-z0-9_./]*")
_YAML_1_1_KEYWORDS: Final = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null"])
"""Words that YAML 1.1 reads as bool or null, in any case: https://yaml.org/type/bool.html, /null.html."""
_BLOCK_TEXT: Final = re.compile(r"(?=[!-~])(?:[ -~]*[!-~]\n|\n)+")
"""Lines of printable ASCII: the first has no leading space, none a trailing one, and each ends with a newline."""


def manifests_to_yaml(manifests: Iterable[Mapping[str, Any]]) -> str:
    """Return the manifests as documents of one stream."""
    yaml = YAML(typ="rt", pure=True)
    yaml.width = 1_000_000  # folded lines are hard to read
    yaml.indent(mapping=2, sequence=4, offset=2)
    out = StringIO()
    yaml.dump_all([_quote_strings(manifest) for manifest in manifests], out)
    return out.getvalue()


def _quote_strings(value: Any) -> Any:
    match value:
        case Mapping():
            return {_quote_strings(str(key)): _quote_strings(each) for key, each in value.items()}
        case list() | tuple():
            return [_quote_strings(each) for each in value]
        case str():
            return _quote_text(value)
        case _:
            return value


def _quote_text(value: str) -> str:
    if _PLAIN_SCALAR.fullmatch(value) and value.lower() not in _YAML_1_1_KEYWORDS:
        return value
    is_block = "\n" in value and _BLOCK_TEXT.fullmatch(value) and not value.endswith("\n\n")
    quoted: str = LiteralScalarString(value) if is_block else DoubleQuotedScalarString(value)
    return quoted
