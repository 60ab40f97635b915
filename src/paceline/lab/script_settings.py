"""Change the command of a training script: its arguments, its variables, and patches of its processes. Pure."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from paceline.lab.script_ladder_file import ScriptRung, Value, format_value
from paceline.watch.patches import DDP_KEYWORDS, LOADER_KEYWORDS, OPTIMIZER_KEYWORDS

_CONSTRUCTORS: Final = (
    ("DataLoader(...", LOADER_KEYWORDS),
    ("DistributedDataParallel(model, ...", DDP_KEYWORDS),
    ("the optimizer(...", OPTIMIZER_KEYWORDS),
)
_LAUNCHERS: Final = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
"""Modules that start a script."""


@dataclass(frozen=True)
class ScriptSettings:
    """A command with its variables, None for one that is removed, and its patches by name."""

    command: tuple[str, ...]
    environ: Mapping[str, str | None] = field(default_factory=dict)
    patches: Mapping[str, Any] = field(default_factory=dict)

    def add(self, rung: ScriptRung) -> "ScriptSettings":
        """Return the settings with those of a rung on top."""
        command = self.command
        for name, value in rung.args.items():
            command = set_argument(command, name, value)
        environ = {name: None if value is None else str(value) for name, value in rung.env.items()}
        return ScriptSettings(command, {**self.environ, **environ}, {**self.patches, **rung.patch.values})

    def apply_environ(self, environ: Mapping[str, str]) -> dict[str, str]:
        """Return `environ` with the variables."""
        changed = {**environ, **self.environ}
        return {name: value for name, value in changed.items() if value is not None}

    def command_line(self) -> str:
        """Return the command with its variables, to be pasted into a shell."""
        unset = [word for name, value in self.environ.items() if value is None for word in ("-u", name)]
        arguments = [f"{name}={shlex.quote(value)}" for name, value in self.environ.items() if value is not None]
        return " ".join([*(["env", *unset] if unset else []), *arguments, shlex.join(self.command)])

    def code_lines(self, device: str) -> tuple[str, ...]:
        """Return a line of code for each place of the script to which patches belong; `device` is cuda or cpu."""
        lines = []
        for start, keywords in _CONSTRUCTORS:
            given = [f"{keyword}={self.patches[name]!r}" for name, keyword in keywords.items() if name in self.patches]
            if given:
                lines.append(f"{start}, {', '.join(given)})")
        if "native_jpegs" in self.patches:
            lines.append("import paceline.interop; paceline.interop.patch_pillow()  # at the start")
        if "channels_last" in self.patches:
            lines.append("model = model.to(memory_format=torch.channels_last)")
        if "autocast" in self.patches:
            lines.append(f'with torch.autocast("{device}", torch.bfloat16):  # around the model and its loss')
        if "compile" in self.patches:
            lines.append("model.compile()")
        if "cudnn_benchmark" in self.patches:
            lines.append(f"torch.backends.cudnn.benchmark = {self.patches['cudnn_benchmark']}")
        if "threads" in self.patches:
            lines.append(f"torch.set_num_threads({self.patches['threads']})")
        return tuple(lines)


def set_argument(command: Sequence[str], name: str, value: Value) -> tuple[str, ...]:
    """Return `command` with one argument of its script changed.

    An option takes the place of the same one, as `--x 1` or `--x=1`; a `name` without dashes is that of `name=value`.
    True adds a flag, False removes one, and None removes an option with its value. New arguments come last.
    """
    start = find_arguments(command)
    head, arguments = list(command[:start]), list(command[start:])
    kept, position = _remove(arguments, name, has_value=not isinstance(value, bool))
    if value is None or (value is False and name.startswith("-")):
        return (*head, *kept)
    if not name.startswith("-"):
        added = [f"{name}={format_value(value)}"]
    elif value is True:
        added = [name]
    elif position is not None and arguments[position].startswith(f"{name}="):
        added = [f"{name}={value}"]
    else:
        added = [name, str(value)]
    place = len(kept) if position is None else position
    return (*head, *kept[:place], *added, *kept[place:])


def _remove(arguments: Sequence[str], name: str, *, has_value: bool) -> tuple[list[str], int | None]:
    """Return the arguments without an argument, which may be there several times, and the place of the first."""
    kept: list[str] = []
    position = None
    skips_next = False
    for word in arguments:
        if skips_next and not word.startswith("--"):  # which begins the next option, as after a flag
            skips_next = False
            continue
        skips_next = False
        is_pair = word.startswith(f"{name}=")
        if is_pair or (word == name and name.startswith("-")):
            position = len(kept) if position is None else position
            skips_next = has_value and not is_pair
        else:
            kept.append(word)
    return kept, position


def find_arguments(command: Sequence[str]) -> int:
    """Return the index after the script or module of a command; 1 if there is neither."""
    scripts = [index for index, word in enumerate(command) if index and word.endswith(".py")]
    modules = [
        index + 1 for index, (option, name) in enumerate(pairwise(command)) if option == "-m" and name not in _LAUNCHERS
    ]
    return 1 + min([*scripts, *modules], default=0)
