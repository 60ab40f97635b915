"""Find weights that timm, torchvision and the Hugging Face Hub publish, and keep them in these libraries' caches."""

import contextlib
import fcntl
import json
import logging
import math
import os
import re
import secrets
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from paceline.core.errors import RecipeError, suggest_similar
from paceline.core.files import open_lock_file
from paceline.recipe.schema.model import Model

_TIMEOUT_S: Final = 60.0
_MIN_DIGITS: Final = 8
"""Fewer hexadecimal digits in a file's name, such as `300e` of I-JEPA's, are no digest."""
_CONFIG: Final = ("config.json",)
_HUB_WEIGHTS: Final = "pytorch_model.bin"
_SAFE_NAMES: Final = {
    _HUB_WEIGHTS: "model.safetensors",
    "open_clip_pytorch_model.bin": "open_clip_model.safetensors",
}
"""Files of the Hub that may hold pickles, and timm's names for the same weights in safetensors."""


class NotCachedError(RecipeError):
    """Weights, or their `config.json`, are not in the cache, and may not be downloaded."""


@dataclass(frozen=True)
class HubFile:
    """A file of a repository on the Hugging Face Hub: the first of `names` that exists; `revision` "" is the newest."""

    repo: str
    names: tuple[str, ...]
    revision: str = ""


@dataclass(frozen=True)
class PublishedWeights:
    """Weights with their full `name`, such as `timm:resnet50.a1_in1k`, on the Hub or at a URL.

    `config` has timm's keys for the preprocessing: `input_size`, `interpolation`, `crop_pct`, `crop_mode`, `mean`,
    `std`. `args` are the arguments of the model that the weights belong to.
    """

    name: str
    location: HubFile | str
    config: Mapping[str, Any]
    args: Mapping[str, Any] = field(default_factory=dict)


def find_published_weights(section: Model, *, may_download: bool = True) -> PublishedWeights:
    """Return the weights that `section.weights` names; for `hf-hub:`, fetch `config.json` if it is not cached.

    Raise `RecipeError` if there are none of that name, or they belong to another model, and `NotCachedError` if
    `config.json` is missing and not `may_download`.
    """
    from paceline.models.build import check_library_model  # which imports torch

    check_library_model(section.name)
    kind, _, name = section.weights.partition(":")
    if kind == "hf-hub":
        return _find_in_repo(section, name, may_download=may_download)
    library, _, model = section.name.partition(":")
    tag = "" if section.weights == "default" else name.removeprefix(f"{model}.")
    return _find_in_timm(section, model, tag) if library == "timm" else _find_in_torchvision(section, model, tag)


def list_tags(model_name: str) -> list[str]:
    """Return the tags of the published weights of a `timm:` or `torchvision:` model, the default first."""
    library, _, name = model_name.partition(":")
    if library == "timm":
        import timm

        config = timm.get_pretrained_cfg(name)
        default = config.tag if config is not None and config.has_weights else None
        tags = [each.partition(".")[2] for each in timm.list_pretrained(f"{name}.*")]
        return sorted(filter(None, tags), key=lambda tag: tag != default)
    if library == "torchvision":
        from torchvision.models import get_model_weights

        weights = get_model_weights(name)
        default = weights.DEFAULT.name if len(weights) else ""
        return sorted((each.name for each in weights), key=lambda tag: tag != default)
    return []


def _find_in_timm(section: Model, model: str, tag: str) -> PublishedWeights:
    import timm

    tags = list_tags(section.name)
    if tag and tag not in tags:
        raise _unknown_tag_error(section, tag, tags)
    config = timm.get_pretrained_cfg(f"{model}.{tag}" if tag else model)
    # Only timm's own code reads `custom_load` files, such as those of JAX; on the Hub, the same are tensors by name.
    if config is None or not (config.hf_hub_id or (config.url and not config.custom_load)):
        raise RecipeError(
            f"model.weights: {section.weights}: timm publishes no weights for {section.name} that are tensors by name "
            f"(name a model of `paceline models 'timm:*'` that has some)"
        )
    name = f"timm:{model}.{config.tag}" if config.tag else section.name
    if config.hf_hub_id:
        location: HubFile | str = _hub_file(config.hf_hub_id, config.hf_hub_filename)
    else:
        location = config.url[0] if isinstance(config.url, tuple) else str(config.url)
    return PublishedWeights(name, location, asdict(config))


