"""The site builds without warnings, has the content of the Markdown files, and is displayed without other hosts."""

import importlib.util
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DESKTOP, PHONE = 1280, 390
KINDS = (  # a page of each kind, and those with the widest tables and the longest words
    "index.html",
    "tutorial/2-your-photographs.html",
    "how-to/slurm.html",
    "how-to/kubernetes.html",
    "coming-from/lightning.html",
    "reference/recipe/index.html",
    "reference/recipe/optim.html",
    "reference/cli/index.html",
    "reference/cli/scale.html",
    "reference/python/results.html",
    "reference/run-directory.html",
    "explanation/prediction.html",
    "adr/0016-data-path.html",
    "gallery/index.html",
    "project/contributing.html",
)
VIEWS = ((DESKTOP, "light"), (PHONE, "dark"))
ACCESSIBLE = (  # a page of each part of the site
    "index.html",
    "tutorial/2-your-photographs.html",
    "how-to/slurm.html",
    "reference/recipe/data-augment.html",
    "explanation/exposed-communication.html",
)


class Outline(HTMLParser):
    """Count the elements of a page: within its article, if it has one, and without additions of the site."""

    COUNTED = ("h1", "h2", "h3", "li", "table", "tr", "td", "pre", "img", "blockquote", "ol", "ul")

    def __init__(self, text):
        super().__init__()
        self.counts, self.links, self.ids, self.words, self.codes = dict.fromkeys(self.COUNTED, 0), [], set(), [], []
        self.depth, self.is_code = 0, False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids.add(values.get("id"))
        self.links.append(values.get("href") or values.get("src") or "")
        self.is_code = self.is_code or tag == "code"
        if tag in self.counts:
            self.counts[tag] += 1

    def handle_endtag(self, tag):
        self.is_code = self.is_code and tag != "code"

    def handle_data(self, data):
        self.words += data.split()
        if self.is_code:
            self.codes += data.split()


def article(path):
    """Return the outline of a page's own text."""
    text = path.read_text(encoding="utf-8")
    inner = re.search(r"<article[^>]*>(.*?)</article>", text, re.DOTALL)[1]
    return Outline(re.sub(r'<a class="headerlink".*?</a>', "", inner, flags=re.DOTALL))


