"""Every public name has a docstring that says shapes, types, units and errors.

What is public is what `docs/reference/python/` shows: its lines `::: NAME`. The source is read and not imported.
Tensors, numbers and errors are found by annotations and by `raise`, of a function and of the private ones of its file
that it calls. What a public function of ours raises further down is for its own docstring.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "reference" / "python"
ARRAYS = {"Tensor", "NDArray", "ndarray"}
SHAPE = re.compile(r"\[[\w., ]+\]")
DTYPE = re.compile(r"\b(u?int(8|16|32|64)|b?float(16|32|64)|bool|whole numbers|float images)\b")
UNIT_IN_NAME = re.compile(r"(_(s|ms|us|bytes|px|per_s|w|j|share)|^(bytes|share|n|images_per_s)|^num_\w+)(_\w+)?$")
UNIT_IN_WORDS = re.compile(
    r"\b(seconds?|ms|µs|bytes|pixels?|px|images/s|images|samples|batches|steps?|epochs?|shares?|"
    r"GB/s|Hz|watts|joules|0 to 1|percentiles?)\b|\[0, 1[\])]|%",
    re.IGNORECASE,
)
# Numbers that have none, or are what the field's word for them says: shares from 0 to 1, and a loss in nats.
WITHOUT_UNIT = {
    "cost",  # in the currency of a price
    "loss",
    "lr",
    "peak_lr",
    "top1",
    "top5",
    "ece",
    "mean_class_accuracy",
    "gap",
    "temperature",
    "epoch",
    "epochs",
    "mean",
    "std",
}
# Whole numbers mostly count or name something; these words tell of a size or a time.
SIZES = re.compile(r"(^|_)((?<!world_)size|height|width|resize|memory|time|wait|timeout|every|delay)($|_)")


@dataclass(frozen=True)
class Public:
    """A function or a class at dotted `path`, its tree, and the module it is defined in."""

    path: str
    node: ast.FunctionDef | ast.ClassDef
    tree: ast.Module

    @property
    def doc(self) -> str:
        return ast.get_docstring(self.node) or ""


def names_on(page: str) -> list[str]:
    """Return the names that a page shows."""
    return re.findall(r"^::: (\S+)$", page, re.MULTILINE)


def public_names() -> list[str]:
    """Return the names that the pages of the Python API show."""
    return [name for page in sorted(PAGES.glob("*.md")) for name in names_on(page.read_text())]


def found(path: str, trees: dict[str, ast.Module]) -> Public:
    """Return what `path` is the public name of, wherever it is defined."""
    module, _, name = path.rpartition(".")
    assert module in trees, f"{path}: there is no module {module}"
    body = trees[module].body
    # A module that imports on demand names its imports below `if TYPE_CHECKING`.
    for node in [*body, *(inner for each in body if isinstance(each, ast.If) for inner in each.body)]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return Public(path, node, trees[module])
        if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
            alias = next(each for each in node.names if (each.asname or each.name) == name)
            return found(f"{node.module}.{alias.name}", trees)
    raise AssertionError(f"{path}: {module} has no {name}")


def errors_of_ours(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Return each of our errors, by name, with the names of what it is, itself included."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def above(name: str) -> set[str]:
        return {name}.union(*(above(base) for base in bases.get(name, set()) if base != name))

    return {name: above(name) & bases.keys() for name in bases if "PacelineError" in above(name)}


def with_members(public: Public) -> Iterator[tuple[Public, str]]:
    """Yield `public` and its public methods, each with the docstring of its class, or nothing."""
    yield public, ""
    if isinstance(public.node, ast.ClassDef):
        for node in public.node.body:
            if isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name == "__call__"):
                yield Public(f"{public.path}.{node.name}", node, public.tree), public.doc


def faults(public: Public, class_doc: str, errors: dict[str, set[str]]) -> Iterator[str]:
    """Yield what the docstring of one name lacks."""
    if not public.doc:
        yield "has no docstring"
        return
    if any(ARRAYS & words(annotation) for _, annotation in annotated(public.node)):
        if not SHAPE.search(public.doc):
            yield "does not say the shape of an array, such as [N, C, H, W]"
        if not DTYPE.search(public.doc):
            yield "does not say the type of an array's numbers, such as uint8"
    for name, annotation in annotated(public.node):
        if has_unit(name, annotation) and not says_unit(
            name, public.doc, class_doc, is_returned=name == public.node.name
        ):
            yield f"does not say the unit of {name}"
    for name in sorted(raised(public)):
        said = errors.get(name)
        if said is not None and not any(says(public.doc, each) for each in said):
            yield f"does not say that it raises {name}"


def annotated(node: ast.FunctionDef | ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """Yield (name, annotation) of what a function takes and returns, by its own name, or of the fields of a class."""
    if isinstance(node, ast.ClassDef):
        for each in node.body:
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id[0] != "_":
                yield each.target.id, each.annotation
        return
    for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
        if argument.annotation is not None:
            yield argument.arg, argument.annotation
    if node.returns is not None:
        yield node.name, node.returns


def words(annotation: ast.expr) -> set[str]:
    """Return the names in an annotation, those in quotes too; not those of what a callable takes and returns."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return words(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.Subscript) and words(annotation.value) & {"Callable", "Literal"}:
        return words(annotation.value)
    own = {annotation.id} if isinstance(annotation, ast.Name) else set()
    own |= {annotation.attr} if isinstance(annotation, ast.Attribute) else set()
    return own.union(*(words(child) for child in ast.iter_child_nodes(annotation) if isinstance(child, ast.expr)))


