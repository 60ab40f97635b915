"""Pretrained weights: what is loaded, what stays fresh, and the one-line errors."""

import io
import pickle
import zipfile
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.core.errors import RecipeError
from paceline.models.build import build_model
from paceline.models.pretrained import load_weights
from paceline.recipe.schema.model import Model

NAME = "resnet18_cifar"


def build(seed: int, *, num_classes: int = 5, channels: int = 3, name: str = NAME) -> nn.Module:
    """Build a small network whose weights and statistics depend on `seed`."""
    torch.manual_seed(seed)
    width = 0.125 if ":" not in name else 1.0
    model = build_model(Model(name=name, width=width), num_classes=num_classes, channels=channels)
    for key, tensor in model.state_dict().items():
        if "running" in key:
            tensor.uniform_(1, 2)
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the tensors of `model` but for the counters."""
    return {key: t.clone() for key, t in model.state_dict().items() if not key.endswith("num_batches_tracked")}


def equal_keys(model: nn.Module, tensors: dict[str, Tensor]) -> set[str]:
    """Return the names of the tensors of `model` that equal the ones in `tensors`."""
    now = state(model)
    return {key for key in now if key in tensors and torch.equal(now[key], tensors[key])}


def error_of(model: nn.Module, path: Path, name: str = NAME) -> str:
    """Return the one line that loading raises, having checked that the model stays as it is; without the path."""
    before = state(model)
    with pytest.raises(RecipeError) as caught:
        load_weights(model, str(path), name)
    assert equal_keys(model, before) == set(before)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    start = f"model.weights: {path}: "
    assert message.startswith(start)
    return message.removeprefix(start)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
def test_every_tensor_of_a_file_of_the_same_network_is_loaded(tmp_path, suffix):
    source, model = build(0), build(1)
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        save_file(source.state_dict(), path)
    else:
        torch.save(source.state_dict(), path)
    num_tensors = len(state(model))
    assert load_weights(model, str(path), NAME) == f"loaded {num_tensors} of {num_tensors} tensors"
    assert equal_keys(model, state(source)) == set(state(source))


@pytest.mark.parametrize("nest", ["state_dict", "model"])
@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_nested_state_dicts_and_prefixes_of_wrappers_are_understood(tmp_path, nest, prefix):
    source, model = build(0), build(1)
    path = tmp_path / "weights.pth"
    torch.save({nest: {prefix + key: t for key, t in source.state_dict().items()}, "epoch": 3}, path)
    load_weights(model, str(path), NAME)
    assert equal_keys(model, state(source)) == set(state(source))


@pytest.mark.parametrize(
    "name", [NAME, "speednet94", "torchvision:squeezenet1_1", "torchvision:mobilenet_v3_small", "timm:test_vit"]
)
def test_a_classifier_of_other_classes_alone_stays_fresh(tmp_path, name):
    source, model = build(0, num_classes=7, name=name), build(1, name=name)
    fresh = state(model)
    path = tmp_path / "weights.pth"
    torch.save(source.state_dict(), path)
    sentence = load_weights(model, str(path), name)
    kept = {key for key, t in state(source).items() if t.shape != fresh[key].shape}
    assert 1 <= len(kept) <= 2
    assert kept <= equal_keys(model, fresh)
    assert equal_keys(model, state(source)) == set(fresh) - kept
    expected = f"loaded {len(fresh) - len(kept)} of {len(fresh)} tensors; the classifier starts fresh (7 -> 5 classes)"
    assert sentence == expected


@pytest.mark.parametrize("name", ["timm:tf_efficientnet_lite0", "torchvision:efficientnet_b0"])
def test_a_fresh_classifier_has_no_large_weights(tmp_path, name):
    """The library's own are 1 / sqrt(classes), for which fine-tuning on few classes loses the pretrained layers."""
    source, model = build(0, num_classes=7, name=name), build(1, name=name)
    own = model.classifier.weight if "timm" in name else model.classifier[1].weight
    before = own.detach().clone()
    path = tmp_path / "weights.pth"
    torch.save(source.state_dict(), path)
    load_weights(model, str(path), name)
    bound = own.shape[1] ** -0.5
    assert before.abs().max() > 10 * bound
    torch.testing.assert_close(own.abs().max(), torch.tensor(bound))
    torch.testing.assert_close(own / own.abs().max(), before / before.abs().max())


