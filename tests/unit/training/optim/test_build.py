"""Building an optimizer: that torch's are torch's, which parameters decay and how fast, what cannot take effect."""

import pytest
import torch
from torch import nn

from paceline.core.errors import RecipeError
from paceline.recipe.schema.optim import Adam, AdamW, Lamb, Lars, Muon, NovoGrad, RmsProp, ScheduleFree, Sgd
from paceline.training.optim.build import build_optimizer, set_lr

FUSED_OR_NOT = ["fused", "foreach", "loop"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))


def build(section, model):
    return build_optimizer(section, model.named_parameters(), "cpu")


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    torch.manual_seed(1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def names_of(model, group):
    chosen = {id(parameter) for parameter in group["params"]}
    return [name for name, parameter in model.named_parameters() if id(parameter) in chosen]


@pytest.mark.parametrize(
    ("section", "reference"),
    [
        (
            Sgd(lr=0.05, nesterov=True),
            lambda p: torch.optim.SGD(p, 0.05, 0.9, weight_decay=5e-4, nesterov=True, fused=True),
        ),
        (Adam(lr=0.01, weight_decay=0.1), lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1, fused=True)),
        (AdamW(lr=0.01), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.01, fused=True)),
        (
            Adam(lr=0.01, betas=(0.8, 0.9), eps=1e-3, implementation="loop"),
            lambda p: torch.optim.Adam(p, 0.01, betas=(0.8, 0.9), eps=1e-3, foreach=False),
        ),
        (
            RmsProp(lr=0.01, alpha=0.9, momentum=0.5, eps=1e-3, centered=True, weight_decay=0.1),
            lambda p: torch.optim.RMSprop(
                p, 0.01, 0.9, eps=1e-3, weight_decay=0.1, momentum=0.5, centered=True, foreach=True
            ),
        ),
    ],
    ids=["sgd", "adam", "adamw", "adam loop", "rmsprop"],
)
def test_an_optimizer_does_what_torchs_does(section, reference) -> None:
    ours, theirs = net(), net()
    updated = train(ours, build(section, ours))
    expected = train(theirs, reference(theirs.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(updated, expected, strict=True))


@pytest.mark.parametrize("section", [Sgd(lr=0.05, nesterov=True), Adam(lr=0.01, eps=1e-4), AdamW(lr=0.01, eps=1e-4)])
def test_every_implementation_takes_the_same_steps(section) -> None:
    walks = []
    for implementation in FUSED_OR_NOT:
        model = net().double()
        optimizer = build(section.model_copy(update={"implementation": implementation}), model)
        generator = torch.Generator().manual_seed(1)
        for _ in range(5):
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            optimizer.step()
        walks.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    for walk in walks[1:]:
        # The same operations, but a fused kernel does not round a product before it is added: 1e-16 of 1, five times.
        torch.testing.assert_close(walk, walks[0], rtol=0, atol=1e-15)


@pytest.mark.parametrize("implementation", FUSED_OR_NOT)
@pytest.mark.parametrize("section", [Sgd(), Adam(), AdamW()])
def test_the_implementation_asked_for_is_the_one_used(section, implementation) -> None:
    group = build(section.model_copy(update={"implementation": implementation}), net()).param_groups[0]
    assert bool(group["fused"]) == (implementation == "fused")
    assert bool(group["foreach"]) == (implementation == "foreach")


@pytest.mark.parametrize(("device_type", "kernels"), [("cpu", "fused"), ("cuda", "fused"), ("xpu", "foreach")])
def test_the_automatic_implementation_is_fused_where_that_was_measured(device_type, kernels) -> None:
    group = build_optimizer(Sgd(), net().named_parameters(), device_type).param_groups[0]
    assert group[kernels]


@pytest.mark.parametrize("section", [Sgd(), AdamW(), RmsProp(), NovoGrad(), ScheduleFree()])
def test_what_is_treated_alike_is_one_group_in_the_models_order(section) -> None:
    model = net()
    (group,) = build(section, model).param_groups
    assert [id(parameter) for parameter in group["params"]] == [id(parameter) for parameter in model.parameters()]
    assert group["lr_factor"] == 1.0


@pytest.mark.parametrize("variant", [Sgd, AdamW, RmsProp, NovoGrad, Lars, Lamb, ScheduleFree])
def test_norms_and_biases_are_spared_from_decay_when_asked(variant) -> None:
    model = net()
    weights, spared = build(variant(weight_decay=0.1, decay_norm_and_bias=False), model).param_groups
    assert names_of(model, weights) == ["0.weight", "3.weight"] and weights["weight_decay"] == 0.1
    assert names_of(model, spared) == ["0.bias", "1.weight", "1.bias", "3.bias"] and spared["weight_decay"] == 0.0


def test_norms_and_biases_may_learn_at_their_own_rate() -> None:
    model = net()
    optimizer = build(Sgd(lr=0.1, norm_and_bias_lr=4.0), model)
    assert [names_of(model, group) for group in optimizer.param_groups] == [
        ["0.weight", "3.weight"],
        ["0.bias", "1.weight", "1.bias", "3.bias"],
    ]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.4]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [5e-4, 5e-4]


