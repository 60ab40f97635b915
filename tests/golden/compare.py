"""Compare the behaviour of two checkouts of paceline: `python tests/golden/compare.py OLD NEW`.

Each is a checkout, or a file that record.py has written on this machine, because bits differ between processors. Every
difference is printed on one line that starts with its place. The exit code is 1 if there are differences, and 2 if a
checkout could not be recorded.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("record.py")
LONGEST = 100
TIMING = "timing/"
"""First parts of places whose values depend on the load of the machine: what a search of settings tries."""


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Return a line for each place where two records differ, in the order of places."""
    for place in sorted({*old, *new}):
        if place not in new:
            yield f"{place}: only in OLD: {_short(old[place])}"
        elif place not in old:
            yield f"{place}: only in NEW: {_short(new[place])}"
        elif old[place] != new[place] or type(old[place]) is not type(new[place]):
            yield f"{place}: {_short(old[place])} -> {_short(new[place])}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."


def main() -> int:
    """Record what is not recorded yet, and print the differences; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path, metavar="OLD", help="a checkout, or a record of one")
    parser.add_argument("new", type=Path, metavar="NEW", help="another")
    parser.add_argument("--only", default="", help="compare one part alone: train, interface, codes or verbs")
    parser.add_argument("--timing", action="store_true", help="print what depends on how busy the machine was, too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-golden-") as folder:
        old = _recorded(asked.old, Path(folder) / "old.json", asked.only)
        new = _recorded(asked.new, Path(folder) / "new.json", asked.only, names=old)
        if not (old and new):
            return 2
        documents = [json.loads(path.read_text()) for path in (old, new)]
    values = [document["values"] for document in documents]
    parts = set.intersection(*({place.split("/")[0] for place in each} for each in values))
    if asked.only:  # a record in a file has all parts
        values = [{place: value for place, value in each.items() if place.split("/")[0] in parts} for each in values]
    found = list(differences(*values))
    by_timing = [line for line in found if line.startswith(TIMING)]
    real = [line for line in found if not line.startswith(TIMING)]
    for line in [*real, *(by_timing if asked.timing else [])]:
        print(line)
    if by_timing and not asked.timing:
        print(f"{len(by_timing)} more depend on how busy the machine was, and do not count (--timing shows them)")
    print(f"{len(real)} differences in {len(values[0])} values" if real else f"identical: {len(values[0])} values")
    return 1 if real else 0


def _recorded(path: Path, out: Path, only: str, names: Path | None = None) -> Path | None:
    """Return the record of a checkout, or of a file if `path` is one; None if recording failed."""
    if path.is_file():
        return path
    more = [*(["--only", only] if only else []), *(["--names", str(names)] if names else [])]
    done = subprocess.run([sys.executable, str(RECORD), str(path), "--out", str(out), *more])
    return out if done.returncode == 0 or out.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
