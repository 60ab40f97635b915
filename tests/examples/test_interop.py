"""Paceline's data in other trainers: the examples run unchanged, and Lightning and joined ranks get the right batches.

`tests/unit/interop` verifies the batches themselves: those of `paceline train`, with explicit ranks.
"""

import json
import os
import re
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.interop import loaders

EXAMPLES = Path(__file__).parents[2] / "examples"
ARGS = ("digits", "data.batch_size=256")  # 5 steps per epoch
LOCAL = {"COLUMNS": "120", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
LOCAL |= {"ACCELERATE_USE_CPU": "true"}  # the environment that `accelerate launch --cpu` sets for its ranks

DIGEST = """
from hashlib import sha256


def digest(batch):
    return sha256(b"".join(part.numpy().tobytes() for part in batch)).hexdigest()
"""
LIGHTNING = (
    DIGEST
    + """
import json
import logging
import os
import sys
import warnings

import lightning as L
import torch

from paceline.interop.lightning import DataModule

WORDS = json.loads(sys.argv[1])
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.simplefilter("ignore")


class Probe(L.LightningModule):
    def __init__(self, save_at=0):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen, self.evaluated, self.save_at = [], 0, save_at

    def training_step(self, batch, batch_idx):
        self.seen.append(digest(batch))
        return self.layer(batch[0].mean().reshape(1, 1)).sum()

    def on_train_batch_end(self, *_):
        if self.save_at and self.trainer.global_step == self.save_at:
            self.trainer.save_checkpoint("middle.ckpt")

    def validation_step(self, batch, batch_idx):
        self.evaluated += len(batch[1])
        share = (batch[1] == 7).sum() / self.trainer.datamodule.val.dataset.num_images
        self.log("seven", share, reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_fit_end(self):
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        record = {"seen": self.seen, "evaluated": self.evaluated, **metrics}
        with open(f"{self.trainer.world_size}-{self.save_at}-{self.global_rank}.json", "w") as file:
            json.dump(record, file)




def fit(save_at, ckpt_path=None, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    quiet |= {"enable_model_summary": False, "num_sanity_val_steps": 1, "barebones": False}
    trainer = L.Trainer(max_epochs=3, **quiet, **options)
    trainer.fit(Probe(save_at), datamodule=DataModule(*WORDS), ckpt_path=ckpt_path, weights_only=True)


def alone():
    data = DataModule(*WORDS, device="cpu")
    seen = [digest(next(iter(data.train_dataloader())))]  # nothing is set up
    evaluated = sum(len(labels) for _, labels in data.val_dataloader())
    data.teardown("")
    data = DataModule(*WORDS, device="cpu")
    data.setup("fit")
    data.teardown("fit")
    with open("alone.json", "w") as file:
        json.dump({"seen": seen, "evaluated": evaluated}, file)


if __name__ == "__main__":
    alone()
    fit(7, devices=1)
    fit(0, devices=1, ckpt_path="middle.ckpt")
    fit(0, devices=2, strategy="ddp_fork")
"""
)
JOINED = (
    DIGEST
    + """
import json
import sys
import time

import torch.distributed as dist

from paceline.interop import loaders

dist.init_process_group("gloo")
with loaders(*json.loads(sys.argv[1]), device="cpu") as (train, val):
    record = {"train": [digest(batch) for batch in train], "val": [digest(batch) for batch in val]}
print(json.dumps(record))
dist.destroy_process_group()
time.sleep(0.5)  # gloo's threads outlive the group, and must not free a tensor while the interpreter ends
"""
)
UNCLOSED = """
from paceline.interop import loaders

train, val = loaders("synthetic", "data.loader=processes", "data.workers=1", device="cpu")
batches = iter(train), iter(val)
print(*(next(each)[1].shape for each in batches))
"""
NOTEBOOK = """
import json
import sys

import __main__

del __main__.__file__  # a notebook is no file
__main__.__spec__ = None
with open(sys.argv[1]) as file:
    cells = json.load(file)["cells"]
for cell in cells:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), vars(__main__))
"""


@pytest.fixture
def run(forking, tmp_path: Path):
    """Return a function from `python`'s arguments to the output of each of `ranks` connected ranks."""

    def output(*args: str, ranks: int = 1) -> list[str]:
        environs = [LOCAL] if ranks == 1 else [{**LOCAL, **place} for place in rank_environs(ranks)]
        started = [forking.start([*args], tmp_path, {**os.environ, **environ}) for environ in environs]
        completed = [process.communicate() for process in started]
        for process, (_, err) in zip(started, completed, strict=True):
            assert process.returncode == 0, err
        return [out for out, _ in completed]

    return output


def rank_environs(ranks: int) -> list[dict[str, str]]:
    """Return the environment that torchrun sets for each of its ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    every = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_PORT": port}
    return [{**every, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def needs(name: str) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed (pip install {name})")


def digests(loader) -> list[str]:
    found: dict = {}
    exec(DIGEST, found)
    return [found["digest"](batch) for batch in loader]


def script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return "script.py"


@pytest.mark.parametrize("library", ["lightning", "timm"])
def test_each_example_learns_the_digits(library: str, run) -> None:
    needs(library)
    (out,) = run(str(EXAMPLES / f"{library}_data.py"))
    assert float(re.findall(r"top1 (\S+)%", out)[-1]) > 60  # guessing is correct once in ten times


def check_shares(of: int, first: str, second: str) -> None:
    shares = re.findall(rf"top1 (\S+)% of {of} images", first)
    assert len(shares) >= 2 and "top1" not in second
    assert all(0 < float(share) <= 100 for share in shares)


def test_two_ranks_of_timm_count_every_image_once(run) -> None:
    needs("timm")
    check_shares(359, *run(str(EXAMPLES / "timm_data.py"), ranks=2))


def test_two_ranks_of_accelerate_count_every_image_once_and_share_the_schedule(run) -> None:
    needs("accelerate")
    first, second = run(str(EXAMPLES / "accelerate_loop.py"), ranks=2)
    check_shares(250, first, second)
    # Half of a cosine after half of the steps, as on one rank.
    assert re.findall(r"next learning rate (\S+)", first) == ["0.0050", "0.0000"]


def test_connected_ranks_are_detected_and_get_their_shares(run, tmp_path: Path) -> None:
    output = run(script(tmp_path, JOINED), json.dumps(ARGS), ranks=2)
    for rank, record_of in enumerate(map(json.loads, output)):
        train, val = loaders(*ARGS, device="cpu", rank=rank, world_size=2)
        assert record_of == {"train": digests(train), "val": digests(val)}
        assert len(record_of["train"]) == 5 and len(record_of["val"]) == 1


def test_a_program_that_closes_no_loader_ends(run, tmp_path: Path) -> None:
    """Workers end with their owner; otherwise multiprocessing would wait for them at exit."""
    assert run(script(tmp_path, UNCLOSED)) == ["torch.Size([64]) torch.Size([128])\n"]


@pytest.fixture(scope="module")
def lightning_runs(forking, tmp_path_factory) -> Path:
    """Return the folder in which three Lightning runs recorded the batches of each rank."""
    needs("lightning")
    folder = tmp_path_factory.mktemp("lightning")
    args = [script(folder, LIGHTNING), json.dumps(ARGS)]
    process = forking.start(args, folder, {**os.environ, **LOCAL})
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    return folder


def record_of(folder: Path, world_size: int, save_at: int, rank: int = 0) -> dict:
    return json.loads((folder / f"{world_size}-{save_at}-{rank}.json").read_text())


def test_lightning_trains_on_the_batches_of_the_trainer(lightning_runs: Path) -> None:
    train, _ = loaders(*ARGS, device="cpu")
    expected = [digest for _ in range(3) for digest in digests(train)]
    assert record_of(lightning_runs, 1, 7)["seen"] == expected and len(expected) == 15


def test_a_data_module_works_without_a_trainer(lightning_runs: Path) -> None:
    train, _ = loaders(*ARGS, device="cpu")
    found = json.loads((lightning_runs / "alone.json").read_text())
    assert found == {"seen": digests(train)[:1], "evaluated": 359}


def test_lightning_resumes_within_an_epoch(lightning_runs: Path) -> None:
    assert record_of(lightning_runs, 1, 0)["seen"] == record_of(lightning_runs, 1, 7)["seen"][7:]


def test_lightning_on_two_ranks_evaluates_every_image_once(lightning_runs: Path) -> None:
    ranks = [record_of(lightning_runs, 2, 0, rank) for rank in range(2)]
    for rank, found in enumerate(ranks):
        train, _ = loaders(*ARGS, device="cpu", rank=rank, world_size=2)
        assert found["seen"] == [digest for _ in range(3) for digest in digests(train)]
    alone = record_of(lightning_runs, 1, 7)
    # Three times, and a sanity check before
    assert sum(found["evaluated"] for found in ranks) == alone["evaluated"] > 3 * 359
    for found in ranks:  # sums of a few shares in float32
        assert found["seven"] == pytest.approx(alone["seven"], abs=1e-6) and alone["seven"] > 0


def test_the_notebook_runs(run, tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert notebook["nbformat"] == 4 and all(not cell.get("outputs") for cell in notebook["cells"])
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    (out,) = run(script(tmp_path, NOTEBOOK), str(EXAMPLES / "notebook.ipynb"))
    asked = re.findall(r"^is (\d), looks like (\d) \(\d+%\)$", out, re.MULTILINE)
    # Guessing is correct once in ten times
    assert len(asked) == 8 and sum(label == found for label, found in asked) >= 4
    assert re.search(r"^forward +\d+\.\d{3} ms per step", out, re.MULTILINE)
    assert len(re.findall(r"^step +\d+ +top1", out, re.MULTILINE)) == 5
