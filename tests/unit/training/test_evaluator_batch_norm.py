"""Running statistics against the batches' own, on the same images: measured right, and nothing left changed."""

import numpy as np
import pytest
import torch
from torch import nn

from paceline.data.batch import Batch
from paceline.data.transfer import DeviceTransfer
from paceline.models.freeze import use_batch_statistics
from paceline.parallel.strategy import SingleDevice
from paceline.training.evaluator import BatchNormChecker
from paceline.training.precision import build_precision

CPU = torch.device("cpu")


class Listed:
    """Images class by class, as a folder lists them: dark ones of class 0, bright ones of class 1."""

    def __init__(self, num_images: int = 256, batch: int = 64) -> None:
        self.labels = torch.arange(num_images) // (num_images // 2)
        self.images = (60 + 120 * self.labels)[:, None, None, None].expand(-1, 1, 4, 4).to(torch.uint8).contiguous()
        self.batch = batch

    def batches(self, first: int, stop: int):
        for start in range(first * self.batch, stop * self.batch, self.batch):
            chosen = slice(start, start + self.batch)
            labels = self.labels[chosen]
            yield Batch(self.images[chosen], labels, np.arange(len(labels)), torch.zeros(len(labels), 0))


def checker(source: Listed) -> BatchNormChecker:
    place = DeviceTransfer(CPU, torch.float32, (0.5,), (0.25,), torch.contiguous_format)
    num_batches = -(-len(source.labels) // source.batch)
    return BatchNormChecker(source, num_batches, place, build_precision("fp32", CPU), SingleDevice(), CPU)


def model(norm: nn.Module | None = None) -> nn.Sequential:
    """Return what tells dark from bright images by the sign of their normalized mean."""
    layers = [norm or nn.BatchNorm2d(1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1, 2)]
    with torch.no_grad():
        layers[-1].weight.copy_(torch.tensor([[-1.0], [1.0]]))
        layers[-1].bias.zero_()
    return nn.Sequential(*layers).train()


def test_outdated_statistics_are_detected_and_the_model_is_unchanged() -> None:
    lagging = model()
    lagging[0].running_mean.fill_(40.0)
    before = {name: tensor.clone() for name, tensor in lagging.state_dict().items()}
    check = checker(Listed())(lagging)
    assert check is not None and (check.images, check.running, check.batch) == (256, 128, 256)
    assert all(torch.equal(before[name], tensor) for name, tensor in lagging.state_dict().items())
    assert all(module.training for module in lagging.modules()) and lagging[0].track_running_stats


def test_statistics_that_fit_make_no_difference() -> None:
    check = checker(Listed())(model())
    assert check is not None and check.running == check.batch == check.images


@pytest.mark.parametrize("norm", [nn.GroupNorm(1, 1), nn.BatchNorm2d(1).eval()])
def test_a_model_that_trains_no_batch_norm_has_nothing_to_check(norm: nn.Module) -> None:
    other = model(norm)
    norm.train(isinstance(norm, nn.GroupNorm))
    assert checker(Listed())(other) is None


def test_one_image_has_no_statistics() -> None:
    source = Listed()
    source.images, source.labels = source.images[:1], source.labels[:1]
    assert checker(source)(model()) is None


def test_batch_statistics_end_with_an_error_too() -> None:
    trained = model()
    with pytest.raises(ZeroDivisionError), use_batch_statistics(trained) as has_norms:
        assert has_norms and trained[0].training and not trained[3].training
        _ = 1 / 0
    assert trained[0].training and trained[0].track_running_stats