def _hub_file(repo: str, filename: str | None) -> HubFile:
    repo, _, revision = repo.partition("@")
    name = filename or _HUB_WEIGHTS
    safe = _SAFE_NAMES.get(name) or (f"{name[:-4]}.safetensors" if name.endswith(".bin") else name)
    return HubFile(repo, tuple(dict.fromkeys((safe, name))), revision)


def _find_in_torchvision(section: Model, model: str, tag: str) -> PublishedWeights:
    from torchvision.models import get_model_weights

    weights = get_model_weights(model)
    tag = tag.removeprefix(f"{weights.__name__}.")
    tags = list_tags(section.name)
    if not tags or (tag and tag not in tags):
        raise _unknown_tag_error(section, tag, tags)
    chosen = weights[tag or tags[0]]
    transform = chosen.transforms()
    size = transform.crop_size[0]
    config = {
        "input_size": (3, size, size),
        "interpolation": transform.interpolation.value,
        "crop_pct": size / transform.resize_size[0],
        "crop_mode": "center",
        "mean": transform.mean,
        "std": transform.std,
    }
    return PublishedWeights(f"torchvision:{weights.__name__}.{chosen.name}", chosen.url, config)


@dataclass(frozen=True)
class _RepoConfig:
    """A `config.json` of timm: the `architecture`, `args` of the model, and the keys of `PublishedWeights.config`."""

    architecture: str
    args: Mapping[str, Any]
    values: Mapping[str, Any]
    commit: str


def find_repo_model(weights: str) -> str:
    """Return the model, such as `timm:resnet50`, of the repository `weights`, such as `hf-hub:OWNER/NAME`.

    Fetch its `config.json` if it is not cached. Raise `RecipeError` if it has none of a timm model.
    """
    return f"timm:{_read_repo_config(weights, may_download=True).architecture}"


def _find_in_repo(section: Model, repo: str, *, may_download: bool) -> PublishedWeights:
    weights = section.weights
    config = _read_repo_config(weights, may_download=may_download)
    if section.name != f"timm:{config.architecture}":
        raise RecipeError(
            f"model.weights: {weights}: is of timm:{config.architecture}, not {section.name} "
            f"(set model.name=timm:{config.architecture})"
        )
    location = _hub_file(repo, config.values.get("hf_hub_filename"))
    # The weights of the same commit, although the repository may have changed since.
    return PublishedWeights(weights, replace(location, revision=config.commit), config.values, config.args)


def _read_repo_config(weights: str, *, may_download: bool) -> _RepoConfig:
    file = _hub_file(weights.partition(":")[2], None)
    path = fetch_hub_file(HubFile(file.repo, _CONFIG, file.revision), weights, may_download=may_download)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        architecture, config = values["architecture"], values.get("pretrained_cfg", values)
        args, config = {**(values.get("model_args") or {})}, {**config}
        if not re.fullmatch(r"\w+", architecture):
            raise ValueError
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError):
        raise RecipeError(
            f"model.weights: {weights}: its config.json names no architecture of timm (name one of a timm model)"
        ) from None
    for key, (is_valid, kind) in _CONFIG_KEYS.items():
        if config.get(key) is None:
            config.pop(key, None)
        elif not is_valid(config[key]):
            shown = json.dumps(config[key])[:60]
            raise RecipeError(
                f"model.weights: {weights}: its config.json has {key} {shown}, which is not {kind} (name another)"
            )
    for ours in ("in_chans", "num_classes", "img_size"):
        args.pop(ours, None)
    return _RepoConfig(architecture, args, config, path.parent.name)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and _is_number(value) and value > 0


def _is_size(value: object) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(type(each) is int and each > 0 for each in value)


def _is_list_of_numbers(value: object) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(_is_number(each) for each in value)


def _is_file_name(value: object) -> bool:
    if not isinstance(value, str) or not value.isprintable():
        return False
    path = PurePosixPath(value)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_CONFIG_KEYS: Final[Mapping[str, tuple[Callable[[object], bool], str]]] = {
    "input_size": (_is_size, "a list of channels, height and width"),
    "mean": (_is_list_of_numbers, "a list of numbers"),
    "std": (_is_list_of_numbers, "a list of numbers"),
    "crop_pct": (_is_positive, "a positive number"),
    "interpolation": (_is_text, "a name"),
    "crop_mode": (_is_text, "a name"),
    "hf_hub_filename": (_is_file_name, "the name of a file in the repository"),
}
"""Keys of `config.json` that are read: a check of the value, and the kind of value in words."""


