"""After an evaluation every module has its mode back, through the model's own `train()`."""

import pytest
from torch import nn

from paceline.models.freeze import eval_mode, find_modules_set_to_train, record_modes


class Frozen(nn.Sequential):
    """A network whose own `train()` keeps its first layer still, and that counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d(2), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.1)))
        self.asked: list[bool] = []

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self[0].eval()
        self.asked.append(mode)
        return self


def test_the_models_own_train_is_called_after_an_evaluation() -> None:
    model = Frozen().train()
    before = record_modes(model)
    with eval_mode(model):
        assert not any(record_modes(model).values())
    assert record_modes(model) == before == {"": True, "0": False, "1": True, "2": True, "2.0": True}
    assert model.asked == [True, False, True]


@pytest.mark.parametrize("still", [("1",), ("2",), ("2.0",), ("", "0", "1", "2", "2.0"), ("0", "2.0"), ("",)])
def test_the_mode_of_every_module_is_restored(still: tuple[str, ...]) -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.1)))
    for name, module in model.named_modules():
        module.training = name not in still
    with eval_mode(model):
        assert not any(record_modes(model).values())
    assert {name for name, training in record_modes(model).items() if not training} == set(still)


def test_a_failed_evaluation_restores_the_modes_too() -> None:
    model = Frozen().train()
    before = record_modes(model)
    with pytest.raises(ZeroDivisionError), eval_mode(model):
        raise ZeroDivisionError
    assert record_modes(model) == before


def test_modules_set_to_training_mode_are_listed() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Dropout(0.5))
    model[0].eval()
    before = record_modes(model)
    assert find_modules_set_to_train(before, model) == []
    assert find_modules_set_to_train(before, model.train()) == ["0"]
