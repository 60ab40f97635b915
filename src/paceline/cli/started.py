"""When the process started, as nearly as Python code can tell."""

import time

STARTED_S = time.perf_counter()
"""Seconds of `time.perf_counter` at the first import of this module, which the command line does before all else."""
