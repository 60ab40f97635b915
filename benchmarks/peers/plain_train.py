"""Train a small network on images in class folders in plain PyTorch, on one rank or with DDP under torchrun.

python benchmarks/peers/plain_train.py --data FOLDER --out FOLDER --size 48 --batch 8 --workers 1 --epochs 2
"""

import argparse
import os
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder


def build_model(num_classes: int) -> nn.Module:
    """Return a network of half a million parameters."""
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 2)):
        layers += [nn.Conv2d(before, after, 3, stride, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(1024, num_classes))


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--log-every", type=int, default=10)
    for name in ("size", "batch", "workers", "epochs"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    is_distributed = "RANK" in os.environ
    if is_distributed:
        torch.distributed.init_process_group("gloo")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    changes = transforms.Compose([transforms.RandomResizedCrop(args.size), transforms.ToTensor()])
    train, val = (ImageFolder(args.data / split, changes) for split in ("train", "val"))
    sampler = DistributedSampler(train) if is_distributed else None
    options = {"batch_size": args.batch, "num_workers": args.workers}
    loader = DataLoader(train, sampler=sampler, shuffle=sampler is None, drop_last=True, **options)
    model = build_model(len(train.classes)).to(device)
    model = nn.parallel.DistributedDataParallel(model) if is_distributed else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for epoch in range(args.epochs):
        model.train()
        for number, (images, labels) in enumerate(loader):
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number % args.log_every == 0:
                print(f"epoch {epoch}, step {number}: {loss.item():.4f}")
        model.eval()
        with torch.no_grad():
            hits = sum((model(each.to(device)).argmax(1).cpu() == of).sum() for each, of in DataLoader(val, **options))
        print(f"epoch {epoch}: {hits} of {len(val)}")
        torch.save(model.state_dict(), args.out / "weights.pt")
    if is_distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
