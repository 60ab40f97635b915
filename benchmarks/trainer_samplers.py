"""Count the samples that trainers repeat and leave out, with their own samplers and with `ExactSampler`.

    python benchmarks/trainer_samplers.py --json benchmarks/results/trainer-samplers.json

The trainers' own code runs on two gloo ranks, on a dataset whose items are their indices. Each run trains for three
epochs, and every rank writes down the samples of each step before it computes. One run is never stopped. Another kills
its ranks with SIGKILL in its second epoch, two steps after a checkpoint, and is resumed from that checkpoint in new
processes, on two ranks and on three (with as many samples per step as before). The steps that count are those up to the
checkpoint and those after the resume: they made the weights. Each trainer is resumed as its documentation says:

- PyTorch: `DistributedSampler` with `set_epoch`, and the epoch in the checkpoint, as in pytorch/examples; or
  torchdata's `StatefulDataLoader` with its `StatefulDistributedSampler`.
- Lightning: `ModelCheckpoint(every_n_train_steps=...)` and `fit(ckpt_path=...)`, with torch's DataLoader, for which it
  warns; with torchdata's `StatefulDataLoader`, as the warning advises; or with torchdata's sampler, too.
- Accelerate: `save_state`, `load_state` and `skip_first_batches`; with the default sampler, or with
  `use_seedable_sampler` and `set_epoch` before each epoch; or with `use_stateful_dataloader` in place of
  `skip_first_batches`, with either sampler.
- timm: `create_loader`, recovery checkpoints of `CheckpointSaver`, and `resume_checkpoint`, as in its `train.py`.

`paceline` is `paceline train` itself, never stopped, from its own record of samples. The exit status is 1 if any run
with `ExactSampler` has another step than it. Rows that need torchdata are left out, with a note, without it.
"""

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import record

NUM_SAMPLES, BATCH, EPOCHS = 101, 12, 3  # 101 divides over neither 2 nor 3 ranks
SAVE_EVERY, KILL_AT = 3, 14  # steps; a checkpoint after step 12, in the second epoch
WORKERS, TIMEOUT_S = 1, 180
Step = Counter[int]
"""The samples of a step over all ranks."""


@dataclass(frozen=True)
class Job:
    """What one rank of a run does."""

    trainer: str
    sampler: str  # exact, or one of the trainer's own
    folder: Path
    name: str
    rank: int = 0
    world_size: int = 1
    kill_at: int = 0  # 0: never
    resumes: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the loader has an `ExactSampler`."""
        return self.sampler == "exact"

    @property
    def rank_batch(self) -> int:
        """Samples per step on this rank."""
        return BATCH // self.world_size

    @property
    def checkpoint(self) -> Path:
        """Where the newest checkpoint is."""
        return self.folder / "checkpoint"

    def note(self, epoch: int, step: int, samples: Iterable[int]) -> None:
        """Write down step `step`, counted from 1 through all epochs; or end this process in its place."""
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        line = json.dumps({"epoch": epoch, "step": step, "samples": [int(sample) for sample in samples]})
        with (self.folder / f"{self.name}.rank{self.rank}.jsonl").open("a") as file:
            file.write(line + "\n")


class Numbers:
    """A dataset whose items are their indices."""

    transform = None  # timm sets it

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import torch

        return torch.tensor([float(index)]), index


def exact_loader(**options: Any) -> Any:
    """Return the loader that replaces a trainer's own."""
    from torch.utils.data import DataLoader

    from paceline.interop import ExactLoader, ExactSampler

    return ExactLoader(DataLoader(Numbers(), batch_sampler=ExactSampler(NUM_SAMPLES, BATCH), **options))


def run_pytorch(job: Job) -> None:
    """Train in a plain loop under DistributedDataParallel."""
    import torch
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    sampler: Any = None
    if job.is_exact:
        loader = exact_loader(num_workers=WORKERS)
    elif job.sampler == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        sampler = StatefulDistributedSampler(Numbers())
        loader = StatefulDataLoader(Numbers(), job.rank_batch, sampler=sampler, num_workers=WORKERS)
    else:
        sampler = DistributedSampler(Numbers())
        loader = DataLoader(Numbers(), job.rank_batch, sampler=sampler, num_workers=WORKERS)
    start = step = 0
    if job.resumes:
        state = torch.load(job.checkpoint)
        model.load_state_dict(state["model"])
        start, step = state["epoch"], state["step"]
        if "loader" in state:
            loader.load_state_dict(state["loader"])
    for epoch in range(start, EPOCHS):
        if sampler:
            sampler.set_epoch(epoch)
        for numbers, samples in loader:
            step += 1
            job.note(epoch, step, samples)
            model(numbers).sum().backward()
            if step % SAVE_EVERY == 0 and job.rank == 0:
                state = {"model": model.state_dict(), "epoch": epoch, "step": step}
                if hasattr(loader, "state_dict"):
                    state["loader"] = loader.state_dict()
                torch.save(state, job.checkpoint)
    dist.barrier()
    dist.destroy_process_group()


