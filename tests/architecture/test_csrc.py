"""The rules of the native core that a compiler does not know."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
SOURCES = sorted([*CSRC.glob("*.[ch]"), *CSRC.glob("fuzz/*.[ch]")])
BINDING = (
    "arguments.c",
    "binding.h",
    "module.c",
    "module_batch.c",
    "module_batch.h",
    "module_mapped.c",
    "module_move.c",
    "module_pool.c",
)
"""The files that may know Python."""


def test_lines_are_at_most_120_characters_long(none_of):
    assert len(SOURCES) > 50
    lines = [(path, at, line) for path in SOURCES for at, line in enumerate(path.read_text().splitlines(), 1)]
    none_of([f"{path.name}:{at}: is longer than 120" for path, at, line in lines if len(line) > 120])


def test_each_file_begins_with_what_it_does(none_of):
    none_of([f"{path.name}: begins with no comment" for path in SOURCES if not path.read_text().startswith("/* ")])


def test_the_decoder_knows_nothing_of_python(none_of):
    knowing = [path.name for path in SOURCES if re.search(r'#include ["<](Python|binding)\.h[">]', path.read_text())]
    assert knowing, "nothing was found that knows Python"
    none_of([f"{name}: includes Python.h" for name in knowing if name not in BINDING])


def test_what_is_for_one_processor_has_a_plain_version_beside_it(none_of):
    """So every processor can do all, and where `x_avx2.c` is compiled elsewhere it is empty."""
    special = sorted(CSRC.glob("*_avx2.c"))
    assert special
    none_of([f"{path.name}: no plain {path.stem[:-5]}.c" for path in special if not plain_of(path).exists()])
    guard = "#if defined(__x86_64__)"
    none_of([f"{path.name}: is not guarded" for path in special if path.read_text().count(guard) != 1])
    intrinsics = [path for path in SOURCES if "immintrin.h" in path.read_text() and path not in special]
    none_of([f"{path.name}: has instructions of one processor" for path in intrinsics])


def plain_of(path: Path) -> Path:
    return path.with_name(path.name.replace("_avx2", ""))


def test_it_is_compiled_so_that_every_processor_gives_the_same_bits(none_of):
    """No product and sum is contracted to one rounding, nothing is made for the processor that compiles."""
    builds = [ROOT / "setup.py", ROOT / "Makefile"]
    none_of(
        [f"{path.name}: without -ffp-contract=off" for path in builds if "-ffp-contract=off" not in path.read_text()]
    )
    forbidden = re.compile(r"-march=|-mtune=|-ffast-math|-Ofast|-funsafe|-mavx|-mfma|target\(\"[^\"]*fma")
    files = [*builds, *SOURCES]
    none_of([f"{path.name}: {found}" for path in files for found in forbidden.findall(path.read_text())])


def test_the_readme_names_every_file(none_of):
    """Headers go with their `.c` file, and `x_avx2.c` with `x.c`."""
    named = set(re.findall(r"`(\w+)(?:\.[ch])?`", (CSRC / "README.md").read_text()))
    parts = {path.stem.removesuffix("_avx2") for path in CSRC.glob("*.[ch]")}
    none_of([f"csrc/README.md: does not name {name}" for name in sorted(parts - named)])