def _unknown_tag_error(section: Model, tag: str, tags: Sequence[str]) -> RecipeError:
    if not tags:
        return RecipeError(f"model.weights: {section.weights}: no weights are published for {section.name}")
    hint = suggest_similar(tag, tags) or f" (there are {', '.join(tags[:8])}{', ...' if len(tags) > 8 else ''})"
    return RecipeError(f"model.weights: {section.weights}: {section.name} has no weights {tag!r}{hint}")


def find_cached(weights: PublishedWeights) -> Path | None:
    """Return the file of `weights` in the cache, or None, without a request to the network."""
    match weights.location:
        case HubFile() as file:
            return _find_in_hub_cache(file)
        case url:
            path = torch_cache_path(url)
            return path if path.is_file() else None


def fetch_weights(weights: PublishedWeights, setting: str, *, may_download: bool = True) -> Path:
    """Return the file of `weights` in the library's cache; download it if it is missing and `may_download`.

    Raise `RecipeError`, about `model.weights=setting`, if it can be neither found nor downloaded.
    """
    cached = find_cached(weights)
    if cached is not None:
        return cached
    match weights.location:
        case HubFile() as file:
            return fetch_hub_file(file, setting, may_download=may_download)
        case url:
            return _fetch_url(url, setting, may_download=may_download)


def expected_sha256(path: Path) -> str:
    """Return the SHA-256 of a cached file, or its first digits, as its name in the cache states it; "" if unknown."""
    from torch.hub import HASH_REGEX

    # The Hub's cache names large files by their SHA-256. Follow one link only: that name may itself be a link, into the
    # store that repositories share, whose names are hashes of another kind.
    blob = path.readlink().name if path.is_symlink() else ""
    if re.fullmatch("[0-9a-f]{64}", blob):
        return blob
    match = HASH_REGEX.search(path.name)
    return match.group(1) if match and len(match.group(1)) >= _MIN_DIGITS else ""


def hub_commit(weights: PublishedWeights, path: Path) -> str:
    """Return the commit of the repository that the cached file `path` of `weights` is of; "" for files of a URL."""
    if not isinstance(weights.location, HubFile):
        return ""
    for name in weights.location.names:  # which may be in a folder of the repository
        if path.as_posix().endswith(f"/{name}"):
            return path.parents[len(PurePosixPath(name).parts) - 1].name
    return ""


def torch_cache_path(url: str) -> Path:
    """Return the path at which torch's cache keeps the file of `url`."""
    import torch

    return Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]


def _fetch_url(url: str, setting: str, *, may_download: bool) -> Path:
    import torch

    path = torch_cache_path(url)
    command = f"curl -L -o {shlex.quote(path.name)} {shlex.quote(url)}"
    way = f"on a machine with a network run `{command}`, and copy the file to {path}"
    if not may_download:
        raise NotCachedError(f"model.weights: {setting}: {path} is missing ({way})")
    before, digest = socket.getdefaulttimeout(), expected_sha256(path)
    unchecked = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        socket.setdefaulttimeout(_TIMEOUT_S)  # torch.hub sets none
        torch.hub.download_url_to_file(url, str(unchecked), digest or None, progress=sys.stderr.isatty())
        if not digest:
            _check_size(url, unchecked)
        unchecked.replace(path)
    except Exception as error:  # of urllib, of the file system, or torch's RuntimeError for another digest
        if isinstance(error, HTTPError):
            error.close()
        raise RecipeError(f"model.weights: {setting}: cannot be downloaded: {_reason(error)} ({way})") from None
    finally:
        socket.setdefaulttimeout(before)
        with contextlib.suppress(OSError):
            unchecked.unlink(missing_ok=True)
    return path


def _check_size(url: str, path: Path) -> None:
    """Raise `OSError` if `path` has another size than the server says, as after a lost connection."""
    # torch.hub compares digests only, and urllib ends a short answer without an error.
    with urlopen(Request(url, method="HEAD")) as answer:  # noqa: S310 - of timm and torchvision, not of a recipe
        expected = answer.headers.get("Content-Length", "")
    size = path.stat().st_size
    if expected.isdecimal() and int(expected) != size:
        raise OSError(f"got {size:,} bytes of {int(expected):,}")


