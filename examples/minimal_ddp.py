"""Train a small classifier under DistributedDataParallel, in plain PyTorch, with only what data parallelism needs.

python examples/minimal_ddp.py
torchrun --standalone --nproc_per_node=2 examples/minimal_ddp.py
"""

import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, RANK_BATCH, LR, MOMENTUM, NUM_TEST = 4, 32, 0.1, 0.9, 360


class Net(nn.Sequential):
    """Two convolutions and a linear layer: float images [N, C, 8, 8] to logits [N, num_classes]."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        first = nn.Conv2d(in_channels, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        second = nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten()
        super().__init__(*first, *second, nn.Linear(512, num_classes))


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Train on this rank's images; `backward` averages the gradients over all ranks."""
    for images, labels in loader:
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """Return the accuracy over the images of all ranks."""
    counts = torch.zeros(2, device=device)
    for images, labels in loader:
        correct = (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
        counts += torch.stack([correct, torch.tensor(len(labels), device=device)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main() -> None:
    """Run one rank: join the others, train, and save the weights on rank 0."""
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if is_cuda else torch.device("cpu")
    # torchrun says who this rank is and where ranks meet; without it there is one rank, which meets nobody.
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if is_cuda else "gloo", **alone)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)
    train = TensorDataset(images[:-NUM_TEST], labels[:-NUM_TEST])
    test = TensorDataset(images[-NUM_TEST + rank :: world_size], labels[-NUM_TEST + rank :: world_size])
    sampler = DistributedSampler(train, seed=0, drop_last=True)  # different images on each rank
    loader, test_loader = DataLoader(train, RANK_BATCH, sampler=sampler, drop_last=True), DataLoader(test, RANK_BATCH)
    torch.manual_seed(0)
    model = DistributedDataParallel(Net().to(device))  # starts from the weights of rank 0 on every rank
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # a different order in every epoch
        start = time.perf_counter()
        train_epoch(model, loader, optimizer, device)
        seconds, accuracy = time.perf_counter() - start, evaluate(model, test_loader, device)
        if rank == 0:
            print(f"epoch {epoch + 1}/{EPOCHS}: {seconds:.2f} s, test accuracy {accuracy:.1%}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), "minimal_ddp.pt")
    dist.barrier()  # wait for rank 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
