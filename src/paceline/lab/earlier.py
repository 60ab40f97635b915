"""Runs that an experiment's folder holds already: whether one still counts, and what becomes of one that does not.

It counts where it would be made here as it was made then: on the same hardware, with the same versions, and with the
same code where parts are a user's own. Otherwise it is made again, so that no table mixes what was measured on two
machines; what was there is kept, and a line says so. That recipe and ranks are the same is looked at before.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import PacelineError
from paceline.lab.child import Start, complaint, end
from paceline.lab.trial import Outcome, started, vary
from paceline.recipe.code_identity import stale_code
from paceline.recipe.schema import Recipe

_VERSIONS: Final = ("paceline", "torch", "torchvision", "numpy", "python")
_OF_GPUS: Final = ("cuda", "nccl", "driver")
_LIMIT_S: Final = 600.0
"""Longest that a process may take to say what it runs on: it imports torch, on a cluster from a slow disk."""


@dataclass(frozen=True)
class Earlier:
    """Says which runs of before count, and puts the others into the folder `replaced`; `say` hears a line of each.

    A run over more than `most_nodes` nodes of an allocation cannot be made here at all, and is taken as it is.
    """

    replaced: Path
    say: Callable[[str], None]
    most_nodes: int = 0
    _machines: dict[tuple[int, int], Mapping[str, Any]] = field(default_factory=dict, init=False, repr=False)

    def others(self, known: Outcome, recipe: Recipe, ranks: int, start: Start) -> list[str]:
        """Return what is not as it was when a run of `recipe` was made on `ranks`; nothing where it counts.

        `start` starts what says where it would be made. Raise `PacelineError` where that cannot be told.
        """
        assert known.result is not None, "a run is known by its result"
        if known.trial.nodes > self.most_nodes:
            return []
        place = (known.trial.nodes, ranks if known.trial.nodes else 0)
        if place not in self._machines:
            self._machines[place] = describe(*place, start)
        before = known.result.provenance
        on_cpu = vary(recipe, known.trial.patch).parallel.device == "cpu"
        return [
            *differences(before, self._machines[place], on_cpu=on_cpu),
            *(f"other code of {name}" for name in stale_code(before.get("own_parts", {}))),
        ]

    def put_away(self, known: Outcome, others: list[str]) -> None:
        """Move a run to where it is kept, and say why. Raise `PacelineError` when it cannot be moved."""
        path = known.rundir.path
        try:
            self.replaced.mkdir(exist_ok=True)
            kept = next(each for each in _names(self.replaced / path.name) if not each.exists())
            path.rename(kept)
        except OSError as error:
            raise PacelineError(f"{path}: cannot be moved: {error.strerror} (name another --run-dir)") from None
        what = f"{known.trial.name}, run {known.repeat}: is made again"
        self.say(f"{what}: what was there had {', '.join(others)}; it is kept in {kept}")


def _names(path: Path) -> Iterator[Path]:
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))


def differences(before: Mapping[str, Any], here: Mapping[str, Any], *, on_cpu: bool) -> list[str]:
    """Return what of hardware and versions is another here, such as `torch 2.10.0 (here 2.11.0)`.

    Both are as `machine.json` has it; what one of them does not say is not compared. With `on_cpu` GPUs play no part.
    """
    told = [
        *_told("{}", "cpu", before, here),
        *_told("logical cores {}", "logical_cores", before, here),
        *(each for name in _VERSIONS for each in _told(f"{name} {{}}", name, before, here)),
    ]
    if on_cpu:
        return told
    gpus = _gpus(before), _gpus(here)
    if gpus[0] != gpus[1]:
        return [*told, f"{gpus[0]} (here {gpus[1]})"]
    return [*told, *(each for name in _OF_GPUS for each in _told(f"{name} {{}}", name, before, here))]


def _told(form: str, name: str, before: Mapping[str, Any], here: Mapping[str, Any]) -> Iterator[str]:
    if name in before and name in here and before[name] != here[name]:
        yield f"{form.format(before[name])} (here {here[name]})"


def _gpus(machine: Mapping[str, Any]) -> str:
    """Return the GPUs that a process sees: `2 x NVIDIA H200`."""
    names = machine.get("cuda_devices", ())
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "no GPU"


def describe(nodes: int, ranks: int, start: Start) -> Mapping[str, Any]:
    """Return what `machine.json` would say of a run here, or on `nodes` of the allocation with so many `ranks`.

    A process of its own says it, started as the run's would be: Slurm may give a step fewer cores than the job has,
    and asking a GPU would load its driver into a process that lives as long as the experiment. Raise `PacelineError`
    where it does not say.
    """
    words = [sys.executable, "-P", "-m", "paceline.measure.machine"]
    process = start(started(words, nodes, ranks, ["--output=0"]))  # what rank 0 says
    try:
        said, besides = process.communicate(timeout=_LIMIT_S)
        found: dict[str, Any] = json.loads(said or "")
    except subprocess.TimeoutExpired:
        why = f"no answer in {_LIMIT_S:.0f} s"
    except ValueError:
        why = complaint(besides or "", process.returncode or 0)
    else:
        return found
    finally:
        end(process)
    raise PacelineError(f"python {' '.join(words[2:])}: does not say what it runs on: {why} (mend it)")
