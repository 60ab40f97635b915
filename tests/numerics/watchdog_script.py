"""One rank of a small run with rendezvous, heartbeats and a planted fault, without training.

python watchdog_script.py FOLDER FAULT RANK STEP TIMEOUT_S     FAULT happens to RANK at STEP; the world is in the
environment
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.core.errors import PacelineError, PeerLostError
from paceline.parallel.consensus import build_replica_check
from paceline.parallel.environ import world_from_environ
from paceline.parallel.process_group import process_group, rendezvous
from paceline.parallel.watchdog import watchdog
from paceline.recipe.schema.train import Parallel

STEPS = 200


class RecordedStopRequests:
    """Print a stop request when it arrives."""

    requested = ""

    def request(self, name: str) -> None:
        print(f"asked {name}", flush=True)
        self.requested = name


def frozen() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def asleep() -> None:
    time.sleep(600)


def busy() -> None:
    while True:
        pass


def keeps_the_gil() -> None:
    ctypes.PyDLL(None).sleep(600)


def raises() -> None:
    raise KeyError("a bug on one rank")


def refuses() -> None:
    raise PacelineError("data.x: 3 is wrong (try 4)")


FAULTS = {each.__name__: each for each in (frozen, killed, asleep, busy, keeps_the_gil, raises, refuses)}


class Run:
    """A loop of steps; the tables above define the faults."""

    def __init__(self, folder: str, fault: str, rank: str, step: str, timeout_s: str) -> None:
        self.folder, self.fault, self.rank, self.at = Path(folder), fault, int(rank), int(step)
        self.section = Parallel(timeout=f"{timeout_s}s", check_replicas="5st")
        self.world = world_from_environ(os.environ)
        self.step, self.stage, self.asked = 0, "start", RecordedStopRequests()
        torch.manual_seed(0)
        self.model = torch.nn.Linear(300, 300)
        self.is_faulty = self.world.rank == self.rank

    def train(self) -> None:
        with rendezvous(self.world, self.section) as joined:
            stacks = self.folder / f"stacks.rank{self.world.rank}.txt"
            with watchdog(joined, self.section, lambda: (self.step, self.stage), self.asked, stacks):
                self.meet_fault("first")
                with process_group(joined, self.section, torch.device("cpu")):
                    self.loop()

    def loop(self) -> None:
        replicas = build_replica_check(self.section, self.world, self.model, every=5)
        gradient = torch.ones(10_000)
        while self.step < STEPS:
            self.stage = "data_wait"
            if self.is_faulty and self.step == self.at:
                print(f"fault {time.time()}", flush=True)
                if self.fault == "ends":
                    return
                if self.fault == "weights":
                    self.model.weight.data[3, 4] += 1e-6
                if self.fault == "is_asked":
                    self.asked.requested = "SIGTERM"
                self.meet_fault(self.fault)
            self.stage = "backward"
            if self.world.world_size > 1:
                dist.all_reduce(gradient, op=dist.ReduceOp.MAX)
                replicas.check(self.step)
            self.stage = ""
            time.sleep(0.01)
            self.step += 1

    def meet_fault(self, name: str) -> None:
        if self.is_faulty and self.fault == name and name in FAULTS:
            FAULTS[name]()


def main() -> int:
    try:
        Run(*sys.argv[1:]).train()
    except PeerLostError as error:
        if not error.is_explained:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except Exception as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 3
    return 0


if __name__ == "__main__":
    os._exit(main())
