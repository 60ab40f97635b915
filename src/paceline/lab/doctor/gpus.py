"""Check the GPUs: torch and driver, NCCL, peer access, and health."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations
from re import search
from typing import Any, Final

from paceline.core.units import count, size
from paceline.lab.doctor.check import DoctorFinding, HostContext
from paceline.parallel.environ import count_gpus, has_own_gpu

_MAX_USED_SHARE: Final = 0.2
"""Share of a GPU's memory: a driver uses less than 1 %, and a process with a context about 0.5 GB."""
_HARDWARE_SLOWDOWN: Final = 0x8 | 0x20 | 0x40 | 0x80
"""nvmlClocksEventReason: HwSlowdown, SwThermalSlowdown, HwThermalSlowdown and HwPowerBrakeSlowdown.

Other reasons, such as an idle GPU or its power limit, are no fault. https://docs.nvidia.com/deploy/nvml-api/
"""
_COMPUTE_MODE_PROHIBITED: Final = 2
"""nvmlComputeMode_t: NVML_COMPUTEMODE_PROHIBITED."""


@dataclass(frozen=True)
class _GpuFault:
    description: str
    advice: str
    is_wrong: bool = False


def check_gpus(host: HostContext) -> Iterator[DoctorFinding]:
    """Yield findings on the GPUs of this process."""
    present = count_gpus(host.environ, host.root / "dev")
    if not present:
        yield _report_no_gpus(host)
        return
    torch = host.import_module("torch")
    yield _check_visible_gpus(host, torch, present)
    yield _check_nccl(torch)
    if torch.cuda.device_count() > 1:
        yield _check_peer_access(torch)
    yield _check_health(host)


def _report_no_gpus(host: HostContext) -> DoctorFinding:
    hidden = count_gpus({}, host.root / "dev")
    given = host.get_env_int("SLURM_GPUS_ON_NODE", 0)
    if given:
        advice = "start with srun --gpus-per-node=N or --gpus-per-task=1"
        return DoctorFinding.warning("GPUs", f"none, but Slurm allocated {given} on this node", advice)
    named = f" of {hidden} (CUDA_VISIBLE_DEVICES={host.environ.get('CUDA_VISIBLE_DEVICES')!r})" if hidden else ""
    return DoctorFinding.ok("GPUs", f"none{named}: runs train on the CPU")


def _check_visible_gpus(host: HostContext, torch: Any, present: int) -> DoctorFinding:
    seen, ranks = torch.cuda.device_count(), host.world.local_world_size
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(seen)}))
    driver = search(r"^NVRM version:.*?\s(\d+\.\d+(?:\.\d+)?)\s", host.read_text("proc/driver/nvidia/version"))
    parts = [f"{present} ({names})" if names else str(present)]
    parts += [f"driver {driver[1]}"] if driver else []
    parts += [f"CUDA {torch.version.cuda}"] if torch.version.cuda else []
    found = ", ".join(parts)
    if seen < present:
        why = "is built for the driver's CUDA, or renew the driver" if torch.version.cuda else "is built for GPUs"
        advice = f"install a torch that {why} (https://pytorch.org/get-started)"
        return DoctorFinding.problem("GPUs", f"{found}, torch sees {seen}", advice)
    if ranks > present and not has_own_gpu(host.world, present):
        advice = f"start {present} per node, or request more (with Slurm --gpus-per-node={ranks} or --gpus-per-task=1)"
        return DoctorFinding.problem("GPUs", f"{found}, for {count(ranks, 'rank')}", advice)
    return DoctorFinding.ok("GPUs", found)


def _check_nccl(torch: Any) -> DoctorFinding:
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_nccl_available()):
        advice = "install a torch for CUDA (https://pytorch.org/get-started), or set parallel.backend=gloo, far slower"
        return DoctorFinding.problem("NCCL", "none in this torch", advice)
    return DoctorFinding.ok("NCCL", ".".join(str(part) for part in torch.cuda.nccl.version()))


