"""One summary of all parts of the tests, from their JUnit files: `python .ci/tests.py build/tests/*.xml`."""

import sys
from pathlib import Path
from xml.etree import ElementTree

PARTS = ("units", "rest")


def main() -> int:
    """Print what has failed, and a last line as pytest's is; return 1 where a test has, or a part is not there."""
    paths = {path.stem: path for path in map(Path, sys.argv[1:])}
    totals, took_s = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}, 0.0
    for path in paths.values():
        for suite in ElementTree.parse(path).iter("testsuite"):  # noqa: S314  pytest has written it
            totals = {name: number + int(suite.get(name, "0")) for name, number in totals.items()}
            took_s += float(suite.get("time", "0"))
            for case in suite.iter("testcase"):
                if case.find("failure") is not None or case.find("error") is not None:
                    print(f"FAILED {case.get('classname')}::{case.get('name')}")
    missing = [part for part in PARTS if part not in paths]
    for part in missing:
        print(f"error: the part '{part}' of the tests has not come to an end")
    num_bad = totals["failures"] + totals["errors"]
    counts = {"failed": num_bad, "passed": totals["tests"] - num_bad - totals["skipped"], "skipped": totals["skipped"]}
    said = ", ".join(f"{number} {name}" for name, number in counts.items() if number)
    print(f"===== all parts: {said or 'nothing'} in {took_s:.2f}s =====")
    return int(bool(num_bad or missing))


if __name__ == "__main__":
    sys.exit(main())
