"""The page on `paceline doctor` has a row for every finding that there is."""

import re
from pathlib import Path

from paceline.lab.doctor.host import HOST_CHECKS

ROOT = Path(__file__).parents[3]
CALL = re.compile(r'\bDoctorFinding\(\s*"([^"]+)"')


def test_every_finding_is_on_the_page() -> None:
    sources = sorted((ROOT / "src/paceline/lab/doctor").glob("*.py"))
    names = {name for name, _ in HOST_CHECKS}
    names |= {name for source in sources for name in CALL.findall(source.read_text())}
    assert len(names) > 15
    page = (ROOT / "docs/how-to/doctor.md").read_text()
    rows = set(re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)) - {"finding"}
    assert names - rows == set(), "have no row in docs/how-to/doctor.md"
    assert rows - names == {"versions of …"}, "are in docs/how-to/doctor.md, and nothing finds them"
