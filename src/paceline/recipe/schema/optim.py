"""The recipe's sections `optim` and `schedule`: optimizers, their settings, and learning-rate schedules."""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from paceline.recipe.schema.base import Args, Auto, ByName, ImportPath, Off, Section, TrainingDuration

Betas = tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]]


class _Optimizer(Section):
    """What every optimizer has."""

    lr: float = Field(0.1, gt=0)
    """Peak learning rate at `base_batch_size`."""
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the learning rate follows the batch size: times B/base, its square root, or not at all."""
    base_batch_size: PositiveInt | Auto = "auto"
    """Batch size that `lr` was chosen for; needed when `lr_scaling` is not none."""
    weight_decay: float = Field(0.0, ge=0)
    """Decay of the weights; each optimizer says how."""
    decay_norm_and_bias: bool = True
    """Whether the decay also pulls on biases and normalisation parameters."""
    norm_and_bias_lr: float = Field(1.0, gt=0)
    """Learning rate of biases and normalisation parameters, times that of the rest."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] | Off = "off"
    """Learning rate of each layer, times that of the layer after it; the classifier has the whole one. For fine-tuning
    (Clark et al. 2020, arXiv 2003.10555; Bao et al. 2021, arXiv 2106.08254). What is a layer, timm's networks say
    themselves; of others it is a block, or a weight outside of blocks."""

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
    """What torch's own optimizers have."""

    implementation: Literal["auto", "fused", "foreach", "loop"] = "auto"
    """One kernel for all parameters, a few, or one loop; `auto` is fused, which was never slower on a CPU
    (benchmarks/optimizers.py), or foreach where torch has no fused one, as for SGD under fsdp."""


def _check_nesterov(momentum: float, *, nesterov: bool) -> None:
    if nesterov and momentum == 0:
        raise ValueError("nesterov has no effect with momentum 0 (set momentum=0.9)")


class Sgd(_TorchOptimizer):
    """Stochastic gradient descent with momentum."""

    name: Literal["sgd"] = "sgd"
    momentum: float = Field(0.9, ge=0, lt=1)
    """Share of the last update kept."""
    nesterov: bool = False
    """Look ahead along the momentum."""
    weight_decay: float = Field(5e-4, ge=0)
    """L2 penalty added to the gradient."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
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
    """Decay of the weights themselves, times the learning rate."""


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
    """Share of the last update kept."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator."""
    centered: bool = False
    """Divide by the standard deviation of the gradient instead of its root mean square."""


class NovoGrad(_Optimizer):
    """NovoGrad: Adam's normalisation layer by layer (Ginsburg et al. 2019, arXiv 1905.11286)."""

    name: Literal["novograd"] = "novograd"
    lr: float = Field(0.01, gt=0)
    """Peak learning rate at `base_batch_size`."""
    weight_decay: float = Field(0.001, ge=0)
    """Decay added to the normalised gradient, so decoupled from its size."""
    betas: Betas = (0.95, 0.98)
    """Decay of the running mean, and of the running square of each layer's gradient norm."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator."""
    grad_averaging: bool = False
    """Weigh a new gradient by 1 - beta1, which makes the mean an average; otherwise it is a sum."""

    @model_validator(mode="after")
    def _an_average_has_a_past(self) -> Self:
        if self.grad_averaging and self.betas[0] == 0:
            raise ValueError("grad_averaging has no effect with betas[0] 0 (set betas=[0.95, 0.98])")
        return self


