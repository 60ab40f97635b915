"""Progress is printed as lines to a file, and on a terminal with a status line."""

import io

from paceline.cli.progress_output import progress_output
from paceline.lab.trial import Trial


class Terminal(io.StringIO):
    """A terminal that remembers what it was shown."""

    def isatty(self) -> bool:
        return True


def test_a_file_gets_the_lines_alone():
    out = io.StringIO()
    with progress_output(out, 2) as (begins, print_it):
        begins(Trial("bf16"), 1)
        print_it("bf16: 100 images/s")
    assert out.getvalue() == "bf16: 100 images/s\n"


def test_a_terminal_shows_which_run_of_how_many_it_is(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with progress_output(out, 2) as (begins, print_it):
        begins(Trial("base"), 1)
        begins(Trial("bf16"), 1)
        print_it("done")
    assert "bf16 (run 2 of 2)" in out.getvalue()


def test_more_runs_than_were_foreseen_are_no_error(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with progress_output(out) as (begins, _):
        for _ in range(3):
            begins(Trial("bf16"), 1)
    assert "bf16 (run 3)" in out.getvalue()
