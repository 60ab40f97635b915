"""Code paths that only a GPU runs, on a GPU emulated in host memory (tests/emulated).

They are streams, graph captures, copies, devices, and ranks that communicate over NCCL.
"""

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "emulated"))
from emulation import build, missing_requirement

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(bool(missing_requirement()), reason=f"no GPU can be emulated: {missing_requirement()}")
TESTS = (
    "test_cuda_graphs.py::test_a_captured_run_has_the_losses_of_an_eager_one[plain]",
    "test_loaders.py::test_page_locked_memory_is_not_reused_before_its_copy_ends",
    "test_loaders.py::test_copies_on_a_side_stream_are_complete_while_the_gpu_computes",
    "test_train.py::test_a_step_without_log_does_not_synchronise[plain]",
)
MISTAKES = """
import torch

def raised(work):
    try:
        work()
    except RuntimeError as error:
        return type(error).__name__
    return "nothing"

here, there = torch.ones(3), torch.ones(3, device="cuda")
side = torch.cuda.Stream()

def captured(work):
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        work()

def fork_and_leave():
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        there.add_(1)

print("two devices:", raised(lambda: here + there))
print("unwritten:", torch.empty(2, device="cuda").tolist())
print("a number in a capture:", raised(lambda: captured(lambda: there.sum().item())))
print("a mask in a capture:", raised(lambda: captured(lambda: there[there > 0])))
print("a stream not joined:", raised(lambda: captured(fork_and_leave)))

lent, arrived = torch.ones(4).pin_memory(), torch.zeros(4, device="cuda")
with torch.cuda.stream(side):
    arrived.copy_(lent, non_blocking=True)
print("not waited for:", arrived.tolist())
lent.fill_(7)
side.synchronize()
print("lent again too early:", arrived.tolist())

total, graph = torch.zeros(1, device="cuda"), torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    total += 2
print("captured:", total.item())
for _ in range(3):
    graph.replay()
print("replayed:", total.item())
"""
EXPECTED = """
two devices: RuntimeError
unwritten: [nan, nan]
a number in a capture: AcceleratorError
a mask in a capture: AcceleratorError
a stream not joined: AcceleratorError
not waited for: [0.0, 0.0, 0.0, 0.0]
lent again too early: [7.0, 7.0, 7.0, 7.0]
captured: 0.0
replayed: 6.0
"""


def on_emulated_gpu(*args: str, cwd: Path = ROOT, gpus: int = 1) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **build(ROOT / "build" / "emulated"), "EMULATED_GPUS": str(gpus)}
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=environment, capture_output=True, text=True, timeout=580, check=False
    )


def test_the_emulated_gpu_detects_mistakes() -> None:
    result = on_emulated_gpu("-c", textwrap.dedent(MISTAKES))
    assert result.stdout.strip() == EXPECTED.strip(), result.stderr


@pytest.mark.timeout(600)
@pytest.mark.long
def test_gpu_tests_pass_on_an_emulated_gpu() -> None:
    """One test of each kind; `make test-gpu-emulated` runs all."""
    tests = [f"tests/gpu/{each}" for each in TESTS]
    result = on_emulated_gpu("-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *tests)
    assert re.search(rf"\b{len(TESTS)} passed", result.stdout) and result.returncode == 0, result.stdout + result.stderr
    assert "a kernel did nothing" not in result.stderr


def test_two_emulated_gpus_end_with_the_same_weights_as_two_cpu_ranks(paceline, tmp_path: Path) -> None:
    """The runs use NCCL's process group, streams and watchdog, over an emulated NCCL that adds like gloo."""
    args = ["train", "synthetic", "--ranks", "2", "--json", "model.width=0.125", "train.steps=12"]
    args += ["model.memory_format=contiguous"]  # the layout in which a CPU computes such a narrow model
    args += ["data.source.num_images=96", "data.source.num_val_images=13", "data.batch_size=8", "optim.lr=0.01"]
    args += ["parallel.compression=powersgd", "train.ema.decay=0.9", "log.sinks=[]", "parallel.threads=1"]
    args += ["data.source.image_size=16", "log.report=off"]
    on_gpus = on_emulated_gpu("-m", "paceline", *args, "parallel.device=cuda", cwd=tmp_path, gpus=2)
    assert on_gpus.returncode == 0, on_gpus.stderr
    here, there = json.loads(on_gpus.stdout), paceline(*args, "parallel.device=cpu").result
    assert here["provenance"]["device"] != there["provenance"]["device"]
    assert here["weights_sha256"] == there["weights_sha256"] and here["eval"] == there["eval"]