def run_lightning(job: Job) -> None:
    """Fit with Lightning's Trainer."""
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    L.seed_everything(0, verbose=False)

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            job.note(self.current_epoch, self.trainer.fit_loop.total_batch_idx + 1, batch[1])
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    if job.is_exact:
        loader = exact_loader(num_workers=WORKERS)
    elif job.sampler == "stateful loader":
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(Numbers(), job.rank_batch, shuffle=True, num_workers=WORKERS)
    elif job.sampler == "stateful":
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        sampler = StatefulDistributedSampler(Numbers(), job.world_size, job.rank)  # Lightning keeps it
        loader = StatefulDataLoader(Numbers(), job.rank_batch, sampler=sampler, num_workers=WORKERS)
    else:
        loader = DataLoader(Numbers(), job.rank_batch, shuffle=True, num_workers=WORKERS)
    saving = L.pytorch.callbacks.ModelCheckpoint(
        job.checkpoint, "{step:04}", every_n_train_steps=SAVE_EVERY, save_top_k=-1
    )
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=job.world_size, strategy="ddp", callbacks=[saving], **quiet
    )
    newest = max(job.checkpoint.glob("*.ckpt"), default=None) if job.resumes else None
    trainer.fit(Module(), loader, ckpt_path=newest and str(newest), weights_only=False)


def run_accelerate(job: Job) -> None:
    """Train in a loop of Accelerate's."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed
    from torch.utils.data import DataLoader

    config = DataLoaderConfiguration(
        use_seedable_sampler="seedable" in job.sampler, use_stateful_dataloader="stateful" in job.sampler
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    set_seed(0)
    if job.is_exact:
        loader = exact_loader(num_workers=WORKERS)
        accelerator.register_for_checkpointing(loader)
    else:
        loader = DataLoader(Numbers(), job.rank_batch, shuffle=True, num_workers=WORKERS)
    model = torch.nn.Linear(1, 1)
    model, loader = accelerator.prepare(model, loader)
    start = step = skipped = 0
    if job.resumes:
        accelerator.load_state(str(job.checkpoint))
        step = json.loads((job.checkpoint / "step.json").read_text())
        start, skipped = divmod(step, len(loader))
    for epoch in range(start, EPOCHS):
        batches = loader
        if "seedable" in job.sampler:
            loader.set_epoch(epoch)
        if skipped and job.sampler in ("default", "seedable"):
            batches = accelerator.skip_first_batches(loader, skipped)
        skipped = 0
        for numbers, samples in batches:
            step += 1
            job.note(epoch, step, samples)
            accelerator.backward(model(numbers).sum())
            if step % SAVE_EVERY == 0:
                accelerator.save_state(str(job.checkpoint), safe_serialization=False)
                if job.rank == 0:
                    (job.checkpoint / "step.json").write_text(str(step))
    accelerator.end_training()


def run_timm(job: Job) -> None:
    """Train in the loop of timm's `train.py`, with its loader and its checkpoints."""
    import timm.data
    import timm.models
    import timm.utils
    import torch
    from torch.distributed import barrier, destroy_process_group

    logging.disable(logging.WARNING)
    args = argparse.Namespace(device="cpu")
    timm.utils.init_distributed_device(args)
    options = {"is_training": True, "distributed": True, "use_prefetcher": False, "num_workers": WORKERS}
    loader = timm.data.create_loader(Numbers(), (3, 8, 8), job.rank_batch, **options)
    if job.is_exact:
        names = ("num_workers", "collate_fn", "worker_init_fn", "persistent_workers")
        loader = exact_loader(**{name: getattr(loader, name) for name in names})
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    saver = timm.utils.CheckpointSaver(
        model, optimizer, checkpoint_dir=str(job.folder), recovery_dir=str(job.folder), max_history=1
    )
    start = step = 0
    position = job.folder / "position.json"
    if job.resumes:
        newest = max(job.folder.glob("recovery-*"), key=os.path.getmtime)
        start = timm.models.resume_checkpoint(model, str(newest), optimizer, log_info=False)
        # timm counts no steps; the checkpoint that this resumes is from this step.
        step = KILL_AT - KILL_AT % SAVE_EVERY
        if job.is_exact:
            loader.load_state_dict(json.loads(position.read_text()))
            start = loader.epoch
    replica = torch.nn.parallel.DistributedDataParallel(model)
    for epoch in range(start, EPOCHS):
        if not job.is_exact:
            loader.sampler.set_epoch(epoch)
        for index, (numbers, samples) in enumerate(loader):
            step += 1
            job.note(epoch, step, samples)
            replica(numbers).sum().backward()
            if step % SAVE_EVERY == 0 and job.rank == 0:
                saver.save_recovery(epoch, batch_idx=index)
                if job.is_exact:
                    position.write_text(json.dumps(loader.state_dict()))
    barrier()
    destroy_process_group()


