"""Paceline's data in other trainers: examples as users run them, and the batches that Lightning and joined ranks get.

Which batches are right is known from `tests/unit/interop`: those of `paceline train`, by ranks that are told.
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
ARGS = ("digits", "data.batch_size=256")  # 5 steps an epoch
LOCAL = {"COLUMNS": "120", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}
LOCAL |= {"ACCELERATE_USE_CPU": "true"}  # what `accelerate launch --cpu` tells its ranks

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
        self.seen, self.judged, self.save_at = [], 0, save_at

    def training_step(self, batch, batch_idx):
        self.seen.append(digest(batch))
        return self.layer(batch[0].mean().reshape(1, 1)).sum()

    def on_train_batch_end(self, *_):
        if self.save_at and self.trainer.global_step == self.save_at:
            self.trainer.save_checkpoint("middle.ckpt")

    def validation_step(self, batch, batch_idx):
        self.judged += len(batch[1])
        share = (batch[1] == 7).sum() / self.trainer.datamodule.val.dataset.num_images
        self.log("seven", share, reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_fit_end(self):
        metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        told = {"seen": self.seen, "judged": self.judged, **metrics}
        with open(f"{self.trainer.world_size}-{self.save_at}-{self.global_rank}.json", "w") as file:
            json.dump(told, file)




def fit(save_at, ckpt_path=None, **options):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    quiet |= {"enable_model_summary": False, "num_sanity_val_steps": 1, "barebones": False}
    trainer = L.Trainer(max_epochs=3, **quiet, **options)
    trainer.fit(Probe(save_at), datamodule=DataModule(*WORDS), ckpt_path=ckpt_path, weights_only=True)


def alone():
    data = DataModule(*WORDS, device="cpu")
    seen = [digest(next(iter(data.train_dataloader())))]  # nothing is set up
    judged = sum(len(labels) for _, labels in data.val_dataloader())
    data.teardown("")
    data = DataModule(*WORDS, device="cpu")
    data.setup("fit")
    data.teardown("fit")
    with open("alone.json", "w") as file:
        json.dump({"seen": seen, "judged": judged}, file)


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

import torch.distributed as dist

from paceline.interop import loaders

dist.init_process_group("gloo")
with loaders(*json.loads(sys.argv[1]), device="cpu") as (train, val):
    told = {"train": [digest(batch) for batch in train], "val": [digest(batch) for batch in val]}
print(json.dumps(told))
dist.destroy_process_group()
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
    """Return a function from the words behind `python` to what they say, of each of `ranks` that are joined."""

    def output(*args: str, ranks: int = 1) -> list[str]:
        environs = [LOCAL] if ranks == 1 else [{**LOCAL, **place} for place in places(ranks)]
        started = [forking.start([*args], tmp_path, {**os.environ, **environ}) for environ in environs]
        completed = [process.communicate() for process in started]
        for process, (_, err) in zip(started, completed, strict=True):
            assert process.returncode == 0, err
        return [out for out, _ in completed]

    return output


def places(ranks: int) -> list[dict[str, str]]:
    """Return what torchrun tells each of its ranks."""
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
def test_the_example_learns_the_digits(library: str, run) -> None:
    needs(library)
    (out,) = run(str(EXAMPLES / f"{library}_data.py"))
    assert float(re.findall(r"top1 (\S+)%", out)[-1]) > 60  # a guess is right once in ten times


def check_shares(of: int, first: str, second: str) -> None:
    shares = re.findall(rf"top1 (\S+)% of {of} images", first)
    assert len(shares) >= 2 and "top1" not in second
    assert all(0 < float(share) <= 100 for share in shares)


def test_two_ranks_of_timm_count_every_image_once(run) -> None:
    needs("timm")
    check_shares(359, *run(str(EXAMPLES / "timm_data.py"), ranks=2))


def test_two_ranks_of_accelerate_count_every_image_once_and_take_a_step_of_the_schedule_together(run) -> None:
    needs("accelerate")
    first, second = run(str(EXAMPLES / "accelerate_loop.py"), ranks=2)
    check_shares(250, first, second)
    # Half of a cosine behind half of the steps, as on one rank.
    assert re.findall(r"next learning rate (\S+)", first) == ["0.0050", "0.0000"]


def test_joined_ranks_are_found_out_and_have_their_parts(run, tmp_path: Path) -> None:
    output = run(script(tmp_path, JOINED), json.dumps(ARGS), ranks=2)
    for rank, told in enumerate(map(json.loads, output)):
        train, val = loaders(*ARGS, device="cpu", rank=rank, world_size=2)
        assert told == {"train": digests(train), "val": digests(val)}
        assert len(told["train"]) == 5 and len(told["val"]) == 1


def test_a_program_that_closes_nothing_ends(run, tmp_path: Path) -> None:
    """Workers end with what they work for; multiprocessing would wait for them when a program ends."""
    assert run(script(tmp_path, UNCLOSED)) == ["torch.Size([64]) torch.Size([128])\n"]


@pytest.fixture(scope="module")
def fitted(forking, tmp_path_factory) -> Path:
    """Return where three runs of Lightning have left what each rank was given."""
    needs("lightning")
    folder = tmp_path_factory.mktemp("lightning")
    args = [script(folder, LIGHTNING), json.dumps(ARGS)]
    process = forking.start(args, folder, {**os.environ, **LOCAL})
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    return folder


def told(folder: Path, world_size: int, save_at: int, rank: int = 0) -> dict:
    return json.loads((folder / f"{world_size}-{save_at}-{rank}.json").read_text())


def test_lightning_trains_on_the_batches_of_the_trainer_epoch_by_epoch(fitted: Path) -> None:
    train, _ = loaders(*ARGS, device="cpu")
    wanted = [digest for _ in range(3) for digest in digests(train)]
    assert told(fitted, 1, 7)["seen"] == wanted and len(wanted) == 15


def test_a_module_of_data_is_looked_at_without_a_trainer(fitted: Path) -> None:
    train, _ = loaders(*ARGS, device="cpu")
    found = json.loads((fitted / "alone.json").read_text())
    assert found == {"seen": digests(train)[:1], "judged": 359}


def test_lightning_goes_on_in_the_midst_of_an_epoch(fitted: Path) -> None:
    assert told(fitted, 1, 0)["seen"] == told(fitted, 1, 7)["seen"][7:]


def test_lightning_on_two_ranks_has_their_parts_and_judges_every_image_once(fitted: Path) -> None:
    ranks = [told(fitted, 2, 0, rank) for rank in range(2)]
    for rank, found in enumerate(ranks):
        train, _ = loaders(*ARGS, device="cpu", rank=rank, world_size=2)
        assert found["seen"] == [digest for _ in range(3) for digest in digests(train)]
    alone = told(fitted, 1, 7)
    assert sum(found["judged"] for found in ranks) == alone["judged"] > 3 * 359  # three times, and a check before
    for found in ranks:  # sums of a few shares in float32
        assert found["seven"] == pytest.approx(alone["seven"], abs=1e-6) and alone["seven"] > 0


def test_the_notebook_runs_from_top_to_bottom(run, tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert notebook["nbformat"] == 4 and all(not cell.get("outputs") for cell in notebook["cells"])
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    (out,) = run(script(tmp_path, NOTEBOOK), str(EXAMPLES / "notebook.ipynb"))
    asked = re.findall(r"^is (\d), looks like (\d) \(\d+%\)$", out, re.MULTILINE)
    assert len(asked) == 8 and sum(label == found for label, found in asked) >= 4  # a guess is right once in ten times
    assert re.search(r"^forward +\d+\.\d{3} ms per step", out, re.MULTILINE)
    assert len(re.findall(r"^step +\d+ +top1", out, re.MULTILINE)) == 5
