"""The source code as syntax trees: every module of paceline, what it imports and what it names."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "paceline"


@dataclass(frozen=True)
class Import:
    """One imported thing: dotted `target`, `line`, and whether it is imported when the module is (`at_once`)."""

    target: str
    line: int
    at_once: bool


@dataclass(frozen=True)
class Module:
    """A source file: its dotted `name`, its `path` below the package, its text and its tree."""

    name: str
    path: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The first folder below paceline, or an empty string beside it."""
        return self.path.partition("/")[0] if "/" in self.path else ""

    def at(self, line: int, what: str) -> str:
        """Return `file:line: what`, as an editor can follow it."""
        return f"src/paceline/{self.path}:{line}: {what}"

    @cached_property
    def imports(self) -> list[Import]:
        """Every import, inside functions too."""
        return list(_imports(self.tree, at_once=True))

    @cached_property
    def names(self) -> list[tuple[str, ast.expr]]:
        """Each name that is read, dotted and as it was imported: `np.load` is `numpy.load`."""
        known = dict(_aliases(self.tree))
        loaded = [
            (_dotted(node, known), node)
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load)
        ]
        return [(dotted, node) for dotted, node in loaded if dotted]


def _imports(node: ast.AST, *, at_once: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                yield from (Import(alias.name, child.lineno, at_once) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                assert level == 0, f"line {child.lineno}: relative imports would escape these tests"
                yield from (Import(f"{module}.{alias.name}", child.lineno, at_once) for alias in names)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from _imports(child, at_once=False)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from _imports(child, at_once=False)
            case ast.Call(func=ast.Name(id="__import__") | ast.Attribute(attr="import_module"), args=[first, *_]):
                target = first.value if isinstance(first, ast.Constant) else "?"
                yield Import(str(target), child.lineno, at_once)
                yield from _imports(child, at_once=at_once)
            case _:
                yield from _imports(child, at_once=at_once)


def _aliases(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _dotted(node: ast.expr, known: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return known.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value, known)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _read(path: Path) -> Module:
    relative = path.relative_to(PACKAGE)
    parts = [part for part in relative.with_suffix("").parts if part != "__init__"]
    text = path.read_text(encoding="utf-8")
    return Module(".".join(["paceline", *parts]), relative.as_posix(), text, ast.parse(text))


@pytest.fixture(scope="session")
def none_of():
    """Return a function that fails with the whole list of places it is given, one a line, if there are any."""

    def check(places: list[str]) -> None:
        if places:
            pytest.fail("\n".join(["", *places]), pytrace=False)

    return check


@pytest.fixture(scope="session")
def modules() -> dict[str, Module]:
    """Return every module of the package by its dotted name."""
    found = {module.name: module for module in map(_read, sorted(PACKAGE.rglob("*.py")))}
    assert len(found) > 60
    return found


@pytest.fixture(scope="session")
def edges(modules) -> dict[str, list[tuple[str, Import]]]:
    """Return, for each module, the modules of ours that it imports, and how."""

    def target_of(each: Import) -> str | None:
        owner = each.target.rpartition(".")[0]
        return next((name for name in (each.target, owner) if name in modules), None)

    found = {
        name: [(target, each) for each in module.imports if (target := target_of(each))]
        for name, module in modules.items()
    }
    assert sum(len(targets) for targets in found.values()) > 200
    return found
