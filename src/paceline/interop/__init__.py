"""Paceline's data loading for other training loops."""

from paceline.interop.build import Loaders, loaders
from paceline.interop.data_loaders import Dataset, EvalLoader, TrainLoader

__all__ = ["Dataset", "EvalLoader", "Loaders", "TrainLoader", "loaders"]
