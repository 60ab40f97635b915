"""The clock in a plain PyTorch loop: where did every second of this training go?

    python examples/plain_loop.py

The images are made up, and slow to come on purpose: the table names `data_wait`, which is what this loop waits for.
"""

import time

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline.measure import StageClock

EPOCHS = 2
WARMUP_STEPS = 3  # the first steps allocate and choose kernels: they are timed, but in a row of their own
DECODE_S = 0.002


class SlowImages(Dataset[tuple[Tensor, int]]):
    """Made-up images that take 2 ms each, as decoding a photograph does."""

    def __init__(self, num_images: int) -> None:
        self.images = torch.randn(num_images, 3, 16, 16)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(DECODE_S)
        return self.images[index], index % 10


def main() -> None:
    """Train for two epochs, and print where the time went."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    train = DataLoader(SlowImages(320), batch_size=16, shuffle=True)
    val = DataLoader(SlowImages(64), batch_size=16)

    clock = StageClock.for_device(device.type, warmup_steps=WARMUP_STEPS)  # its time runs from here
    for _ in range(EPOCHS):
        for images, labels in clock.batches(train):  # waiting for a batch is the stage `data_wait`
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
        with clock.paused("evaluate"), torch.inference_mode():  # in no step, and not in images/s
            hits = sum((model(images.to(device)).argmax(1).cpu() == labels).sum().item() for images, labels in val)
        print(f"top1 {hits / len(val.dataset):.1%} (of labels that mean nothing)")
    print(clock.drain().table())


if __name__ == "__main__":
    main()
