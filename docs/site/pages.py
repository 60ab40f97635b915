"""Make pages of the site from the documents of the repository, which a code host shows as they are.

Documents beside `docs/`, such as the changelog, become pages; the home page takes the README's place. Links between
documents stay links; a link to anything else, a program or a result, leads to the repository, if
`project.urls.Repository` in pyproject.toml says where that is, and is the file's path otherwise. Marks for tests are
left out. Notes and warnings of code hosts (`> [!NOTE]`) become those of the theme.
"""

import posixpath
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from markdown import Extension, Markdown
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
BESIDE = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "LICENSE": "project/LICENSE.txt",
    "examples/README.md": "project/examples.md",
    "benchmarks/README.md": "project/benchmarks.md",
    "csrc/README.md": "project/native-core.md",
}
"""Documents that are not in `docs/`, and what they are called on the site."""

_PARTS = re.compile(
    r"""
      ^[ ]*(?P<fence>`{3,})[^\n]*\n.*?^[ ]*(?P=fence)[ ]*$              # a block of code,
    | (?P<ticks>`+)(?!`)(?:(?!\n[ ]*\n).)+?(?<!`)(?P=ticks)(?!`)        # and code in a line: as they are
    | ^[ ]*<!--[ ]test:.*?-->\n                                         # a mark for tests
    | \[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<link>[^()\s]+)\)     # a link or an image
    | (?P<tag><(?:img|a)\s[^>]*>)                                       # the same in HTML
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)

_NAMES = re.compile(
    r'<pre.*?</pre>|<code>(?P<code>[^<]+)</code>|(?P<opened><span class="[^"]*doc-object-name[^"]*">)(?P<name>[^<]+)',
    re.DOTALL,
)
_SEARCH_BOOSTS = {
    "help": 3,
    "how-to": 3,
    "tutorial": 2,
    "explanation": 2,
    "project": 0.5,
    "promises.md": 0.2,
    "measured.md": 0.2,
    "limits.md": 1,
    "coming-from": 1,
    "reference": 1,
    "reference/python": 0.5,
}
"""How much a hit of the search counts on a page, by the page's folder or first folder."""
_UNSEARCHED_SECTIONS = {"reference/models.md": "table"}
"""Sections without hits, by page and anchor.

From names that differ in digits, lunr's index makes words that no page has, and then fails for all that begin so.
"""
_SHORT = 24
"""Letters of code that fit into a line of a phone, and are kept in one line."""


def on_config(config: Any) -> None:
    """Fill in the folders of the navigation; read lists as code hosts do, with two spaces of indentation."""
    config.nav = with_folders(config.nav)
    config.markdown_extensions.append(_Indentation())


def with_folders(nav: Any) -> Any:
    """Return the navigation with the pages of each folder, such as `reference/cli/`, in place of its name.

    The first is the folder's README, and the others follow in the order in which it links to them.
    """
    match nav:
        case list():
            return [with_folders(each) for each in nav]
        case dict():
            return {title: with_folders(each) for title, each in nav.items()}
        case str() if nav.endswith("/"):
            overview = (ROOT / "docs" / nav / "README.md").read_text(encoding="utf-8")
            linked = dict.fromkeys(re.findall(r"\]\(([\w-]+\.md)[#)]", overview))
            return [f"{nav}{name}" for name in ("README.md", *linked)]
    return nav


def on_files(files: Files, config: Any) -> None:
    """Add the documents that are not in `docs/`."""
    for source, page in BESIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return the text of a page with the links of the site."""
    if page.is_homepage or page.file.src_uri == "gallery/README.md":
        page.meta["hide"] = ["navigation", "toc"]  # it has no pages beside it
    page.meta.setdefault("search", {}).update(_search_settings(page.file.src_uri))
    page_path = Path(page.file.abs_src_path).relative_to(ROOT).as_posix()

    def is_page(path: str) -> bool:
        file = files.get_file_from_path(path)
        return file is not None and not file.inclusion.is_excluded()

    return with_lists_apart(without_escapes(shown(markdown, page_path, page.file.src_uri, is_page, repository())))


def _search_settings(uri: str) -> dict[str, Any]:
    """Return how the search treats a page: pages for users come first, records of decisions not at all."""
    folder = uri.partition("/")[0]
    if folder == "adr" or uri == "project/changelog.md":
        return {"exclude": True}
    return {"boost": _SEARCH_BOOSTS.get(posixpath.dirname(uri), _SEARCH_BOOSTS.get(folder, 1))}


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Keep short code in one line; let a long name break, where there is little room, behind `_`, `.`, `/` and `:`.

    Leave sections with nothing to find out of the search.
    """
    anchor = f'id="{_UNSEARCHED_SECTIONS.get(page.file.src_uri)}"'
    html = html.replace(anchor, f"{anchor} data-search-exclude", 1)

    def laid_out(found: re.Match[str]) -> str:
        if found["name"]:
            return found["opened"] + _breaking(found["name"])
        if not found["code"]:
            return found[0]
        if len(found["code"]) <= _SHORT:
            return f'<code class="short">{found["code"]}</code>'
        return f"<code>{_breaking(found['code'])}</code>"

    return _NAMES.sub(laid_out, with_notes(html))


def with_notes(html: str) -> str:
    """Return the HTML of a page with the quotes that begin with `[!NOTE]` or the like as the theme's notes."""

    def titled(found: re.Match[str]) -> str:
        kind = found[1].lower()
        return f'<blockquote class="admonition {kind}">\n<p class="admonition-title">{kind.title()}</p>\n<p>'

    return re.sub(r"<blockquote>\s*<p>\[!(NOTE|TIP|WARNING)\]\s*", titled, html)


def _breaking(name: str) -> str:
    return re.sub(r"(?<=[_./:])(?=\w)", "<wbr>", name)


def repository() -> str:
    """Return where the repository is, or nothing where that is not said."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    url: str = project.get("urls", {}).get("Repository", "")
    return url.rstrip("/")


def shown(markdown: str, page_path: str, uri: str, is_page: Callable[[str], bool], repository: str) -> str:
    """Return the text of page `uri` of the site, from the document at `page_path` of the repository.

    `is_page` says whether a path below `docs/` is on the site. Without a `repository` files there are named.
    """

    def placed(found: re.Match[str]) -> str:
        return f'{found[1]}="{_on_site(_target(found[2], page_path, is_page), uri) or found[2]}"'

    def replaced(found: re.Match[str]) -> str:
        if found["link"]:
            target = _target(found["link"], page_path, is_page)
            if target and not target.page and not repository:
                return _path(found["text"], target.path, in_brackets=markdown[found.start() - 1 : found.start()] == "(")
            return _link(found["text"], target, uri, repository) or found[0]
        if found["tag"]:
            return re.sub(r'(src|href)="([^"]+)"', placed, found["tag"]).replace("`", "&#96;")  # no code in an `alt`
        return "" if found[0].lstrip().startswith("<!--") else found[0]

    return _PARTS.sub(replaced, markdown)


def without_escapes(markdown: str) -> str:
    """Return the text with plain bars in the code of tables: Python-Markdown, other than code hosts, shows `\\|`."""

    def replaced(found: re.Match[str]) -> str:
        line = markdown[markdown.rfind("\n", 0, found.start()) + 1 : found.start()]
        is_in_table = found["ticks"] and line.lstrip().startswith("|")
        return found[0].replace(r"\|", "|") if is_in_table else found[0]

    return _PARTS.sub(replaced, markdown)


def with_lists_apart(markdown: str) -> str:
    """Return the text with a blank line before a list, or the next item of one, that directly follows a paragraph."""
    lines: list[str] = []
    is_code = is_list = False
    for line in markdown.split("\n"):
        is_item = re.match(r" *[-*+] ", line) is not None
        is_new = not lines or not lines[-1].strip()
        if is_item and not (is_code or is_new or is_list):
            lines.append("")
        is_list = is_item or (is_list and not is_new)
        is_code = is_code != line.lstrip().startswith("```")
        lines.append(line)
    return "\n".join(lines)


class _Target:
    """What a link leads to: `path` in the repository, `page` of the site if it is one, and the `anchor` on it."""

    def __init__(self, path: str, page: str, anchor: str) -> None:
        self.path, self.page, self.anchor = path, page, anchor


def _target(link: str, page_path: str, is_page: Callable[[str], bool]) -> _Target | None:
    """Return what a link on page `page_path` leads to; None for another host, this page, or what is not there."""
    name, sign, anchor = link.partition("#")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page_path), name))
    if not name or ":" in name or not (ROOT / path).exists():
        return None
    if (ROOT / path / "README.md").exists():
        path = f"{path}/README.md"
    if path == "README.md":  # the home page says the same
        return _Target(path, "index.md", "")
    below = path.removeprefix("docs/")
    page = BESIDE.get(path, below if below != path and is_page(below) else "")
    return _Target(path, page, sign + anchor)


def _on_site(target: _Target | None, uri: str) -> str:
    """Return the link from page `uri` to `target`, or nothing where that is not on the site."""
    if target is None or not target.page:
        return ""
    return posixpath.relpath(target.page, posixpath.dirname(uri) or ".") + target.anchor


def _link(text: str, target: _Target | None, uri: str, repository: str) -> str:
    """Return a link in Markdown, to a page or into the repository; nothing where it is to stay as it is."""
    if target is None:
        return ""
    return f"[{text}]({_on_site(target, uri) or f'{repository}/blob/HEAD/{target.path}{target.anchor}'})"


def _path(text: str, path: str, *, in_brackets: bool) -> str:
    """Return what stands for a link to a file of a repository that nobody knows the place of: the file's path."""
    if path.endswith(text.strip("`")):
        return f"`{path}`"
    return f"{text}, `{path}`" if in_brackets else f"{text} (`{path}`)"


class _Indentation(Extension):
    """Have two spaces be a level of indentation, where Markdown has four."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  the name that Markdown calls
        """Set the width, and make what has been made with another one anew: it has patterns of so many spaces."""
        md.tab_length = 2
        for each in md.parser.blockprocessors:
            if type(each).__module__ == "markdown.blockprocessors":
                each.__init__(md.parser)