RUN: dict[str, Callable[[Job], None]] = {
    "PyTorch": run_pytorch,
    "Lightning": run_lightning,
    "Accelerate": run_accelerate,
    "timm": run_timm,
}
ROWS = (
    ("PyTorch", "default", "DistributedSampler"),
    ("PyTorch", "stateful", "StatefulDistributedSampler"),
    ("Lightning", "default", "DistributedSampler"),
    ("Lightning", "stateful loader", "StatefulDataLoader"),
    ("Lightning", "stateful", "StatefulDistributedSampler"),
    ("Accelerate", "default", "default"),
    ("Accelerate", "seedable", "use_seedable_sampler"),
    ("Accelerate", "stateful", "use_stateful_dataloader"),
    ("Accelerate", "seedable stateful", "use_seedable_sampler + use_stateful_dataloader"),
    ("timm", "default", "DistributedSampler"),
    *((trainer, "exact", "ExactSampler") for trainer in RUN),
)


def run(job: Job, world_size: int) -> list[tuple[int, int, Step]]:
    """Run all ranks of a job; return the epoch, number and samples of each step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [start(replace(job, rank=rank, world_size=world_size), port) for rank in range(world_size)]
    ends = time.monotonic() + TIMEOUT_S
    while None in (codes := [rank.poll() for rank in ranks]) and time.monotonic() < ends:
        if any(codes):
            break  # one rank died: the others would wait for it
        time.sleep(0.05)
    for rank in ranks:
        # The workers of a killed rank are in its group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait(TIMEOUT_S)
    if not job.kill_at and codes != [0] * world_size:
        raise SystemExit(f"{job.trainer}, {job.sampler}, {job.name}: exit codes {codes}")
    return together(job.folder / f"{job.name}.rank{rank}.jsonl" for rank in range(world_size))


def start(job: Job, port: int) -> subprocess.Popen[bytes]:
    """Start one rank of a run as torchrun would."""
    place = {"RANK": job.rank, "LOCAL_RANK": job.rank, "WORLD_SIZE": job.world_size, "GROUP_RANK": 0}
    place |= {"LOCAL_WORLD_SIZE": job.world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {"TORCHELASTIC_RUN_ID": job.name, "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    place |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": 1, "PYTHONWARNINGS": "ignore"}
    environ = {**os.environ, **{name: str(value) for name, value in place.items()}}
    told = json.dumps({**vars(job), "folder": str(job.folder)})
    errors = subprocess.DEVNULL if job.kill_at else None  # of the rank that outlives the other for a moment
    return subprocess.Popen(
        [sys.executable, __file__, "--job", told], env=environ, start_new_session=True, stderr=errors
    )


def together(files: Iterable[Path]) -> list[tuple[int, int, Step]]:
    """Return the epoch, number and samples of each step that all ranks wrote down."""
    ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [
        (parts[0]["epoch"], parts[0]["step"], Counter(sample for part in parts for sample in part["samples"]))
        for parts in zip(*ranks, strict=False)
    ]


def measure(trainer: str, sampler: str, parent: Path) -> dict[str, Any]:
    """Return what one trainer does with one sampler, and its steps if it is never stopped."""
    folder = parent / f"{trainer}-{sampler}"
    for name in ("whole", "2"):
        (folder / name).mkdir(parents=True)
    whole = run(Job(trainer, sampler, folder / "whole", "whole"), 2)
    killed = Job(trainer, sampler, folder / "2", "killed", kill_at=KILL_AT)
    before = [step for step in run(killed, 2) if step[1] <= KILL_AT - KILL_AT % SAVE_EVERY]
    shutil.copytree(folder / "2", folder / "3")
    first = [samples for epoch, _, samples in whole if epoch == 0]
    found: dict[str, Any] = {"epoch": count(first, NUM_SAMPLES), "orders": num_orders(whole)}
    for world_size in (2, 3):
        job = Job(trainer, sampler, folder / str(world_size), "resumed", resumes=True)
        found[f"resumed_on_{world_size}"] = compare(whole, before, run(job, world_size))
    return found | {"steps": [samples for _, _, samples in whole]}


def count(steps: Sequence[Step], num_samples: int) -> dict[str, int]:
    """Return how many samples the steps of an epoch leave out, and how many they take again."""
    taken = sum(steps, Counter())
    return {"left_out": num_samples - len(taken), "repeated": taken.total() - len(taken)}


def compare(
    whole: Sequence[tuple[int, int, Step]],
    before: Sequence[tuple[int, int, Step]],
    after: Sequence[tuple[int, int, Step]],
) -> dict[str, Any]:
    """Return what a kill in the second epoch and a resume did to the samples of that epoch, and to all later steps."""
    epoch = before[-1][0]
    steps = [samples for number, _, samples in (*before, *after) if number == epoch]
    rest = [samples for _, _, samples in whole[len(before) :]]
    same = [samples for _, _, samples in after] == rest
    return {**count(steps, NUM_SAMPLES), "same_steps": same}


def num_orders(whole: Sequence[tuple[int, int, Step]]) -> int:
    """Return in how many different orders the epochs were."""
    epochs: dict[int, list[Any]] = {}
    for epoch, _, samples in whole:
        epochs.setdefault(epoch, []).append(sorted(samples.items()))
    return len({json.dumps(steps) for steps in epochs.values()})


def paceline_steps(folder: Path) -> list[Step]:
    """Return the samples of each step of `paceline train` on two ranks."""
    settings = f"data.source.num_images={NUM_SAMPLES} data.source.image_size=8 data.batch_size={BATCH} data.augment=[]"
    settings += f" train.epochs={EPOCHS} log.samples=true log.every=1st log.report=off parallel.threads=1"
    command = [sys.executable, "-m", "paceline", "train", "synthetic", *settings.split(), "--ranks", "2"]
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([*command, "--run-dir", str(folder)], check=True, stdout=subprocess.PIPE, env=environ)
    ranks = [(folder / f"steps.rank{rank}.jsonl").read_text().splitlines() for rank in range(2)]
    return [
        Counter(sample for line in step for sample in json.loads(line)["samples"]) for step in zip(*ranks, strict=True)
    ]


def main() -> int:
    """Run all, print and write the result; return 1 if `ExactSampler` anywhere differs from `paceline train`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the record")
    parser.add_argument("--only", choices=RUN, help="one trainer")
    parser.add_argument("--job", help=argparse.SUPPRESS)  # be one rank of a run
    options = parser.parse_args()
    if options.job:
        told = json.loads(options.job)
        job = Job(**{**told, "folder": Path(told["folder"])})
        RUN[job.trainer](job)
        return 0
    rows, is_same = {}, True
    with tempfile.TemporaryDirectory() as name:
        expected = paceline_steps(Path(name) / "paceline")
        for trainer, sampler, label in ROWS:
            if options.only not in (None, trainer):
                continue
            if "stateful" in sampler and find_spec("torchdata") is None:
                print(f"{trainer}, {label}: left out (pip install torchdata)", file=sys.stderr)
                continue
            found = measure(trainer, sampler, Path(name))
            found["as_paceline"] = found.pop("steps") == expected
            rows[f"{trainer}, {label}"] = found
            print(f"{trainer}, {label}", json.dumps(found), flush=True)
            if sampler == "exact":
                is_same &= found["as_paceline"] and found["resumed_on_2"]["same_steps"]
                is_same &= found["resumed_on_3"]["same_steps"]
    config = {"num_samples": NUM_SAMPLES, "batch": BATCH, "epochs": EPOCHS, "save_every": SAVE_EVERY}
    config |= {"killed_at_step": KILL_AT, "ranks": 2, "workers": WORKERS}
    result = {
        "benchmark": "trainer_samplers",
        **record.provenance(),
        "versions": {
            package: installed(package) for package in ("torch", "lightning", "accelerate", "timm", "torchdata")
        },
        "config": config,
        "rows": rows,
    }
    if options.json:
        record.write(options.json, result)
    return int(not is_same)


def installed(package: str) -> str:
    """Return the version of a package, or "" without it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
