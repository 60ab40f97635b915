"""Train on a CPU in one process, with micro-batches, an evaluation and a checkpoint per epoch; print the weights."""

import hashlib
import logging
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, STEPS, MICRO_BATCHES, BATCH = 3, 6, 2, 8


def main():
    torch.manual_seed(0)
    num_workers = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    images = torch.randn(EPOCHS * STEPS * MICRO_BATCHES * BATCH // EPOCHS, 3, 16, 16)
    labels = torch.arange(len(images)) % 10
    train = DataLoader(TensorDataset(images, labels), batch_size=BATCH, shuffle=True, num_workers=num_workers)
    val = DataLoader(TensorDataset(images[:32], labels[:32]), batch_size=BATCH)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(3136, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    criterion = nn.CrossEntropyLoss()
    logging.basicConfig(level=logging.INFO)
    for _ in range(EPOCHS):
        model.train()
        for number, (batch, target) in enumerate(train, 1):
            loss = criterion(model(batch), target)
            (loss / MICRO_BATCHES).backward()
            if number % MICRO_BATCHES == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                logging.info("loss %s", loss.item())
        model.eval()
        with torch.no_grad():
            hits = sum((model(batch).argmax(1) == target).sum().item() for batch, target in val)
        torch.save(model.state_dict(), Path("weights.pt"))
    digest = hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in model.state_dict().values()))
    print(digest.hexdigest(), hits)


if __name__ == "__main__":
    main()
