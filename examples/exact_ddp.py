"""Train under DistributedDataParallel on an exact order of samples, and resume it within an epoch.

    torchrun --standalone --nproc_per_node=2 examples/exact_ddp.py

Kill it at any time and start it again, also with another number of processes that divides the batch size: it resumes
after its newest checkpoint, with the samples that it would have had. The lines marked `exact` replace a
DistributedSampler and its `set_epoch`.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from paceline.interop import ExactEvalSampler, ExactLoader, ExactSampler  # exact

EPOCHS, BATCH, SAVE_EVERY, NUM_TEST = 3, 96, 5, 360
CHECKPOINT = Path("exact_ddp.pt")


def main() -> None:
    """Run one rank: train, save every few steps, and print the test loss at the end."""
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_cuda else torch.device("cpu")
    dist.init_process_group("nccl" if is_cuda else "gloo")
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
    train = TensorDataset(images[:-NUM_TEST], labels[:-NUM_TEST])
    test = TensorDataset(images[-NUM_TEST:], labels[-NUM_TEST:])
    sampler = ExactSampler(len(train), BATCH, seed=0)  # exact: the batch size counts all ranks
    loader = ExactLoader(DataLoader(train, batch_sampler=sampler, num_workers=1))  # exact
    test_loader = DataLoader(test, batch_sampler=ExactEvalSampler(len(test), BATCH))  # exact: each image once

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if CHECKPOINT.exists():
        state = torch.load(CHECKPOINT, map_location=device)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])  # exact

    for _ in range(loader.epoch, EPOCHS):  # exact: no set_epoch
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if loader.step % SAVE_EVERY == 0 and dist.get_rank() == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                state["loader"] = loader.state_dict()  # exact
                torch.save(state, CHECKPOINT.with_suffix(".new"))
                CHECKPOINT.with_suffix(".new").replace(CHECKPOINT)  # a kill leaves the old checkpoint whole

    total = torch.zeros((), device=device)
    with torch.no_grad():
        for images, labels in test_loader:
            total += nn.functional.cross_entropy(model.module(images.to(device)), labels.to(device), reduction="sum")
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"step {loader.step}: test loss {total / len(test):.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
