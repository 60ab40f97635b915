"""Paceline's data loading for other training loops: packs, fast loaders and exact order.

`loaders` returns iterables for both splits of a recipe's data, used like a `DataLoader`. `paceline.interop.lightning`
is the only module that imports Lightning.
"""

from paceline.interop.build import Loaders, loaders
from paceline.interop.dataset import Dataset
from paceline.interop.eval_loader import EvalLoader
from paceline.interop.train_loader import TrainLoader

__all__ = ["Dataset", "EvalLoader", "Loaders", "TrainLoader", "loaders"]
