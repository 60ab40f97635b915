"""`model.freeze` freezes parameters and modules of any model; patterns that match nothing are one-line errors."""

from functools import partial

import pytest
import torch
from torch import nn

from paceline.core.errors import RecipeError
from paceline.models.build import MODEL_NAMES, build_model
from paceline.models.freeze import (
    describe_trained_parameters,
    eval_mode,
    freeze_parameters,
    list_frozen,
    set_training_mode,
)
from paceline.models.pretrained import load_weights
from paceline.models.structure import find_classifier
from paceline.parallel.sync_batch_norm import convert_sync_batch_norm
from paceline.recipe.load import Patch, load
from paceline.recipe.schema.model import Model

NAME, WIDTH = "resnet18_cifar", 0.125
LIBRARIES = (
    *("torchvision:resnet18", "torchvision:vit_b_32", "torchvision:squeezenet1_1", "torchvision:googlenet"),
    *("torchvision:efficientnet_b0", "torchvision:convnext_tiny", "torchvision:densenet121", "torchvision:alexnet"),
    *("timm:test_resnet", "timm:test_vit", "timm:levit_128s", "timm:crossvit_tiny_240", "timm:efficientvim_m1_dist"),
)


class Net(nn.Module):
    """A backbone with all that keeps statistics or draws numbers, and a head with some of it too."""

    def __init__(self) -> None:
        super().__init__()
        norms = (nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False))
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), norms[0], nn.ReLU(), nn.Dropout(0.5))
        self.still = norms[1]
        self.neck = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 2)


def names_in(model: nn.Module, *, training: bool) -> set[str]:
    return {name for name, module in model.named_modules() if module.training is training}


def trained_in(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def frozen_net(*patterns: str) -> tuple[Model, Net]:
    section, model = Model(name="nets:Net", freeze=patterns or "backbone"), Net()
    freeze_parameters(section, model, 2)
    set_training_mode(section, model, 2)
    return section, model


@pytest.mark.parametrize("name", [*MODEL_NAMES, *LIBRARIES])
def test_the_classifier_is_what_changes_with_the_number_of_classes(name: str) -> None:
    def shapes(num_classes: int) -> dict[str, torch.Size]:
        with torch.device("meta"):
            model = build_model(Model(name=name), num_classes=num_classes, channels=3)
        if num_classes == 7:
            found.extend(find_classifier(model, 7))
        return {name: parameter.shape for name, parameter in model.named_parameters()}

    found: list[str] = []
    seven, eight = shapes(7), shapes(8)
    assert seven.keys() == eight.keys()
    assert {name.rpartition(".")[0] for name in seven if seven[name] != eight[name]} == set(found) != set()


@pytest.mark.parametrize("name", [*MODEL_NAMES, "torchvision:resnet18"])
def test_of_a_network_with_a_frozen_backbone_the_classifier_is_trained_and_nothing_else(name: str) -> None:
    with torch.device("meta"):
        model = build_model(Model(name=name, freeze="backbone"), num_classes=7, channels=3)
    (classifier,) = find_classifier(model, 7)
    layer = model.get_submodule(classifier)
    assert trained_in(model) == {f"{classifier}.{name}" for name, _ in layer.named_parameters()}
    section = Model(name=name, freeze="backbone")
    set_training_mode(section, model, 7)
    layers = {name for name in names_in(model, training=True) if [*model.get_submodule(name).parameters()]}
    assert layers == {"", classifier}
    few, all_ = (sum(each.numel() for each in part.parameters()) for part in (layer, model))
    assert describe_trained_parameters(Model(name=name), model) is None
    given = describe_trained_parameters(Model(name=name, freeze="backbone", weights="some.pth"), model)
    assert given == f"model.freeze: {few:,} parameters of {all_:,} are trained"
    assert (
        describe_trained_parameters(section, model)
        == f"{given}; the others keep their random initial values (set model.weights)"
    )


def test_a_fully_frozen_module_stays_in_evaluation_mode() -> None:
    _, model = frozen_net()
    assert trained_in(model) == {"head.weight", "head.bias"}
    still = {"stem", "stem.0", "stem.1", "stem.2", "stem.3", "still", "neck", "neck.0", "neck.1"}
    assert names_in(model, training=False) == still
    assert names_in(model, training=True) == {"", "drop", "head"}


def test_a_norm_stays_in_evaluation_mode_if_patterns_match_all_its_parameters() -> None:
    _, model = frozen_net("stem.?.*", "neck.1.bias")
    assert trained_in(model) == {"neck.0.weight", "neck.0.bias", "neck.1.weight", "head.weight", "head.bias"}
    assert names_in(model, training=False) == {"stem", "stem.0", "stem.1", "stem.2", "stem.3"}
    _, model = frozen_net("st*", "neck.1.*")
    assert names_in(model, training=False) == {"stem", "stem.0", "stem.1", "stem.2", "stem.3", "still", "neck.1"}


def test_evaluation_and_sync_batch_norm_keep_frozen_modules_in_evaluation_mode() -> None:
    section, model = frozen_net()
    before = names_in(model, training=False)
    convert_sync_batch_norm(model, torch.device("cpu"))
    set_training_mode(section, model, 2)
    for _ in range(2):
        with eval_mode(model):
            assert names_in(model, training=True) == set()
        assert names_in(model, training=False) == before
    assert len([each for each in model.modules() if type(each).__name__ == "SyncBatchNorm"]) == 3
    assert trained_in(model) == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("name", "freeze", "message"),
    [
        (NAME, ["stem"], f"'stem' matches no parameter of {NAME} (write 'stem.*')"),
        (NAME, ["backbone"], f"'backbone' matches no parameter of {NAME} (write model.freeze=backbone)"),
        (NAME, ["off"], f"'off' matches no parameter of {NAME} (write model.freeze=off)"),
        (NAME, ["stem.*", "layer9.*"], f"'layer9.*' matches no parameter of {NAME} (one is 'stem.0.weight')"),
        (NAME, ["clasifier.bias"], "'clasifier.bias' matches no parameter of resnet18_cifar (did you mean "
         "'classifier.bias'?)"),
        (NAME, ["s*", "c*"], f"[s*, c*] freezes every parameter of {NAME} (leave some to train)"),
        ("empty", "backbone", "backbone has no effect on empty, which is a classifier alone (set off)"),
    ],
)  # fmt: skip
def test_what_names_nothing_or_everything_is_refused(name: str, freeze: object, message: str) -> None:
    section = Model.model_validate({"name": name, "freeze": freeze})
    with pytest.raises(RecipeError) as caught:
        build_model(section, num_classes=4, channels=3)
    assert str(caught.value) == f"model.freeze: {message}"


