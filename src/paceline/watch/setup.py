"""Describe what can make one training differ from another: versions, environment, hardware, code and settings.

Everything is read once, at the first step, from objects that the script has made. Nothing is imported that the script
did not import, and no value of a tensor is read.
"""

import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, final

from paceline.core.secrets import MASK, is_secret_name

_PREFIXES: Final = (
    *("OMP_", "MKL_", "KMP_", "OPENBLAS_", "CUDA_", "CUBLAS_", "NCCL_", "TORCH", "PYTORCH_", "GLOO_"),
    *("TOKENIZERS_", "PYTHONHASHSEED", "LD_PRELOAD", "MALLOC_"),
)
"""Environment variables that may be recorded: others may hold secrets."""
_PER_PROCESS: Final = ("TORCHELASTIC_", "TORCH_NCCL_TRACE", "CUDA_VISIBLE_DEVICES")
_PACKAGES: Final = (
    *("torch", "torchvision", "timm", "lightning", "pytorch_lightning", "transformers", "accelerate", "numpy", "PIL"),
    *("albumentations", "cv2", "webdataset", "datasets", "torch_xla", "deepspeed", "apex", "triton"),
)
_DDP: Final = ("bucket_bytes_cap", "find_unused_parameters", "static_graph", "gradient_as_bucket_view")
_MAX_TEXT: Final = 200
_MAX_VARIABLE: Final = 1000
_MAX_FILES: Final = 50
_MAX_FILE_BYTES: Final = 1 << 20
_DIGEST: Final = 8
_DEFAULT_PREFETCH_FACTOR: Final = 2
_LIBRARIES: Final = ("torchvision.", "timm.", "albumentations.")
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")


@final
class SetupRecorder:
    """Collect what is known before the first step ends, and describe it then."""

    def __init__(self) -> None:
        self._input = ""
        self._autocast = ""
        self._optimizer: Any = None

    def see_batch(self, shape: tuple[int, ...]) -> None:
        """Note the shape of the first batch, without its length."""
        if not self._input:
            self._input = "x".join(map(str, shape[1:]))

    def see_forward(self, torch: Any) -> None:
        """Note whether a forward that trains runs under autocast."""
        for device in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                self._autocast = f"{device} {torch.get_autocast_dtype(device)}"

    def see_optimizer(self, optimizer: Any) -> None:
        """Keep the optimizer of the first step until it is described."""
        self._optimizer = optimizer

    def describe(
        self, torch: Any, environ: Mapping[str, str], loaders: Iterable[Any], models: Iterable[Any], micro_batches: int
    ) -> dict[str, str]:
        """Return all settings as text by dotted name; those that cannot be read are left out."""
        values: dict[str, Any] = {
            "micro_batches": micro_batches,
            "input.shape": self._input,
            "model.autocast": self._autocast,
        }
        # Of a model and its wrapper, the wrapper: it has the settings of DDP.
        model = max(models, key=lambda each: (_num_parameters(each), hasattr(each, "module")), default=None)
        for part in (
            _describe_versions(torch),
            _describe_environ(environ),
            _describe_machine(torch),
            _describe_modes(torch),
            _describe_argv(sys.argv[1:]),
            _describe_loader(next(iter(loaders), None)),
            _describe_model(torch, model),
            _describe_optimizer(self._optimizer),
            _describe_code(sys.modules.get("__main__")),
        ):
            with suppress(Exception):  # a script may define anything in its own way: the rest still counts
                for name, value in part:
                    values[name] = value
        self._optimizer = None
        return {name: _to_text(name, value) for name, value in values.items() if value not in (None, "")}


def is_recorded(name: str) -> bool:
    """Return whether the environment variable `name` is recorded."""
    return name.startswith(_PREFIXES) and not name.startswith(_PER_PROCESS) and not is_secret_name(name)


def is_whole(value: str) -> bool:
    """Return whether the recorded `value` of an environment variable was short enough to be kept whole."""
    return len(value) < _MAX_VARIABLE


def _to_text(name: str, value: Any) -> str:
    if name.startswith("env."):
        return _shorten(str(value), _MAX_VARIABLE)
    return _shorten(_ADDRESS.sub("", str(value)), _MAX_TEXT)


def _shorten(text: str, longest: int) -> str:
    """Return `text`, or its beginning and a digest if it is too long, which changes with its end."""
    if len(text) <= longest:
        return text
    digest = f" {_digest(text)}"
    return f"{text[: longest - len(digest)]}{digest}"


