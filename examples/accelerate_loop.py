"""Use paceline's loaders and clock in a training loop of Hugging Face Accelerate.

    python examples/accelerate_loop.py
    python examples/accelerate_loop.py folder data.source.name=pack data.source.root=photos.pack data.batch_size=256
    accelerate launch --cpu --num-processes 2 examples/accelerate_loop.py

Do not prepare the loaders: they know the Accelerator's ranks, and move batches to the device. Their batch size counts
all ranks. Set `split_batches`, so that a prepared scheduler steps once per batch and not once per rank.
`data_wait` includes the copy and normalization, so there is no `h2d`. On several ranks, `backward` includes waiting for
the gradients of other ranks. Without arguments, the images are synthetic.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn

from paceline.interop import loaders
from paceline.measure import StageClock

EPOCHS = 2
MICRO_BATCHES = 2  # per optimizer step
WARMUP_STEPS = 3  # the first steps allocate memory and choose kernels, so they are timed in a row of their own
MADE_UP = ("synthetic", "data.source.num_images=2560", "data.source.num_val_images=250", "data.source.image_size=16")


def main() -> None:
    """Train for two epochs, two micro-batches per step, and print the time per stage."""
    counted_whole = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES, dataloader_config=counted_whole)
    train, val = loaders(*(sys.argv[1:] or MADE_UP), device=accelerator.device)  # the ranks are joined
    model = nn.Sequential(
        nn.AdaptiveAvgPool2d(16),
        nn.Flatten(),
        nn.LazyLinear(1024),
        nn.ReLU(),
        nn.Linear(1024, train.dataset.num_classes),
    )
    model(torch.zeros(1, train.dataset.channels, 16, 16))  # creates the lazy layer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train) // MICRO_BATCHES)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loss_of = nn.CrossEntropyLoss()

    clock = StageClock.for_device(accelerator.device.type, warmup_steps=WARMUP_STEPS)  # starts the clock
    images_of_step = 0
    for _ in range(EPOCHS):
        for images, targets in clock.batches(train):  # waiting for a batch is stage `data_wait`
            with accelerator.accumulate(model):
                with clock.stage("forward"):
                    logits = model(images)
                with clock.stage("loss"):
                    loss = loss_of(logits, targets)
                with clock.stage("backward"):
                    accelerator.backward(loss)
                with clock.stage("optimizer"):  # all three do nothing before the last micro-batch
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            images_of_step += len(images) * accelerator.num_processes
            if accelerator.sync_gradients:  # the clock counts optimizer steps
                clock.end_step(images=images_of_step)
                images_of_step = 0
        with clock.paused("evaluate"), torch.inference_mode():  # excluded from steps and images/s
            unwrapped = accelerator.unwrap_model(model)  # ranks synchronize once, not per batch
            correct = sum((unwrapped(images).argmax(1) == labels).sum() for images, labels in val)
            correct = accelerator.reduce(correct)  # the sum of counts is exact, as every image is evaluated once
        (rate,) = scheduler.get_last_lr()
        top1 = correct / len(val.dataset)
        accelerator.print(f"top1 {top1:.1%} of {len(val.dataset)} images, next learning rate {rate:.4f}")
    accelerator.print(clock.drain().table())
    train.close()
    val.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
