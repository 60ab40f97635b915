"""What tests of every kind share."""

import os
from pathlib import Path

import pytest


@pytest.fixture
def real_data():
    """Return a function from a data set's name to its folder below `PACELINE_TEST_DATA`; it skips without it."""

    def folder_of(name):
        top = os.environ.get("PACELINE_TEST_DATA")
        if not top:
            pytest.skip("PACELINE_TEST_DATA names no folder of real data sets")
        folder = Path(top, name)
        if not folder.is_dir():
            pytest.skip(f"PACELINE_TEST_DATA has no {name}/")
        return folder

    return folder_of
