"""On the meta device, functions give what a GPU gives: dtypes under autocast, and what is kept for backward."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from paceline.models.meta_gpu import MetaGpu


def meta(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


@pytest.fixture
def saved() -> list[Tensor]:
    return []


def run(function, *args: Tensor, saved: list[Tensor] | None = None, autocast: torch.dtype | None = torch.bfloat16):
    def pack(tensor: Tensor) -> Tensor:
        if saved is not None:
            saved.append(tensor.detach())
        return tensor

    gpu = MetaGpu()
    with gpu, gpu.autocast(autocast), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return function(*args)


# Of https://docs.pytorch.org/docs/stable/amp.html: float32, 16 bits, and the type of the arguments.
@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: functional.linear(x, meta(4, 8)), torch.bfloat16),
        (lambda x: x @ meta(8, 4), torch.bfloat16),
        (lambda x: x.bfloat16().sum(), torch.float32),
        (lambda x: x.bfloat16().softmax(-1), torch.float32),
        (lambda x: torch.sum(input=x.bfloat16()), torch.float32),
        (lambda x: torch.softmax(input=x.bfloat16(), dim=-1), torch.float32),
        (lambda x: functional.dropout(input=x.bfloat16(), p=0.5), torch.bfloat16),
        (lambda x: functional.mse_loss(x.bfloat16(), x.bfloat16()), torch.float32),
        (lambda x: x.bfloat16().log1p(), torch.float32),
        (lambda x: 2 ** x.bfloat16(), torch.float32),
        (lambda x: functional.layer_norm(x.bfloat16(), (8,)), torch.float32),
        (lambda x: functional.gelu(x.bfloat16()), torch.bfloat16),
        (lambda x: functional.relu(x), torch.float32),
    ],
    ids=[
        *("linear", "matmul", "sum", "softmax", "sum by name", "softmax by name", "dropout by name", "mse_loss"),
        *("log1p", "rpow", "layer_norm", "gelu", "relu"),
    ],
)
def test_autocast_gives_each_function_its_type(function, dtype: torch.dtype) -> None:
    assert run(function, meta(2, 8)).dtype == dtype


def test_one_hot_needs_the_number_of_classes() -> None:
    classes = meta(4, dtype=torch.int64)

    assert run(lambda x: functional.one_hot(input=x, num_classes=5), classes).shape == (4, 5)
    with pytest.raises(NotImplementedError, match="num_classes"):
        run(functional.one_hot, classes)


def test_without_autocast_nothing_is_cast() -> None:
    assert run(lambda x: x @ meta(8, 4), meta(2, 8), autocast=None).dtype == torch.float32


def test_a_weight_is_cast_once_for_all_its_uses(saved: list[Tensor]) -> None:
    layer = nn.Linear(8, 8, bias=False, device="meta")

    run(lambda x: layer(layer(layer(x))), meta(2, 8, grad=True), saved=saved)

    weights = {each.untyped_storage()._cdata for each in saved if each.shape == (8, 8)}
    assert len(weights) == 1


def test_dropout_keeps_a_byte_for_each_number(saved: list[Tensor]) -> None:
    run(lambda x: functional.dropout(x, 0.5), meta(16, 8, grad=True), saved=saved)

    assert [each.dtype for each in saved] == [torch.bool]


def test_attention_keeps_no_weights_of_all_pairs(saved: list[Tensor]) -> None:
    layer = nn.MultiheadAttention(64, 2, batch_first=True, device="meta")

    def attend(x: Tensor) -> Tensor:
        return layer(x, x, x, need_weights=False)[0]

    out = run(attend, meta(2, 100, 64, grad=True), saved=saved)

    assert out.dtype == torch.bfloat16
    assert saved and all(each.numel() < 2 * 2 * 100 * 100 for each in saved)


def test_a_checkpointed_block_is_repeated_under_autocast() -> None:
    types: list[torch.dtype] = []

    def block(x: Tensor) -> Tensor:
        out = functional.linear(x.sin(), meta(8, 8))
        types.append(out.dtype)
        return out.relu()

    gpu = MetaGpu()
    with gpu:
        with gpu.autocast(torch.bfloat16):
            out = checkpoint(block, meta(2, 8, grad=True), use_reentrant=False)
        with gpu.repeating(torch.bfloat16):
            out.float().sum().backward()

    assert types == [torch.bfloat16, torch.bfloat16]
