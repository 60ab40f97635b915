"""Train with Hugging Face Accelerate on an exact order of samples, and resume it within an epoch.

    python examples/exact_accelerate.py
    torchrun --standalone --nproc_per_node=2 examples/exact_accelerate.py

Kill it at any time and start it again, also with another number of processes that divides the batch size. The lines
marked `exact` replace a prepared loader, `skip_first_batches` and `set_epoch`.
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.interop import ExactEvalSampler, ExactLoader, ExactSampler  # exact

EPOCHS, BATCH, SAVE_EVERY, NUM_TEST = 3, 96, 5, 360
CHECKPOINT = Path("exact_accelerate")


def main() -> None:
    """Train from the newest checkpoint, if there is one, and print the test loss."""
    accelerator = Accelerator()  # joins the ranks, which the samplers ask for
    device = accelerator.device
    digits = load_digits()
    images, labels = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
    train = TensorDataset(images[:-NUM_TEST], labels[:-NUM_TEST])
    test = TensorDataset(images[-NUM_TEST:], labels[-NUM_TEST:])
    sampler = ExactSampler(len(train), BATCH, seed=0)  # exact: the batch size counts all ranks
    loader = ExactLoader(DataLoader(train, batch_sampler=sampler, num_workers=1))  # exact: not prepared
    test_loader = DataLoader(test, batch_sampler=ExactEvalSampler(len(test), BATCH))  # exact: each image once

    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.register_for_checkpointing(loader)  # exact: save_state and load_state have its position
    if CHECKPOINT.exists():
        accelerator.load_state(str(CHECKPOINT))

    for _ in range(loader.epoch, EPOCHS):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            if loader.step % SAVE_EVERY == 0:
                accelerator.save_state(str(CHECKPOINT))

    total = torch.zeros((), device=device)
    unwrapped = accelerator.unwrap_model(model)
    with torch.no_grad():
        for images, labels in test_loader:
            total += nn.functional.cross_entropy(unwrapped(images.to(device)), labels.to(device), reduction="sum")
    total = accelerator.reduce(total)
    accelerator.print(f"step {loader.step}: test loss {total / len(test):.4f}", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
