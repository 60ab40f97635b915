"""Run directories to report on."""

import base64
import hashlib
import importlib.util
import re
from collections.abc import Callable
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
def without_own_scripts() -> Callable[[str], str]:
    """Return a function from a page to the page without the scripts that its policy allows by their hashes."""

    def without(page: str) -> str:
        policy = re.search(r"script-src ([^;]*);", page)
        allowed = set(policy[1].split()) if policy else set()
        scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
        digests = {base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts}
        assert allowed == {f"'sha256-{each}'" for each in digests}
        return re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)

    return without


@pytest.fixture
def rundir(runs, tmp_path):
    """Return a finished run of ten classes, one of whose names is hostile."""
    return runs.write_run(tmp_path / "cifar10-20261121-153113", runs.Shape(names=(runs.EVIL, *runs.NAMES[1:])))
