"""Runs that an experiment's folder holds already: whether one still counts, and what becomes of one that does not.

It counts where it would be made here as it was made then: on the same hardware, with the same versions, and with the
same code where parts are a user's own; and where it had the cores to itself. Otherwise it is made again, so that no
table mixes what was measured on two machines; what was there is kept, and a line says so. That recipe and ranks are
the same is looked at before. Where a run cannot be made again, what is told of the experiment says that its runs are
not alike.
"""

import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from paceline.core.errors import PacelineError
from paceline.core.results import starved_note
from paceline.lab.child import Start, complaint, end
from paceline.lab.trial import Outcome, started, vary
from paceline.recipe.code_identity import changed_code, stale_code
from paceline.recipe.schema import Recipe

_VERSIONS: Final = ("torch", "torchvision", "numpy", "python")
_OF_GPUS: Final = ("cuda", "nccl", "driver")
_LIMIT_S: Final = 600.0
"""Longest that a process may take to say what it runs on: it imports torch, on a cluster from a slow disk."""


@dataclass(frozen=True)
class Earlier:
    """Says which runs of before count, and puts the others into the folder `replaced`; `say` hears a line of each.

    A run over more than `most_nodes` nodes of an allocation cannot be made here at all, and is taken as it is: what it
    has that others have not is told of all runs together, by `unlike`.
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
        starved = starved_note([known.result])
        on_cpu = vary(recipe, known.trial.patch).parallel.device == "cpu"
        return [
            *differences(before, self._machines[place], on_cpu=on_cpu),
            *(f"other code of {name}" for name in stale_code(before.get("own_parts", {}))),
            *([f"no cores to itself: {starved}"] if starved else []),
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


def unlike(outcomes: Sequence[Outcome]) -> str:
    """Return in a sentence which runs were made on other hardware, or with other versions or code, than the first.

    It is "" where all were made alike. A step of Slurm's has cores after its shape: they are compared where runs have
    the same one.
    """
    made = [(outcome, outcome.result.provenance) for outcome in outcomes if outcome.result is not None]
    alike: dict[tuple[int | None, int], tuple[str, Mapping[str, Any]]] = {}
    found: dict[str, list[str]] = {}
    for outcome, machine in made:
        name = f"{outcome.trial.name}, run {outcome.repeat}"
        first, first_machine = next(iter(alike.values()), (name, machine))
        of_shape, machine_of_shape = alike.setdefault((outcome.trial.ranks, outcome.trial.nodes), (name, machine))
        others = [
            *_differences(machine, first_machine, f"{first}:", on_cpu=_on_cpu(machine) and _on_cpu(first_machine)),
            *_told("logical cores {}", "logical_cores", machine, machine_of_shape, f"{of_shape}:"),
            *(f"other code of {part} than {first}" for part in changed_code(_own(first_machine), _own(machine))),
        ]
        if others:
            found.setdefault(", ".join(others), []).append(name)
    if not found:
        return ""
    told = "; ".join(f"{_few(names)} had {others}" for others, names in found.items())
    return f"Not all runs were made alike, so they differ by more than what was varied: {told}."


def _few(names: Sequence[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _on_cpu(provenance: Mapping[str, Any]) -> bool:
    return provenance.get("device") == "cpu"


def _own(provenance: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = provenance.get("own_parts", {})
    return found


def differences(before: Mapping[str, Any], here: Mapping[str, Any], *, on_cpu: bool) -> list[str]:
    """Return what of hardware and versions is another here, such as `torch 2.10.0 (here 2.11.0)`.

    Both are as `machine.json` has it; what one of them does not say is not compared. With `on_cpu` GPUs play no part.
    """
    cores = _told("logical cores {}", "logical_cores", before, here, "here")
    return [*cores, *_differences(before, here, "here", on_cpu=on_cpu)]


def _differences(before: Mapping[str, Any], here: Mapping[str, Any], whose: str, *, on_cpu: bool) -> Iterator[str]:
    """Yield what is another `here`, which is called `whose`; of hardware all but the number of cores."""
    yield from _told("{}", "cpu", before, here, whose)
    yield from _of_paceline(before, here, whose)
    yield from _all_told(_VERSIONS, before, here, whose)
    if on_cpu:
        return
    gpus = _gpus(before), _gpus(here)
    if gpus[0] != gpus[1]:
        yield f"{gpus[0]} ({whose} {gpus[1]})"
    else:
        yield from _all_told(_OF_GPUS, before, here, whose)


def _of_paceline(before: Mapping[str, Any], here: Mapping[str, Any], whose: str) -> Iterator[str]:
    """Yield that paceline is another: by what its files are, and by its version where one does not say that.

    A commit has a version of its own, whatever it changes, and all changes that are in none have the same.
    """
    files = [machine.get("paceline_sha256") for machine in (before, here)]
    if not all(files):
        yield from _told("paceline {}", "paceline", before, here, whose)
    elif files[0] != files[1]:
        told = list(_told("paceline {}", "paceline", before, here, whose))
        yield from told or [f"other code of paceline {before.get('paceline', '')}".rstrip()]


def _all_told(names: Sequence[str], before: Mapping[str, Any], here: Mapping[str, Any], whose: str) -> Iterator[str]:
    for name in names:
        yield from _told(f"{name} {{}}", name, before, here, whose)


def _told(form: str, name: str, before: Mapping[str, Any], here: Mapping[str, Any], whose: str) -> Iterator[str]:
    if name in before and name in here and before[name] != here[name]:
        yield f"{form.format(before[name])} ({whose} {here[name]})"


def _gpus(machine: Mapping[str, Any]) -> str:
    """Return the models of the GPUs that a process sees; how many it sees is not how many it uses."""
    return ", ".join(dict.fromkeys(machine.get("cuda_devices", ()))) or "no GPU"


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
