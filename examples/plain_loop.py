"""Measure the time per stage in a plain PyTorch training loop.

    python examples/plain_loop.py

The images are synthetic and slow to load on purpose, so `data_wait` dominates the printed table.
"""

import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline.measure import StageClock

EPOCHS = 2
WARMUP_STEPS = 3  # the first steps allocate memory and choose kernels, so they are timed in a row of their own
DECODE_S = 0.002


class SlowImages(Dataset[tuple[Tensor, int]]):
    """Synthetic images that take 2 ms each, like decoding a photo."""

    def __init__(self, num_images: int) -> None:
        self.images = torch.randn(num_images, 3, 16, 16)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(DECODE_S)
        return self.images[index], index % 10


def main() -> None:
    """Train for two epochs, and print the time per stage."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    train = DataLoader(SlowImages(320), batch_size=16, shuffle=True)
    val = DataLoader(SlowImages(64), batch_size=16)

    clock = StageClock.for_device(device.type, warmup_steps=WARMUP_STEPS)  # starts the clock
    for _ in range(EPOCHS):
        for images, labels in clock.batches(train):  # waiting for a batch is stage `data_wait`
            with clock.stage("h2d"):
                images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            with clock.stage("forward"):
                logits = model(images)
            with clock.stage("loss"):
                loss = loss_of(logits, labels)
            with clock.stage("backward"):
                loss.backward()
            with clock.stage("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            clock.end_step(images=len(images))
        with clock.paused("evaluate"), torch.inference_mode():  # excluded from steps and images/s
            correct = sum((model(images.to(device)).argmax(1).cpu() == labels).sum().item() for images, labels in val)
        print(f"top1 {correct / len(val.dataset):.1%} (of labels that mean nothing)")
    print(clock.drain().table())


if __name__ == "__main__":
    main()
