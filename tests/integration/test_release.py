"""The contents of a release, and that the installed program works without the checkout."""

import email
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from PIL import Image

from paceline.data.native import NATIVE_MISSING_MESSAGE

ROOT = Path(__file__).parents[2]
WAIT_S = 120
BUILT = {"paceline/data/_native.abi3.so"}


def python_output(installed, code: str) -> str:
    """Return the output of Python code in the release's environment."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(installed.python), "-I", "-c", code], capture_output=True, text=True, timeout=WAIT_S, env=environ
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_wheel_contains_only_the_package_and_the_native_core(installed):
    package = ROOT / "src" / "paceline"
    files = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".pyc", ".so")}
    expected = {f"paceline/{path.relative_to(package).as_posix()}" for path in files}
    assert {"paceline/py.typed", "paceline/training/trainer.py", "paceline/report/templates/page.html.j2"} <= expected
    with zipfile.ZipFile(installed.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == expected | BUILT


def test_the_wheel_is_abi3_from_python_3_11_on(installed):
    assert re.search(r"-cp311-abi3-linux_\w+\.whl$", installed.wheel.name), installed.wheel.name


def test_the_source_distribution_contains_every_tracked_file(installed):
    with tarfile.open(installed.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S)
    if tracked.returncode:
        pytest.skip("git lists no tracked files")
    assert len(tracked.stdout.splitlines()) > 900
    assert {path for path in tracked.stdout.splitlines() if (ROOT / path).exists()} - names == set()
    assert [name for name in names if name.endswith((".so", ".pyc"))] == []


def test_the_version_is_that_of_git_everywhere(installed, installed_in, tmp_path):
    output = installed_in(tmp_path)("--version").out.strip()
    found = python_output(
        installed, "import importlib.metadata as m, paceline as p; print(m.version('paceline'), p.__version__)"
    )
    assert found.split() == [output, output]
    assert installed.wheel.name.startswith(f"paceline-{output}-cp311")
    assert installed.sdist.name == f"paceline-{output}.tar.gz"
    if (ROOT / ".git").exists():
        described = subprocess.run(
            [sys.executable, "-m", "setuptools_scm"], cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S
        )
        assert output == described.stdout.strip(), described.stderr


def test_the_metadata_is_complete(installed):
    with zipfile.ZipFile(installed.wheel) as wheel:
        (path,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(wheel.read(path))
    assert metadata["Name"] == "paceline"
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown" and "# paceline" in metadata.get_payload()
    assert "Typing :: Typed" in metadata.get_all("Classifier")
    assert any(each.startswith("torch>=") for each in metadata.get_all("Requires-Dist"))


def test_twine_accepts_the_release(installed):
    pytest.importorskip("twine", reason="twine is not installed: pip install twine")
    command = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", installed.sdist, installed.wheel]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASSED") == 2


def test_the_installed_package_and_native_core_are_imported(installed):
    code = "import paceline, paceline.data.native as n, sys; "
    code += "print(paceline.__file__, n.load_native().__file__, sys.prefix)"
    package, core, prefix = python_output(installed, code).split()
    assert package.startswith(f"{prefix}/lib") and core.startswith(f"{prefix}/lib")
    assert Path(prefix) == installed.python.parents[1] != Path(sys.prefix)


def test_the_installed_program_trains_evaluates_and_reports(installed_in, tmp_path):
    for number in range(16):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (48, 48), (number * 15, 90, 40)).save(path)
    paceline = installed_in(tmp_path)
    assert paceline("data", "pack", "photos", "photos.pack").code == 0
    args = ("data.source.name=pack", "data.source.root=photos.pack", "data.loader=native", "data.batch_size=4")
    args += (
        "data.image_size=32",
        "model.name=resnet18_cifar",
        "model.width=0.25",
        "train.steps=3",
        "measure.warmup_steps=1",
    )
    args += ("--ranks", "2", "parallel.device=cpu", "--run-dir", "run", "--json")
    trained = paceline("train", "folder", *args)
    assert trained.result["status"] == "completed" and trained.result["world_size"] == 2
    assert trained.result["provenance"]["paceline"] == paceline("--version").out.strip()
    evaluated = paceline("eval", "run", "--json").result
    assert evaluated["top1"] == trained.result["eval"]["top1"]
    assert paceline("report", "run").code == 0
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()


def test_the_installed_program_finds_its_data_files(installed_in, tmp_path):
    paceline = installed_in(tmp_path)
    assert len(json.loads(paceline("recipes", "--json").out)) == len(presets())
    assert "ddp-post" in paceline("ladder", "--list").out
    job = paceline("submit", "digits", "--engine", "slurm", "--nodes", "2", "--site", "juwels-booster", "--dry-run")
    assert "#SBATCH --nodes=2" in job.out, job.err
    assert "complete -o default" in paceline("--show-completion", "bash").out


def presets() -> list[Path]:
    found = sorted((ROOT / "src/paceline/recipe/presets").rglob("*.yaml"))
    assert len(found) > 30
    return found


def test_type_checkers_use_the_package_types(installed, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import paceline\nreveal_type(paceline.train)\n")
    mypy = [sys.executable, "-m", "mypy", "--python-executable", str(installed.python), "--config-file="]
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    command = [*mypy, "--cache-dir", str(tmp_path / "cache"), str(program)]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=WAIT_S)
    assert re.search(r'Revealed type is "def \(.*\) -> paceline\.core\.results\.RunResult"', done.stdout), done.stdout


def test_a_build_without_a_compiler_succeeds_and_prints_what_is_missing(installed, tmp_path):
    with tarfile.open(installed.sdist) as sdist:
        sdist.extractall(tmp_path / "sources", filter="data")
    (sources,) = (tmp_path / "sources").iterdir()
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(sources)]
    environ = {**os.environ, "CC": "no-such-compiler", "PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert NATIVE_MISSING_MESSAGE.partition(" (")[0] in done.stdout
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == installed.wheel.name
    with zipfile.ZipFile(wheel) as opened, zipfile.ZipFile(installed.wheel) as complete:
        assert {*complete.namelist()} - {*opened.namelist()} == BUILT
        opened.extractall(tmp_path / "packages")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'packages')!r}); import paceline.data.native as n; "
    assert python_output(installed, f"{code}print(n.load_native())") == "None"
