"""What fsspec cannot do is told with the command that mends it."""

import sys

import pytest

from paceline.data.remote.address import Address
from paceline.data.remote.filesystem import Filesystem
from paceline.data.remote.transport import LastingError


def test_without_fsspec_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(LastingError, match="needs fsspec") as raised:
        Filesystem().read(Address("s3://bucket/a.pack"), 0, 10)
    assert raised.value.fix == "pip install 'paceline[remote]'"


def test_without_what_fsspec_needs_for_an_address_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed (pip install 'paceline[remote]')")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(LastingError, match=r"needs a package that is missing: .*s3fs") as raised:
        Filesystem().read(Address("s3://bucket/a.pack"), 0, 10)
    assert "s3fs" in raised.value.fix
