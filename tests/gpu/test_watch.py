"""A watched script that uses a GPU: the stages of the device, and nothing that waits for it."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline.watch

pytestmark = pytest.mark.gpu
INJECT = Path(paceline.watch.__file__).parent / "inject"
SCRIPT = """
import hashlib, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(96, 3, 8, 8), torch.arange(96) % 10)
model = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 10)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
total = 0.0
for _ in range(2):
    for images, labels in DataLoader(data, batch_size=8):
        images, labels = images.cuda(non_blocking=True), labels.to("cuda")
        loss = nn.functional.cross_entropy(model(images.float()), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    model.eval()
    with torch.no_grad():
        for images, labels in DataLoader(data, batch_size=8):
            model(images.cuda()).sum().item()
    model.train()
torch.cuda.synchronize()
print(total, hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in model.state_dict().values())).hexdigest())
"""


def run(folder, **environ):
    path = os.pathsep.join(filter(None, [environ.pop("FIRST", ""), os.environ.get("PYTHONPATH", "")]))
    environ = {**os.environ, **environ, "PYTHONPATH": path}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_stages_of_the_device_are_read_without_a_wait_and_bits_stay(tmp_path):
    records = tmp_path / "records"
    records.mkdir()
    watched = run(tmp_path, FIRST=f"{INJECT}:{INJECT.parents[2]}", PACELINE_WATCH_DIR=str(records))
    assert watched == run(tmp_path)
    (path,) = records.iterdir()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line for line in lines if line["kind"] == "note"] == []
    steps = [line for line in lines if line["kind"] == "step"]
    assert [step["n"] for step in steps] == list(range(1, 25))
    later = steps[2:]
    for stage in ("h2d", "sync", "forward", "loss", "backward", "optimizer"):
        assert all(step["stages"].get(stage, 0.0) > 0 for step in later if step["n"] != 13), stage
    assert [line["name"] for line in lines if line["kind"] == "pause"].count("evaluate") == 2
    device = {line["n"]: line["stages"] for line in lines if line["kind"] == "device"}
    assert set(device) >= set(range(3, 22))
    for step in later:
        if step["n"] in device and step["n"] != 13:
            assert {"h2d", "forward", "backward", "optimizer"} <= set(device[step["n"]])
            assert math.fsum(device[step["n"]].values()) < 2 * (step["end_s"] - step["start_s"]) + 0.01
