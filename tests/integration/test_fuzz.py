"""Fuzz the native core: decode every file of the corpus, then thousands of damaged ones.

The core is built with AddressSanitizer and UndefinedBehaviorSanitizer, so that reading one byte too far aborts. The
mutations are the same in every run; `make fuzz` searches further, with libFuzzer. `make test-long` compares with
libjpeg-turbo and searches for data races, each for `PACELINE_LONG_SECONDS` seconds.
"""

import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
SECONDS = 4
LIMIT_S = 120
SANITISE = ["-std=c11", "-O1", "-g", "-fno-sanitize-recover=all", "-fsanitize=address,undefined", "-ffp-contract=off"]


BUILD_S = 600
LONG_S = int(os.environ.get("PACELINE_LONG_SECONDS", "180"))


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the object files of the decoders, compiled unless build/fuzz has those of the same sources."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler: the native core cannot be built here")
    folder = tmp_path_factory.mktemp("decoder")
    probe = folder / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    if subprocess.run(["cc", *SANITISE, probe, "-o", folder / "probe"], capture_output=True).returncode:
        pytest.skip("this C compiler has no sanitizers")
    files = [*sources("pool"), CSRC / "fuzz" / "check.c", CSRC / "fuzz" / "driver.c"]
    compiler = subprocess.run(["cc", "--version"], capture_output=True, text=True, check=True, timeout=LIMIT_S).stdout
    digest = hashlib.sha256(f"{compiler}{SANITISE}{CSRC}{os.uname()}".encode())
    for each in sorted(CSRC.rglob("*.[ch]")):
        digest.update(f"{each.name} ".encode() + each.read_bytes())
    built = ROOT / "build" / "fuzz" / digest.hexdigest()[:16]
    if not built.exists():
        subprocess.run(["cc", *SANITISE, "-c", *files], cwd=folder, check=True, timeout=LIMIT_S)
        built.parent.mkdir(parents=True, exist_ok=True)
        part = built.with_name(f"{built.name}.{os.getpid()}")
        shutil.copytree(folder, part, ignore=shutil.ignore_patterns("probe*"))
        part.rename(built)  # all of it, or nothing
    return [str(each) for each in built.glob("*.o")]


@pytest.mark.parametrize("kind", ["record", "jpeg"])
def test_damaged_files_are_rejected_without_a_crash(kind: str, decoder: list[str], tmp_path: Path) -> None:
    """The fuzzer also aborts if vector and scalar code, or a used and a new scratch buffer, give different pixels."""
    files = sorted((CSRC / "fuzz" / "corpus" / kind).iterdir())
    assert len(files) > 40
    fuzzer = tmp_path / kind
    fuzz = CSRC / "fuzz" / f"fuzz_{kind}.c"
    subprocess.run(["cc", *SANITISE, fuzz, *decoder, "-lm", "-o", fuzzer], check=True, timeout=LIMIT_S)
    fuzzed = subprocess.run(
        [fuzzer, str(SECONDS), "1", *files], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert fuzzed.returncode == 0, fuzzed.stderr[-4000:]
    num_files, num_mutated = (int(word) for word in fuzzed.stdout.split() if word.isdigit())
    assert num_files == len(files) and num_mutated > 100  # thousands on an idle machine


def sources(*but: str) -> list[Path]:
    """Return the core's C files except the Python bindings and those that start with `but`."""
    return [each for each in sorted(CSRC.glob("*.c")) if not each.stem.startswith(("arguments", "module", *but))]


@pytest.mark.long
@pytest.mark.timeout(LONG_S + LIMIT_S + BUILD_S)
def test_accepted_jpegs_have_the_pixels_of_libjpeg_turbo(tmp_path: Path) -> None:
    if not shutil.which("clang"):
        pytest.skip("clang is not installed: apt-get install clang")
    fuzzer = tmp_path / "compare"
    options = [*SANITISE[:-2], "-fsanitize=address,undefined,fuzzer", "-ffp-contract=off"]
    files = [*sources("pool"), CSRC / "fuzz" / "check.c", CSRC / "fuzz" / "fuzz_compare.c"]
    probe = tmp_path / "probe.c"
    probe.write_text(
        "#include <stdio.h>\n#include <jpeglib.h>\nint main(void) { return LIBJPEG_TURBO_VERSION_NUMBER < 0; }\n"
    )
    if subprocess.run(["clang", probe, "-ljpeg", "-o", tmp_path / "probe"], capture_output=True).returncode:
        pytest.skip("libjpeg-turbo's headers are not installed: apt-get install libjpeg62-turbo-dev")
    subprocess.run(["clang", *options, *files, "-ljpeg", "-lm", "-o", fuzzer], check=True, timeout=BUILD_S)
    (tmp_path / "new").mkdir()
    limits = [f"-max_total_time={LONG_S}", "-max_len=16384", "-timeout=60", "-rss_limit_mb=3000"]
    completed = subprocess.run(
        [fuzzer, *limits, tmp_path / "new", CSRC / "fuzz" / "corpus" / "jpeg"],
        cwd=tmp_path, capture_output=True, text=True, timeout=LONG_S + LIMIT_S, check=False,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr[-4000:]
    compared = re.search(r"(\d+) compared with libjpeg", completed.stdout)
    assert compared and int(compared[1]) > 100, completed.stdout
    print(completed.stdout.strip())


@pytest.mark.long
@pytest.mark.timeout(LONG_S + LIMIT_S + BUILD_S)
def test_submitting_freeing_and_closing_a_pool_has_no_data_race(tmp_path: Path) -> None:
    compiler = shutil.which("clang") or shutil.which("cc")
    if not compiler:
        pytest.skip("no C compiler: apt-get install clang")
    stress = tmp_path / "stress"
    files = [*sources(), CSRC / "fuzz" / "check.c", CSRC / "fuzz" / "stress_pool.c"]
    options = ["-std=c11", "-O1", "-g", "-pthread", "-fsanitize=thread", "-ffp-contract=off"]
    built = subprocess.run(
        [compiler, *options, *files, "-lm", "-o", stress], capture_output=True, text=True, timeout=BUILD_S
    )
    if built.returncode and "tsan" in built.stderr:
        pytest.skip(f"{compiler} has no ThreadSanitizer: apt-get install clang")
    assert built.returncode == 0, built.stderr
    files = sorted((CSRC / "fuzz" / "corpus").glob("*/*"))
    completed = subprocess.run(
        [stress, str(LONG_S), *files], capture_output=True, text=True, timeout=LONG_S + LIMIT_S, check=False,
        env={**os.environ, "TSAN_OPTIONS": "strict_string_checks=1"},  # a path that is opened is read
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr[-4000:]
    done, dropped, freed = (int(number) for number in re.findall(r"(\d+) (?:batches|dropped|freed)", completed.stdout))
    assert done > 100 and freed > 100 and (dropped > 0 or LONG_S < 60)
    print(completed.stdout.strip())
