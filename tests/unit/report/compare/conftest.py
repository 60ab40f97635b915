"""Runs to compare."""

import importlib.util
from pathlib import Path

import pytest

from paceline.report.compare_model import read_compared_run
from paceline.report.compare_runs import compare_runs


@pytest.fixture(scope="session")
def made():
    """Return the module that writes runs."""
    spec = importlib.util.spec_from_file_location("made", Path(__file__).with_name("made.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def compared():
    """Return a function that compares run directories."""

    def work(*paths, metric="top1", target=None):
        return compare_runs([read_compared_run(path, metric) for path in paths], metric=metric, target=target)

    return work
