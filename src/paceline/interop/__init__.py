"""Paceline's data path for other trainers: packed photographs, fast loaders and exact order, in anybody's loop.

`loaders` gives the two splits of a recipe's data as what a `DataLoader` is to a training loop. Lightning's form of it
is in `paceline.interop.lightning`, which alone imports that.
"""

from paceline.interop.build import Loaders, loaders
from paceline.interop.dataset import Dataset
from paceline.interop.eval_loader import EvalLoader
from paceline.interop.train_loader import TrainLoader

__all__ = ["Dataset", "EvalLoader", "Loaders", "TrainLoader", "loaders"]
