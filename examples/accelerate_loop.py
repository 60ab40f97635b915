"""Paceline's data and clock in a loop of Hugging Face Accelerate: where did every second of this training go?

    python examples/accelerate_loop.py
    python examples/accelerate_loop.py folder data.source.name=pack data.source.root=photos.pack data.batch_size=256
    accelerate launch --cpu --num-processes 2 examples/accelerate_loop.py

Loaders are not to be prepared: they know the ranks that the Accelerator has joined, and bring batches to the device.
Their batch size counts all ranks, and `split_batches` tells a prepared scheduler so: else it steps once for each.
The copy is in `data_wait`, with normalising, and there is no `h2d`; on several ranks `backward` has the waiting for
gradients of others in it. Without words images are made up.
"""

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn

from paceline.interop import loaders
from paceline.measure import StageClock

EPOCHS = 2
MICRO_BATCHES = 2  # of an optimizer step
WARMUP_STEPS = 3  # the first steps allocate and choose kernels: they are timed, but in a row of their own
MADE_UP = ("synthetic", "data.source.num_images=2560", "data.source.num_val_images=250", "data.source.image_size=16")


def main() -> None:
    """Train for two epochs, two micro-batches a step, and print where the time went."""
    counted_whole = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES, dataloader_config=counted_whole)
    train, val = loaders(*(sys.argv[1:] or MADE_UP), device=accelerator.device)  # once the ranks are joined
    model = nn.Sequential(
        nn.AdaptiveAvgPool2d(16),
        nn.Flatten(),
        nn.LazyLinear(1024),
        nn.ReLU(),
        nn.Linear(1024, train.dataset.num_classes),
    )
    model(torch.zeros(1, train.dataset.channels, 16, 16))  # which makes the lazy layer
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train) // MICRO_BATCHES)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loss_of = nn.CrossEntropyLoss()

    clock = StageClock.for_device(accelerator.device.type, warmup_steps=WARMUP_STEPS)  # its time runs from here
    images_of_step = 0
    for _ in range(EPOCHS):
        for images, targets in clock.batches(train):  # waiting for a batch is the stage `data_wait`
            with accelerator.accumulate(model):
                with clock.stage("forward"):
                    logits = model(images)
                with clock.stage("loss"):
                    loss = loss_of(logits, targets)
                with clock.stage("backward"):
                    accelerator.backward(loss)
                with clock.stage("optimizer"):  # all three do nothing until the last micro-batch
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            images_of_step += len(images) * accelerator.num_processes
            if accelerator.sync_gradients:  # a step of the clock is a step of the optimizer
                clock.end_step(images=images_of_step)
                images_of_step = 0
        with clock.paused("evaluate"), torch.inference_mode():  # in no step, and not in images/s
            alone = accelerator.unwrap_model(model)  # ranks do not meet at each batch, but once
            hits = sum((alone(images).argmax(1) == labels).sum() for images, labels in val)
            hits = accelerator.reduce(hits)  # every image once: what is counted is added up, and nothing left out
        (rate,) = scheduler.get_last_lr()
        top1 = hits / len(val.dataset)
        accelerator.print(f"top1 {top1:.1%} of {len(val.dataset)} images, next learning rate {rate:.4f}")
    accelerator.print(clock.drain().table())
    train.close()
    val.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
