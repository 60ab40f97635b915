"""All checks of this machine run once, and it is fit for a run."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.data.native import NATIVE_MISSING_MESSAGE
from paceline.lab.doctor import host
from paceline.lab.doctor.check import DoctorFinding, HostContext
from paceline.lab.doctor.host import check_host
from paceline.lab.doctor.storage import DiskSpeed

NAMES = [
    "versions", "cores", "threads", "NUMA", "load", "GPUs", "native core", "memory", "shared memory", "open files",
    "disk", "disk speed", "host name", "loopback", "interfaces", "gloo", "launcher", "clock",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the disk, which has its own test."""
    monkeypatch.setattr("paceline.lab.doctor.storage.measure_disk_speed", lambda folder, now: DiskSpeed(1e9, 1e9))


def looked_at(folder: Path) -> dict[str, DoctorFinding]:
    here = HostContext({"CUDA_VISIBLE_DEVICES": ""}, folder, lambda: 0.0, 0.0)  # GPUs have their own test
    return {finding.name: finding for finding in check_host(here)}


def test_every_check_runs_once(tmp_path: Path) -> None:
    found = looked_at(tmp_path)
    assert list(found) == NAMES
    assert all(finding.found for finding in found.values())
    assert [finding for finding in found.values() if finding.state == "wrong"] == []


def test_a_package_that_is_missing_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "numpy":
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(host, "version", version)
    versions = looked_at(tmp_path)["versions"]
    assert versions.state == "wrong" and versions.found.endswith("torch 1.0, torchvision 1.0; no numpy")


def test_whether_there_is_a_native_core_is_reported_and_what_is_lost_without(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(host, "load_native", lambda: SimpleNamespace(isa=lambda: "avx2"))
    assert looked_at(tmp_path)["native core"] == DoctorFinding.ok("native core", "built, uses avx2")
    monkeypatch.setattr(host, "load_native", lambda: None)
    core = looked_at(tmp_path)["native core"]
    assert core.state == "look" and f"{core.found} ({core.advice})" == NATIVE_MISSING_MESSAGE
