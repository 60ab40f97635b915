"""The recipe's sections `optim` and `schedule`."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from paceline.recipe.schema.base import Args, Auto, ByName, ImportPath, Off, Section, TrainingDuration

Betas = tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]


class _Optimizer(Section):
    """Fields of every optimizer."""

    lr: float = Field(0.1, gt=0)
    """Peak learning rate at `base_batch_size`."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """Scale the learning rate with the batch size B: by B / `base_batch_size` (linear), by its square root, or not at
    all."""
    base_batch_size: PositiveInt | Auto = "auto"
    """Batch size that `lr` was tuned for; required unless `lr_scaling` is none."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay; its form depends on the optimizer."""
    decay_norm_and_bias: bool = True
    """Apply weight decay to biases and normalization parameters too."""
    norm_and_bias_lr: float = Field(1.0, gt=0)
    """Learning rate of biases and normalization parameters, relative to that of all others."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | Off = "off"
    """Learning rate of each layer, relative to that of the next; the classifier has the full rate. For fine-tuning
    (Clark et al. 2020, arXiv 2003.10555; Bao et al. 2021, arXiv 2106.08254). timm's models define their layers; in
    other models a layer is a block, or a weight outside of blocks."""

    @model_validator(mode="after")
    def _refuse_settings_without_effect(self) -> Self:
        if self.lr_scaling == "none" and self.base_batch_size != "auto":
            raise ValueError("base_batch_size has no effect with lr_scaling none (set lr_scaling=linear or sqrt)")
        if self.lr_scaling != "none" and self.base_batch_size == "auto":
            raise ValueError(
                f"lr_scaling {self.lr_scaling} needs the batch size lr was chosen for (set base_batch_size)"
            )
        if not self.decay_norm_and_bias and self.weight_decay == 0:
            raise ValueError("decay_norm_and_bias=false has no effect with weight_decay 0 (set weight_decay)")
        return self


class _TorchOptimizer(_Optimizer):
    """Fields of torch's own optimizers."""

    implementation: Literal["auto", "fused", "foreach", "loop"] = "auto"
    """`fused` is one kernel for all parameters, `foreach` a few, and `loop` one per parameter. `auto` is fused, which
    was never slower on a CPU (benchmarks/optimizers.py), or foreach if torch has no fused version, as for SGD under
    fsdp."""


def _check_nesterov(momentum: float, *, nesterov: bool) -> None:
    if nesterov and momentum == 0:
        raise ValueError("nesterov has no effect with momentum 0 (set momentum=0.9)")


class Sgd(_TorchOptimizer):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"] = "sgd"
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum factor."""
    nesterov: bool = False
    """Use Nesterov momentum."""
    weight_decay: float = Field(5e-4, ge=0)
    """L2 penalty added to the gradient."""

    @model_validator(mode="after")
    def _check_momentum(self) -> Self:
        _check_nesterov(self.momentum, nesterov=self.nesterov)
        return self


class Adam(_TorchOptimizer):
    """Adam (Kingma and Ba 2015, arXiv 1412.6980), with L2 weight decay."""

    name: Literal["adam"] = "adam"
    lr: float = Field(1e-3, gt=0)
    """Peak learning rate at `base_batch_size`."""
    weight_decay: float = Field(0.0, ge=0)
    """L2 penalty added to the gradient."""
    betas: Betas = (0.9, 0.999)
    """Decay of the running mean and of the running square of the gradient."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator."""


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101)."""

    name: Literal["adamw"] = "adamw"  # type: ignore[assignment]
    weight_decay: float = Field(0.01, ge=0)
    """Decoupled decay of the weights, multiplied by the learning rate."""


class RmsProp(_Optimizer):
    """RMSprop (Hinton 2012, lecture 6e), with momentum."""

    name: Literal["rmsprop"] = "rmsprop"
    lr: float = Field(0.01, gt=0)
    """Peak learning rate at `base_batch_size`."""
    weight_decay: float = Field(0.0, ge=0)
    """L2 penalty added to the gradient."""
    alpha: float = Field(0.99, ge=0, lt=1)
    """Decay of the running square of the gradient."""
    momentum: float = Field(0.0, ge=0, lt=1)
    """Momentum factor."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator."""
    centered: bool = False
    """Divide by the standard deviation of the gradient instead of its root mean square."""


class NovoGrad(_Optimizer):
    """NovoGrad: Adam with second moments per layer (Ginsburg et al. 2019, arXiv 1905.11286)."""

    name: Literal["novograd"] = "novograd"
    lr: float = Field(0.01, gt=0)
    """Peak learning rate at `base_batch_size`."""
    weight_decay: float = Field(0.001, ge=0)
    """Decay added to the normalized gradient, and so independent of the gradient's size."""
    betas: Betas = (0.95, 0.98)
    """Decay of the running mean, and of the running square of each layer's gradient norm."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator."""
    grad_averaging: bool = False
    """Weight a new gradient by 1 - beta1, so that the running mean is an average instead of a sum."""

    @model_validator(mode="after")
    def _check_grad_averaging(self) -> Self:
        if self.grad_averaging and self.betas[0] == 0:
            raise ValueError("grad_averaging has no effect with betas[0] 0 (set betas=[0.95, 0.98])")
        return self


