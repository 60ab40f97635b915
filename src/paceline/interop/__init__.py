"""Paceline's sample order and data loading for other training loops."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.interop.build import Loaders, loaders
    from paceline.interop.data_loaders import Dataset, EvalLoader, TrainLoader
    from paceline.interop.pillow import patch_pillow
    from paceline.interop.samplers import ExactEvalSampler, ExactLoader, ExactSampler
else:
    # Samplers and Pillow need a small part of the package: importing them loads no model, source or transform.
    _MODULES = {
        "build": ("Loaders", "loaders"),
        "data_loaders": ("Dataset", "EvalLoader", "TrainLoader"),
        "pillow": ("patch_pillow",),
        "samplers": ("ExactEvalSampler", "ExactLoader", "ExactSampler"),
    }

    def __getattr__(name):
        for module, names in _MODULES.items():
            if name in names:
                return getattr(import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Dataset",
    "EvalLoader",
    "ExactEvalSampler",
    "ExactLoader",
    "ExactSampler",
    "Loaders",
    "TrainLoader",
    "loaders",
    "patch_pillow",
]
