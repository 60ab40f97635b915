"""The loop a PyTorch user would write by hand for CIFAR: the opponent of `overhead.py`. It imports no paceline.

ResNet-18 for small images, pixels in memory, random order, pad-crop-flip on whole batches, SGD with Nesterov
momentum and a cosine. No checkpoint, no evaluation, no clock, no resuming; the loss is read every ten steps only.

    python benchmarks/bare_loop.py --steps 20 --batch-size 32 --width 0.25
"""

import argparse
import math
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TextIO

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LOG_EVERY = 10
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut: [N, C, H, W] to [N, channels, H / stride, W / stride]."""

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_channels != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x), inplace=True)


class ResNet18(nn.Module):
    """Map images, float [N, 3, H, W], to logits, float [N, num_classes]; `width` multiplies the channels."""

    def __init__(self, num_classes: int = 10, width: float = 1.0) -> None:
        super().__init__()
        stem, *stages = (max(1, round(channels * width)) for channels in (64, 64, 128, 256, 512))
        self.conv1 = nn.Conv2d(3, stem, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(stem)
        blocks: list[Block] = []
        for before, channels in zip([stem, *stages], stages, strict=False):
            blocks += [Block(before, channels, 2 if blocks else 1), Block(channels, channels, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.linear = nn.Linear(stages[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        out = F.relu(self.bn1(self.conv1(images)), inplace=True)
        return self.linear(self.blocks(out).mean(dim=(2, 3)))


def batches(images: Tensor, labels: Tensor, batch_size: int, padding: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (uint8 [N, 3, H, W], int64 [N]) for ever: a new order each epoch, cropped and flipped at random.

    The set is padded once. `windows` is a view of every crop of every image, so that cutting is one indexing.
    """
    num, _, height, width = images.shape
    windows = F.pad(images, [padding] * 4).unfold(2, height, 1).unfold(3, width, 1)
    while True:
        order = torch.randperm(num)
        for start in range(0, num - batch_size + 1, batch_size):
            chosen = order[start : start + batch_size]
            rows, columns = torch.randint(0, 2 * padding + 1, (2, batch_size))
            crops = windows[chosen, :, rows, columns]
            is_flipped = torch.rand(batch_size) < 0.5
            yield torch.where(is_flipped[:, None, None, None], crops.flip(3), crops), labels[chosen]


def train(
    model: nn.Module,
    source: Iterable[tuple[Tensor, Tensor]],
    *,
    num_steps: int,
    peak_lr: float,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    out: TextIO,
) -> Iterator[Tensor]:
    """Train `model` on `source`; yield the loss, float32 [], after every step. `mean` and `std` are of [0, 1]."""
    model.train()
    criterion = nn.CrossEntropyLoss()
    options = {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, "fused": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=peak_lr, **options)
    shift = (torch.tensor(mean) * 255).view(1, -1, 1, 1)
    scale = (torch.tensor(std) * 255).reciprocal().view(1, -1, 1, 1)
    loss_sum, logged_s = torch.zeros(()), time.perf_counter()
    for step, (images, labels) in zip(range(num_steps), source, strict=False):
        lr = peak_lr * (1 + math.cos(math.pi * step / num_steps)) / 2
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = criterion(model(images.float().sub_(shift).mul_(scale)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss_sum += loss.detach()
        if (step + 1) % LOG_EVERY == 0:
            now_s = time.perf_counter()
            images_per_s = LOG_EVERY * len(labels) / (now_s - logged_s)
            print(
                f"step {step + 1}  loss {loss_sum.item() / LOG_EVERY:.4f}  lr {lr:.4g}  {images_per_s:.0f} images/s",
                file=out,
                flush=True,
            )
            loss_sum, logged_s = torch.zeros(()), now_s
        yield loss.detach()


def main() -> None:
    """Train on random pixels shaped like CIFAR-10."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--width", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    images = torch.randint(0, 256, (50_000, 3, 32, 32), dtype=torch.uint8)
    source = batches(images, torch.randint(0, 10, (50_000,)), args.batch_size)
    model = ResNet18(width=args.width)
    steps = train(
        model, source, num_steps=args.steps, peak_lr=args.lr, mean=CIFAR10_MEAN, std=CIFAR10_STD, out=sys.stdout
    )
    started_s = time.perf_counter()
    num_done = sum(1 for _ in steps)
    print(f"{num_done} steps, {(time.perf_counter() - started_s) / num_done:.4f} s a step on average")


if __name__ == "__main__":
    main()