def _check_peer_access(torch: Any) -> DoctorFinding:
    pairs = list(permutations(range(torch.cuda.device_count()), 2))
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if not apart:
        return DoctorFinding.ok("peer access", "all GPUs can access each other's memory")
    some = ", ".join(f"{first} to {second}" for first, second in apart[:4]) + (", ..." if len(apart) > 4 else "")
    return DoctorFinding.warning(
        "peer access",
        f"{len(apart)} of {count(len(pairs), 'pair')} go through the host's memory ({some})",
        "see nvidia-smi topo -p2p r: GeForce cards have none; in a virtual machine pass the GPUs through with their "
        "switch, and on bare metal turn PCIe ACS off",
    )


def _check_health(host: HostContext) -> DoctorFinding:
    """Return the GPUs' health from NVML: https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html."""
    try:
        nvml = host.import_module("pynvml")
    except ImportError:
        return DoctorFinding.ok(
            "GPU health", "unknown: nvidia-ml-py is not installed (pip install 'paceline[telemetry]')"
        )
    try:
        # The driver may be absent or broken although the library is installed.
        nvml.nvmlInit()
        numbers = _list_visible_gpus(host, nvml.nvmlDeviceGetCount())
        troubles = [each for number in numbers for each in _iter_faults(nvml, number)]
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return DoctorFinding.warning("GPU health", f"unknown: NVML: {error}", "run nvidia-smi for details")
    if not troubles:
        return DoctorFinding.ok("GPU health", f"no problems with {count(len(numbers), 'GPU')}")
    found = "; ".join(each.description for each in troubles)
    advice = "; ".join(dict.fromkeys(each.advice for each in troubles))
    is_wrong = any(each.is_wrong for each in troubles)
    return DoctorFinding("GPU health", "wrong" if is_wrong else "look", found, advice)


def _list_visible_gpus(host: HostContext, num: int) -> list[int]:
    # Entries may be UUIDs, which NVML does not number: then check all GPUs.
    entries = host.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    numbers = [int(entry) for entry in entries if entry.strip().isdecimal() and int(entry) < num]
    return numbers if len(numbers) == len(entries) else list(range(num))


def _iter_faults(nvml: Any, number: int) -> Iterator[_GpuFault]:
    gpu, name = nvml.nvmlDeviceGetHandleByIndex(number), f"GPU {number}"
    if _query_nvml(nvml, nvml.nvmlDeviceGetComputeMode, gpu) == _COMPUTE_MODE_PROHIBITED:
        yield _GpuFault(
            f"{name} does not allow programs to compute", f"nvidia-smi -i {number} -c DEFAULT", is_wrong=True
        )
    memory = _query_nvml(nvml, nvml.nvmlDeviceGetMemoryInfo, gpu)
    if memory is not None and memory.used > _MAX_USED_SHARE * memory.total:
        used = f"{size(memory.used)} of {size(memory.total)}"
        yield _GpuFault(f"{name}: other programs use {used}", "stop them: nvidia-smi lists them")
    uncorrected, since_boot = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    errors = _query_nvml(nvml, nvml.nvmlDeviceGetTotalEccErrors, gpu, uncorrected, since_boot)
    if errors:
        yield _GpuFault(f"{name}: {count(errors, 'uncorrected memory error')}", "have the GPU reset, or leave it out")
    remapped = _query_nvml(nvml, nvml.nvmlDeviceGetRemappedRows, gpu)  # corrected, uncorrected, is pending, has failed
    if remapped and (remapped[2] or remapped[3]):
        yield _GpuFault(f"{name}: memory rows are pending replacement", "have the GPU reset, or leave it out")
    reasons = _query_nvml(nvml, nvml.nvmlDeviceGetCurrentClocksThrottleReasons, gpu)
    if reasons and reasons & _HARDWARE_SLOWDOWN:
        yield _GpuFault(f"{name} is throttled by its temperature or power supply", "check its cooling and power")


def _query_nvml(nvml: Any, query: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return query(*arguments)
    except nvml.NVMLError:
        return None
