"""Be a module whose Python is another: `python at_once.py PYTHON MODULE WORDS`. What it starts, it starts by PYTHON."""

import os
import runpy
import sys

_, sys.executable, module, *words = sys.argv
sys.argv = [module, *words]
os.environ["STARTED_IN_TURN"] = "1"
runpy.run_module(module, run_name="__main__", alter_sys=True)
