"""Parse labels in tars: an integer or a class name, as text or in a JSON field."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.errors import DataError
from paceline.core.files import open_to_read
from paceline.data.sources.places import expand_path, printable
from paceline.recipe.schema.source import WebDataset

MAX_CLASSES = 1_000_000
_MAX_CLASS_LIST_BYTES = 2**26


@dataclass(frozen=True)
class LabelReader:
    """Parse labels from members with `extension`: the value of `json_field`, or the whole text if that is None.

    `class_numbers` maps class names to class numbers, empty without a class list.
    """

    extension: bytes
    json_field: str | None
    class_numbers: Mapping[str, int]

    def __call__(self, content: bytes) -> int:
        """Return the class number. Raise `ValueError` with a reason of one line."""
        value = self._parse_value(content)
        if isinstance(value, str) and value in self.class_numbers:
            return self.class_numbers[value]
        text = value.strip() if isinstance(value, str) else value
        if isinstance(text, str) and text.isascii() and text.isdigit() and len(text) < 10:
            text = int(text)
        if not isinstance(text, int) or isinstance(text, bool) or not 0 <= text < MAX_CLASSES:
            raise ValueError(f"is labelled {printable(repr(value))[:80]}, which is not a class number")
        return text

    def _parse_value(self, content: bytes) -> object:
        try:
            if self.json_field is None:
                return content.decode("ascii")
            return json.loads(content)[self.json_field]
        except (KeyError, TypeError, IndexError):
            raise ValueError(f"has no field '{printable(self.json_field or '')}' in its JSON") from None
        except (ValueError, RecursionError):
            raise ValueError(f"has a .{self.extension.decode()} that cannot be read as such") from None


def build_label_reader(section: WebDataset, class_names: tuple[str, ...]) -> LabelReader:
    """Build the reader for `section.label`. Raise `DataError` for an unknown format."""
    numbers = {name: number for number, name in enumerate(class_names)}
    kind, _, json_field = section.label.partition(":")
    if kind == "cls" and section.label == "cls":
        return LabelReader(b"cls", None, numbers)
    if kind == "json" and json_field:
        return LabelReader(b"json", json_field, numbers)
    raise DataError(f"data.source.label: '{printable(section.label)}' is neither cls nor json:FIELD (set it to one)")


def read_class_list(section: WebDataset) -> tuple[str, ...]:
    """Read the class names from the file `section.classes`; () for `auto`. Raise `DataError` naming the file."""
    if section.classes == "auto":
        return ()
    path = expand_path(section.classes)
    prefix = f"data.source.classes: {printable(path)}"
    try:
        with open_to_read(path) as file:
            text = file.read(_MAX_CLASS_LIST_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"{prefix} cannot be read: {error.strerror} (correct the path)") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{prefix} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    names = tuple(printable(line.rstrip("\r")) for line in text.removesuffix("\n").split("\n"))
    if len(names) > MAX_CLASSES:
        raise DataError(f"{prefix} names more than {MAX_CLASSES:,} classes (correct the path)")
    seen: dict[str, int] = {}
    for number, name in enumerate(names, start=1):
        first = seen.setdefault(name, number)
        if not name.strip() or first != number:
            problem = f"names '{name}' again, after line {first}" if name.strip() else "has no name"
            raise DataError(f"{prefix}: line {number} {problem} (give each class one line)")
    return names
