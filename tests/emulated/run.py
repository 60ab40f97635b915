"""Run a program that sees the emulated GPU: python tests/emulated/run.py PROGRAM ARGUMENT..."""

import os
import sys
from pathlib import Path

from emulation import build, why_not

if __name__ == "__main__":
    if reason := why_not():
        raise SystemExit(f"error: no GPU can be emulated here: {reason}")
    here = Path(__file__).resolve().parents[2] / "build" / "emulated"
    os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **build(here)})
