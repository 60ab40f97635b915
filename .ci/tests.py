"""Summarize parts of the tests from their JUnit files: `python .ci/tests.py build/tests pairs alone`."""

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree


def main() -> int:
    """Print failures and a last line like pytest's; return 1 if a test has failed or a part is missing."""
    folder, *parts = sys.argv[1:]
    paths = {part: path for part in parts if (path := Path(folder, f"{part}.xml")).exists()}
    complaints = [f"the part '{part}' of the tests did not finish" for part in parts if part not in paths]
    totals, took_s = Counter[str](), 0.0
    for part, path in paths.items():
        counts = Counter[str]()
        for suite in ElementTree.parse(path).iter("testsuite"):  # noqa: S314  pytest has written it
            counts.update({name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")})
            took_s += float(suite.get("time", "0"))
            for case in suite.iter("testcase"):
                if case.find("failure") is not None or case.find("error") is not None:
                    print(f"FAILED {case.get('classname')}::{case.get('name')}")
        if counts["tests"] == counts["skipped"]:
            complaints.append(f"the part '{part}' of the tests ran none: {counts['skipped']} were skipped")
        totals.update(counts)
    for complaint in complaints:
        print(f"error: {complaint}")
    num_bad = totals["failures"] + totals["errors"]
    outcomes = {
        "failed": num_bad,
        "passed": totals["tests"] - num_bad - totals["skipped"],
        "skipped": totals["skipped"],
    }
    summary = ", ".join(f"{number} {name}" for name, number in outcomes.items() if number)
    print(f"===== {', '.join(parts)}: {summary or 'nothing'} in {took_s:.2f}s =====")
    return int(bool(num_bad or complaints))


if __name__ == "__main__":
    sys.exit(main())