def test_two_classifiers_of_a_distilled_network_both_stay_fresh(tmp_path):
    def distilled(num_classes: int) -> nn.Module:
        return nn.ModuleDict(
            {"body": nn.Linear(4, 6), "head": nn.Linear(6, num_classes), "dist": nn.Linear(6, num_classes)}
        )

    source, model = distilled(9), distilled(2)
    path = tmp_path / "weights.pth"
    torch.save(source.state_dict(), path)
    assert load_weights(model, str(path), "x") == "loaded 2 of 6 tensors; the classifier starts fresh (9 -> 2 classes)"
    assert torch.equal(model["body"].weight, source["body"].weight)


@pytest.mark.parametrize("name", [NAME, "torchvision:resnet18"])
def test_a_grey_image_gives_the_logits_of_its_copy_in_three_channels(tmp_path, name):
    """Sums of three products in another order: float64 and the tolerance of `assert_close` absorb it."""
    source, model = build(0, name=name).double().eval(), build(1, channels=1, name=name).double().eval()
    path = tmp_path / "weights.pth"
    torch.save(source.state_dict(), path)
    sentence = load_weights(model, str(path), name)
    assert sentence.endswith("; the first convolution is summed over 3 channels")
    grey = torch.randn(2, 1, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(grey), source(grey.expand(-1, 3, -1, -1)))


@pytest.mark.parametrize("channels", [2, 5])
def test_other_channels_get_the_filters_of_rgb_in_turn(tmp_path, channels):
    """As timm does: an image whose channels repeat red, green and blue has responses of the same size."""
    source, model = build(0), build(1, channels=channels)
    path = tmp_path / "weights.pth"
    torch.save(source.state_dict(), path)
    sentence = load_weights(model, str(path), NAME)
    assert sentence.endswith(f"; the filters of RGB in the first convolution are repeated for {channels} channels")
    (first, *_), (given, *_) = (
        [each.weight for each in net.modules() if isinstance(each, nn.Conv2d)] for net in (model, source)
    )
    expected = given[:, [number % 3 for number in range(channels)]] * 3 / channels
    torch.testing.assert_close(first, expected)


def test_files_of_half_precision_and_without_counters_are_taken(tmp_path):
    """torchvision's first files have no `num_batches_tracked`."""
    source, model = build(0).half(), build(1)
    path = tmp_path / "weights.safetensors"
    save_file({key: t.contiguous() for key, t in state(source).items()}, path)
    load_weights(model, str(path), NAME)
    assert equal_keys(model, state(source.float())) == set(state(source))
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_the_encoder_of_a_file_of_ijepa_is_taken(tmp_path):
    source, model = build(0), build(1)
    encoder = {f"module.{key}": t for key, t in state(source).items() if not key.startswith("classifier.")}
    path = tmp_path / "IN1K-vit.h.14-300e.pth.tar"
    torch.save({"encoder": encoder, "predictor": {"x": torch.zeros(1)}, "epoch": 300}, path)
    assert load_weights(model, str(path), NAME).endswith("; the file has no classifier, which starts fresh")
    assert equal_keys(model, state(source)) >= {key.removeprefix("module.") for key in encoder}


@pytest.mark.parametrize("prefix", ["", "visual.trunk."])
def test_filters_of_another_patch_size_are_refused_and_resampled_positions_are_named(tmp_path, prefix):
    """timm's rule would resample both without a word; it also renames the tensors of OpenCLIP's files."""
    torch.manual_seed(0)
    path = tmp_path / "weights.pth"

    def save_vit(patch_size: int, img_size: int) -> None:
        vit = timm.create_model("test_vit", num_classes=5, patch_size=patch_size, img_size=img_size)
        torch.save({prefix + key: t for key, t in vit.state_dict().items()}, path)

    model = timm.create_model("test_vit", num_classes=5, patch_size=16, img_size=64)
    save_vit(8, 32)
    message = error_of(model, path, "timm:test_vit")
    assert message == (
        "'patch_embed.proj.weight' has filters of 8x8 pixels instead of 16x16 (is it for another model than "
        "timm:test_vit?)"
    )
    save_vit(16, 96)
    sentence = load_weights(model, str(path), "timm:test_vit")
    assert sentence.partition("; ")[2] == "resampled to the image size: pos_embed"


