"""The clock in a loop of Hugging Face Accelerate: where did every second of this training go?

    python examples/accelerate_loop.py          (or: accelerate launch examples/accelerate_loop.py)

What the stages mean here: a prepared loader copies each batch to the device before it hands it over, so the copy is in
`data_wait` and there is no `h2d`; on several ranks `backward` has the waiting for gradients of others in it.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.measure import StageClock

EPOCHS = 2
WARMUP_STEPS = 3  # the first steps allocate and choose kernels: they are timed, but in a row of their own


def made_up(num_images: int) -> TensorDataset:
    """Return images that are rows of 512 numbers, with labels that mean nothing."""
    return TensorDataset(torch.randn(num_images, 512), torch.arange(num_images) % 10)


def main() -> None:
    """Train for two epochs, two micro-batches a step, and print where the time went."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train, val = DataLoader(made_up(2560), batch_size=64, shuffle=True), DataLoader(made_up(250), batch_size=64)
    model, optimizer, train, val = accelerator.prepare(model, optimizer, train, val)
    loss_of = nn.CrossEntropyLoss()

    clock = StageClock.for_device(accelerator.device.type, warmup_steps=WARMUP_STEPS)  # its time runs from here
    images_of_step = 0
    for _ in range(EPOCHS):
        for images, labels in clock.batches(train):  # waiting for a batch is the stage `data_wait`
            with accelerator.accumulate(model):
                with clock.stage("forward"):
                    logits = model(images)
                with clock.stage("loss"):
                    loss = loss_of(logits, labels)
                with clock.stage("backward"):
                    accelerator.backward(loss)
                with clock.stage("optimizer"):  # both do nothing until the last micro-batch
                    optimizer.step()
                    optimizer.zero_grad()
            images_of_step += len(images) * accelerator.num_processes
            if accelerator.sync_gradients:  # a step of the clock is a step of the optimizer
                clock.end_step(images=images_of_step)
                images_of_step = 0
        with clock.paused("evaluate"), torch.inference_mode():  # in no step, and not in images/s
            pairs = [accelerator.gather_for_metrics((model(images).argmax(1), labels)) for images, labels in val]
            hits = sum((found == labels).sum().item() for found, labels in pairs)
        accelerator.print(f"top1 {hits / len(val.dataset):.1%} (of labels that mean nothing)")
    accelerator.print(clock.drain().table())


if __name__ == "__main__":
    main()
