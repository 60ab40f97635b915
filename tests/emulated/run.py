"""Run a program with an emulated GPU: python tests/emulated/run.py PROGRAM ARGUMENT..."""

import os
import sys
from pathlib import Path

from emulation import build, missing_requirement

if __name__ == "__main__":
    if reason := missing_requirement():
        raise SystemExit(f"error: no GPU can be emulated here: {reason}")
    here = Path(__file__).resolve().parents[2] / "build" / "emulated"
    os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **build(here)})
