"""Tests of the parser of blocks, marks and commands."""

from pathlib import Path

import pytest

from .commands import Block, Mark, MarkError, how_tested, read_blocks, read_commands, read_mark, typed_words

PAGE = Path("page.md")
TEXT = """\
Words.

```sh
paceline train
```

<!-- test: with train.steps=2 -->
```sh
paceline train
```

- a list

  <!-- test: needs gpu -->
  ```sh
  nsys profile paceline train
    indented
  ```

```text
no command
```
"""


def words(text: str) -> list[list[str]]:
    return [[*command.words] for command in read_commands(text)]


def test_blocks_are_read_in_order_with_marks_and_without_indentation(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(TEXT)
    found = [(block.line, block.language, block.mark, block.text) for block in read_blocks(page)]
    assert found == [
        (4, "sh", Mark(), "paceline train\n"),
        (9, "sh", Mark("with", "train.steps=2"), "paceline train\n"),
        (16, "sh", Mark("needs", "gpu"), "nsys profile paceline train\n  indented\n"),
        (21, "text", Mark(), "no command\n"),
    ]


def test_a_mark_must_be_in_the_line_above_its_block() -> None:
    assert read_mark("<!-- test: dry-run -->\n", PAGE) == Mark("dry-run")
    assert read_mark("<!-- test: dry-run -->\n\n", PAGE) == Mark()


@pytest.mark.parametrize(
    "mark", ["later", "needs", "needs luck", "with", "dry-run soon", "shown by me", "withtrain.steps=2", "file"]
)
def test_an_unknown_mark_is_an_error(mark: str) -> None:
    with pytest.raises(MarkError, match=mark):
        read_mark(f"<!-- test: {mark} -->\n", PAGE)


def test_commands_are_separated_like_in_a_shell() -> None:
    assert words("a b && c; d | e - # f\ng \\\n  h\n") == [["a", "b"], ["c"], ["d"], ["e", "-"], ["g", "h"]]


def test_assignments_and_redirections_are_not_part_of_a_command() -> None:
    assert words("RANK=0 SIZE=2 paceline train a=1 > out 2>&1 --json < in") == [["paceline", "train", "a=1", "--json"]]
    assert words("paceline predict --top 2 > out") == [["paceline", "predict", "--top", "2"]]
    assert words("export A=1\nA=1\n") == [["export", "A=1"]]


def test_quoted_operators_are_not_interpreted() -> None:
    assert words("paceline train 'log.sinks=[wandb, mlflow]' \"a|b\"") == [
        ["paceline", "train", "log.sinks=[wandb, mlflow]", "a|b"]
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("paceline train a=1", ("train", "a=1")),
        ("torchrun --nproc-per-node 2 -m paceline train", ("train",)),
        ("srun paceline doctor", ("doctor",)),
        ("paceline", ()),
        ("ls runs", None),
    ],
)
def test_paceline_is_found_behind_any_launcher(line: str, expected: tuple[str, ...] | None) -> None:
    (command,) = read_commands(line)
    assert command.paceline == expected


@pytest.mark.parametrize(
    ("line", "mark", "typed"),
    [
        (
            "paceline train",
            Mark("with", "train.steps=2 --ranks 1"),
            "paceline train train.steps=2 --ranks 1",
        ),
        (
            "paceline train train.epochs=3 seed=1",
            Mark("with", "train.steps=2"),
            "paceline train seed=1 train.steps=2",
        ),
        (
            "paceline train seed=2 --ranks 2",
            Mark("with", "seed=1"),
            "paceline train --ranks 2 seed=1",
        ),
        ("paceline tune", Mark("with", "--budget=4 seed=1"), "paceline tune --budget=4 seed=1"),
        ("paceline scale", Mark("with", "--budget=4 seed=1"), "paceline scale seed=1"),
        ("paceline report runs/a", Mark("with", "train.steps=2"), "paceline report runs/a"),
        ("paceline predict-scaling runs/a", Mark("with", "train.steps=2"), "paceline predict-scaling runs/a"),
        ("paceline train", Mark("dry-run"), "paceline train --dry-run"),
        ("paceline train --dry-run", Mark("dry-run"), "paceline train --dry-run"),
        ("paceline submit --wait", Mark("dry-run"), "paceline submit --dry-run"),
        ("paceline recipes", Mark("dry-run"), "paceline recipes"),
        ("paceline train", Mark(), "paceline train"),
        ("paceline", Mark("with", "train.steps=2"), "paceline"),
        ("python -c pass", Mark("with", "train.steps=2"), "python -c pass"),
    ],
)
def test_arguments_of_a_mark_are_added_to_matching_commands(line: str, mark: Mark, typed: str) -> None:
    assert typed_words(line.split(), mark) == typed.split()


@pytest.mark.parametrize(
    ("line", "mark", "how"),
    [
        ("paceline train", Mark(), "executed"),
        ("paceline train", Mark("with", "train.steps=2"), "executed"),
        ("paceline train", Mark("dry-run"), "dry-run"),
        ("paceline report runs/a", Mark("dry-run"), "executed"),
        ("srun paceline train", Mark(), "needs cluster"),
        ("nsys profile paceline train", Mark("with", "a=1"), "needs gpu"),
        ("paceline train", Mark("needs", "docker"), "needs docker"),
        ("paceline train", Mark("shown by", "tests/a.py::test_b"), "shown by a test"),
    ],
)
def test_the_test_of_a_command_follows_from_its_mark_and_program(line: str, mark: Mark, how: str) -> None:
    (command,) = read_commands(line)
    assert how_tested(Block(PAGE, 1, "sh", line, mark), command) == how