def _find_in_hub_cache(file: HubFile) -> Path | None:
    from huggingface_hub import try_to_load_from_cache  # hf_hub_download asks the Hub about the client even if offline

    for name in file.names:
        path = try_to_load_from_cache(file.repo, name, revision=file.revision or None)
        if isinstance(path, str):  # else missing, or known to be missing on the Hub
            return Path(path)
    return None


def fetch_hub_file(file: HubFile, setting: str, *, may_download: bool = True) -> Path:
    """Return the first of `file.names` that the repository has, from the cache without a request, or downloaded.

    Of processes that share a cache, one downloads, and the others wait. Raise `RecipeError`, about
    `model.weights=setting`, if that fails, and `NotCachedError` if the file is missing and not `may_download`.
    """
    from huggingface_hub import constants, errors

    start = f"model.weights: {setting}:"
    try:
        cached = _find_in_hub_cache(file)
    except errors.HFValidationError:
        raise RecipeError(f"{start} {file.repo!r} is not the name of a repository (write hf-hub:OWNER/NAME)") from None
    if cached is not None:
        return cached
    revision = f" --revision {shlex.quote(file.revision)}" if file.revision else ""
    folder = Path(constants.HF_HUB_CACHE) / f"models--{file.repo.replace('/', '--')}"
    names = "config.json model.safetensors" if file.names == _CONFIG else shlex.quote(file.names[0])
    way = (
        f"on a machine with a network run `hf download {shlex.quote(file.repo)} {names}{revision}`, "
        f"and copy the folder {folder.name} of its cache to {folder.parent} with `cp -rL`"
    )
    if not may_download:
        raise NotCachedError(f"{start} is not in the cache {folder.parent} ({way})")
    with _one_at_a_time(folder.parent / ".locks" / folder.name / "paceline.lock"):
        # Again, as another process may have downloaded it since, also before this one asked for the lock.
        return _find_in_hub_cache(file) or _download_hub_file(file, start, way)


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Let one process pass at once, by a lock on the file `path`; the others wait for it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_lock_file(path)
    except OSError:  # a cache that cannot be written, or another user's lock
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Shared: if the first process failed, the others fail at the same time, not one after the other.
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(descriptor)


def _download_hub_file(file: HubFile, start: str, way: str) -> Path:
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_download, hf_hub_url

    for name in file.names:
        try:
            with _quiet_client():
                # Once, and without the client's five attempts, which take minutes on a node without a network.
                get_hf_file_metadata(hf_hub_url(file.repo, name, revision=file.revision or None))
                return Path(hf_hub_download(file.repo, name, revision=file.revision or None))
        except errors.EntryNotFoundError as error:
            if isinstance(error, errors.LocalEntryNotFoundError):  # the network was lost between the two
                raise RecipeError(f"{start} cannot be downloaded: {_reason(error)} ({way})") from None
        except Exception as error:  # of httpx, of the file system, and checks of the Hub's client
            refusal = _explain_refusal(file, error) or f"cannot be downloaded: {_reason(error)} ({way})"
            raise RecipeError(f"{start} {refusal}") from None
    raise RecipeError(f"{start} the repository {file.repo} has no {' or '.join(file.names)} (name another)")


def _explain_refusal(file: HubFile, error: Exception) -> str:
    """Return what an answer of the Hub means for `file`, and the fix; "" for other errors."""
    from huggingface_hub import errors

    match error:
        case errors.GatedRepoError():
            return f"{file.repo} is gated (accept its terms on the Hub, and log in with `hf auth login`)"
        case errors.RevisionNotFoundError():
            return f"{file.repo} has no revision {file.revision!r} (leave @ out for the newest)"
        case errors.RepositoryNotFoundError():
            return (
                f"there is no repository {file.repo} on the Hub, or it is private (check the name, or log in with "
                "`hf auth login`)"
            )
    return ""


@contextlib.contextmanager
def _quiet_client() -> Iterator[None]:
    """Show the progress of the Hub's client on terminals only, and no warnings of its own."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger = logging.getLogger("huggingface_hub")
    level, had_bars = logger.level, not are_progress_bars_disabled()
    logger.setLevel(logging.ERROR)
    if had_bars and not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if had_bars:
            enable_progress_bars()


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())[:150]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
