"""Loops that other people's programs are, for `gpu.py`: by hand in PyTorch, in Lightning, and in Accelerate.

All train the same network on the same made-up pixels, which lie on the device, and time themselves in windows of steps
by a clock that waits for the device at the ends of a window alone. None augments. Only the models are paceline's.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.models.build import build_model
from paceline.recipe.schema.model import Model

MEAN, STD = 127.0, 52.0


@dataclass(frozen=True)
class Work:
    """What is trained: a network by paceline's name, on `num_images` images of `size` pixels, in windows of steps."""

    name: str
    size: int
    channels: int
    num_classes: int
    batch_size: int
    num_images: int
    width: float
    device: torch.device
    steps_a_window: int
    num_windows: int

    def model(self) -> nn.Module:
        """Return the network, untrained, on the device."""
        torch.manual_seed(0)
        section = Model(name=self.name, width=self.width if ":" not in self.name else 1.0)
        return build_model(section, num_classes=self.num_classes, channels=self.channels).to(self.device)

    def pixels(self) -> tuple[Tensor, Tensor]:
        """Return uint8 [M, C, H, W] and int64 [M] on the device."""
        shape = (self.num_images, self.channels, self.size, self.size)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, device=self.device)
        return images, torch.arange(self.num_images, device=self.device) % self.num_classes

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (uint8 [N, C, H, W], int64 [N]) for ever, in a new random order each epoch."""
        images, labels = self.pixels()
        while True:
            order = torch.randperm(self.num_images, device=self.device)
            for start in range(0, self.num_images - self.batch_size + 1, self.batch_size):
                chosen = order[start : start + self.batch_size]
                yield images[chosen], labels[chosen]

    def autocast(self) -> Any:
        """Return what a pass in bfloat16 is surrounded by."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


class Windows:
    """The rates, in images/s, of windows of steps; the first window, which warms up, is dropped."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._steps = 0
        self._began_s = 0.0
        self.rates: list[float] = []

    @property
    def num_steps(self) -> int:
        """How many steps it takes to fill all windows."""
        return self._work.steps_a_window * (self._work.num_windows + 1)

    def step(self) -> None:
        """Count a step."""
        self._steps += 1
        if self._steps % self._work.steps_a_window == 0:
            if self._work.device.type == "cuda":
                torch.cuda.synchronize()
            now_s = time.perf_counter()
            if self._steps > self._work.steps_a_window:
                images = self._work.steps_a_window * self._work.batch_size
                self.rates.append(images / (now_s - self._began_s))
            self._began_s = now_s


def tutorial(work: Work) -> list[float]:
    """Return the rates of NERSC's first rung as its tutorial writes it: float32 with no TF32, nothing optimized.

    Contiguous, one optimizer kernel a parameter, gradients zeroed and not dropped, cuDNN's first choice, and a wait for
    the device in every step (NERSC/sc20-dl-tutorial, train.py). Its loader is left out: it would only be slower.
    """
    model, windows = work.model(), Windows(work)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=5e-4, foreach=False, fused=False)
    with numerics(may_round=False, benchmark=False):
        for _, (images, labels) in zip(range(windows.num_steps), work.batches(), strict=False):
            optimizer.zero_grad(set_to_none=False)
            loss = criterion(model((images.float() - MEAN) / STD), labels)
            loss.backward()
            optimizer.step()
            if work.device.type == "cuda":
                torch.cuda.synchronize()
            windows.step()
    return windows.rates


def bare(work: Work, *, compiled: bool) -> list[float]:
    """Return the rates of a loop by hand with all that PyTorch's tuning guide names, compiled or not."""
    model = work.model().to(memory_format=torch.channels_last)
    windows, criterion = Windows(work), nn.CrossEntropyLoss()
    replica: Callable[[Tensor], Tensor] = torch.compile(model) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=5e-4, fused=True)
    with numerics(may_round=True, benchmark=True):
        for _, (images, labels) in zip(range(windows.num_steps), work.batches(), strict=False):
            floats = images.to(torch.float32, memory_format=torch.channels_last).sub_(MEAN).div_(STD)
            with work.autocast():
                loss = criterion(replica(floats), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            windows.step()
    return windows.rates


def accelerate(work: Work) -> list[float]:
    """Return the rates of the same loop in Accelerate. Raise `ImportError` where it is not installed."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=work.device.type == "cpu")
    model = work.model().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, weight_decay=5e-4, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    windows, criterion = Windows(work), nn.CrossEntropyLoss()
    with numerics(may_round=True, benchmark=True):
        for _, (images, labels) in zip(range(windows.num_steps), work.batches(), strict=False):
            floats = images.to(torch.float32, memory_format=torch.channels_last).sub_(MEAN).div_(STD)
            with accelerator.autocast():
                loss = criterion(model(floats), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            windows.step()
    return windows.rates


def lightning(work: Work) -> list[float]:
    """Return the rates of the same loop in Lightning. Raise `ImportError` where it is not installed."""
    import lightning

    windows = Windows(work)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.model().to(memory_format=torch.channels_last)

        def training_step(self, batch: Any, number: int) -> Tensor:
            images, labels = batch
            floats = images.to(torch.float32, memory_format=torch.channels_last).sub_(MEAN).div_(STD)
            return nn.functional.cross_entropy(self.model(floats), labels)

        def on_train_batch_end(self, *_: Any) -> None:
            windows.step()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9, weight_decay=5e-4, fused=True)

    class Batches(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return work.batches()

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    with warnings.catch_warnings(), numerics(may_round=True, benchmark=True):
        warnings.simplefilter("ignore")  # of loaders without workers, which batches on the device do not want
        trainer = lightning.Trainer(
            accelerator="gpu" if work.device.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed",
            max_steps=windows.num_steps,
            benchmark=True,
            **quiet,
        )
        trainer.fit(Module(), torch.utils.data.DataLoader(Batches(), batch_size=None))
    return windows.rates


class numerics:  # noqa: N801 - read as a verb: with numerics(...)
    """Set how products may be rounded and whether cuDNN times its algorithms, for a while."""

    def __init__(self, *, may_round: bool, benchmark: bool) -> None:
        self._wanted = ("high" if may_round else "highest", may_round, benchmark)

    def __enter__(self) -> None:
        cudnn = torch.backends.cudnn
        self._before = (torch.get_float32_matmul_precision(), cudnn.allow_tf32, cudnn.benchmark)
        self._set(self._wanted)

    def __exit__(self, *_: object) -> None:
        self._set(self._before)

    def _set(self, values: tuple[str, bool, bool]) -> None:
        precision, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = values
        torch.set_float32_matmul_precision(precision)


LOOPS: dict[str, Callable[[Work], list[float]]] = {
    "bare, eager": lambda work: bare(work, compiled=False),
    "bare, compiled": lambda work: bare(work, compiled=True),
    "Lightning": lightning,
    "Accelerate": accelerate,
}
