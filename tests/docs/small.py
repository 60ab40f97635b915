"""Shrink commands of the pages in `docs/coming-from` so that two cores run them quickly. Pure functions of words.

A small command keeps its verb, recipe, options and overrides, with smaller lengths, batches, models and images.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from .commands import Command

SMALL_MODEL = {"model.name": "resnet18_cifar", "model.width": "0.25"}
PRESETS: Mapping[str, Mapping[str, str]] = {
    "sc20": {"data.batch_size": "4", "model.width": "0.25"},
    "course": {"data.rank_batch_size": "2", "model.width": "0.1"},
    "ddp-post": {"data.rank_batch_size": "2", **SMALL_MODEL},
    "jsc": {"data.rank_batch_size": "2", "data.image_size": "32", "data.source.train": "train_data.pkl", **SMALL_MODEL},
    "quant": {"data.batch_size": "4", "data.image_size": "32", "data.source.root": "~/photos", **SMALL_MODEL},
}
"""Arguments for each group of presets, and the ladder of its name."""
EVERY_RUN = {"data.workers": "0", "log.tensorboard": "off", "checkpoint.every": "off", "measure.warmup_steps": "1"}
SYNTHETIC = {
    "data.source.name": "synthetic",
    "data.source.num_images": "16",
    "data.source.num_val_images": "4",
    "data.source.image_size": "28",
}
"""Images for complete runs, of which a study has several."""
SHORTENED = ("data.batch_size", "data.rank_batch_size", "train.epochs", "train.steps", "measure.warmup_steps")
"""Fields whose values are replaced; all other values of a command are unchanged."""
OPTIONS = {
    "--steps": "2",
    "--repeats": "1",
    "--seeds": "1",
    "--batch-sizes": "4,8",
    "--warmups": "0ep,1ep",
}
"""Values of options that replace those of the command."""
WITH_A_VALUE = (*OPTIONS, "--ranks", "--vary")
VARIED = {
    "data.rank_batch_size": "2,4",
    "data.workers": "0,1",
    "train.precision": "fp32,bf16,bf16_master,bf16_pure",
}
"""Values of `--vary`."""
HALF = {"fp16": "bf16", "fp16_master": "bf16_master", "fp16_pure": "bf16_pure"}
"""Formats that need a GPU, and their replacements on a CPU."""
HALF_PRESETS = {"-o1": "bf16", "-o2": "bf16_master", "-o3": "bf16_pure", "ddp-amp": "bf16"}
"""Suffix of presets in float16."""
PLACEHOLDERS = {"RUN": "<run>", "RECIPE": "sc20/bs256", "IMAGE...": "cat.jpg", "FOLDER": "~/photos"}
IMAGE_FOLDER = "~/imagenet"
_HOSTS = re.compile(r"--nnodes(?:=| )(?!1\b)")
_PROCESSES = re.compile(r"(--nproc[-_]per[-_]node(?:=| ))\d+")


def needs(command: Command) -> str:
    """Return the requirement of `command` that no test environment has: docker, a cluster, a GPU or more arguments."""
    words, text = command.paceline or (), shlex.join(command.words)
    if command.program == "docker":
        return "docker"
    if command.program == "srun" or _HOSTS.search(text) or (words[0] == "scale" and "--nodes" in words):
        return "cluster"
    if {"parallel.backend=nccl", "parallel.strategy=dataparallel", "ddp-post/dataparallel"} & {*words}:
        return "gpu"
    return "more words" if _is_fragment(words) else ""


def shrink(command: Command) -> str:
    """Return a shell line: `command` with small settings."""
    start = len(command.words) - len(command.paceline or ())
    verb, *words = [PLACEHOLDERS.get(word, word) for word in command.paceline or ()]
    words = [word.replace(IMAGE_FOLDER, "~/photos") for word in words]
    if verb in ("train", "profile", "ladder", "scale", "batch-study") and "--list" not in words:
        words = [*_options(words), *_fields(verb, words), *_added_options(verb, words)]
    if verb == "submit" and "--dry-run" not in words:
        words.append("--dry-run")
    launcher = _PROCESSES.sub(r"\g<1>2", " ".join(command.words[:start]))
    return " ".join([launcher, verb, *map(_quoted, words)])


def _is_fragment(words: Sequence[str]) -> bool:
    """Return whether a page only names a verb, or omits required arguments."""
    match words[0]:
        case "data":
            return words[1:2] == ("pack",) or len(words) < 3
        case "export":
            return "--out" not in words
        case "train" if words[1:2] == ("folder-finetune",):
            return True
    return "..." in words or (len(words) == 1 and words != ("doctor",))


def _options(words: Sequence[str]) -> Iterator[str]:
    """Yield all words except overrides, with small values."""
    option = ""
    for word in words:
        match option:
            case "--ranks":
                yield ",".join(sorted({str(min(int(each), 2)) for each in word.split(",")}))
            case "--vary":
                name, _, values = word.partition("=")
                yield f"{name}={VARIED.get(name, values)}"
            case "" if _is_override(word):
                pass
            case _:
                yield OPTIONS.get(option, word)
        option = word if not option and word in WITH_A_VALUE else ""


def _added_options(verb: str, words: Sequence[str]) -> Iterator[str]:
    """Yield the options that shorten a command, unless it has them already."""
    names = {"profile": ("--steps",), "ladder": ("--steps", "--repeats"), "scale": ("--steps", "--repeats")}
    for name in ("--seeds",) if _is_study(words) else names.get(verb, ()):
        if name not in words:
            yield f"{name}={OPTIONS[name]}"


def _fields(verb: str, words: Sequence[str]) -> Iterator[str]:
    """Yield the overrides: those of the command, and those that shorten it."""
    stated = (word for before, word in zip(["", *words], words, strict=False) if before != "--vary")
    own = dict(word.split("=", 1) for word in stated if _is_override(word))
    recipe = next((word for word in words if word.partition("/")[0] in PRESETS), "")
    added: dict[str, str] = {**EVERY_RUN, **PRESETS.get(recipe.partition("/")[0], {}), **_precision(recipe)}
    if verb == "train":
        added["train.steps"] = "2"
    if verb == "ladder" and recipe == "quant":
        del added["data.workers"]  # the ladder's rungs set it
    if _is_study(words):  # complete runs, whose batches the study sets
        added = {name: value for name, value in added.items() if "batch_size" not in name}
        added = {**added, **SYNTHETIC, "train.epochs": "1"}
        if recipe.startswith("course"):
            added["data.source.channels"] = "1"
    added = _fitting(own, added)
    kept = {name: HALF.get(value, value) for name, value in own.items() if name not in SHORTENED}
    yield from (f"{name}={value}" for name, value in {**added, **kept}.items())


def _precision(recipe: str) -> dict[str, str]:
    precision = next((each for ending, each in HALF_PRESETS.items() if recipe.endswith(ending)), "")
    return {"train.precision": precision} if precision else {}


def _fitting(own: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """Return `added` without fields that contradict one of `own`, and with those that it requires."""
    fitting = {**added}
    if "model.name" in own and "model.name" in added:
        del fitting["model.width"]
    if "data.batch_size" in own and "data.rank_batch_size" in added:
        del fitting["data.rank_batch_size"]
        fitting["data.batch_size"] = "4"
    if "data.source.train_root" in own:
        del fitting["data.source.root"]
    if own.get("data.loader") == "processes":
        fitting["data.workers"] = "1"
    return fitting


def _is_study(words: Sequence[str]) -> bool:
    return "--batch-sizes" in words


def _is_override(word: str) -> bool:
    return re.match(r"[a-z_]+(?:\.[a-z_0-9]+)*=", word) is not None


def _quoted(word: str) -> str:
    """Quote `word` for the shell, except `~` and placeholders."""
    return word if re.fullmatch(r"[\w./=~,:<>+-]+", word) else shlex.quote(word)
