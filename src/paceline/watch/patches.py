"""Change how an observed script trains, from outside: settings of its loaders, its model, its optimizer and DDP.

A patch replaces an argument of a constructor of torch, the decoder of JPEGs, or changes the model after its first step.
Those that found no place in the script say why. Nothing here imports torch before the script does.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, final

from paceline.watch.loss_scaler import Hook, LossScaler
from paceline.watch.record_writer import Flag

# Keywords of constructors, by patch. The code that a ladder recommends has them, too.
LOADER_KEYWORDS: Final = {
    "workers": "num_workers",
    "pin_memory": "pin_memory",
    "persistent_workers": "persistent_workers",
    "prefetch_factor": "prefetch_factor",
}
_NEEDS_WORKERS: Final = ("persistent_workers", "prefetch_factor")
DDP_KEYWORDS: Final = {
    "ddp_bucket_mb": "bucket_cap_mb",
    "gradient_as_bucket_view": "gradient_as_bucket_view",
    "static_graph": "static_graph",
}
OPTIMIZER_KEYWORDS: Final = {"fused_optimizer": "fused", "foreach_optimizer": "foreach"}
_REASONS: Final = {
    **dict.fromkeys(LOADER_KEYWORDS, "no DataLoader was created"),
    **dict.fromkeys(DDP_KEYWORDS, "no DistributedDataParallel was created"),
    **dict.fromkeys(OPTIMIZER_KEYWORDS, "no optimizer of torch.optim was created that has this argument"),
    "channels_last": "the optimizer has no weights with four dimensions",
    "autocast": "no model was called",
    "compile": "no model was called",
    "cudnn_benchmark": "the script trains without a GPU",
    "native_jpegs": "no JPEG of Pillow was cropped and resized as RandomResizedCrop does",
}
Arguments = dict[str, Any]
Constructor = Callable[..., Any]


@final
class ScriptPatches:
    """The patches of one process by name, and what became of them.

    Worker processes, which decode images, report that through a file in `folder`.
    """

    def __init__(self, values: Mapping[str, Any], folder: Path) -> None:
        self._values = values
        self._has_native_crop = Flag(folder / "native-crop")
        self._torch: Any = None
        self._scaler: LossScaler | None = None
        self._has_own_scaler = False
        self._reasons = {name: _REASONS.get(name, "") for name in values}
        self._applied: set[str] = set()

    @property
    def outcomes(self) -> dict[str, str]:
        """Why each patch was not applied, "" for those that were."""
        if "native_jpegs" in self._values and "native_jpegs" not in self._applied and self._has_native_crop.is_set:
            self._applied.add("native_jpegs")
        return {name: "" if name in self._applied else reason for name, reason in self._reasons.items()}

    def patch_torch(self, torch: Any) -> None:
        """Replace constructors of torch, right after its import."""
        self._torch = torch
        if "PIL.Image" in sys.modules:
            self.patch_pillow()
        if self._has(LOADER_KEYWORDS):
            _replace_constructor(self._torch.utils.data.DataLoader, self._changing(self._change_loader))
        if self._has(DDP_KEYWORDS):
            _replace_constructor(torch.nn.parallel.DistributedDataParallel, self._changing(self._change_ddp))
        if self._has(OPTIMIZER_KEYWORDS):
            for optimizer in vars(torch.optim).values():
                if inspect.isclass(optimizer) and {"fused", "foreach"} & inspect.signature(optimizer).parameters.keys():
                    _replace_constructor(optimizer, self._changing(self._change_optimizer))
        if "channels_last" in self._values:
            _replace_constructor(torch.nn.parallel.DistributedDataParallel, self._convert_module)
            _replace_constructor(torch.optim.Optimizer, _then(self._convert_parameters))
        if self._values.get("autocast") == "float16":
            self._scaler = LossScaler(torch)
            _replace_constructor(torch.optim.Optimizer, _then(self._scaler.follow))
            _replace_constructor(torch.amp.GradScaler, _then(self._see_scaler))

    def patch_pillow(self) -> None:
        """Replace the decoder of JPEGs, after the import of Pillow."""
        if "native_jpegs" not in self._values:
            return
        try:
            from paceline.interop.pillow import patch_pillow

            patch_pillow(on_first_crop=self._has_native_crop.set)
        except (ImportError, RuntimeError) as error:
            self._explain("native_jpegs", str(error))

    def patch_model(self, modules: Iterable[Any]) -> None:
        """Change the models that have trained, after the first step."""
        self._set_globals()  # after the script has set its own
        modules = list(modules)
        if self._scaler is not None and not self._begin_scaling(modules):
            self._values = {name: value for name, value in self._values.items() if name != "autocast"}
        inside = {id(each) for module in modules for each in module.modules() if each is not module}
        for module in modules:
            if id(module) not in inside:
                self._patch_outermost(module)

    def _patch_outermost(self, module: Any) -> None:
        if "autocast" in self._values:
            module.forward = _Autocast(self._torch, module.forward, getattr(self._torch, self._values["autocast"]))
            self._applied.add("autocast")
        if "compile" in self._values:
            if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
                self._explain("compile", "the script compiles the model already")
            else:
                module.compile()
                self._applied.add("compile")

    # Scaled gradients

    def begin_backward(self, tensors: Any) -> list[Hook]:
        """Begin a backward pass from `tensors`; its result is for `end_backward`."""
        return [] if self._scaler is None else self._scaler.begin_backward(tensors)

    def end_backward(self, hooks: list[Hook]) -> None:
        """End a backward pass."""
        if self._scaler is not None:
            self._scaler.end_backward(hooks)

    def _begin_scaling(self, modules: Iterable[Any]) -> bool:
        """Scale gradients from now on, and return whether they can be."""
        assert self._scaler is not None
        kinds = {type(each).__name__ for module in modules for each in module.modules()}
        if self._has_own_scaler:
            self._explain("autocast", "the script scales its losses already")
        elif any(kind.startswith(("FSDP", "FullyShardedDataParallel")) for kind in kinds):
            self._explain("autocast", "FSDP has its own precision: set its mixed precision")
        else:
            self._scaler.is_on = True
        return self._scaler.is_on

    def _see_scaler(self, scaler: Any) -> None:
        self._has_own_scaler |= scaler.is_enabled()

    def _set_globals(self) -> None:
        torch = self._torch
        if "threads" in self._values:
            if torch.get_num_threads() == self._values["threads"]:
                self._explain("threads", f"the script has {self._values['threads']} already")
            else:
                torch.set_num_threads(self._values["threads"])
                self._applied.add("threads")
        if "cudnn_benchmark" in self._values and torch.cuda.is_initialized():
            if torch.backends.cudnn.benchmark == self._values["cudnn_benchmark"]:
                self._explain("cudnn_benchmark", f"the script has {self._values['cudnn_benchmark']} already")
            else:
                torch.backends.cudnn.benchmark = self._values["cudnn_benchmark"]
                self._applied.add("cudnn_benchmark")

    # Constructors

    def _has(self, keywords: Mapping[str, str]) -> bool:
        return not keywords.keys().isdisjoint(self._values)

    def _changing(self, change: Callable[[Arguments], None]) -> Callable[[Constructor], Constructor]:
        """Return what makes a constructor of which `change` changes the arguments."""

        def make(original: Constructor) -> Constructor:
            signature = inspect.signature(original)

            def __init__(instance: Any, /, *args: Any, **kwargs: Any) -> None:  # noqa: N807
                try:
                    bound = signature.bind(instance, *args, **kwargs)
                except TypeError:  # the script's own error, which the constructor reports
                    original(instance, *args, **kwargs)
                    return
                bound.apply_defaults()
                change(bound.arguments)
                original(*bound.args, **bound.kwargs)

            return __init__

        return make

    def _change_ddp(self, arguments: Arguments) -> None:
        self._change_arguments(arguments, DDP_KEYWORDS)

    def _change_arguments(self, arguments: Arguments, keywords: Mapping[str, str]) -> None:
        for name, keyword in keywords.items():
            if name in self._values:
                self._set_argument(arguments, name, keyword)

    def _set_argument(self, arguments: Arguments, name: str, keyword: str) -> None:
        value = self._values[name]
        if keyword not in arguments:
            self._explain(name, f"this release of torch has no {keyword}")
        elif arguments[keyword] == value:
            self._explain(name, f"the script has {keyword}={value} already")
        else:
            arguments[keyword] = value
            self._applied.add(name)

    def _explain(self, name: str, reason: str) -> None:
        self._reasons[name] = reason

    def _change_loader(self, arguments: Arguments) -> None:
        # Without workers an IterableDataset need not divide its samples between them.
        is_alone = isinstance(arguments["dataset"], self._torch.utils.data.IterableDataset)
        is_alone = is_alone and not arguments["num_workers"]
        workers = arguments["num_workers"] if is_alone else self._values.get("workers") or arguments["num_workers"]
        for name, keyword in LOADER_KEYWORDS.items():
            if name not in self._values:
                continue
            if name == "workers" and is_alone:
                self._explain(name, "its IterableDataset may not divide its samples over workers")
            elif name in _NEEDS_WORKERS and not workers:
                self._explain(name, "the DataLoader has no workers")
            else:
                self._set_argument(arguments, name, keyword)
        if not arguments["num_workers"]:  # an earlier patch may have removed the workers
            arguments.update(persistent_workers=False, prefetch_factor=None, timeout=0, multiprocessing_context=None)

    def _change_optimizer(self, arguments: Arguments) -> None:
        self._change_arguments(
            arguments, {name: each for name, each in OPTIMIZER_KEYWORDS.items() if each in arguments}
        )
        if self._values.get("fused_optimizer") and arguments.get("fused"):  # both at once are refused
            arguments["foreach"] = None

    # Channels last

    def _convert_module(self, original: Constructor) -> Constructor:
        def __init__(instance: Any, module: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            self._convert(module.parameters())  # before the buckets of gradients take the layout of the weights
            original(instance, module, *args, **kwargs)

        return __init__

    def _convert_parameters(self, optimizer: Any) -> None:
        self._convert(each for group in optimizer.param_groups for each in group["params"])

    def _convert(self, parameters: Iterable[Any]) -> None:
        layout = self._torch.channels_last
        for each in parameters:
            if each.dim() != 4:
                continue
            if each.is_contiguous(memory_format=layout):
                if not each.is_contiguous():  # those of a 1x1 convolution are both
                    self._explain("channels_last", "the script has weights in channels_last already")
                continue
            each.data = each.data.contiguous(memory_format=layout)
            self._applied.add("channels_last")


def _then(call: Callable[[Any], None]) -> Callable[[Constructor], Constructor]:
    """Return what makes a constructor that calls `call` with the new instance."""

    def make(original: Constructor) -> Constructor:
        def __init__(instance: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(instance, *args, **kwargs)
            call(instance)

        return __init__

    return make


def _replace_constructor(owner: Any, make: Callable[[Constructor], Constructor]) -> None:
    original = owner.__init__
    owner.__init__ = functools.wraps(original)(make(original))


@final
class _Autocast:
    """A forward under autocast, whose outputs are float32 as those of a loss under it."""

    def __init__(self, torch: Any, forward: Callable[..., Any], dtype: Any) -> None:
        self._torch = torch
        self._forward = forward
        self._dtype = dtype
        functools.update_wrapper(self, forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = "cuda" if self._torch.cuda.is_initialized() else "cpu"
        with self._torch.autocast(device, self._dtype):
            output = self._forward(*args, **kwargs)
        return self._to_float(output)

    def _to_float(self, output: Any) -> Any:
        if isinstance(output, self._torch.Tensor):
            return output.float() if output.dtype == self._dtype else output
        if isinstance(output, dict):
            for key, value in output.items():
                output[key] = self._to_float(value)
            return output
        if isinstance(output, tuple) and hasattr(output, "_fields"):
            return type(output)(*map(self._to_float, output))
        if type(output) in (tuple, list):
            return type(output)(map(self._to_float, output))
        return output
