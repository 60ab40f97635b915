"""Run directories to report on."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def runs():
    """Return the module that writes run directories."""
    spec = importlib.util.spec_from_file_location("runs", Path(__file__).with_name("runs.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def rundir(runs, tmp_path):
    """Return a finished run of ten classes, one of whose names is hostile."""
    return runs.write_run(tmp_path / "cifar10-20261121-153113", runs.Shape(names=(runs.EVIL, *runs.NAMES[1:])))
