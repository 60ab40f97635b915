"""JSON that is damaged, too large or no file is one kind of error."""

import json
import os
from pathlib import Path

import pytest

from paceline.core.json_file import parse_json, read_json

DEEP = "[" * 100_000


def test_values_come_back(tmp_path: Path) -> None:
    value = {"a": [1, 2.5, None, True, "\u00e9"], "b": {"c": -1e300}}
    (tmp_path / "v.json").write_text(json.dumps(value))
    assert read_json(tmp_path / "v.json") == value == parse_json(json.dumps(value))


@pytest.mark.parametrize("text", [DEEP, '{"a": ' * 100_000, '{"a": 1e999}', "{", "", "9" * 5000], ids=range(6))
def test_invalid_json_is_a_value_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "v.json").write_text(text)
    with pytest.raises(ValueError):
        read_json(tmp_path / "v.json")


def test_deep_nesting_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(DEEP)


def test_a_file_too_large_a_pipe_and_a_device_are_errors_at_once(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(10**12)
    with pytest.raises(ValueError, match="longer than"):
        read_json(tmp_path / "large")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("pipe", "link"):
        with pytest.raises(OSError, match="no regular file"):
            read_json(tmp_path / name)
