"""Train in two forked processes."""

import torch
from torch import multiprocessing, nn


def train(number):
    torch.set_num_threads(1)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    multiprocessing.start_processes(train, nprocs=2, start_method="fork")
