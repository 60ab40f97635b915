"""Untrusted pickles give plain values or a one-line error, and never run code."""

import io
import os
import pickle
import struct
import tracemalloc
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from paceline.data.sources.restricted_pickle import load_restricted_pickle

ALLOWED = "only plain values are allowed (write CSV)"


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


class Remote(pickle.Pickler):
    """Refers to bytes by a persistent id."""

    def persistent_id(self, value):
        return "an id" if isinstance(value, bytes) else None


@pytest.fixture
def stored(tmp_path):
    """Return a function that writes bytes to a file."""

    def write(content):
        path = tmp_path / "m.pkl"
        path.write_bytes(content)
        return path

    return write


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_come_back_in_every_protocol(protocol, stored):
    value = {"a": 1, "b": [2.5, None, True], "é": ("x", {"y": -(10**30)})}
    assert load_restricted_pickle(stored(pickle.dumps(value, protocol)), hint=ALLOWED) == value


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_call_is_refused_and_not_made(protocol, stored, tmp_path, error_message):
    mark = tmp_path / "ran"
    path = stored(pickle.dumps({"a": Evil(mark)}, protocol))
    assert error_message(load_restricted_pickle, path, hint=ALLOWED) == f"{path}: refers to posix.mkdir; {ALLOWED}"
    assert not mark.exists()


EVIL = {
    "global": b"cposix\nsystem\n(S'touch x'\ntR.",
    "inst": b"(S'touch x'\niposix\nsystem\n.",
    "obj": b"(cposix\nsystem\nS'touch x'\no.",
    "stack_global": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x07touch x\x85R.",
    "builtins": b"cbuiltins\neval\n(S'1'\ntR.",
    "dotted": b"\x80\x04\x8c\x05posix\x8c\x0fsystem.__call__\x93.",
}


@pytest.mark.parametrize("stream", EVIL.values(), ids=EVIL)
def test_every_opcode_that_names_a_global_is_refused(stream, stored, error_message):
    assert ": refers to " in error_message(load_restricted_pickle, stored(stream), hint=ALLOWED)


@pytest.mark.parametrize("value", [OrderedDict(a=1), Path("/x"), np.int64(1), np.zeros(3), Evil, len, 1j, range(3)])
def test_objects_are_refused(value, stored, error_message):
    assert ": refers to " in error_message(load_restricted_pickle, stored(pickle.dumps(value)), hint=ALLOWED)


def test_persistent_objects_are_refused(stored, error_message):
    file = io.BytesIO()
    Remote(file).dump({"a": b"kept elsewhere"})
    message = error_message(load_restricted_pickle, stored(file.getvalue()), hint=ALLOWED)
    assert "refers to the persistent object 'an id'" in message


def test_extension_codes_are_refused(stored, error_message):
    assert "unregistered extension code" in error_message(
        load_restricted_pickle, stored(b"\x80\x02\x82\x01."), hint=ALLOWED
    )


BROKEN = {
    "empty": b"",
    "text": b"path,label\na.jpg,1\n",
    "truncated": pickle.dumps({"a": "b" * 100})[:-20],
    "no stop": b"\x80\x04}",
    "empty stack": b".",
    "wrong memo": b"\x80\x04h\x05.",
    "claims 8 EiB": b"\x80\x04\x8d" + struct.pack("<Q", 2**63 - 1) + b"x.",
    "claims 4 EiB of bytes": b"\x80\x05\x96" + struct.pack("<Q", 2**62) + b"x.",
    "future protocol": b"\x80\xff.",
    "unhashable key": b"\x80\x02}]K\x01s.",
    "not utf-8": b"\x80\x04\x8c\x01\xff.",
}


@pytest.mark.parametrize("stream", BROKEN.values(), ids=BROKEN)
def test_a_malformed_stream_is_a_one_line_error(stream, stored, error_message):
    path = stored(stream)
    message = error_message(load_restricted_pickle, path, hint=ALLOWED)
    assert message.startswith(f"{path}: is not a readable pickle (")
    assert message.endswith(f"; {ALLOWED}")


def test_a_stream_truncated_anywhere_is_a_one_line_error(stored, error_message):
    whole = pickle.dumps({f"{number}.jpg": number for number in range(20)})
    for length in range(len(whole)):
        error_message(load_restricted_pickle, stored(whole[:length]), hint=ALLOWED)


def test_a_missing_file_is_a_one_line_error(tmp_path, error_message):
    message = error_message(load_restricted_pickle, tmp_path / "gone.pkl", hint=ALLOWED)
    assert message == f"{tmp_path}/gone.pkl: cannot be read: No such file or directory; {ALLOWED}"


def test_a_name_of_many_lines_is_printed_on_one(stored, error_message):
    name = "a\nb" * 500
    stream = (
        b"\x80\x04" + b"".join(b"X" + struct.pack("<I", len(text)) + text.encode() for text in (name, "x")) + b"\x93."
    )
    assert len(error_message(load_restricted_pickle, stored(stream), hint=ALLOWED)) < 400


@pytest.mark.parametrize("content", [b"\x80\x02Nr\0\0\0\x10.", b"Np268435456\n.", b"\x80\x02Nr\xff\xff\xff\x7f."])
def test_a_memo_larger_than_the_file_is_refused_before_it_is_allocated(content, stored, error_message):
    path = stored(content)
    tracemalloc.start()
    try:
        message = error_message(load_restricted_pickle, path, hint=ALLOWED)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    assert message.startswith(f"{path}: needs memory for ")


def test_missing_bytes_are_not_allocated(stored, error_message):
    path = stored(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 33) + b"abc.")
    assert error_message(load_restricted_pickle, path, hint=ALLOWED).startswith(f"{path}: is not a readable pickle (")
