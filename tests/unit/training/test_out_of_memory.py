"""Running out of memory is one line with the setting to use."""

import re
from pathlib import Path

import pytest
import torch

from paceline.core.errors import RecipeError
from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.recipe.load import Patch, load
from paceline.training.evaluator import ModelEvaluator
from paceline.training.out_of_memory import is_out_of_memory, suggest_accumulation
from paceline.training.process import Invocation
from paceline.training.run import run
from paceline.training.trainer import EagerStep

ON_CPU = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 2000000000 bytes. Error code 12"


@pytest.mark.parametrize(
    ("now", "overload", "expected"), [(1, 1.0, 2), (1, 2.5, 3), (2, 1.2, 4), (4, 9.0, 12), (12, 1.0, None)]
)
def test_the_next_number_of_micro_batches_that_may_fit_is_suggested(now: int, overload: float, expected) -> None:
    assert suggest_accumulation([1, 2, 3, 4, 6, 12], now, overload) == expected


def test_errors_of_all_allocators_are_known_and_others_are_not() -> None:
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def fail(monkeypatch, owner: type, error: Exception) -> None:
    def failing(self, *args):
        raise error

    monkeypatch.setattr(owner, "__call__", failing)


def train(folder: Path) -> None:
    words = ["train.epochs=1", "data.batch_size=128", "parallel.device=cpu", "model.width=0.1", "parallel.threads=1"]
    words += ["log.report=off", "log.tensorboard=off"]
    run(load("digits", Patch.parse(words)).recipe, World.single(), RunDir(folder), invocation=Invocation())


@pytest.mark.parametrize("error", [RuntimeError(ON_CPU), MemoryError()])
def test_a_step_names_the_rank_the_micro_batch_and_the_setting(tmp_path: Path, monkeypatch, error) -> None:
    fail(monkeypatch, EagerStep, error)
    with pytest.raises(RecipeError) as caught:
        train(tmp_path / "run")
    message = str(caught.value)
    assert message.startswith("train.accumulate: 1: rank 0 ran out of host memory") and "\n" not in message
    assert "in step 1" in message and "128 images" in message
    assert "(set train.accumulate=auto, or at least 2; " in message
    assert ("2 GB" in message) == isinstance(error, RuntimeError)


def test_an_evaluation_names_its_batch(tmp_path: Path, monkeypatch) -> None:
    fail(monkeypatch, ModelEvaluator, RuntimeError(ON_CPU))
    with pytest.raises(
        RecipeError, match=r"^data\.eval_batch_size: 256: rank 0 ran out of host memory .*2 GB"
    ) as caught:
        train(tmp_path / "run")
    assert "model.width" not in str(caught.value), "it is no setting of every model, and may not change on resume"


def test_another_error_keeps_its_traceback(tmp_path: Path, monkeypatch) -> None:
    fail(monkeypatch, EagerStep, RuntimeError("a bug"))
    with pytest.raises(RuntimeError, match=re.escape("a bug")):
        train(tmp_path / "run")
