"""Train with timm's loader and optimizer on an exact order of samples, and resume it within an epoch.

    python examples/exact_timm.py
    torchrun --standalone --nproc_per_node=2 examples/exact_timm.py

Kill it at any time and start it again, also with another number of processes that divides the batch size. timm's
`create_loader` makes a sampler of its own: the lines marked `exact` keep its transforms, collation and worker seeds,
and replace that sampler.
"""

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from timm.data import create_loader
from timm.optim import create_optimizer_v2
from timm.utils import init_distributed_device, is_primary
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from paceline.interop import ExactEvalSampler, ExactLoader, ExactSampler  # exact

EPOCHS, BATCH, SAVE_EVERY, NUM_TEST = 3, 96, 5, 360
CHECKPOINT = Path("exact_timm.pt")


def with_sampler(loader: DataLoader, sampler: ExactSampler | ExactEvalSampler) -> DataLoader:  # exact
    """Return a loader like one of `create_loader(..., use_prefetcher=False)`, with another sampler."""
    names = ("num_workers", "collate_fn", "pin_memory", "worker_init_fn", "persistent_workers")
    return DataLoader(loader.dataset, batch_sampler=sampler, **{name: getattr(loader, name) for name in names})


def main() -> None:
    """Train from the newest checkpoint, if there is one, and print the test loss."""
    args = argparse.Namespace(device="cuda" if torch.cuda.is_available() else "cpu")
    device = init_distributed_device(args)  # joins the ranks of torchrun, which the samplers ask for
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
    train = TensorDataset(images[:-NUM_TEST], labels[:-NUM_TEST])  # with photographs: timm.data.create_dataset
    test = TensorDataset(images[-NUM_TEST:], labels[-NUM_TEST:])
    options = {"use_prefetcher": False, "num_workers": 1, "persistent_workers": False}
    timm_loader = create_loader(train, 8, BATCH, is_training=True, **options)
    loader = ExactLoader(with_sampler(timm_loader, ExactSampler(len(train), BATCH, seed=0)))  # exact
    timm_loader = create_loader(test, 8, BATCH, **options)
    test_loader = with_sampler(timm_loader, ExactEvalSampler(len(test), BATCH))  # exact: each image once

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).to(device)
    optimizer = create_optimizer_v2(model, opt="momentum", lr=0.1, momentum=0.9)
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])  # exact
    replica = DistributedDataParallel(model) if args.distributed else model

    for _ in range(loader.epoch, EPOCHS):  # exact: no set_epoch
        for images, labels in loader:
            loss = nn.functional.cross_entropy(replica(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if loader.step % SAVE_EVERY == 0 and is_primary(args):
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state["loader"] = loader.state_dict()  # exact
                torch.save(state, CHECKPOINT.with_suffix(".new"))
                CHECKPOINT.with_suffix(".new").replace(CHECKPOINT)  # a kill leaves the old checkpoint whole

    total = torch.zeros((), device=device)
    with torch.no_grad():
        for images, labels in test_loader:
            total += nn.functional.cross_entropy(model(images.to(device)), labels.to(device), reduction="sum")
    if args.distributed:
        torch.distributed.all_reduce(total)
    if is_primary(args):
        print(f"step {loader.step}: test loss {total / len(test):.4f}", flush=True)
    if args.distributed:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
