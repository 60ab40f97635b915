"""Run paceline with planted faults: `python planted.py FAULT[,FAULT] ARGS`, where ARGS are those of `paceline`."""

import sys
import time

AHEAD_S = 7.0


def torch() -> None:
    """Report another version of torch than the other ranks."""
    import torch

    torch.__version__ = "2.0.1"


def clock() -> None:
    """Have a clock that is ahead."""
    real = time.time
    time.time = lambda: real() + AHEAD_S


def impatience() -> None:
    """Shorten the time limits of messages between ranks to what a test can wait for."""
    from paceline.lab.doctor import ranks

    ranks._COLLECTIVE_TIMEOUT_S, ranks._REPORT_MARGIN_S, ranks._FACTS_TIMEOUT_S = 3.0, 1.0, 3.0


def silence() -> None:
    """Join the other ranks but take no part in their collectives, as behind a firewall."""
    from paceline.lab.doctor import ranks

    ranks.measure_all_reduces = lambda world, device, seconds_per_size: time.sleep(9.0)


def death() -> None:
    """Die after the ranks have joined, before sending any facts."""
    import os
    import signal

    from paceline.lab.doctor import ranks

    ranks.collect_facts = lambda *arguments, **more: os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {"torch": torch, "clock": clock, "impatience": impatience, "silence": silence, "death": death}

if __name__ == "__main__":
    for name in sys.argv[1].split(","):
        FAULTS[name]()
    del sys.argv[1]
    from paceline.cli import main

    main()
