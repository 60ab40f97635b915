"""Start time of the process, taken at the first import of the command line."""

import time

START_TIME_S = time.perf_counter()
"""`time.perf_counter()` at the first import of this module, in seconds. The command line imports it first."""
