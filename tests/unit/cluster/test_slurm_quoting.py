"""Text stays text in a job script, whatever is in it."""

import re

import pytest

from paceline.cluster.slurm import comment, directive, shell_command, shell_word
from paceline.core.errors import RecipeError


def test_plain_arguments_are_not_quoted():
    assert shell_word("optim.lr=0.4") == "optim.lr=0.4"
    assert shell_word("/runs/a b") == "'/runs/a b'"
    assert directive("time", "02:00:00") == "#SBATCH --time=02:00:00"
    assert comment("paceline train") == "# paceline train"


def test_an_argument_with_a_newline_is_on_one_line():
    assert shell_word("a\n#SBATCH --nodes=9") == r"$'a\x0a#SBATCH --nodes=9'"
    assert shell_word("it's\t\\") == r"$'it\'s\x09\\'"


def test_bytes_of_a_name_that_are_no_text_stay_those_bytes():
    assert shell_word("caf\udce9\n") == r"$'caf\xe9\x0a'"
    assert shell_word("\u202e") == r"$'\xe2\x80\xae'"


def test_a_directive_quotes_spaces_and_hashes():
    assert directive("job-name", 'a "b" #c\\') == '#SBATCH --job-name="a \\"b\\" #c\\\\"'
    assert directive("job-name", "") == '#SBATCH --job-name=""'


def test_a_directive_refuses_line_breaks():
    with pytest.raises(RecipeError, match=re.escape(r"--chdir: '/a\n#SBATCH --nodes=9' has a character")):
        directive("chdir", "/a\n#SBATCH --nodes=9")


def test_a_comment_escapes_line_breaks():
    assert comment("a\n#SBATCH --nodes=9\x1b[2J") == r"# a\n#SBATCH --nodes=9\x1b[2J"


def test_a_long_command_breaks_between_groups():
    command = shell_command([["srun"], ["-x", "y" * 60], ["--run-dir", "z" * 50], ["--resume"]])
    assert command == f"srun -x {'y' * 60} \\\n    --run-dir {'z' * 50} --resume"
