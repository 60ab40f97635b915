"""Parse the documentation: code blocks of pages, the marks above them, and the commands in them.

These are pure functions of text; nothing is executed here. A mark is an HTML comment in the line above a block,
invisible to readers: `<!-- test: KIND ... -->`, one of `MARKS`. A block without a mark is executed as it is.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDS = ("gpu", "cluster", "network", "docker", "time")
MARKS = {
    "with": "each paceline command that trains or measures has these words, in place of its own of the same fields",
    "dry-run": "--dry-run is added to each paceline command that has it",
    "needs": f"not executed, for it needs one of {', '.join(NEEDS)}",
    "shown by": "executed by the test that is named, as tests/PATH.py::NAME",
    "fragment": "a part of a program, which alone is none",
    "file": "the block is the file of that name, for the commands below it",
    "fails": "ends with this exit code, which the page is about",
}
PROGRAMS = {
    **dict.fromkeys(("srun", "salloc", "sbatch", "scontrol", "squeue", "kubectl", "ssh"), "cluster"),
    **dict.fromkeys(("pip", "curl", "uvicorn"), "network"),
    **dict.fromkeys(("nsys", "nvidia-smi"), "gpu"),
    "docker": "docker",
    "make": "time",
}
"""Requirements of programs that no test environment has."""
MEASURING = ("train", "check", "profile", "ladder", "tune", "lr-find", "scale", "batch-study", "cv", "bench")
"""Commands to which the arguments of a `with` mark are added."""
VERB_OF_OPTION = {"--budget": "tune"}
"""Options of a `with` mark that only one verb has: `--budget=4`."""
MEASURES_NOTHING = ("--list", "--help")
DRY = ("train", "submit")
LENGTHS = ("train.epochs", "train.steps")
_FENCE = re.compile(r"^( *)```(\w*)[^\n`]*\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"^ *<!-- test: (.+?) -->\n\Z", re.MULTILINE)
_ENDS = frozenset(("|", "||", "&&", ";", "&", "(", ")", ";;"))
_REDIRECTION = re.compile(r"[<>]+&?")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)


class MarkError(ValueError):
    """A mark of unknown kind or with a wrong argument."""


@dataclass(frozen=True)
class Mark:
    """One of `MARKS` and its argument; both are empty for a block without a mark."""

    kind: str = ""
    argument: str = ""

    @property
    def is_executed(self) -> bool:
        """Whether the block is executed as commands or a program, at least as a dry run."""
        return self.kind in ("", "with", "dry-run", "fails")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its language, the number of its first line, its text without indentation."""

    page: Path
    line: int
    language: str
    text: str
    mark: Mark

    @property
    def place(self) -> str:
        """The block's location as file:line."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """The words of one command, without variable assignments before it and without redirections."""

    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """The program that the shell starts."""
        return self.words[0]

    @property
    def paceline(self) -> tuple[str, ...] | None:
        """The words after `paceline`, with any launcher; None without `paceline`."""
        place = next((place for place, word in enumerate(self.words) if word == "paceline"), None)
        return None if place is None else self.words[place + 1 :]

    @property
    def needs(self) -> str:
        """The requirement of the program that no test environment has, or an empty string."""
        return PROGRAMS.get(self.program, "")


def pages() -> list[Path]:
    """Return every page with commands for readers, without decision records and the changelog."""
    match = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")]
    match += [ROOT / name / "README.md" for name in ("examples", "benchmarks", "csrc")]
    match += [page for page in (ROOT / "docs").rglob("*.md") if "adr" not in page.parts]
    return sorted(match)


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of `page`. Raises `MarkError` for an unknown mark."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, match.start(3)) + 1,
            match[2],
            re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE),
            read_mark(text[: match.start()], page),
        )
        for match in _FENCE.finditer(text)
    ]


def read_mark(before: str, page: Path) -> Mark:
    """Return the mark in the last line of the text `before` a block. Raises `MarkError` if it is unknown."""
    match = _MARK.search(before)
    if match is None:
        return Mark()
    kind = next((kind for kind in MARKS if re.match(rf"{kind}(?: |$)", match[1])), None)
    if kind is None:
        raise MarkError(f"{page.name}: {match[1]!r} is no mark (use {', '.join(MARKS)})")
    argument = match[1][len(kind) :].strip()
    if (argument == "") != (kind in ("dry-run", "fragment")):
        raise MarkError(f"{page.name}: {match[1]!r} says {'nothing' if argument == '' else 'too much'}")
    if kind == "needs" and argument not in NEEDS:
        raise MarkError(f"{page.name}: {match[1]!r} needs none of {', '.join(NEEDS)}")
    if kind == "shown by" and not re.fullmatch(r"tests/[\w/]+\.py::test_\w+", argument):
        raise MarkError(f"{page.name}: {match[1]!r} names no test (write tests/PATH.py::NAME)")
    return Mark(kind, argument)


def read_commands(text: str) -> Iterator[Command]:
    """Yield the commands in shell text, line by line, each from its program on."""
    for line in text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*_split(line), ";"]:
            if word not in _ENDS:
                words.append(word)
                continue
            command = [*_without_redirections(words)]
            words = []
            if command:
                yield Command(tuple(command))


def _split(line: str) -> list[str]:
    lexer = shlex.shlex(re.sub(r"(?<=\s)\d(?=>)", "", line), posix=True, punctuation_chars=True)  # the 2 of `2>&1`
    lexer.whitespace_split = True
    return list(lexer)


def _without_redirections(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command, without assignments before it and redirections."""
    is_before, is_target = True, False
    for word in words:
        if is_target or _REDIRECTION.fullmatch(word):
            is_target = not is_target
            continue
        is_before = is_before and _ASSIGNMENT.fullmatch(word) is not None
        if not is_before:
            yield word


def typed_words(words: Sequence[str], mark: Mark) -> list[str]:
    """Return a program's `words`, which may contain `paceline VERB`, with the additions of `mark`.

    Fields that the mark sets are removed from the words, and so is a length if the mark sets another one.
    """
    paceline_words = Command(tuple(words)).paceline or ("",)
    verb = next((word for word in paceline_words if word != "data"), "")
    if mark.kind == "with" and verb in MEASURING and not set(MEASURES_NOTHING) & set(paceline_words):
        added = [
            word for word in shlex.split(mark.argument) if VERB_OF_OPTION.get(word.partition("=")[0], verb) == verb
        ]
        fields = {word.partition("=")[0] for word in added if not word.startswith("-") and "=" in word}
        fields |= {name for name in LENGTHS if fields & set(LENGTHS)}
        return [*(word for word in words if word.partition("=")[0] not in fields), *added]
    if mark.kind == "dry-run" and verb in DRY and "--dry-run" not in paceline_words:
        place = words.index(verb) + 1  # arguments after `--` are for another verb
        return [*words[:place], "--dry-run", *(word for word in words[place:] if word != "--wait")]
    return [*words]


def how_tested(block: Block, command: Command) -> str:
    """Return how a command of `block` is tested: executed, dry-run, by a test, as a file, or what it needs."""
    match block.mark.kind:
        case "needs":
            return f"needs {block.mark.argument}"
        case "shown by":
            return "shown by a test"
        case "file":
            return "a file"
        case "dry-run" if "--dry-run" in typed_words(command.words, block.mark):
            return "dry-run"
    return f"needs {command.needs}" if command.needs else "executed"
