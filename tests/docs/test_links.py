"""No link in a document is broken: files and headings exist, addresses are valid, named tests exist.

No network request is made. Anchors are those that GitHub gives to headings; the site has the same.
"""

import re
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import pytest

ROOT = Path(__file__).parents[2]
BESIDE = ("examples/README.md", "csrc/README.md", "benchmarks/README.md")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in BESIDE)])
CODE = re.compile(
    r"^ *(`{3,})[^\n]*\n.*?^ *\1 *$|(`+)(?!`)(?:(?!\n *\n).)+?(?<!`)\2(?!`)|<!--.*?-->", re.MULTILINE | re.DOTALL
)
LINK = re.compile(
    r"\]\(\s*([^()\s]+)\s*\)|<(?:img|a)[^>]*? (?:src|href)=\"([^\"]+)\"|^\[[^\]]+\]: +(\S+)", re.MULTILINE
)
HOST = re.compile(r"[a-z0-9-]+(\.[a-z0-9-]+)+(:\d+)?|localhost:\d+")


def without_code(text: str) -> str:
    """Return a document's text without code and comments."""
    return CODE.sub("", text)


def links_in(text: str) -> list[str]:
    """Return the targets of a document's links, including images and link definitions."""
    return ["".join(found) for found in LINK.findall(without_code(text))]


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a document: of `<a id>`, and of headings; a second one of the same text ends in -1."""
    without_blocks = re.sub(r"^ *(`{3,})[^\n]*\n.*?^ *\1 *$", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#{1,6} +(.+?) *$", without_blocks, re.MULTILINE)
    plain = [re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    names = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain]
    seen: Counter[str] = Counter()
    found = set(re.findall(r'<a id="([^"]+)">', without_blocks))
    for name in names:
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def fault(link: str, page: Path) -> str | None:
    """Return the error of a link on `page`, or None."""
    parts = urlsplit(link)
    if parts.scheme:
        whole = parts.scheme in ("https", "http") and HOST.fullmatch(parts.netloc)
        return None if whole or (parts.scheme == "mailto" and "@" in parts.path) else "is no address"
    if link.startswith("/"):
        return "leads to the root of whatever shows the page"
    target = page.parent / parts.path if parts.path else page
    if not target.exists():
        return "does not exist"
    if not target.resolve().is_relative_to(ROOT):
        return "leads out of the repository"
    if parts.fragment and (target.suffix != ".md" or parts.fragment not in anchors_of(target.read_text())):
        return "is no heading there"
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page: Path) -> None:
    wrong = [f"{link} {what}" for link in links_in(page.read_text()) if (what := fault(link, page))]
    assert wrong == []


def test_all_pages_and_links_are_checked() -> None:
    assert {"README.md", "docs/index.md", "docs/reference/python/train.md", "csrc/README.md"} <= {
        str(page.relative_to(ROOT)) for page in PAGES
    }
    found = [link for page in PAGES for link in links_in(page.read_text())]
    assert len(found) > 200
    assert len([link for link in found if "#" in link]) > 10


@pytest.mark.parametrize(
    "link, what",
    [
        ("../README.md", None),
        ("../README.md#guarantees", None),
        ("#where-to-begin", None),
        ("https://example.org/a#b", None),
        ("../README.md#unmeasured", "is no heading there"),
        ("#what-nobody-promises", "is no heading there"),
        ("../LICENSE#a", "is no heading there"),
        ("nothing.md", "does not exist"),
        ("/README.md", "leads to the root of whatever shows the page"),
        ("../../", "leads out of the repository"),
        ("https//example.org", "does not exist"),
        ("https:///a", "is no address"),
        ("ftp://example.org", "is no address"),
    ],
)
def test_a_broken_link_is_reported(link: str, what: str | None) -> None:
    assert fault(link, ROOT / "docs" / "index.md") == what


def test_links_in_code_are_ignored_but_links_with_code_are_not() -> None:
    text = "`[a](b)` [`c`](d)\n```\n[e](f)\n```\n<!-- [g](h) -->\n[i]: https://j.k\n<img alt='' src=\"l\">\n![m](n)\n"
    assert links_in(text) == ["d", "https://j.k", "l", "n"]


def test_headings_have_the_anchors_of_github() -> None:
    text = '# A `b_c`: d, e-f\n## Same\n## Same\n```\n# no heading\n```\n### [Linked](to.md) one\n<a id="g.h"></a>\n'
    assert anchors_of(text) == {"a-b_c-d-e-f", "same", "same-1", "linked-one", "g.h"}


def test_every_test_named_by_a_document_exists() -> None:
    files = {str(file.relative_to(ROOT)): file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}
    defined = {name for text in files.values() for name in re.findall(r"^ *def (test_\w+)", text, re.MULTILINE)}
    texts = [page.read_text() for page in PAGES]
    promised = {name for text in texts for name in re.findall(r"`(test_\w+)`", text)}
    assert len(promised) > 80
    assert promised - defined == set()
    named = {name for text in texts for name in re.findall(r"\btests/[\w/]+\.py\b", text)}
    assert len(named) > 5
    assert named - files.keys() - {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")} == set()
