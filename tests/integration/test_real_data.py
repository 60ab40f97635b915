"""Training on real images, if they are present."""

import pytest

pytestmark = pytest.mark.real_data
QUIET = ("log.tensorboard=off", "log.report=off", "log.worst=0", "measure.telemetry=off")


def test_imagenet_photographs_train_on_two_ranks(paceline, real_data) -> None:
    photographs = real_data("imagenet-sample") / "train"
    roots = (f"data.source.train_root={photographs}", f"data.source.val_root={photographs}")
    args = ("folder", *roots, "data.batch_size=8", "data.image_size=64", "train.steps=4", *QUIET)
    result = paceline("train", *args, "--ranks", "2", "--run-dir", "run", "--json").result
    assert (result["status"], result["steps"], result["images_seen"]) == ("completed", 4, 32)
    assert result["eval"]["images"] == 500
    assert result["lr"] == "0.1 at batch 256 -> 0.003125 at batch 8 (linear scaling), 5 epochs of warm-up"


def test_the_course_recipe_trains_on_fashion_mnist(paceline, real_data) -> None:
    root = f"data.source.root={real_data('fashion-mnist')}"
    args = ("course/wideresnet-fashion", "model.width=0.05", root, "train.steps=6", *QUIET)
    result = paceline("train", *args, "--ranks", "2", "--run-dir", "run", "--json").result
    assert result["eval"]["images"] == 10_000 and result["images_seen"] == 6 * 2 * 32
