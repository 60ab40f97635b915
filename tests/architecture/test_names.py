"""Names are the field's words: no identifier holds a word that a PyTorch engineer would have to look up.

`docs/project/names.md` has the words to use instead.
"""

import ast
import re
from collections.abc import Iterator

# Everyday words that stood for a technical term, and terms that were ours alone. `names.md` says what replaced each.
BANNED = frozenset(
    """
    told tell tells telling said say says asked asks ask words here there aside whatever somebody nobody alike unlike
    leave leaves meet met held judge judged judges settle settled lay laying mend mended thin lenient
    fight duel books council journal whereabouts beginning begun hands laps tally bus crew trail lease
    """.split()  # noqa: SIM905
)
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


def identifiers(module) -> Iterator[tuple[int, str]]:
    """Yield each identifier that a module defines, with its line."""
    yield 1, module.name.rpartition(".")[2]
    for node in ast.walk(module.tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name


def banned_words(name: str) -> set[str]:
    """Return the banned words in an identifier, however it is written: `what_is_told`, `_ToldOnce`."""
    return {word.lower() for word in WORD.findall(name)} & BANNED


def test_no_identifier_holds_a_banned_word(modules, none_of):
    wrong = [
        module.at(line, f"{name}: {', '.join(sorted(words))}")
        for module in modules.values()
        for line, name in identifiers(module)
        if (words := banned_words(name))
    ]
    none_of(wrong)


def test_a_banned_word_is_found_in_any_spelling():
    assert banned_words("what_is_told") == {"told"}
    assert banned_words("_ToldOnce") == {"told"}
    assert banned_words("TRAIL_S") == {"trail"}
    assert banned_words("business_words") == {"words"}
    assert banned_words("attribute_leaf") == set()
