"""Run a module whose `sys.executable` is another Python: `python at_once.py PYTHON MODULE ARGS`."""

import os
import runpy
import sys

_, sys.executable, module, *args = sys.argv
sys.argv = [module, *args]
os.environ["STARTED_IN_TURN"] = "1"
runpy.run_module(module, run_name="__main__", alter_sys=True)
