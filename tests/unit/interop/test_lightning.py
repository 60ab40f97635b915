"""Lightning's form of the loaders, where there is no Lightning."""

import importlib.util
import sys

import pytest


def test_without_lightning_the_error_names_the_package(monkeypatch) -> None:
    for name in ("lightning.pytorch", "pytorch_lightning", "paceline.interop.lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"^lightning: is not installed \(pip install lightning\)$"):
        importlib.import_module("paceline.interop.lightning")