@pytest.mark.parametrize("auxiliary", ["aux1.fc1.weight", "AuxLogits.fc.bias"])
def test_the_auxiliary_outputs_of_torchvisions_files_are_left_out(tmp_path, auxiliary):
    model = nn.Sequential(nn.Linear(2, 2))
    path = tmp_path / "weights.pth"
    torch.save({**model.state_dict(), auxiliary: torch.zeros(3)}, path)
    assert load_weights(model, str(path), "torchvision:googlenet") == "loaded 2 of 2 tensors"


def test_another_network_is_refused_by_its_first_missing_tensor(tmp_path):
    path = tmp_path / "weights.pth"
    tensors = build(0).state_dict()
    torch.save({key: t for key, t in tensors.items() if key != "stem.0.weight"}, path)
    assert error_of(build(1), path) == f"has no 'stem.0.weight' (is it for another model than {NAME}?)"


def test_a_tensor_too_many_is_refused(tmp_path):
    path = tmp_path / "weights.pth"
    torch.save({**build(0).state_dict(), "stages.0.9.weight": torch.zeros(1)}, path)
    expected = f"has 'stages.0.9.weight', which the model lacks (is it for another model than {NAME}?)"
    assert error_of(build(1), path) == expected


@pytest.mark.parametrize(
    ("key", "tensor", "sizes"),
    [
        ("stem.0.weight", torch.zeros(8, 2, 3, 3), "8x2x3x3 instead of 8x3x3x3"),
        ("stem.1.bias", torch.tensor(1.0), "a single number instead of 8"),
        ("classifier.weight", torch.zeros(5, 3), "5x3 instead of 5x64"),
    ],
)
def test_another_shape_is_refused(tmp_path, key, tensor, sizes):
    path = tmp_path / "weights.pth"
    torch.save({**build(0).state_dict(), key: tensor}, path)
    assert error_of(build(1), path) == f"{key!r} is {sizes} (is it for another model than {NAME}?)"


def test_missing_unknown_and_broken_files_are_refused(tmp_path):
    model = build(1)
    assert error_of(model, tmp_path / "none.pth") == (
        "no such file (give a .safetensors, a .pth or a run directory, or default for the library's own weights)"
    )
    foreign = tmp_path / "weights.onnx"
    foreign.write_bytes(b"x")
    assert error_of(model, foreign) == (
        "is not a file of weights by its name (rename it to one of .safetensors, .pth, .pt, .pth.tar, .bin)"
    )
    for suffix in (".safetensors", ".pth", ".pt"):
        for content in (b"", b"\x80garbage", b"x" * 100):
            broken = tmp_path / f"broken{suffix}"
            broken.write_bytes(content)
            assert error_of(model, broken).startswith("cannot be read as weights, ")


@pytest.mark.parametrize("content", [{}, [torch.zeros(1)], {"epoch": 3}, {"state_dict": {"a": 1}}, torch.zeros(2)])
def test_a_file_without_a_state_dict_is_refused(tmp_path, content):
    path = tmp_path / "weights.pth"
    torch.save(content, path)
    assert error_of(build(1), path) == "holds no state dict (give a file of tensors by name)"


class Hostile:
    """What runs a command when it is unpickled."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple:
        return Path.touch, (self.victim,)


def test_a_pickle_that_would_run_code_is_refused_and_does_not(tmp_path):
    path, victim = tmp_path / "weights.pth", tmp_path / "ran"
    torch.save({"state_dict": Hostile(victim)}, path)
    assert error_of(build(1), path).startswith("cannot be read as weights, UnpicklingError (give a .safetensors")
    assert not victim.exists()
    with zipfile.ZipFile(path) as archive:
        inside = next(name for name in archive.namelist() if name.endswith("data.pkl"))
        pickle.load(io.BytesIO(archive.read(inside)))
    assert victim.exists(), "the file would have run its code in a plain unpickler"
