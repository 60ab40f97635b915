"""Call a function on a module right after the script has imported it. Torch-free."""

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, final


@final
class AfterImport:
    """A finder of `sys.meta_path` that finds nothing itself: others find a module, and then `patch` gets it."""

    def __init__(self, names: Iterable[str], patch: Callable[[ModuleType], None]) -> None:
        self._names = frozenset(names)
        self._patch = patch
        self._searching: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that another finder finds for one of the modules."""
        if name not in self._names or name in self._searching:  # another finder may ask the rest, too
            return None
        self._searching.add(name)
        try:
            return self._find(name, path, target)
        finally:
            self._searching.discard(name)

    def _find(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find_spec = None if finder is self else getattr(finder, "find_spec", None)  # old finders have none
            spec: ModuleSpec | None = find_spec(name, path, target) if find_spec is not None else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    with contextlib.suppress(AttributeError, TypeError):  # a loader without attributes of its own
                        self._patch_after_execution(spec.loader, name)
                return spec
        return None

    def _patch_after_execution(self, loader: Any, name: str) -> None:
        # The loader stays itself, as scripts read sources and resources through `module.__loader__`.
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == name:
                loader.__dict__.pop("exec_module", None)
                self._patch(module)

        loader.exec_module = exec_module
