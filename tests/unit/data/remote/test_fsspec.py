"""Errors of fsspec name the command that fixes them, and untrusted URLs are refused."""

import base64
import json
import sys
from pathlib import Path

import pytest

from paceline.core.errors import DataError
from paceline.data.remote import open_remote
from paceline.data.remote.transport import FsspecTransport, PermanentError, RemoteUrl


def test_without_fsspec_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(PermanentError, match="needs fsspec") as raised:
        FsspecTransport().read(RemoteUrl("s3://bucket/a.pack"), 0, 10)
    assert raised.value.fix == "pip install 'paceline[remote]'"


def test_a_missing_package_of_fsspec_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec", reason="fsspec is not installed (pip install 'paceline[remote]')")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(PermanentError, match=r"needs a package that is missing: .*s3fs") as raised:
        FsspecTransport().read(RemoteUrl("s3://bucket/a.pack"), 0, 10)
    assert "s3fs" in raised.value.fix


def templates(command: str) -> str:
    """Return a URL that contains JSON with a template that runs `command` in older fsspec."""
    key = "{{ cycler.__init__.__globals__.os.popen('" + command + "').read() }}"
    carried = {"version": 1, "gen": [{"key": key, "url": "x", "dimensions": {"i": [1]}}], "refs": {}}
    data = base64.b64encode(json.dumps(carried).encode()).decode()
    return f"reference://::data:application/json;base64,{data}.pack"


@pytest.mark.parametrize(
    "root",
    [
        "ssh://host/a.pack",
        "file:///etc/a.pack",
        "memory://a.pack",
        "data:application/json://a.pack",
        "reference://a.pack",
        "simplecache::s3://bucket/a.pack",
        "s3::reference://a.pack",
        "http::reference://a.pack",
        "s3://bucket/x::reference://a.pack",
        "http://[1/a.pack",
        "http://host:no/a.pack",
        "://a.pack",
    ],
)
def test_an_unknown_scheme_or_a_chained_url_is_refused_unread(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(DataError, match=r"^data.source.root: .*://\.\.\.: .*\((use|name|correct) .*\)$") as raised:
        open_remote(root, tmp_path, 0)
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_url_with_a_template_runs_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.source.root: reference://...: is a chain of URLs"):
        open_remote(templates(f"touch {tmp_path / 'ran'}"), tmp_path / "cache", 0)
    assert not (tmp_path / "ran").exists()


def test_a_shard_name_that_makes_a_chained_url_is_refused() -> None:
    with pytest.raises(DataError, match="is a chain of URLs"):
        RemoteUrl("s3://bucket/set/index.pack").sibling("a::reference://b")


def test_any_error_of_a_file_system_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    core = pytest.importorskip("fsspec.core", reason="fsspec is not installed (pip install 'paceline[remote]')")

    def raises(*_: object, **__: object) -> None:
        raise IndexError("list index\nout of range")

    monkeypatch.setattr(core, "url_to_fs", raises)
    with pytest.raises(PermanentError, match="list index out of range") as raised:
        FsspecTransport().read(RemoteUrl("s3://bucket/a.pack"), 0, 10)
    assert raised.value.fix == "correct data.source.root"
