"""How ranks work together. How many there are is not part of a recipe."""

from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from paceline.recipe.schema.section import Auto, CadenceDuration, Off, Section, TimeDuration

_ONLY_FOR_STRATEGY = {
    "bucket_mb": "ddp",
    "bucket_view": "ddp",
    "static_graph": "ddp",
    "compression": "ddp",
    "powersgd_rank": "ddp",
    "check_replicas": "ddp",
    "sync_gradients": "ddp",
    "reshard": "fsdp",
}


class Parallel(Section):
    """How ranks work together. How many there are is not part of a recipe."""

    strategy: Literal["ddp", "fsdp", "dataparallel"] = "ddp"
    """ddp keeps a replica on every rank, fsdp shards weights, gradients and optimizer over them (FSDP2), and
    dataparallel drives all GPUs from one process, for comparison. One rank needs nothing."""
    bucket_mb: PositiveFloat | Auto = "auto"
    """MiB of gradient that ddp sends at once; `auto` is torch's 25, after a first bucket of 1."""
    bucket_view: bool = True
    """ddp: gradients are views into what is sent, which saves a copy of each."""
    static_graph: bool = False
    """ddp: promise that every step uses the same parameters in the same order."""
    compression: Off | Literal["bf16", "fp16", "powersgd"] = "off"
    """ddp: send gradients in 16 bits, or as low-rank factors (Vogels et al. 2019, arXiv 1905.13727)."""
    sync_gradients: bool = True
    """ddp: average gradients over the ranks. false is a probe of what communication costs: each rank trains alone, and
    its weights go their own way. Gradients and buffers stay where they are, but a late rank is still waited for: in
    each step the ranks share one number, the mean of their gradients' norms, so that all stop or skip alike, and votes
    on saving and leaving, which a step waits for in the next; the losses that are logged stay means over the ranks.
    `model.norm=sync_batch` is communication of its own, which stays."""
    powersgd_rank: PositiveInt | Auto = "auto"
    """Rank of the factors; `auto` is 1."""
    reshard: bool = False
    """fsdp: drop gathered weights after forward and gather them again in backward: less memory, more to send."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where each rank computes; `auto` is a GPU when there is one."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Collective library; `auto` is nccl for GPUs and gloo for CPUs."""
    timeout: TimeDuration = "10min"
    """How long a rank waits for another, or for its own step to end, before the run fails."""
    check_replicas: CadenceDuration | Off = "off"
    """ddp: compare the ranks' weights, by a hash, every so many steps, and end the run where they differ."""
    threads: PositiveInt | Auto = "auto"
    """CPU threads a rank computes with; `auto` shares the node's cores. Another number gives other bits."""

    @model_validator(mode="after")
    def _options_belong_to_the_strategy(self) -> Self:
        for name, strategy in _ONLY_FOR_STRATEGY.items():
            default = type(self).model_fields[name].default
            if getattr(self, name) != default and self.strategy != strategy:
                raise ValueError(f"{name} has no effect with strategy {self.strategy} (set strategy={strategy})")
        for name in ("check_replicas", "compression", "static_graph"):
            if not self.sync_gradients and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with sync_gradients false (set sync_gradients=true)")
        if self.powersgd_rank != "auto" and self.compression != "powersgd":
            raise ValueError(
                f"powersgd_rank has no effect with compression {self.compression} (set compression=powersgd)"
            )
        return self