def _describe_versions(torch: Any) -> Iterator[tuple[str, Any]]:
    yield "version.python", sys.version.split()[0]
    for name in _PACKAGES:
        module = sys.modules.get(name)
        version = vars(module).get("__version__") if module is not None else None
        if isinstance(version, str):
            yield f"version.{name.replace('PIL', 'pillow')}", str(version)
    if torch.cuda.is_initialized():
        yield "version.cuda", torch.version.cuda
        yield "version.cudnn", torch.backends.cudnn.version()
        if torch.distributed.is_available() and torch.distributed.is_nccl_available():
            yield "version.nccl", ".".join(map(str, torch.cuda.nccl.version()))


def _describe_environ(environ: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(environ.items()):
        if is_recorded(name):
            yield f"env.{name}", value


def _describe_machine(torch: Any) -> Iterator[tuple[str, Any]]:
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    yield "machine.cpu", cpu[1] if cpu else ""
    yield "machine.cores", len(os.sched_getaffinity(0))
    yield "machine.memory_bytes", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if torch.cuda.is_initialized():
        yield "machine.gpu", torch.cuda.get_device_name()
    yield "machine.load", f"{os.getloadavg()[0]:.1f}"


def _describe_modes(torch: Any) -> Iterator[tuple[str, Any]]:
    yield "threads", torch.get_num_threads()
    yield "torch.seed", torch.initial_seed()
    yield "torch.deterministic", torch.are_deterministic_algorithms_enabled()
    yield "torch.cudnn_benchmark", torch.backends.cudnn.benchmark
    yield "torch.detect_anomaly", torch.is_anomaly_enabled()
    yield "torch.profiler", torch._C._autograd._profiler_enabled()
    yield "torch.matmul_precision", torch.get_float32_matmul_precision()


def _describe_argv(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for name, each in group_arguments(arguments).items():
        text = " ".join(each)
        if not name.isdecimal():
            text = text.removeprefix(name)[1:] or "given"
        yield f"argv.{name}", MASK if is_secret_name(name.strip("-")) else text


def group_arguments(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the words of a command line by name: of `--name value`, `--name=value` and `name=value`.

    Other words have their position from 1 as their name.
    """
    found: dict[str, list[str]] = {}
    position = index = 0
    while index < len(arguments):
        number = 1
        name, has_value, _ = arguments[index].partition("=")
        if not has_value and name.startswith("-"):
            following = arguments[index + 1] if index + 1 < len(arguments) else "-"
            number += not following.startswith("-") or _is_number(following)
        elif not has_value:
            position += 1
            name = str(position)
        found.setdefault(name, []).extend(arguments[index : index + number])
        index += number
    return found


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _describe_loader(loader: Any) -> Iterator[tuple[str, Any]]:
    if loader is None:
        return
    for name in ("num_workers", "pin_memory", "persistent_workers", "drop_last", "batch_size"):
        yield f"loader.{name}", getattr(loader, name, None)
    # None without workers and torch's default with them, which is no difference beside that of the workers.
    prefetch_factor = getattr(loader, "prefetch_factor", None)
    yield "loader.prefetch_factor", None if prefetch_factor == _DEFAULT_PREFETCH_FACTOR else prefetch_factor
    yield "loader.sampler", type(loader.sampler).__name__
    yield "loader.collate", getattr(loader.collate_fn, "__qualname__", None)
    dataset = loader.dataset
    yield "loader.dataset", type(dataset).__qualname__
    yield "loader.transform", _describe_transform(vars(dataset).get("transform"))
    if hasattr(type(dataset), "__len__"):
        yield "loader.images", len(dataset)


def _describe_transform(transform: Any) -> str | None:
    """Return the text of a transform; names of classes if code of the script would make a part of the text."""
    if transform is None:
        return None
    if _is_of_library(transform):
        return " ".join(str(transform).split())
    name = _name_of(transform)
    return f"{name}({', '.join(map(_name_of, _parts_of(transform)))})" if _parts_of(transform) else name


def _is_of_library(transform: Any) -> bool:
    return type(transform).__module__.startswith(_LIBRARIES) and all(map(_is_of_library, _parts_of(transform)))


def _parts_of(transform: Any) -> list[Any]:
    """Return the members of a `Compose` or another container of a library."""
    return list(getattr(transform, "transforms", ())) if type(transform).__module__.startswith(_LIBRARIES) else []


def _name_of(value: Any) -> str:
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _num_parameters(model: Any) -> int:
    try:
        return sum(each.numel() for each in model.parameters())
    except Exception:  # it may be a module that defines `parameters` in another way, or lazy
        return 0


def _describe_model(torch: Any, model: Any) -> Iterator[tuple[str, Any]]:
    if model is None:
        return
    yield "model.parameters", _num_parameters(model)
    yield "model.trained_parameters", sum(each.numel() for each in model.parameters() if each.requires_grad)
    wrapped = getattr(model, "module", model)
    yield "model.class", type(getattr(wrapped, "_orig_mod", wrapped)).__qualname__
    yield "model.compiled", any("_orig_mod" in vars(each)["_modules"] for each in (model, wrapped))
    weights = next((each for each in model.parameters() if each.dim() == 4), None)
    if weights is not None:
        # A 1x1 or a single-channel weight is contiguous in both formats.
        is_last = weights.is_contiguous(memory_format=torch.channels_last) and not weights.is_contiguous()
        yield "model.memory_format", "channels_last" if is_last else "contiguous"
    first = next(iter(model.parameters()), None)
    if first is not None:
        yield "model.dtype", first.dtype
    if type(model).__name__ == "DistributedDataParallel":
        for name in _DDP:
            yield f"ddp.{name}", getattr(model, name, None)


def _describe_optimizer(optimizer: Any) -> Iterator[tuple[str, Any]]:
    if optimizer is None:
        return
    yield "optimizer.class", type(optimizer).__name__
    groups = optimizer.param_groups
    yield "optimizer.groups", len(groups)
    lr = groups[0].get("initial_lr", groups[0].get("lr"))  # a schedule keeps the first
    for name, value in {**groups[0], "lr": lr}.items():
        # The text of a tensor on a GPU would wait for it.
        parts = value if isinstance(value, tuple) else (value,)
        if name != "initial_lr" and all(isinstance(each, str | bool | int | float) for each in parts):
            yield f"optimizer.{name}", value


def _describe_code(main: Any) -> Iterator[tuple[str, Any]]:
    """Yield digests of each function of the script, of the modules beside it, and the commit that is checked out."""
    path = Path(vars(main).get("__file__") or "")
    if not path.is_file() or not _INSTALLED.isdisjoint(path.parts):
        return
    path = path.resolve()
    with suppress(OSError, UnicodeDecodeError):  # a repository without a commit, for example
        yield "code.commit", _read_commit(path.parent)
    yield from ((f"code.{path.name}:{name}", digest) for name, digest in digest_functions(_read_source(path)))
    for file in sorted(_modules_beside(path))[:_MAX_FILES]:
        yield f"code.{file.relative_to(path.parent)}", _digest(_read_source(file))


def _modules_beside(script: Path) -> Iterator[Path]:
    """Yield the files of imported modules below the folder of `script`, without installed ones and paceline's."""
    import sysconfig  # not before the first step: the script may never import it

    folder, own = script.parent, Path(__file__).resolve().parents[1]
    standard = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")})
    names = [getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())]
    # An object may take the place of a module, with any name: that of torch.classes is relative, and no file.
    for file in {Path(name).resolve() for name in names if isinstance(name, str) and Path(name).is_absolute()}:
        is_other = file.is_relative_to(folder) and file != script and not file.is_relative_to(own)
        is_installed = not _INSTALLED.isdisjoint(file.parts) or any(map(file.is_relative_to, standard))
        if is_other and not is_installed and file.is_file():
            yield file


def digest_functions(source: str) -> Iterator[tuple[str, str]]:
    """Yield name and digest of each function and class of Python `source`, and of the rest as `module`.

    Comments and blank lines do not count.
    """
    rest = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, _digest(ast.dump(node))
        elif isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            yield from ((f"{node.name}.{each.name}", _digest(ast.dump(each))) for each in methods)
            others = [ast.dump(each) for each in (*node.bases, *node.body) if each not in methods]
            yield node.name, _digest("\n".join(others))
        else:
            rest.append(ast.dump(node))
    yield "module", _digest("\n".join(rest))


def _digest(text: str) -> str:
    return sha256(text.encode(errors="replace")).hexdigest()[:_DIGEST]


def _read_source(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(_MAX_FILE_BYTES).decode(errors="replace")


def _read_commit(folder: Path) -> str | None:
    """Return the commit that is checked out around `folder`, None without one; git is not started."""
    git = next((each / ".git" for each in (folder, *folder.parents) if (each / ".git" / "HEAD").is_file()), None)
    if git is None:
        return None
    head = (git / "HEAD").read_text().strip()
    name = head.removeprefix("ref: ")
    if name == head:
        return head[:12]
    if (git / name).is_file():
        return (git / name).read_text().strip()[:12]
    packed = (git / "packed-refs").read_text().splitlines()
    return next((line.split()[0][:12] for line in packed if line.endswith(f" {name}")), None)
