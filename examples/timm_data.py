"""Use paceline's loaders in a training loop with timm's models, optimizers, schedules and meters.

    python examples/timm_data.py
    python examples/timm_data.py folder data.source.name=pack data.source.root=photos.pack data.batch_size=256
    torchrun --nproc-per-node 2 examples/timm_data.py

Without arguments, it trains on scikit-learn's digits, in seconds on a CPU. timm's own `train.py` takes the loaders
after a change of two lines: see docs/how-to/other-trainers.md.
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
    """Train for an epoch, stepping the schedule per batch; return the mean loss of this rank's images."""
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
    """Return the accuracy over all images of all ranks."""
    # The mean of batch means would weight images of smaller batches more.
    model.eval()
    correct = sum((model(images).argmax(1) == labels).float().sum() for images, labels in loader)
    return (reduce_tensor(correct, 1) if distributed else correct).item() / len(loader.dataset)


def main() -> None:
    """Train for a few epochs, and print the accuracy after each."""
    args = argparse.Namespace(device="cuda" if torch.cuda.is_available() else "cpu")
    device = init_distributed_device(args)  # joins the ranks of torchrun; `loaders` needs them
    with loaders(*(sys.argv[1:] or ["digits"]), device=device) as (train, val):
        dataset = train.dataset
        model = timm.create_model("test_resnet", num_classes=dataset.num_classes, in_chans=dataset.channels).to(device)
        replica = DistributedDataParallel(model) if args.distributed else model
        optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, momentum=0.9)
        scheduler, num_epochs = create_scheduler_v2(
            optimizer, num_epochs=EPOCHS, step_on_epochs=False, updates_per_epoch=len(train)
        )
        for epoch in range(num_epochs):
            loss = train_one_epoch(replica, train, optimizer, scheduler, epoch)
            share = top1(model, val, args.distributed)
            if is_primary(args):
                print(f"epoch {epoch + 1}: loss {loss:.3f}, top1 {share:.1%} of {len(val.dataset)} images")
    if args.distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
