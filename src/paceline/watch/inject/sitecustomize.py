"""Load the observer into this Python process once it imports torch. Python imports this module when it starts.

A process that does not import torch only gets a finder of modules. An error here never reaches the script.
"""

from __future__ import annotations  # this file alone must also run where Python is older than paceline allows

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

# Every Python process of the command runs this module, so what only an observed one needs is imported in functions.
_FOLDER = __file__.rpartition(os.sep)[0]


class TorchFinder:
    """Install the observer after the first import of torch. It finds no module itself."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of torch that the other finders find, with a loader that installs the observer."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        try:
            finder = _import_observer().install()
        except Exception as error:
            _write_note(f"the observer could not start: {error!r}")
            return None
        spec: ModuleSpec | None = finder.find_spec(name, path, target)
        return spec


def _import_observer() -> Any:
    try:
        from paceline.watch import observer
    except ModuleNotFoundError:  # the script runs in another environment than `paceline watch`
        source = _FOLDER.rsplit(os.sep, 3)[0]  # without paceline/watch/inject
        sys.path.append(source)
        try:
            from paceline.watch import observer
        finally:
            sys.path.remove(source)
    return observer


def _write_note(text: str) -> None:
    import json
    import socket
    from pathlib import Path

    name = f"{socket.gethostname()}-{os.getpid()}.jsonl"
    try:
        with Path(os.environ["PACELINE_WATCH_DIR"], name).open("a") as file:
            file.write(json.dumps({"kind": "note", "text": text}) + "\n")
    except Exception:  # such as a full disk, or a script that has cleared the environment
        return


def _run_hidden() -> None:
    """Run the `sitecustomize` that Python would have imported without this one."""
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != _FOLDER])
    if spec is None or spec.loader is None or spec.origin == __file__:
        return
    import importlib.util

    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


try:
    _run_hidden()
finally:
    if os.environ.get("PACELINE_WATCH_DIR"):
        sys.meta_path.insert(0, TorchFinder())  # first, as other finders may not ask the rest
