"""GPUs, from stand-ins of torch, NCCL and NVML; without GPUs none of them is queried."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.lab.doctor.check import DoctorFinding, HostContext
from paceline.lab.doctor.host import check_gpu_health, check_gpus, check_nccl

GB = 10**9


def torch_of(gpus: int, *, nccl: bool = True, cuda: str | None = "12.8") -> Any:
    return SimpleNamespace(
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            device_count=lambda: gpus,
            get_device_name=lambda index: "NVIDIA A100",
            nccl=SimpleNamespace(version=lambda: (2, 27, 5)),
        ),
        distributed=SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: nccl),
    )


class NvmlError(Exception):
    """What the library raises."""


def nvml_of(**values: Any) -> Any:
    """Return an NVML module with these values for each GPU; None is a query that fails."""

    def say(name: str, usual: Any) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            value = values.get(name, usual)
            if value is None:
                raise NvmlError("Not Supported")
            return value

        return ask

    return SimpleNamespace(
        NVMLError=NvmlError,
        NVML_MEMORY_ERROR_TYPE_UNCORRECTED=1,
        NVML_VOLATILE_ECC=0,
        nvmlInit=say("init", 0),
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda number: number,
        nvmlDeviceGetMemoryInfo=say("memory", SimpleNamespace(used=GB, total=80 * GB)),
        nvmlDeviceGetTotalEccErrors=say("errors", 0),
        nvmlDeviceGetCurrentClocksThrottleReasons=say("reasons", 0x1 | 0x4),  # idle, and at its power limit
    )


@pytest.fixture
def found(tmp_path: Path) -> Callable[..., dict[str, DoctorFinding]]:
    """Return a function from what torch and NVML are to the findings on a machine of two GPUs."""
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    driver = tmp_path / "proc/driver/nvidia/version"
    driver.parent.mkdir(parents=True)
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\n")

    def look(torch: Any, nvml: Any = None, **environ: str) -> dict[str, DoctorFinding]:
        modules = {"torch": torch, "pynvml": nvml or nvml_of()}
        here = HostContext(environ, tmp_path, tmp_path, modules.__getitem__)
        return outcomes(here)

    return look


def outcomes(here: HostContext) -> dict[str, DoctorFinding]:
    checks = {"GPUs": check_gpus, "NCCL": check_nccl, "GPU health": check_gpu_health}
    return {name: DoctorFinding(name, *outcome) for name, check in checks.items() if (outcome := check(here))}


def never(name: str) -> Any:
    raise AssertionError(f"{name} was loaded")


@pytest.mark.parametrize(
    ("environ", "state", "says"),
    [
        ({}, "ok", "none: runs train on the CPU"),
        ({"SLURM_GPUS_ON_NODE": "4"}, "warning", "none, but Slurm allocated 4 on this node"),
    ],
)
def test_a_machine_without_gpus_loads_nothing(tmp_path: Path, environ: dict, state: str, says: str) -> None:
    (gpus,) = outcomes(HostContext(environ, tmp_path, tmp_path, never)).values()
    assert (gpus.name, gpus.state, gpus.found) == ("GPUs", state, says)


def test_gpus_that_are_hidden_are_reported(found) -> None:
    assert found(None, CUDA_VISIBLE_DEVICES="")["GPUs"].found.startswith("none of 2 (CUDA_VISIBLE_DEVICES='')")


def test_healthy_gpus_are_reported_with_driver_cuda_and_nccl(found) -> None:
    findings = found(torch_of(2))
    assert {finding.state for finding in findings.values()} == {"ok"}
    assert findings["GPUs"].found == "2 (NVIDIA A100), driver 570.86.15, CUDA 12.8"
    assert findings["NCCL"].found == "2.27.5" and findings["GPU health"].found == "no problems with 2 GPUs"


def test_a_torch_that_does_not_see_the_gpus_is_wrong(found) -> None:
    gpus = found(torch_of(0, cuda=None))["GPUs"]
    assert gpus.state == "error" and gpus.found.endswith("torch sees 0") and "built for GPUs" in gpus.advice
    assert "renew the driver" in found(torch_of(0))["GPUs"].advice


def test_a_torch_without_nccl_is_wrong(found) -> None:
    assert found(torch_of(2, nccl=False))["NCCL"].state == "error"


def test_more_ranks_than_gpus_are_wrong(found) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    gpus = found(torch_of(2), **ranks)["GPUs"]
    assert gpus.state == "error" and gpus.found.endswith("for 3 ranks")


def test_a_gpu_that_slurm_shows_to_one_rank_alone_is_enough(found) -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "2"}
    given = {"SLURM_CPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0"}
    assert found(torch_of(1), **step, **given, SLURM_GPUS_ON_NODE="2")["GPUs"].state == "ok"
    shared = found(torch_of(1), **step, **given, SLURM_GPUS_ON_NODE="1")["GPUs"]
    assert shared.state == "error" and shared.found.endswith("for 2 ranks")


@pytest.mark.parametrize(
    ("values", "state", "says"),
    [
        ({"memory": SimpleNamespace(used=60 * GB, total=80 * GB)}, "warning", "other programs use 60 GB of 80 GB"),
        ({"errors": 3}, "warning", "3 uncorrected memory errors"),
        ({"reasons": 0x40}, "warning", "throttled by its temperature"),
        ({"init": None}, "warning", "unknown: NVML: Not Supported"),
    ],
)
def test_a_gpu_that_is_not_well_is_named(found, values: dict[str, Any], state: str, says: str) -> None:
    health = found(torch_of(2), nvml_of(**values))["GPU health"]
    assert health.state == state and says in health.found


def test_what_a_gpu_does_not_report_is_no_fault(found) -> None:
    silent = nvml_of(memory=None, errors=None, reasons=None)
    assert found(torch_of(2), silent)["GPU health"].state == "ok"


def test_only_the_gpus_of_this_process_are_checked(found) -> None:
    health = found(torch_of(1), nvml_of(errors=1), CUDA_VISIBLE_DEVICES="1")["GPU health"]
    assert "GPU 1" in health.found and "GPU 0" not in health.found


def test_without_nvml_health_is_not_known(found, tmp_path: Path) -> None:
    def load(name: str) -> Any:
        if name == "pynvml":
            raise ImportError(name)
        return torch_of(2)

    findings = outcomes(HostContext({}, tmp_path, tmp_path, load))
    assert findings["GPU health"].state == "ok" and "nvidia-ml-py" in findings["GPU health"].found
