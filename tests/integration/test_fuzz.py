"""The native core and bytes it does not trust: every file of the corpus, then some thousands of damaged ones.

Built with AddressSanitizer and UndefinedBehaviorSanitizer, so that one byte read too far ends the program. The
mutations are the same each time; `make fuzz` searches further, with libFuzzer.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
SECONDS = 4
LIMIT_S = 120
SANITISE = ["-std=c11", "-O1", "-g", "-fno-sanitize-recover=all", "-fsanitize=address,undefined", "-ffp-contract=off"]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Compile what decodes, and return the object files."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler: the native core cannot be built here")
    folder = tmp_path_factory.mktemp("decoder")
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    if subprocess.run(["cc", *SANITISE, probe, "-o", folder / "probe"], capture_output=True).returncode:
        pytest.skip("this C compiler has no sanitizers")
    binding = ("arguments", "module", "pool")
    sources = [each for each in sorted(CSRC.glob("*.c")) if not each.stem.startswith(binding)]
    sources += [CSRC / "fuzz" / "check.c", CSRC / "fuzz" / "driver.c"]
    subprocess.run(["cc", *SANITISE, "-c", *sources], cwd=folder, check=True, timeout=LIMIT_S)
    return [str(each) for each in folder.glob("*.o")]


@pytest.mark.parametrize("kind", ["record", "jpeg"])
def test_damaged_files_are_told_and_never_a_crash(kind: str, decoder: list[str], tmp_path: Path) -> None:
    """Aborts too where vector and plain code, or a used and a new scratch, give different pixels."""
    files = sorted((CSRC / "fuzz" / "corpus" / kind).iterdir())
    assert len(files) > 40
    fuzzer = tmp_path / kind
    fuzz = CSRC / "fuzz" / f"fuzz_{kind}.c"
    subprocess.run(["cc", *SANITISE, fuzz, *decoder, "-lm", "-o", fuzzer], check=True, timeout=LIMIT_S)
    found = subprocess.run(
        [fuzzer, str(SECONDS), "1", *files], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert found.returncode == 0, found.stderr[-4000:]
    num_files, num_mutated = (int(word) for word in found.stdout.split() if word.isdigit())
    assert num_files == len(files) and num_mutated > 100  # some thousands where nothing else runs
