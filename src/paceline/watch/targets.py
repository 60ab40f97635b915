"""Functions of torch and of frameworks whose calls belong to one stage or pause. Torch-free."""

from typing import Final

from paceline.core.stages import DATA_WAIT, EXPOSED, LOG
from paceline.watch.step_timer import CHECKPOINT, EVALUATE, H2D, OPTIMIZER

Target = tuple[str, str]
"""The path of a function in its module, and its stage or pause."""

PAUSES: Final = (CHECKPOINT, EVALUATE)

_LIGHTNING: Final = {
    "trainer.trainer": [("Trainer.save_checkpoint", CHECKPOINT)],
    "loops.evaluation_loop": [("_EvaluationLoop.run", EVALUATE)],
    "trainer.connectors.logger_connector.logger_connector": [("_LoggerConnector.log_metrics", LOG)],
}

TARGETS: Final[dict[str, list[Target]]] = {
    "builtins": [("print", LOG)],
    "logging": [("Handler.handle", LOG)],
    "torch.serialization": [("save", CHECKPOINT)],
    "torch.distributed.checkpoint.state_dict_saver": [("save", CHECKPOINT)],
    "safetensors.torch": [("save_file", CHECKPOINT), ("save_model", CHECKPOINT)],
    "torch.optim.optimizer": [("Optimizer.zero_grad", OPTIMIZER)],
    "torch.nn.modules.module": [("Module.zero_grad", OPTIMIZER)],
    "torch.nn.utils.clip_grad": [
        (name, OPTIMIZER) for name in ("clip_grad_norm_", "clip_grad_value_", "get_total_norm", "clip_grads_with_norm_")
    ],
    "torch.optim.lr_scheduler": [("LRScheduler.step", OPTIMIZER), ("ReduceLROnPlateau.step", OPTIMIZER)],
    "torch.optim.swa_utils": [("AveragedModel.update_parameters", OPTIMIZER)],
    "torch.amp.grad_scaler": [(f"GradScaler.{name}", OPTIMIZER) for name in ("unscale_", "step", "update")],
    "torch.nn.parallel.distributed": [("DistributedDataParallel._sync_buffers", EXPOSED)],
    "torch.distributed.distributed_c10d": [
        (name, EXPOSED)
        for name in (
            *("all_reduce", "all_reduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier"),
            *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "_all_gather_base", "all_gather_object"),
            *("reduce_scatter", "reduce_scatter_tensor", "_reduce_scatter_base", "all_to_all", "all_to_all_single"),
            *("gather", "scatter", "gather_object", "scatter_object_list", "broadcast_object_list", "send", "recv"),
        )
    ],
    "torch.utils.tensorboard.writer": [
        (f"SummaryWriter.{name}", LOG)
        for name in ("add_scalar", "add_scalars", "add_histogram", "add_image", "add_images", "add_figure", "flush")
    ],
    "wandb.sdk.wandb_run": [("Run.log", LOG)],
    "timm.utils.checkpoint_saver": [
        ("CheckpointSaver.save_checkpoint", CHECKPOINT),
        ("CheckpointSaver.save_recovery", CHECKPOINT),
    ],
    "timm.utils.model_ema": [(f"{name}.update", OPTIMIZER) for name in ("ModelEma", "ModelEmaV2", "ModelEmaV3")],
    "timm.utils.clip_grad": [("dispatch_clip_grad", OPTIMIZER)],
    "timm.scheduler.scheduler": [("Scheduler.step_update", OPTIMIZER)],
    "transformers.trainer": [
        ("Trainer.evaluate", EVALUATE),
        ("Trainer._save_checkpoint", CHECKPOINT),
        ("Trainer.log", LOG),
    ],
    "paceline.interop.data_loaders": [("Prefetcher.get", DATA_WAIT)],
    "accelerate.accelerator": [
        ("Accelerator.save_state", CHECKPOINT),
        ("Accelerator.clip_grad_norm_", OPTIMIZER),
        ("Accelerator.clip_grad_value_", OPTIMIZER),
    ],
    "accelerate.utils.operations": [("send_to_device", H2D)],  # a copy on CPUs too, from cpu to cpu:0
    "accelerate.optimizer": [("AcceleratedOptimizer.step", OPTIMIZER), ("AcceleratedOptimizer.zero_grad", OPTIMIZER)],
    "accelerate.scheduler": [("AcceleratedScheduler.step", OPTIMIZER)],
    "tqdm.std": [("tqdm.display", LOG)],
    **{
        f"{package}.{name}": each
        for package in ("lightning.pytorch", "pytorch_lightning")
        for name, each in _LIGHTNING.items()
    },
}
"""Targets by the module that defines them. A name that a release does not have is skipped."""

ALIASES: Final = {
    "torch.serialization": ("torch",),
    "torch.distributed.distributed_c10d": ("torch.distributed",),
    "torch.distributed.checkpoint.state_dict_saver": ("torch.distributed.checkpoint",),
    "torch.nn.utils.clip_grad": ("torch.nn.utils",),
    "timm.utils.clip_grad": ("timm.utils",),
    "accelerate.utils.operations": ("accelerate.data_loader",),
}
"""Modules through which the functions of others are called."""

MOVES: Final = ("to", "cuda", "copy_")
"""Methods of tensors that may copy from one device to another."""
READS: Final = ("item", "tolist", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__")
"""Methods of tensors that give a value to the host, which waits for a GPU."""

FRAMEWORKS: Final = {
    "transformers.trainer": "transformers",
    "lightning.pytorch": "lightning",
    "pytorch_lightning": "lightning",
    "accelerate": "accelerate",
}
"""Frameworks by the start of the name of a module that calls the optimizer. Frameworks use one another: first wins."""