def has_unit(name: str, annotation: ast.expr) -> bool:
    """Whether a number of this name is more than a number."""
    kinds = words(annotation) & {"float", "int", "Measured"}
    if not kinds or name in WITHOUT_UNIT or name.startswith("__"):
        return False
    return kinds != {"int"} or SIZES.search(name) is not None


def says_unit(name: str, doc: str, class_doc: str, *, is_returned: bool) -> bool:
    """Whether the name has its unit in it, or a sentence about it does; of what is returned, any sentence."""
    if UNIT_IN_NAME.search(name):
        return True
    about = [doc] if is_returned else [each for each in sentences(f"{doc}\n\n{class_doc}") if says(each, name)]
    return any(UNIT_IN_WORDS.search(each) for each in about)


def sentences(doc: str) -> list[str]:
    """Return the sentences of a docstring, each in one line; a semicolon ends one too."""
    return re.split(r"(?<=[.;:])\s|\n\n", doc)


def says(text: str, name: str) -> bool:
    """Whether `name` is a word of `text`."""
    return re.search(rf"\b{name}\b", text) is not None


def raised(public: Public) -> set[str]:
    """Return the names of the errors that `public` raises, itself or in private functions of its file that it calls."""
    if isinstance(public.node, ast.ClassDef):
        return set()
    scope = {node.name: node for node in ast.walk(public.tree) if isinstance(node, ast.FunctionDef)}
    return set(_raised(public.node, scope, {public.node.name}))


def _raised(node: ast.FunctionDef, scope: dict[str, ast.FunctionDef], seen: set[str]) -> Iterator[str]:
    for child in _own(node):
        if isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call):
            maker = _name(child.exc.func)
            made = scope.get(maker)
            yield maker if made is None or made.returns is None else ast.unparse(made.returns).strip("'\"")
        if isinstance(child, ast.Call):
            name = _name(child.func)
            if name.startswith("_") and name in scope and name not in seen:
                yield from _raised(scope[name], scope, seen | {name})


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is below `node`, but not what functions in it do."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.Lambda):
            yield child
            yield from _own(child)