class Lars(_Optimizer):
    """LARS: SGD whose step follows the size of each layer (You et al. 2017, arXiv 1708.03888)."""

    name: Literal["lars"] = "lars"
    lr: float = Field(1.0, gt=0)
    """Peak learning rate at `base_batch_size`."""
    weight_decay: float = Field(5e-5, ge=0)
    """L2 penalty added to the gradient, and to the norm it is measured against."""
    momentum: float = Field(0.9, ge=0, lt=1)
    """Share of the last update kept."""
    nesterov: bool = False
    """Look ahead along the momentum."""
    trust: float = Field(0.001, gt=0)
    """Trust coefficient: the length of a layer's step, as a share of its weights', at learning rate 1."""
    eps: float = Field(1e-8, ge=0)
    """Added to the denominator."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        _check_nesterov(self.momentum, nesterov=self.nesterov)
        return self


class Lamb(_Optimizer):
    """LAMB: Adam whose step follows the size of each layer (You et al. 2020, arXiv 1904.00962)."""

    name: Literal["lamb"] = "lamb"
    lr: float = Field(0.005, gt=0)
    """Peak learning rate at `base_batch_size`."""
    weight_decay: float = Field(0.01, ge=0)
    """Decay added to the step before it is scaled to the layer."""
    betas: Betas = (0.9, 0.999)
    """Decay of the running mean and of the running square of the gradient."""
    eps: float = Field(1e-6, gt=0)
    """Added to the denominator."""


class Muon(_Optimizer):
    """Muon: momentum made orthogonal (Jordan et al. 2024), for filters flattened to matrices; SGD for the rest."""

    name: Literal["muon"] = "muon"
    lr: float = Field(0.02, gt=0)
    """Peak learning rate of the filters and inner matrices, at `base_batch_size`."""
    weight_decay: float = Field(0.0, ge=0)
    """Decay of the weights themselves, times their learning rate."""
    momentum: float = Field(0.95, ge=0, lt=1)
    """Share of the last update kept."""
    nesterov: bool = True
    """Look ahead along the momentum."""
    newton_schulz_steps: int = Field(5, ge=1)
    """Iterations towards an orthogonal matrix."""
    rescale: bool = False
    """Before each step, scale a filter bank to the norm sqrt(filters): only its direction is learnt."""
    sgd_lr: float = Field(0.05, gt=0)
    """Peak learning rate of what SGD moves: biases, normalisation parameters and the classifier."""
    classifier_lr: float = Field(1.0, gt=0)
    """Learning rate of the classifier's weights, times `sgd_lr`."""
    sgd_momentum: float = Field(0.9, ge=0, lt=1)
    """Momentum of what SGD moves, with Nesterov's look ahead."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        _check_nesterov(self.momentum, nesterov=self.nesterov)
        return self


class ScheduleFree(_Optimizer):
    """Schedule-free SGD (Defazio et al. 2024, arXiv 2405.15682): averages iterates in place of a falling rate."""

    name: Literal["schedule_free"] = "schedule_free"
    lr: float = Field(1.0, gt=0)
    """Learning rate at `base_batch_size`; a constant schedule with warm-up is all it needs."""
    weight_decay: float = Field(5e-4, ge=0)
    """L2 penalty, at the point where gradients are computed."""
    momentum: float = Field(0.9, gt=0, lt=1)
    """Share of the average in the point where gradients are computed."""


class OwnOptim(_Optimizer):
    """An optimizer of your own: called as `NAME(groups, lr=..., **args)`, a `torch.optim.Optimizer` whose groups have
    their own `lr` and `weight_decay` ([the contract](../how-to/extend.md#an-optimizer-of-your-own))."""

    name: ImportPath
    """Module and name of the class or function, such as `mypkg.optim:MyOptimizer`, or `torch.optim:Adagrad`."""
    lr: float = Field(gt=0)
    """Peak learning rate at `base_batch_size`; which one is good depends on the optimizer."""
    args: Args = Field({})
    """Keyword arguments it is called with, beside `lr`."""

    @model_validator(mode="after")
    def _decay_is_the_groups(self) -> Self:
        if "weight_decay" in self.args:
            raise ValueError("args.weight_decay has no effect, as each group has its own (set weight_decay instead)")
        return self


OptimSection = Annotated[
    Sgd | Adam | AdamW | RmsProp | NovoGrad | Lars | Lamb | Muon | ScheduleFree | OwnOptim, ByName()
]


class _WarmedUp(Section):
    """What every schedule but one_cycle, whose rise is its warm-up, has."""

    warmup: TrainingDuration = "0st"
    """Length of the rise from `warmup_start` to the peak."""
    warmup_start: float = Field(0.0, ge=0, le=1)
    """Share of the peak that the rise starts from."""
    warmup_shape: Literal["linear", "exponential", "constant"] = "linear"
    """Rise along a line, by a constant factor a step, or stay at `warmup_start` and jump (Goyal et al. 2017)."""
    warmup_by: Literal["step", "epoch"] = "step"
    """Rise at every step, or once per epoch, as torch's LinearLR that is stepped per epoch: the first epoch has
    `warmup_start`, and where that is 0, which would train nothing, epoch e of n has e/n."""

    @model_validator(mode="after")
    def _rise_can_start(self) -> Self:
        shape = self.warmup_shape
        if shape != "linear" and self.warmup.value == 0:
            raise ValueError(f"warmup_shape {shape} has no effect without warm-up (set warmup=5ep)")
        if self.warmup_start != 0 and self.warmup.value == 0:
            raise ValueError("warmup_start has no effect without warm-up (set warmup=5ep)")
        if shape != "linear" and self.warmup_start == 0:
            raise ValueError(f"warmup_shape {shape} cannot start from 0 (set warmup_start=0.1)")
        return self

    @model_validator(mode="after")
    def _has_whole_epochs(self) -> Self:
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
    """The peak learning rate, all the way."""

    name: Literal["constant"] = "constant"


class Cosine(_WarmedUp):
    """Half a cosine from the peak to `final` (Loshchilov and Hutter 2017, without restarts)."""

    name: Literal["cosine"] = "cosine"
    final: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


class Linear(_WarmedUp):
    """A straight line from the peak to `final`."""

    name: Literal["linear"] = "linear"
    final: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


class Polynomial(_WarmedUp):
    """From the peak to `final` along (1 - t) to a power, as large-batch recipes do (You et al. 2017)."""

    name: Literal["polynomial"] = "polynomial"
    power: float = Field(2.0, gt=0)
    """The power; 1 is a straight line."""
    final: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


class Step(_WarmedUp):
    """Multiply by `factor` at each milestone."""

    name: Literal["step"] = "step"
    milestones: tuple[TrainingDuration, ...] = Field(min_length=1)
    """When, counted from the start of the run."""
    factor: float = Field(0.1, gt=0, lt=1)
    """By how much."""


class OneCycle(Section):
    """Rise to the peak and fall again, both along a cosine (Smith and Topin 2017)."""

    name: Literal["one_cycle"] = "one_cycle"
    peak_at: TrainingDuration = "30%"
    """When the peak is reached."""
    start: float = Field(0.04, ge=0, le=1)
    """Share of the peak that the rise starts from."""
    final: float = Field(4e-6, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


class Plateau(_WarmedUp):
    """Multiply by `factor` when the validation loss has not improved for more than `patience` evaluations. Those within
    the warm-up, the one at its end too, do not count."""

    name: Literal["plateau"] = "plateau"
    factor: float = Field(0.2, gt=0, lt=1)
    """By how much."""
    patience: int = Field(10, ge=0)
    """Evaluations without improvement that are let pass."""
    threshold: float = Field(1e-4, ge=0)
    """Relative improvement that counts."""


ScheduleSection = Annotated[
    Constant | Cosine | Linear | Polynomial | Step | OneCycle | Plateau, Field(discriminator="name")
]
