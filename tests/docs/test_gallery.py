"""The gallery is complete and of today's report: each card leads to a page that makes no request."""

import re
import tarfile
from pathlib import Path

import pytest

from paceline.report import render

GALLERY = Path(__file__).parents[2] / "docs" / "gallery"
TEMPLATES = Path(render.__file__).with_name("templates")
NAMES = sorted(path.stem for path in GALLERY.glob("*.html"))
AGAIN = "run .venv/bin/python docs/gallery/make.py --pages"
MOST_BYTES = 3_000_000


def test_every_card_has_a_page_and_pictures_and_commands_of_today() -> None:
    text = (GALLERY / "README.md").read_text()
    assert sorted(re.findall(r'<figure><a href="(\w[\w-]*)\.html">', text)) == NAMES
    assert len(NAMES) >= 8
    for source in re.findall(r'src(?:set)?="([^"]+)"', text):
        assert (GALLERY / source).is_file(), source
    assert len(re.findall(r"<pre><code>paceline ", text)) == len(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_has_the_layout_of_todays_report(name: str) -> None:
    text = (GALLERY / f"{name}.html").read_text()
    for part in ("page.css", "page.js"):
        assert (TEMPLATES / part).read_text().strip() in text, f"{part} has changed: {AGAIN}"


@pytest.mark.parametrize("name", NAMES)
def test_a_page_makes_no_request(name: str) -> None:
    text = (GALLERY / f"{name}.html").read_text()
    assert "Content-Security-Policy\" content=\"default-src 'none'; script-src 'sha256-" in text
    links = re.findall(r'<[a-z][^>]*?\s(?:src|href|srcset)="([^"]*)"', text)
    assert links and [each for each in links if not each.startswith(("#", "data:"))] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_page_names_no_folder_of_a_machine(name: str) -> None:
    assert re.findall(r'[">= ](/(?:home|root|tmp|work|build)/[^"<\s]*)', (GALLERY / f"{name}.html").read_text()) == []


def test_the_records_of_runs_are_small_and_without_weights() -> None:
    files = [path for path in GALLERY.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    members = 0
    for path in (GALLERY / "runs").glob("*.tar.xz"):
        with tarfile.open(path) as archive:
            for member in archive:
                members += 1
                assert not member.name.endswith((".safetensors", ".html")) and member.uname == "", member.name
    assert members > 100