class Lars(_Optimizer):
    """LARS: SGD with a trust ratio per layer (You et al. 2017, arXiv 1708.03888)."""

    name: Literal["lars"] = "lars"
    lr: float = Field(1.0, gt=0)
    """Peak learning rate at `base_batch_size`."""
    weight_decay: float = Field(5e-5, ge=0)
    """L2 penalty added to the gradient, and to the gradient norm in the trust ratio."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum factor."""
    nesterov: bool = False
    """Use Nesterov momentum."""
    trust: float = Field(0.001, gt=0)
    """Trust coefficient: the norm of a layer's update relative to the norm of its weights, at learning rate 1."""
    eps: float = Field(1e-8, ge=0)
    """Added to the denominator."""

    @model_validator(mode="after")
    def _check_momentum(self) -> Self:
        _check_nesterov(self.momentum, nesterov=self.nesterov)
        return self


class Lamb(_Optimizer):
    """LAMB: Adam with a trust ratio per layer (You et al. 2020, arXiv 1904.00962)."""

    name: Literal["lamb"] = "lamb"
    lr: float = Field(0.005, gt=0)
    """Peak learning rate at `base_batch_size`."""
    weight_decay: float = Field(0.01, ge=0)
    """Decay added to the update before the trust ratio is applied."""
    betas: Betas = (0.9, 0.999)
    """Decay of the running mean and of the running square of the gradient."""
    eps: float = Field(1e-6, gt=0)
    """Added to the denominator."""


class Muon(_Optimizer):
    """Muon: orthogonalized momentum (Jordan et al. 2024) for filters, flattened to matrices, and for inner matrices;
    SGD for the rest."""

    name: Literal["muon"] = "muon"
    lr: float = Field(0.02, gt=0)
    """Peak learning rate of the filters and inner matrices, at `base_batch_size`."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled decay of the weights, multiplied by their learning rate."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Momentum factor."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    newton_schulz_steps: int = Field(5, ge=1)
    """Newton-Schulz iterations."""
    rescale: bool = False
    """Scale each filter bank to norm sqrt(filters) before each step, so that only its direction is learned."""
    sgd_lr: float = Field(0.05, gt=0)
    """Peak learning rate of the parameters trained by SGD: biases, normalization parameters and the classifier."""
    classifier_lr: float = Field(1.0, gt=0)
    """Learning rate of the classifier's weights, relative to `sgd_lr`."""
    sgd_momentum: float = Field(0.9, ge=0, lt=1)
    """Nesterov momentum of the parameters trained by SGD."""

    @model_validator(mode="after")
    def _check_momentum(self) -> Self:
        _check_nesterov(self.momentum, nesterov=self.nesterov)
        return self


class ScheduleFree(_Optimizer):
    """Schedule-free SGD (Defazio et al. 2024, arXiv 2405.15682): averages iterates instead of decaying the learning
    rate."""

    name: Literal["schedule_free"] = "schedule_free"
    lr: float = Field(1.0, gt=0)
    """Learning rate at `base_batch_size`; use a constant schedule, with warm-up if needed."""
    weight_decay: float = Field(5e-4, ge=0)
    """L2 penalty at the point where gradients are computed."""
    momentum: float = Field(0.9, gt=0, lt=1)
    """Interpolation factor (beta): gradients are computed at beta * average + (1 - beta) * current weights."""


class OwnOptim(_Optimizer):
    """Your own optimizer: `MyOptimizer(groups, lr=..., **args)` returns a `torch.optim.Optimizer`. Each group has its
    own `lr` and `weight_decay` ([the interface](../how-to/extend.md#custom-optimizers))."""

    name: ImportPath
    """Module and name of the class or function, such as `mypkg.optim:MyOptimizer`, or `torch.optim:Adagrad`."""
    lr: float = Field(gt=0)
    """Peak learning rate at `base_batch_size`; a good value depends on the optimizer."""
    args: Args = Field({})
    """Keyword arguments, in addition to `lr`."""

    @model_validator(mode="after")
    def _refuse_weight_decay_argument(self) -> Self:
        if "weight_decay" in self.args:
            raise ValueError("args.weight_decay has no effect, as each group has its own (set weight_decay instead)")
        return self


OptimSection = Annotated[
    Sgd | Adam | AdamW | RmsProp | NovoGrad | Lars | Lamb | Muon | ScheduleFree | OwnOptim, ByName()
]