@pytest.fixture(scope="module")
def pages():
    """Return the hook that converts documents to pages."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (pip install 'paceline[docs]')")
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "site" / "pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sources(site, pages):
    """Yield (path in the repository, path on the site) of every document except those generated from docstrings."""
    for path in sorted((ROOT / "docs").rglob("*.md")):
        name = path.relative_to(ROOT).as_posix()
        uri = name.removeprefix("docs/")
        if "\n::: " not in path.read_text():
            yield name, uri.replace("README.md", "index.md")
    yield from (each for each in pages.BESIDE.items() if each[1].endswith(".md"))


def test_every_page_has_the_content_of_its_markdown(site, pages):
    """Dialects of Markdown differ: lists, tables and code must be parsed alike, and no word may be lost."""
    from markdown_it import MarkdownIt

    compared = 0
    for name, uri in sources(site, pages):

        def is_page(path):
            built = site / path.replace("README.md", "index.md")
            return built.with_suffix(".html").exists() or built.is_file()

        text = pages.shown((ROOT / name).read_text(), name, uri, is_page, "")
        text = re.sub(r"^> \[!([A-Z]+)\]$", lambda found: f"> {found[1].title()}", text, flags=re.MULTILINE)
        expected = Outline(MarkdownIt("commonmark").enable("table").render(text))
        found = article((site / uri).with_suffix(".html"))
        assert found.counts == expected.counts, uri
        assert "".join(found.words) == "".join(expected.words), uri
        assert "".join(found.codes) == "".join(expected.codes), uri
        compared += 1
    assert compared > 60


def test_every_link_within_the_site_has_a_target(site):
    outlines = {path: Outline(path.read_text()) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    checked = 0
    for path, outline in outlines.items():
        for link in outline.links:
            name, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link) or link in ("", "#"):
                continue
            target = (path.parent / name).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.relative_to(site)}: {link}"
            if anchor and target.suffix == ".html":
                assert anchor in outlines[target].ids, f"{path.relative_to(site)}: {link}"
            checked += 1
    assert checked > 5000


def test_the_site_contains_pages_and_not_their_sources(site):
    assert [path for path in site.rglob("*") if path.suffix in (".py", ".md", ".pyc")] == []
    texts = [path.read_text() for path in site.rglob("*.html")]
    assert len(texts) > 60
    assert [text for text in texts if "<!-- test:" in text or "test: with" in text] == []


def test_python_pages_show_signatures_over_several_lines(site):
    """Without a formatter a signature is one long line, and without `reading.py` a result has no fields."""
    text = re.sub(r"<[^>]+>", "", (site / "reference/python/results.html").read_text())
    assert re.search(r"RunResult\(\s*\*,\n +\w+: ", text)
    assert "train(\n    recipe: str" in re.sub(r"<[^>]+>", "", (site / "reference/python/train.html").read_text())


def test_links_to_other_files_lead_to_the_repository(pages):
    def shown(text, repository="", path="docs/reference/pack.md", uri="reference/pack.md"):
        return pages.shown(text, path, uri, lambda target: target.endswith((".md", ".svg")), repository)

    assert shown("[the clock](../../benchmarks/clock.py)") == "the clock (`benchmarks/clock.py`)"
    assert shown("([it](../../benchmarks/clock.py))") == "(it, `benchmarks/clock.py`)"
    assert shown("[`make_cli.py`](make_cli.py)") == "`docs/reference/make_cli.py`"
    linked = shown("[the clock](../../benchmarks/clock.py#a)", "https://host/us/paceline")
    assert linked == "[the clock](https://host/us/paceline/blob/HEAD/benchmarks/clock.py#a)"
    assert shown("[a](../../README.md) [b](../adr/)") == "[a](../index.md) [b](../adr/README.md)"
    assert shown("[a](docs/adr/README.md#b)", "", "SECURITY.md", "project/security.md") == "[a](../adr/README.md#b)"
    image = '<img src="docs/images/logo.svg">'
    assert shown(image, "", "SECURITY.md", "project/security.md") == '<img src="../images/logo.svg">'
    for text in (
        "[a](exit-codes.md#data)",
        "`[c](../../README.md)`",
        "[d](https://e.f/g.py)",
        "[h](#i)",
        "[j](nothing.md)",
    ):
        assert shown(text) == text
    block = "```sh\n[k](../../README.md)\n```\n"
    assert shown(f"<!-- test: dry-run -->\n{block}") == block


def test_a_folder_of_the_navigation_is_its_pages(pages):
    (reference,) = pages.with_folders([{"Command line": "reference/cli/"}, "index.md"])[:1]
    first, second, *others = reference["Command line"]
    assert (first, second) == ("reference/cli/README.md", "reference/cli/train.md")
    assert "reference/cli/data.md" in others
    assert len(others) == len(set(others))


def test_a_quote_with_a_mark_is_a_note(pages):
    noted = pages.with_notes("<blockquote>\n<p>[!WARNING]\nA</p>\n</blockquote>\n<blockquote>\n<p>B</p>\n</blockquote>")
    assert noted.startswith(
        '<blockquote class="admonition warning">\n<p class="admonition-title">Warning</p>\n<p>A</p>'
    )
    assert noted.endswith("<blockquote>\n<p>B</p>\n</blockquote>")


def test_a_list_may_follow_a_paragraph(pages):
    assert pages.with_lists_apart("a\n- b\n- c\n  d\n- e") == "a\n\n- b\n- c\n  d\n- e"
    assert pages.with_lists_apart("- a\n\n  b\n- c") == "- a\n\n  b\n\n- c"
    assert pages.with_lists_apart("```\na\n- b\n```\nc") == "```\na\n- b\n```\nc"


def leave_search_out(page, site):
    """Give the pages that are opened from now on an index of one document: each of them indexes the whole site."""
    index = json.loads((site / "search" / "search_index.json").read_text())
    index["docs"] = index["docs"][:1]
    page.route("**/search/search_index.json", lambda route: route.fulfill(json=index))


def test_pages_scroll_only_vertically_and_contact_no_other_host(opened, address, site):
    page, requests, messages = opened(address)
    leave_search_out(page, site)
    for name in KINDS:
        page.set_viewport_size({"width": DESKTOP, "height": 900})
        page.goto(address + name)
        assert page.title().endswith("paceline"), name
        for width in (DESKTOP, PHONE):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") == width, (name, width)
        loose = "all => all.filter((each) => !each.closest('.md-typeset__scrollwrap, .highlight')).length"
        assert page.eval_on_selector_all("article table", loose) == 0, name
    assert len(requests) > len(KINDS)
    assert [url for url in requests if not url.startswith((address, "data:"))] == []
    assert messages == []


def test_colours_follow_the_colour_scheme(opened, address):
    grounds = []
    for theme in ("light", "dark"):
        page, *_ = opened(address, theme=theme)
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        grounds.append(sum(map(int, re.findall(r"\d+", ground)[:3])))
    assert grounds[0] > 700 > 150 > grounds[1]


@pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.long)])
def test_pages_have_no_barriers_for_assistive_technology(opened, address, site, barriers, turn):
    """Each page is shown in one of the views, and in the other one by `make test-long`."""
    for place, (width, theme) in enumerate(VIEWS):
        page, *_ = opened(address, width, theme)
        leave_search_out(page, site)
        for name in ACCESSIBLE[(place + turn) % 2 :: 2]:
            page.goto(address + name)
            assert barriers(page) == [], (name, width, theme)


def test_search_results_and_the_menu_of_a_phone_have_no_barriers(opened, address, barriers):
    page, *_ = opened(address)
    query = page.locator("[data-md-component=search-query]")
    query.click()
    page.locator(".md-search-result__meta", has_text="Type to start").wait_for(timeout=20_000)
    query.press_sequentially("huffman")
    page.locator(".md-search-result__item", has_text="Huffman tables").first.wait_for(timeout=20_000)
    assert barriers(page) == []
    page, *_ = opened(address, PHONE, "dark")
    page.locator(".md-header label[for=__drawer]").click()
    page.locator(".md-nav--primary").get_by_text("Get started").first.wait_for()
    assert barriers(page) == []


@pytest.mark.parametrize("kind", ["from a server", "from a disk"])
def test_search_works_without_a_network(opened, address, site, kind):
    page, requests, messages = opened(address if kind == "from a server" else (site / "index.html").as_uri())
    query = page.locator("[data-md-component=search-query]")
    query.click()
    page.locator(".md-search-result__meta", has_text="Type to start").wait_for(timeout=20_000)
    query.press_sequentially("huffman")
    page.locator(".md-search-result__item", has_text="Huffman tables").first.wait_for(timeout=20_000)
    assert [url for url in requests if not url.startswith((address, "file:", "data:", "about:", "blob:"))] == []
    assert messages == []


def test_code_has_a_copy_button(opened, address):
    page, *_ = opened(f"{address}how-to/slurm.html")
    assert page.locator(".md-clipboard, .md-code__button").count() > 5
