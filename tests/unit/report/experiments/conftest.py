"""Results of experiments to report on."""

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def made():
    """Return the module that makes up results."""
    spec = importlib.util.spec_from_file_location("results", Path(__file__).with_name("results.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["ladder", "weak", "strong", "batches", "prediction", "tune"])
def result(request, made):
    """Return a result of each kind."""
    return made.all_results()[request.param]
