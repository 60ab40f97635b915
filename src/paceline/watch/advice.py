"""What to change in a script, in the words of its framework. Pure.

No advice changes what is trained, neither the batch size nor the number of epochs.
"""

from collections.abc import Mapping
from typing import Final

from paceline.core.results import StragglerResult
from paceline.core.stages import DATA_WAIT, LOG, OTHER, PREPARE, SYNC

# Per bottleneck, the advice by framework as the observer names it; "" is plain PyTorch and every other framework.
_ADVICE: Final[Mapping[str, Mapping[str, str]]] = {
    "input-bound": {
        "": "more loader workers: DataLoader(num_workers=N, persistent_workers=True, pin_memory=True)",
        "timm": "more loader workers: --workers N",
        "lightning": "more loader workers in your DataLoader or datamodule: num_workers=N, persistent_workers=True",
        "transformers": "more loader workers: --dataloader_num_workers N (the default is 0: the rank loads itself)",
    },
    "copy-bound": {
        "": "pinned memory and asynchronous copies: DataLoader(pin_memory=True), images.to(device, non_blocking=True)",
        "timm": "pinned memory: --pin-mem",
        "lightning": "pinned memory: DataLoader(pin_memory=True)",
        "accelerate": "pinned memory and asynchronous copies: DataLoader(pin_memory=True), "
        "DataLoaderConfiguration(non_blocking=True)",
        "transformers": "pinned memory: leave out --dataloader_pin_memory False",
    },
    "compute-bound": {
        "": "unless they are in use: torch.autocast('cuda', torch.bfloat16), torch.compile(model)",
        "timm": "unless they are in use: --amp, --torchcompile, --channels-last",
        "lightning": "unless they are in use: Trainer(precision='bf16-mixed'), torch.compile(module)",
        "accelerate": "unless they are in use: Accelerator(mixed_precision='bf16', dynamo_backend='inductor')",
        "transformers": "unless they are in use: --bf16, --torch_compile",
    },
    "communication-bound": {
        "": "gradients of half the bytes: model.register_comm_hook(None, default_hooks.bf16_compress_hook) of "
        "torch.distributed.algorithms.ddp_comm_hooks",
        "lightning": "gradients of half the bytes: DDPStrategy(ddp_comm_hook=default_hooks.bf16_compress_hook)",
        "accelerate": "gradients of half the bytes: DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType"
        ".BF16)",
        "timm": "",
        "transformers": "",
    },
    "evaluation-bound": {
        "": "evaluating less often, or with more loader workers",
        "timm": "evaluating less often: --val-interval N",
        "lightning": "evaluating less often: Trainer(check_val_every_n_epoch=N), or val_check_interval",
        "transformers": "evaluating less often: --eval_steps N",
    },
    "checkpoint-bound": {
        "": "saving less often, or in the background: torch.distributed.checkpoint.async_save",
        "timm": "saving less often: leave out --recovery-interval, or save to a local disk (--output)",
        "lightning": "saving less often: ModelCheckpoint(every_n_epochs=N), or AsyncCheckpointIO",
        "transformers": "saving less often: --save_steps N",
    },
    "sync-bound": {
        "": "reading values every N steps only: sum them on the device (total += loss.detach()) and call .item() when "
        "you log",
        "timm": "reading values less often: --log-interval N",
        "lightning": "logging tensors instead of .item() values: self.log('loss', loss), and "
        "Trainer(log_every_n_steps=N)",
        "transformers": "reading values less often: --logging_steps N, --logging_nan_inf_filter False",
    },
    "logging-bound": {
        "": "logging every N steps only, or from a thread of its own",
        "timm": "logging less often: --log-interval N",
        "lightning": "logging less often: Trainer(log_every_n_steps=N)",
        "transformers": "logging less often: --logging_steps N",
    },
}
_START_ADVICE: Final = {
    "": "keeping the workers between epochs: DataLoader(persistent_workers=True)",
    "transformers": "keeping the workers between epochs: --dataloader_persistent_workers True",
}
_PREPARE_ADVICE: Final = "moving this work into the dataset, where loader workers do it, or onto the GPU"
_ONE_RANK: Final = {
    PREPARE: "looking for work that it alone does on batches",
    DATA_WAIT: "looking at its disk, its loader workers and the other processes of its host",
    SYNC: "looking for values that it alone reads",
    LOG: "looking for logging that it alone does",
    OTHER: "looking for work that it alone does, as in `if rank == 0`",
}


def advise(
    bottleneck: str, framework: str, *, has_gpu: bool, starts_loader: bool = False, prepares_batches: bool = False
) -> str:
    """Return what to try against `bottleneck`, "" for nothing.

    `starts_loader`: input-bound by starting the loader again and again. `prepares_batches`: by work on batches that the
    loader has made. Computing on a CPU gets no advice: 16 bits and compiling are slower on some.
    """
    if bottleneck == "compute-bound" and not has_gpu:
        return ""
    if prepares_batches and bottleneck == "input-bound" and not starts_loader:
        return _PREPARE_ADVICE
    table = _START_ADVICE if starts_loader and bottleneck == "input-bound" else _ADVICE.get(bottleneck, {})
    return table.get(framework, table.get("", ""))


def advise_straggler(straggler: StragglerResult, host: str) -> str:
    """Return where to look for the cause of a late rank on `host`; "" if no rank is named."""
    if straggler.rank is None:
        return ""
    where = _ONE_RANK.get(straggler.stage or "", "looking at its clock rate and the other processes of its host")
    return f"{where} ({host}): paceline doctor compares ranks" if host else where
