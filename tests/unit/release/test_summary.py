"""The summary of all parts of the tests: what it counts, and where it says that they have failed."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[3] / ".ci" / "tests.py"
PASSED, SKIPPED = "<testcase classname='a' name='passes'/>", "<testcase classname='a' name='s'><skipped/></testcase>"
FAILED = "<testcase classname='a.b' name='fails'><failure/></testcase>"
ERROR = "<testcase classname='a.b' name='breaks'><error/></testcase>"


@pytest.fixture
def summary(tmp_path: Path):
    """Return a function from the cases of each part to the exit code of the program, and the lines it prints."""

    def summarize(
        wanted: tuple[str, ...] = ("units", "pairs", "rest"), **parts: tuple[str, ...]
    ) -> tuple[int, list[str]]:
        for name, cases in parts.items():
            counts = {"failures": FAILED, "errors": ERROR, "skipped": SKIPPED}
            attributes = " ".join(f"{count}='{cases.count(case)}'" for count, case in counts.items())
            suite = f"<testsuite tests='{len(cases)}' {attributes} time='1.5'>{''.join(cases)}</testsuite>"
            (tmp_path / f"{name}.xml").write_text(f"<testsuites>{suite}</testsuites>")
        ended = subprocess.run([sys.executable, PROGRAM, tmp_path, *wanted], capture_output=True, text=True, timeout=60)
        assert ended.stderr == ""
        return ended.returncode, ended.stdout.splitlines()

    return summarize


def test_all_parts_are_added_up(summary) -> None:
    assert summary(units=(PASSED, PASSED), pairs=(PASSED,), rest=(PASSED, SKIPPED)) == (
        0,
        ["===== units, pairs, rest: 4 passed, 1 skipped in 4.50s ====="],
    )


def test_what_has_failed_is_named(summary) -> None:
    assert summary(units=(PASSED, FAILED), pairs=(PASSED,), rest=(ERROR,)) == (
        1,
        ["FAILED a.b::fails", "FAILED a.b::breaks", "===== units, pairs, rest: 2 failed, 2 passed in 4.50s ====="],
    )


@pytest.mark.parametrize("cases", [(SKIPPED, SKIPPED), ()])
def test_a_part_of_which_no_test_has_run_is_a_failure(summary, cases: tuple[str, ...]) -> None:
    code, lines = summary(units=(PASSED,), pairs=(PASSED,), rest=cases)
    assert code == 1
    assert lines[0] == f"error: the part 'rest' of the tests ran none: {len(cases)} were skipped"
    assert len(lines) == 2


@pytest.mark.parametrize("missing", ["units", "pairs", "rest"])
def test_a_part_that_is_not_there_is_a_failure(summary, missing: str) -> None:
    present = {name: (PASSED,) for name in ("units", "pairs", "rest") if name != missing}
    code, lines = summary(**present)
    assert (code, lines[0]) == (1, f"error: the part '{missing}' of the tests did not finish")