def test_a_backbone_without_a_classifier_that_can_be_identified_is_refused() -> None:
    with pytest.raises(RecipeError) as caught:
        freeze_parameters(Model(name="nets:Net", freeze="backbone"), Net(), 3)
    assert str(caught.value) == (
        "model.freeze: backbone is not known of nets:Net, whose last linear or convolutional layer does not have 3 "
        "outputs (give patterns of names)"
    )


def test_tied_parameters_are_frozen_by_either_name() -> None:
    for pattern in ("0.*", "1.*"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
        model[1].weight, model[1].bias = model[0].weight, model[0].bias
        freeze_parameters(Model(name="nets:Net", freeze=(pattern,)), model, 2)
        assert trained_in(model) == {"2.weight", "2.bias"}


def test_a_classifier_that_starts_fresh_must_be_trained(tmp_path) -> None:
    build = partial(build_model, channels=3)
    section = Model(name=NAME, width=WIDTH)
    torch.save(build(section, num_classes=4).state_dict(), tmp_path / "weights.pth")
    frozen = section.model_copy(update={"freeze": ("classifier.*",)})
    path = str(tmp_path / "weights.pth")
    with pytest.raises(RecipeError) as caught:
        load_weights(build(frozen, num_classes=5), path, NAME)
    assert str(caught.value) == (
        "model.freeze: the classifier starts fresh (4 -> 5 classes), but 'classifier.weight' is frozen "
        "(leave it out of model.freeze)"
    )
    assert load_weights(build(frozen, num_classes=4), path, NAME) == "loaded 102 of 102 tensors"
    backbone = section.model_copy(update={"freeze": "backbone"})
    assert load_weights(build(backbone, num_classes=5), path, NAME).startswith(
        "loaded 100 of 102 tensors; the classifier"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model.freeze=[]", "model.freeze: freeze has no patterns (set freeze=off, or name some)"),
        ("model.freeze=", "model.freeze: None should be 'off', or 'backbone', or a list"),
        ("model.freeze=''", "model.freeze: '' should be 'off', or 'backbone', or a list"),
        ("model.freeze=stem.*", "model.freeze: 'stem.*' is neither off, backbone nor a list (write [stem.*])"),
        (
            "model.freeze='stem.*, *.bias'",
            "model.freeze: 'stem.*, *.bias' is neither off, backbone nor a list (write [stem.*, \"*.bias\"])",
        ),
    ],
)
def test_a_recipe_sets_off_backbone_or_patterns(words: str, message: str) -> None:
    given = [load("digits", Patch.parse([f"model.freeze={each}"])).recipe.model.freeze for each in ("off", "backbone")]
    assert given == ["off", "backbone"]
    assert load("digits", Patch.parse(['model.freeze=[stem.*, "*.bias"]'])).recipe.model.freeze == ("stem.*", "*.bias")
    with pytest.raises(RecipeError) as caught:
        load("digits", Patch.parse([words]))
    assert str(caught.value) == message


def test_of_tied_parameters_every_name_is_listed() -> None:
    model = Net()
    model.other = model.head
    names = list_frozen(Model(name="nets:Net", freeze=("other.*",)), model, 2)
    assert names == {"head.weight", "head.bias", "other.weight", "other.bias"}
