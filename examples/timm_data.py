"""Paceline's data in a loop of timm's: its networks, optimizers, schedules and meters, on our loaders.

    python examples/timm_data.py
    python examples/timm_data.py folder data.source.name=pack data.source.root=photos.pack data.batch_size=256
    torchrun --nproc-per-node 2 examples/timm_data.py

Without words it trains on the digits that come with scikit-learn, in seconds on a CPU. timm's own `train.py` takes the
loaders as they are, in two lines: see docs/how-to/other-trainers.md.
"""

import argparse
import sys

import timm
import torch
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, init_distributed_device, is_primary, reduce_tensor
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.interop import EvalLoader, TrainLoader, loaders

EPOCHS = 3


def train_one_epoch(model: nn.Module, loader: TrainLoader, optimizer: torch.optim.Optimizer, scheduler, epoch: int):
    """Train for an epoch, the schedule going on with every step; return the mean loss of this rank's images."""
    model.train()
    losses = AverageMeter()
    loss_of = SoftTargetCrossEntropy() if loader.mixup_enabled else nn.CrossEntropyLoss()
    for step, (images, targets) in enumerate(loader, start=epoch * len(loader) + 1):
        loss = loss_of(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step_update(step)
        losses.update(loss.detach(), len(images))
    return losses.avg


@torch.inference_mode()
def top1(model: nn.Module, loader: EvalLoader, distributed: bool) -> float:
    """Return the accuracy over all images of all ranks. Hits are added up: the mean of batches' means is another."""
    model.eval()
    hits = sum((model(images).argmax(1) == labels).float().sum() for images, labels in loader)
    return (reduce_tensor(hits, 1) if distributed else hits).item() / len(loader.dataset)


def main() -> None:
    """Train for a few epochs, and say after each how good the network is."""
    args = argparse.Namespace(device="cuda" if torch.cuda.is_available() else "cpu")
    device = init_distributed_device(args)  # joins the ranks that torchrun has started, before there are loaders
    with loaders(*(sys.argv[1:] or ["digits"]), device=device) as (train, val):
        facts = train.dataset
        model = timm.create_model("test_resnet", num_classes=facts.num_classes, in_chans=facts.channels).to(device)
        replica = DistributedDataParallel(model) if args.distributed else model
        optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9)
        scheduler, num_epochs = create_scheduler_v2(
            optimizer, num_epochs=EPOCHS, step_on_epochs=False, updates_per_epoch=len(train)
        )
        for epoch in range(num_epochs):
            loss, share = (
                train_one_epoch(replica, train, optimizer, scheduler, epoch),
                top1(model, val, args.distributed),
            )
            if is_primary(args):
                print(f"epoch {epoch + 1}: loss {loss:.3f}, top1 {share:.1%} of {len(val.dataset)} images")
    if args.distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