class _WarmedUp(Section):
    """Fields of every schedule except one_cycle, which has a rise of its own."""

    warmup: TrainingDuration = "0st"
    """Length of the warm-up, the rise from `warmup_start` to the peak."""
    warmup_start: float = Field(0.0, ge=0, le=1)
    """Learning rate at the start of the warm-up, as a fraction of the peak."""
    warmup_shape: Literal["linear", "exponential", "constant"] = "linear"
    """Rise linearly, by a constant factor per step, or stay at `warmup_start` and jump (Goyal et al. 2017)."""
    warmup_by: Literal["step", "epoch"] = "step"
    """Rise at every step, or once per epoch, as torch's LinearLR stepped per epoch. By epoch, the first epoch has
    `warmup_start`; if that is 0, epoch e of n has e/n."""

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        shape = self.warmup_shape
        if shape != "linear" and self.warmup.value == 0:
            raise ValueError(f"warmup_shape {shape} has no effect without warm-up (set warmup=5ep)")
        if self.warmup_start != 0 and self.warmup.value == 0:
            raise ValueError("warmup_start has no effect without warm-up (set warmup=5ep)")
        if shape != "linear" and self.warmup_start == 0:
            raise ValueError(f"warmup_shape {shape} cannot start from 0 (set warmup_start=0.1)")
        return self

    @model_validator(mode="after")
    def _check_warmup_epochs(self) -> Self:
        if self.warmup_by == "step":
            return self
        if self.warmup.value == 0:
            raise ValueError("warmup_by epoch has no effect without warm-up (set warmup=5ep)")
        if self.warmup.unit != "ep" or self.warmup.value != int(self.warmup.value):
            raise ValueError(f"warmup_by epoch needs whole epochs, and warmup is {self.warmup} (set warmup=5ep)")
        if self.warmup_shape == "constant":
            raise ValueError("warmup_by epoch has no effect with warmup_shape constant (set warmup_by=step)")
        return self


class Constant(_WarmedUp):
    """The peak learning rate throughout."""

    name: Literal["constant"] = "constant"


class Cosine(_WarmedUp):
    """Half a cosine from the peak to `final` (Loshchilov and Hutter 2017, without restarts)."""

    name: Literal["cosine"] = "cosine"
    final: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a fraction of the peak."""


class Linear(_WarmedUp):
    """A straight line from the peak to `final`."""

    name: Literal["linear"] = "linear"
    final: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a fraction of the peak."""


class Polynomial(_WarmedUp):
    """From the peak to `final` by a power of (1 - t), as in large-batch recipes (You et al. 2017)."""

    name: Literal["polynomial"] = "polynomial"
    power: float = Field(2.0, gt=0)
    """Exponent; 1 is linear."""
    final: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a fraction of the peak."""


class Step(_WarmedUp):
    """Multiply by `factor` at each milestone."""

    name: Literal["step"] = "step"
    milestones: tuple[TrainingDuration, ...] = Field(min_length=1)
    """Times from the start of the run."""
    factor: float = Field(0.1, gt=0, lt=1)
    """Factor at each milestone."""


class OneCycle(Section):
    """Rise to the peak and fall again, both along a cosine (Smith and Topin 2017)."""

    name: Literal["one_cycle"] = "one_cycle"
    peak_at: TrainingDuration = "30%"
    """When the peak is reached."""
    start: float = Field(0.04, ge=0, le=1)
    """Learning rate at the start, as a fraction of the peak."""
    final: float = Field(4e-6, ge=0, le=1)
    """Learning rate at the end, as a fraction of the peak."""


class Plateau(_WarmedUp):
    """Multiply by `factor` once the validation loss has not improved for more than `patience` evaluations. Evaluations
    up to the end of the warm-up do not count."""

    name: Literal["plateau"] = "plateau"
    factor: float = Field(0.2, gt=0, lt=1)
    """Factor at each reduction."""
    patience: int = Field(10, ge=0)
    """Evaluations without improvement to tolerate."""
    threshold: float = Field(1e-4, ge=0)
    """Smallest relative improvement that counts."""


class RangeTest(Section):
    """Learning-rate range test (Smith 2017, arXiv 1506.01186): rise from `start` to the peak by a constant factor per
    step, and end the run once the loss diverges. `paceline lr-find` reads a learning rate from it."""

    name: Literal["range_test"] = "range_test"
    start: float = Field(1e-8, gt=0, lt=1)
    """Learning rate at the first step, as a fraction of the peak."""
    max_rise: float = Field(4.0, gt=1)
    """End the run once the smoothed training loss, as logged, is this many times its minimum."""


ScheduleSection = Annotated[
    Constant | Cosine | Linear | Polynomial | Step | OneCycle | Plateau | RangeTest, Field(discriminator="name")
]
