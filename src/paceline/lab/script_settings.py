"""Change the command of a training script: its arguments, its variables, and patches of its processes. Pure."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from paceline.lab.script_ladder_file import ScriptRung, Value, format_value
from paceline.watch.patches import DDP_KEYWORDS, LOADER_KEYWORDS, OPTIMIZER_KEYWORDS


def _arguments(call: str, keywords: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    return {name: (call, f"{keyword}={{value!r}}") for name, keyword in keywords.items()}


_CODE: Final = {
    **_arguments("DataLoader(..., {arguments})", LOADER_KEYWORDS),
    **_arguments("DistributedDataParallel(model, ..., {arguments})", DDP_KEYWORDS),
    **_arguments("the optimizer(..., {arguments})", OPTIMIZER_KEYWORDS),
    "native_jpegs": ("import paceline.interop; paceline.interop.patch_pillow()  # at the start", ""),
    "channels_last": ("model = model.to(memory_format=torch.channels_last)", ""),
    "autocast": ('with torch.autocast("{device}", torch.{value}):  # around the model and its loss', ""),
    "scaler": ('scaler = torch.amp.GradScaler("{device}")  # scale(loss).backward(), step(optimizer), update()', ""),
    "compile": ("model.compile()", ""),
    "cudnn_benchmark": ("torch.backends.cudnn.benchmark = {value!r}", ""),
    "threads": ("torch.set_num_threads({value!r})", ""),
}
"""For each patch a line of code, or the call to which an argument belongs, and the argument."""
_SHORT: Final = {"bfloat16": {"short": "bf16", "bits": "bf16"}, "float16": {"short": "fp16", "bits": "16"}}
"""Names of dtypes in arguments of frameworks."""
_DDP_OF_ACCELERATE: Final = "Accelerator(..., kwargs_handlers=[DistributedDataParallelKwargs({arguments})])"
_FRAMEWORK_CODE: Final[Mapping[str, Mapping[str, tuple[str, str]]]] = {
    "lightning": {
        **_arguments("DDPStrategy(..., {arguments})", DDP_KEYWORDS),
        "autocast": ("Trainer(..., {arguments})", "precision='{bits}-mixed'"),
        "compile": ("module = torch.compile(module)", ""),
    },
    "accelerate": {
        **_arguments(_DDP_OF_ACCELERATE, DDP_KEYWORDS),
        "autocast": ("Accelerator(..., {arguments})", "mixed_precision='{short}'"),
        "compile": ("Accelerator(..., {arguments})", "dynamo_backend='inductor'"),
    },
    "transformers": _arguments(
        "TrainingArguments(..., {arguments})",
        {
            **{name: f"dataloader_{keyword}" for name, keyword in LOADER_KEYWORDS.items()},
            "ddp_bucket_mb": "ddp_bucket_cap_mb",
            "static_graph": "ddp_static_graph",
            "compile": "torch_compile",
        },
    )
    | {"autocast": ("TrainingArguments(..., {arguments})", "{short}=True")},
}
"""The same for patches that a framework applies by itself, by framework as the observer names it."""
_TIMM_OPTIONS: Final[Mapping[str, Mapping[str, Value]]] = {
    "workers": {"--workers": "{value}"},
    "pin_memory": {"--pin-mem": True},
    "channels_last": {"--channels-last": True},
    "autocast": {"--amp": True, "--amp-dtype": "{value}"},
    "compile": {"--torchcompile": True},
}
"""Options of timm's script, by patch. Its `--opt-kwargs` is left out, as a command may have other values of it."""
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

    def code_lines(self, device: str, framework: str = "") -> tuple[str, ...]:
        """Return a line of code for each place of the script to which patches belong, in its framework's API.

        `device` is cuda or cpu, and `framework` as the observer names it.
        """
        own_code = _FRAMEWORK_CODE.get(framework, {})
        code, patches = {**_CODE, **own_code}, dict(self.patches)
        if patches.get("autocast") == "float16" and "autocast" not in own_code:  # which scales gradients, too
            patches["scaler"] = True
        places: dict[str, list[str]] = {}
        for name, (place, argument) in code.items():
            if name in patches:
                value = patches[name]
                values = {"value": value, "device": device, "arguments": "{arguments}", **_SHORT.get(value, {})}
                places.setdefault(place.format(**values), []).append(argument.format(**values))
        return tuple(place.format(arguments=", ".join(each)) for place, each in places.items())

    def with_timm_options(self, has_option: Callable[[str], bool]) -> "ScriptSettings":
        """Return the settings with options of timm's script in place of patches, as far as the script has them."""
        command, patches = self.command, dict(self.patches)
        for name, options in _TIMM_OPTIONS.items():
            if patches.get(name) and all(map(has_option, options)):
                for option, value in options.items():
                    text = value.format(value=patches[name]) if isinstance(value, str) else value
                    command = set_argument(command, option, text)
                del patches[name]
        return ScriptSettings(command, self.environ, patches)


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
