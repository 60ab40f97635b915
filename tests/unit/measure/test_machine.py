"""`measure.machine`: plain values that say what a number was measured on, and not where or by whom."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import paceline
from paceline.core.source_digest import source_digest
from paceline.measure.machine import describe_machine


def test_every_value_is_plain_json() -> None:
    machine = describe_machine()

    assert json.loads(json.dumps(machine)) == machine
    assert machine["paceline"] == paceline.__version__
    assert machine["paceline_sha256"] == source_digest()
    assert machine["torch"] == str(torch.__version__)
    assert machine["logical_cores"] == len(os.sched_getaffinity(0))
    assert machine["threads"] == torch.get_num_threads()
    assert machine["memory_bytes"] > 2**28


def test_host_user_and_paths_are_not_described() -> None:
    machine = describe_machine()
    software = {"python", "platform", "paceline", "paceline_sha256", "torch", "torchvision", "numpy", "pillow"}
    hardware = {"cpu", "logical_cores", "memory_bytes", "threads"}

    assert (
        set(machine) - {"cuda_devices", "cuda", "driver", "nccl", "imagecodecs", "pillow-heif", "tifffile"}
        == software | hardware
    )
    assert "/" not in json.dumps(machine)


def test_the_cpu_is_the_kernels_name_of_it(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Abacus 9\n\nmodel name\t: Abacus 9\n")

    assert describe_machine(tmp_path)["cpu"] == "Abacus 9"
    assert describe_machine(tmp_path / "absent")["cpu"] == platform.machine()


def test_gpus_are_described_where_torch_sees_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = tmp_path / "driver" / "nvidia" / "version"
    driver.parent.mkdir(parents=True)
    driver.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (x@y)\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1)\n"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)

    machine = describe_machine(tmp_path)

    assert machine["cuda_devices"] == ["GPU 0", "GPU 1"]
    assert machine["driver"] == "580.65.06"
    assert machine["nccl"] == "2.27.5"


def test_the_clock_needs_no_torch() -> None:
    program = (
        "import sys, paceline.measure as m; m.StageClock().drain(); "
        "m.build_clock('on', device_type='cpu', warmup_steps=1); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)})