@pytest.mark.parametrize("variant", [Lars, Lamb])
def test_only_weights_are_followed_layer_by_layer(variant) -> None:
    model = net()
    weights, others = build(variant(), model).param_groups
    assert names_of(model, weights) == ["0.weight", "3.weight"] and weights["layerwise"]
    assert names_of(model, others) == ["0.bias", "1.weight", "1.bias", "3.bias"] and not others["layerwise"]
    assert weights["weight_decay"] == others["weight_decay"] > 0


def test_muon_moves_filters_and_inner_matrices_and_leaves_the_classifier_to_sgd() -> None:
    model = nn.Sequential(*net(), nn.Linear(2, 2), nn.Linear(2, 3))
    section = Muon(lr=0.02, sgd_lr=0.1, classifier_lr=0.5, norm_and_bias_lr=2.0, weight_decay=0.1, nesterov=False)
    matrices, classifier, others = build(section, model).param_groups
    assert names_of(model, matrices) == ["0.weight", "3.weight", "4.weight"]
    assert names_of(model, classifier) == ["5.weight"]
    assert names_of(model, others) == ["0.bias", "1.weight", "1.bias", "3.bias", "4.bias", "5.bias"]
    assert [group["is_matrix"] for group in (matrices, classifier, others)] == [True, False, False]
    assert [group["momentum"] for group in (matrices, classifier, others)] == [0.95, 0.9, 0.9]
    assert [group["nesterov"] for group in (matrices, classifier, others)] == [False, True, True]
    # 0.1 / 0.02 * 0.02 is 0.1 to a rounding
    assert [group["lr"] for group in (matrices, classifier, others)] == pytest.approx([0.02, 0.05, 0.2], rel=1e-15)


def test_muon_takes_nothing_else_for_a_classifier_that_is_frozen() -> None:
    model = nn.Sequential(*net(), nn.Linear(2, 2), nn.Linear(2, 3))
    model[5].requires_grad_(False)
    matrices, others = build(Muon(), model).param_groups
    assert names_of(model, matrices) == ["0.weight", "3.weight", "4.weight"] and not others["is_matrix"]


def test_frozen_parameters_are_left_out() -> None:
    model = net()
    model[0].requires_grad_(False)
    groups = build(Sgd(), model).param_groups
    assert sum(len(group["params"]) for group in groups) == 4


def test_the_learning_rate_reaches_every_group_times_its_factor() -> None:
    optimizer = build(Sgd(decay_norm_and_bias=False, norm_and_bias_lr=2.0), net())
    set_lr(optimizer.param_groups, 0.7)
    assert [group["lr"] for group in optimizer.param_groups] == [0.7, 1.4]


@pytest.mark.parametrize("section", [Sgd(norm_and_bias_lr=2.0), Muon(norm_and_bias_lr=2.0)])
def test_a_rate_for_norms_and_biases_that_are_not_there_is_an_error(section) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Linear(4, 2, bias=False))
    with pytest.raises(
        RecipeError, match=r"^optim.norm_and_bias_lr: 2 has no effect.*\(set optim.norm_and_bias_lr=1\)"
    ):
        build(section, model)


def test_a_rate_for_a_classifier_that_is_not_there_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"^optim.classifier_lr: 3 has no effect.*\(set optim.classifier_lr=1\)"):
        build(Muon(classifier_lr=3.0), nn.Conv2d(3, 4, 3))


def test_muon_without_a_matrix_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"^optim.name: muon needs filters.*\(set optim.name=sgd\)"):
        build(Muon(), nn.Linear(3, 2))


def test_muon_leaves_what_is_one_row_or_column_to_sgd() -> None:
    scale, filters, classifier = (nn.Parameter(torch.ones(shape)) for shape in ((8, 1, 1), (8, 3, 3, 3), (5, 8)))
    made = build_optimizer(Muon(), [("scale", scale), ("conv", filters), ("head", classifier)], "cpu")
    by_kind = {group["is_matrix"]: [] for group in made.param_groups}
    for group in made.param_groups:
        by_kind[group["is_matrix"]] += [tuple(each.shape) for each in group["params"]]
    assert by_kind == {True: [(8, 3, 3, 3)], False: [(5, 8), (8, 1, 1)]}
