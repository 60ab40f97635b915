"""Lightning's form of the loaders: a `LightningDataModule`. Importing this imports Lightning, and nothing else does.

`DataModule` is a class of Lightning's, where ours are not derived from anything: its Trainer asks whether it is one.
"""

import importlib
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from paceline.interop.build import Loaders, loaders
from paceline.interop.eval_loader import EvalLoader
from paceline.interop.train_loader import TrainLoader
from paceline.recipe.schema import Recipe

_NAMES: Final = ("lightning.pytorch", "pytorch_lightning")


def _framework() -> Any:
    """Return Lightning by the name that the program has imported it by, as its two packages know nothing of each other.

    Where it has not yet, that is `lightning`, or else `pytorch_lightning`. Raise `ImportError` where there is neither.
    """
    for name in _NAMES:
        if name in sys.modules:
            return sys.modules[name]
    for name in _NAMES:
        if find_spec(name.partition(".")[0]) is not None:
            return importlib.import_module(name)
    raise ImportError("lightning: is not installed (pip install lightning)")


_Base: Any = _framework().LightningDataModule


class DataModule(_Base):  # type: ignore[misc]
    """The data of a recipe, for Lightning's Trainer: `Trainer.fit(module, datamodule=DataModule("folder", ...))`.

    It takes the words of `paceline.interop.loaders`. The loaders are made in `setup`, when the ranks are joined, on the
    device of the rank, or without a Trainer on that of `loaders`; from then on they are in `train` and `val`, so that
    `configure_model` can read `self.trainer.datamodule.train.dataset.num_classes`. Batches are pairs (images, targets)
    that are on the device and finished, so Lightning has nothing to transfer.

    Lightning puts samplers of its own into torch's DataLoaders alone, so whatever `use_distributed_sampler` says is
    right. It saves where the training loader is in its checkpoints, and goes on from there with `ckpt_path`, in the
    midst of an epoch too. Every image is validated once: log `hits / val.dataset.num_images` with `reduce_fx="sum"` and
    `sync_dist=True`, and the accuracy is exact on any number of devices.
    """

    train: TrainLoader
    val: EvalLoader

    def __init__(self, recipe: str | Path | Recipe | Mapping[str, Any], *overrides: str, **options: Any) -> None:
        super().__init__()
        self._asked = recipe, overrides, options
        self._made: Loaders | None = None

    def setup(self, stage: str) -> None:
        """Make the loaders, once, whatever is to be done with them."""
        if self._made is None:
            recipe, overrides, options = self._asked
            where = "auto" if self.trainer is None else self.trainer.strategy.root_device
            self._made = loaders(recipe, *overrides, **{"device": where, **options})
            self.train, self.val = self._made

    def train_dataloader(self) -> TrainLoader:
        """Return the loader of the training split; it is made where nothing has been set up."""
        self.setup("fit")
        return self.train

    def val_dataloader(self) -> EvalLoader:
        """Return the loader of the validation split; it is made where nothing has been set up."""
        self.setup("validate")
        return self.val

    def teardown(self, stage: str) -> None:
        """End whoever makes batches ahead; another `setup` makes others."""
        if self._made is not None:
            self._made.close()
            self._made = None

    def on_exception(self, exception: BaseException) -> None:
        """Do the same where the Trainer fails."""
        self.teardown("")
