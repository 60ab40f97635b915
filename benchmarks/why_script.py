"""Train a small network for a few epochs: the script whose slow and worse variants `why.py` has explained."""

import argparse
import logging
import os
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    """Noise with a bright stripe that tells the class."""

    def __init__(self, number, size, load_ms):
        self.number, self.size, self.load_ms = number, size, load_ms

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        image = torch.randn(3, self.size, self.size, generator=torch.Generator().manual_seed(index))
        image[:, index % 10] += 1.0
        time.sleep(self.load_ms / 1000)
        return image, index % 10


class Remote(logging.Handler):
    """A tracker that computes for 10 ms per record: a virtual machine may lose its core by sleeping."""

    def emit(self, record):
        """Take the time."""
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass


def build_model(width):
    """Return a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d((8, 1)),
        nn.Flatten(),
        nn.Linear(8 * width, 10),
    )


def evaluate(model, loader):
    """Return the number of images that are classified correctly."""
    model.eval()
    with torch.no_grad():
        hits = sum((model(images).argmax(1) == labels).sum().item() for images, labels in loader)
    model.train()
    return hits


def main():  # noqa: C901 - a script
    """Train."""
    parser = argparse.ArgumentParser()
    for name, default in {
        "--workers": 0, "--load-ms": 0.0, "--batch-size": 32, "--images": 1024, "--log-every": 50, "--image-size": 32,
        "--width": 16, "--eval-every": 4, "--save-every": 1000, "--lr": 0.05, "--seed": 0, "--label-smoothing": 0.0,
        "--epochs": 4, "--slow-rank": -1,
    }.items():  # fmt: skip
        parser.add_argument(name, type=type(default), default=default)
    parser.add_argument("--anomaly", action="store_true")
    parser.add_argument("--tag", default="")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    torch.autograd.set_detect_anomaly(options.anomaly)
    logging.basicConfig(level=logging.INFO, handlers=[Remote()])
    rank = int(os.environ.get("RANK", "0"))
    model = build_model(options.width)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    criterion = nn.CrossEntropyLoss(label_smoothing=options.label_smoothing)
    train = DataLoader(
        Images(options.images, options.image_size, options.load_ms),
        batch_size=options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
    )
    val = DataLoader(Images(512, options.image_size, 0.0), batch_size=64)
    average = torch.zeros(2_000_000)  # checkpoints as large as those of a model that people train
    step = 0
    for epoch in range(1, options.epochs + 1):
        for images, labels in train:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            if rank == options.slow_rank:
                time.sleep(0.02)
            optimizer.step()
            step += 1
            if step % options.log_every == 0:
                logging.info("step %d: loss %.4f", step, loss.item())
            if step % options.save_every == 0:
                torch.save({"model": model.state_dict(), "average": average}, "weights.pt")
        if epoch % options.eval_every == 0:
            print("hits", evaluate(model, val))
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
