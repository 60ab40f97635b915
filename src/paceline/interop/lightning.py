"""Lightning `LightningDataModule` of a recipe. Importing this module imports Lightning."""

import importlib
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from paceline.interop.build import Loaders, loaders
from paceline.interop.data_loaders import EvalLoader, TrainLoader
from paceline.recipe.schema import Recipe

# Two packages with the same classes, which do not know each other: a module of one does not work with the other.
_PACKAGES: Final = ("lightning.pytorch", "pytorch_lightning")


def _import_lightning() -> Any:
    # The package that the program has imported comes first.
    for name in _PACKAGES:
        if name in sys.modules:
            return sys.modules[name]
    for name in _PACKAGES:
        if find_spec(name.partition(".")[0]) is not None:
            return importlib.import_module(name)
    raise ImportError("lightning: is not installed (pip install lightning)")


# Derived from Lightning's class, because its Trainer checks isinstance.
_LightningDataModule: Any = _import_lightning().LightningDataModule


class DataModule(_LightningDataModule):  # type: ignore[misc]
    """Data of a recipe for Lightning's Trainer: `Trainer.fit(module, datamodule=DataModule("folder", ...))`.

    It takes the arguments of `paceline.interop.loaders`. `setup` builds the loaders once the ranks are joined, on the
    rank's device, as `train` and `val`, so `configure_model` can read
    `self.trainer.datamodule.train.dataset.num_classes`. Batches are pairs (images, targets) on the device.

    Any `use_distributed_sampler` works. Checkpoints contain the position of the training loader, and `ckpt_path`
    resumes from there, even within an epoch. Every image is validated once: log `hits / val.dataset.num_images` with
    `reduce_fx="sum"` and `sync_dist=True`, and the accuracy is exact on any number of devices.
    """

    train: TrainLoader
    val: EvalLoader

    def __init__(self, recipe: str | Path | Recipe | Mapping[str, Any], *overrides: str, **options: Any) -> None:
        super().__init__()
        self._args = recipe, overrides, options
        self._loaders: Loaders | None = None

    def setup(self, stage: str) -> None:
        """Build the loaders once, for any stage."""
        if self._loaders is None:
            recipe, overrides, options = self._args
            device = "auto" if self.trainer is None else self.trainer.strategy.root_device
            # Lightning inserts samplers only into torch's DataLoaders, so ours keep their own order.
            self._loaders = loaders(recipe, *overrides, **{"device": device, **options})
            self.train, self.val = self._loaders

    def train_dataloader(self) -> TrainLoader:
        """Return the training loader, built if necessary."""
        self.setup("fit")
        return self.train

    def val_dataloader(self) -> EvalLoader:
        """Return the validation loader, built if necessary."""
        self.setup("validate")
        return self.val

    def teardown(self, stage: str) -> None:
        """Stop prefetching; another `setup` builds new loaders."""
        if self._loaders is not None:
            self._loaders.close()
            self._loaders = None

    def on_exception(self, exception: BaseException) -> None:
        """Tear down after a failure of the Trainer."""
        self.teardown("")
