"""Imported at the start of Python: register the emulated kernels once torch has been imported."""

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType


class _AfterTorch:
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_emulate(module: ModuleType) -> None:
                load(module)
                import emulated_kernels

                emulated_kernels.install()

            spec.loader.exec_module = load_and_emulate  # type: ignore[method-assign]
        return spec


if os.environ.get("EMULATED_GPU") == "1":
    sys.meta_path.insert(0, _AfterTorch())  # type: ignore[arg-type]