def _name(function: ast.expr) -> str:
    """Return the last name of what is called."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


@pytest.fixture(scope="module")
def trees(modules):
    return {name: module.tree for name, module in modules.items()}


def test_every_public_docstring_has_shapes_types_units_and_errors(trees, none_of):
    names = public_names()
    assert len(names) == len(set(names)) > 30
    assert {"paceline.train", "paceline.measure.StageClock", "paceline.core.dataset.Source"} <= set(names)
    errors = errors_of_ours(trees)
    assert errors["ImageError"] == {"ImageError", "DataError", "PacelineError"}
    places, seen = [], 0
    for public in (found(name, trees) for name in names):
        for each, class_doc in with_members(public):
            seen += 1
            places += [f"{each.path} {what}" for what in faults(each, class_doc, errors)]
    none_of(places)
    assert seen > 100


def test_our_errors_are_public(trees):
    """A reader can look up whatever a docstring may name."""
    shown = {name.rpartition(".")[2] for name in public_names()}
    defined = {node.name for node in trees["paceline.core.errors"].body if isinstance(node, ast.ClassDef)}
    assert len(defined) > 5
    assert defined <= shown


def planted(source: str) -> list[str]:
    """Return the faults of the last function or class in `source`, and of its methods."""
    tree = ast.parse(source)
    ours = {"PacelineError": {"PacelineError"}, "DataError": {"DataError", "PacelineError"}}
    public = Public("planted", tree.body[-1], tree)
    return [what for each, class_doc in with_members(public) for what in faults(each, class_doc, ours)]


@pytest.mark.parametrize(
    "doc, fault",
    [
        ("", "has no docstring"),
        ("Return uint8 images.", "does not say the shape of an array, such as [N, C, H, W]"),
        ("Return images [N, C].", "does not say the type of an array's numbers, such as uint8"),
        ("Return uint8 [N, C].", None),
    ],
)
@pytest.mark.parametrize("signature", ["images: Tensor", "a: int, *, images: 'NDArray[np.uint8] | None' = None"])
def test_a_docstring_without_shape_or_type_is_found(signature, doc, fault):
    assert planted(f'def crop({signature}) -> None:\n    """{doc}"""') == ([] if fault is None else [fault])


@pytest.mark.parametrize(
    "code, fault",
    [
        ('def wait(limit: float) -> None:\n    """Wait."""', "limit"),
        ('def wait(limit: float) -> None:\n    """Wait for `limit` seconds."""', None),
        ('def wait(limit_s: float) -> None:\n    """Wait."""', None),
        ('def patience() -> float:\n    """Return how long one waits."""', "patience"),
        ('def patience_s() -> float:\n    """Return how long one waits."""', None),
        ('class Box:\n    """A box."""\n    size: int', "size"),
        ('class Box:\n    """A box of `size` pixels."""\n    size: int', None),
        ('class Box:\n    """A box."""\n    count: int', None),
        ('class Box:\n    """A box."""\n    def far(self, size: int) -> bool:\n        """Ask."""', "size"),
        (
            'class Box:\n    """A box, `size` in pixels."""\n    def far(self, size: int) -> bool:\n        """Ask."""',
            None,
        ),
    ],
)
def test_a_docstring_without_a_unit_is_found(code, fault):
    assert planted(code) == ([] if fault is None else [f"does not say the unit of {fault}"])


@pytest.mark.parametrize(
    "body",
    [
        "raise DataError('x')",
        "for _ in ():\n        raise DataError('x') from None",
        "_check()",
        "raise _error('x')",
    ],
)
def test_an_undocumented_error_is_found(body):
    beside = "def _check():\n    raise DataError('y')\ndef _error(what) -> 'DataError':\n    return DataError(what)\n"
    silent = f'{beside}def load(path: str) -> None:\n    """Load."""\n    {body}'
    assert planted(silent) == ["does not say that it raises DataError"]
    assert planted(silent.replace("Load.", "Load. Raise `DataError` for what is none.")) == []
    assert planted(silent.replace("Load.", "Load. Raise `PacelineError` for what is none.")) == []


def test_methods_are_looked_at_and_private_ones_are_not():
    code = 'class Box:\n    """A box."""\n    def {}(self) -> float:\n        """Look."""'
    assert planted(code.format("look")) == ["does not say the unit of look"]
    assert planted(code.format("_look")) == []
    assert planted(code.replace("float", "Tensor").format("__call__")) != []


def test_a_name_is_followed_to_its_definition_and_a_missing_one_is_an_error():
    trees = {"a": ast.parse("from a.b import Thing as Other"), "a.b": ast.parse("class Thing:\n    '''One.'''")}
    assert found("a.Other", trees).doc == "One."
    with pytest.raises(AssertionError, match=r"a\.b has no None"):
        found("a.b.None", trees)
    assert names_on("# A\n\n::: a.Other\n\ntext ::: b\n::: a.train\n    options:\n") == ["a.Other", "a.train"]
