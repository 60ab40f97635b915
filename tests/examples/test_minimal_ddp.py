"""`minimal_ddp.py`, in plain PyTorch, and `paceline train` train the same weights from the same batches."""

import os
import socket
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DistributedSampler

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal_ddp.py"
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
# One of gloo's threads freed a tensor while the interpreter ended: https://github.com/pytorch/pytorch/issues/190489
ABORTED = "terminate called without an active exception"
IN_ORDER = """
import numpy as np
from sklearn.datasets import load_digits


def in_order(split, order):
    \"\"\"Return the example's images as 0 to 16, one epoch after the other, each step's rank by rank.\"\"\"
    digits = load_digits()
    taken = np.load(order)
    return digits.images[taken].astype(np.uint8), digits.target[taken], [str(digit) for digit in range(10)]
"""


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    import minimal_ddp

    yield minimal_ddp
    del sys.modules["minimal_ddp"]


def torchrun_environs(ranks: int) -> list[dict[str, str]]:
    """Return the environment that torchrun sets for each of its ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    every = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**every, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def order_of(example, world_size: int) -> torch.Tensor:
    """Return the images that the example uses: [epochs * steps * ranks * images per rank]."""
    epochs = []
    for epoch in range(example.EPOCHS):
        ranks = []
        for rank in range(world_size):
            train = range(1797 - example.NUM_TEST)
            sampler = DistributedSampler(train, world_size, rank, seed=0, drop_last=True)
            sampler.set_epoch(epoch)
            taken = torch.tensor(list(sampler))
            ranks.append(taken[: len(taken) // example.RANK_BATCH * example.RANK_BATCH].view(-1, example.RANK_BATCH))
        epochs.append(torch.stack(ranks, dim=1).flatten())
    return torch.cat(epochs)


def test_the_example_is_short_and_does_not_import_paceline() -> None:
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) <= 80
    assert "paceline" not in text


@pytest.mark.parametrize("ranks", [1, 2])
def test_plain_pytorch_and_paceline_train_the_same_weights(
    example, forking, paceline, tmp_path: Path, ranks: int
) -> None:
    for _ in range(2):
        environs = [{}] if ranks == 1 else torchrun_environs(ranks)
        started = [forking.start([str(EXAMPLE)], tmp_path, {**os.environ, **NO_GPU, **each}) for each in environs]
        output = [process.communicate() for process in started]
        if not any(ABORTED in err for _, err in output):
            break
    assert [process.returncode for process in started] == [0] * ranks, output
    lines = output[0][0].splitlines()
    assert len(lines) == example.EPOCHS and lines[-1].startswith(f"epoch {example.EPOCHS}/{example.EPOCHS}: ")
    assert float(lines[-1].rpartition(" ")[2].removesuffix("%")) > 80
    plain = torch.load(tmp_path / "minimal_ddp.pt", weights_only=True)

    np.save(tmp_path / "order.npy", order_of(example, ranks).numpy())
    (tmp_path / "in_order_source.py").write_text(IN_ORDER)
    path = os.pathsep.join([str(tmp_path), str(EXAMPLE.parent), os.environ.get("PYTHONPATH", "")])
    result = paceline(
        *("train", "synthetic", "data.source.name=in_order_source:in_order", "data.source.args.order=order.npy"),
        *("data.order=stored", f"data.rank_batch_size={example.RANK_BATCH}", "data.augment=[]", "data.mean=[0]"),
        *(f"data.std=[{16 / 255!r}]", "data.image_size=8", "model.name=minimal_ddp:Net"),
        *("model.memory_format=contiguous", "optim.name=sgd", f"optim.lr={example.LR}", "optim.weight_decay=0"),
        *(f"optim.momentum={example.MOMENTUM}", "optim.nesterov=false", "optim.implementation=loop"),
        *("schedule={name: constant, warmup: 0ep}", "train={epochs: 1, eval_every: 'off'}", "train.precision=fp32"),
        *("parallel.threads=1", "log.report=off", "--run-dir", "run", "--ranks", str(ranks), "--json"),
        PYTHONPATH=path,
        **NO_GPU,
    ).result
    assert result["steps"] == example.EPOCHS * ((1797 - example.NUM_TEST) // ranks // example.RANK_BATCH)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    ours = load_file(checkpoint / "model.safetensors")
    assert ours.keys() == plain.keys()
    for name, weights in plain.items():
        assert torch.equal(ours[name], weights), name
