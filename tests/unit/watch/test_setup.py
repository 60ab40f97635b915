"""What a watched process records of its setup: settings by name, and no secrets."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import paceline.watch
from paceline.watch.setup import SetupRecorder, digest_functions, group_arguments, is_whole

INJECT = Path(paceline.watch.__file__).parent / "inject"
SCRIPT = Path(__file__).parent / "scripts" / "plain.py"


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """Return the setup record of the plain script."""
    folder = tmp_path_factory.mktemp("setup")
    records, script = folder / "records", folder / "code" / "plain.py"
    for each in (records, script.parent / ".git"):
        each.mkdir(parents=True)
    script.write_text("import beside\n" + SCRIPT.read_text())
    (script.parent / "beside.py").write_text("")
    (script.parent / ".git" / "HEAD").write_text("0123456789abcdef\n")
    environ = {
        "PYTHONPATH": f"{INJECT}:{INJECT.parents[2]}",
        "PACELINE_WATCH_DIR": str(records),
        "OMP_NUM_THREADS": "1",
        "WANDB_API_KEY": "hidden",
        "NCCL_DEBUG": "WARN",
        "TORCH_TOKEN": "hidden",
        "CUDA_VISIBLE_DEVICES": "",
        "MALLOC_LONG": "x" * 900,
    }
    words = ["0", "--api-key", "hidden", "--lr=0.1", "--amp"]
    command = [sys.executable, str(script), *words]
    subprocess.run(command, cwd=script.parent, env=os.environ | environ, capture_output=True, check=True, timeout=120)
    lines = [json.loads(line) for path in records.glob("*.jsonl") for line in path.read_text().splitlines()]
    (record,) = [line for line in lines if line["kind"] == "setup"]
    return record["values"]


def test_settings_of_the_script_are_recorded(setup):
    assert setup["loader.batch_size"] == "8"
    assert setup["loader.num_workers"] == "0"
    assert setup["loader.sampler"] == "RandomSampler"
    assert setup["optimizer.class"] == "SGD"
    assert (setup["optimizer.lr"], setup["optimizer.momentum"]) == ("0.01", "0.9")
    assert setup["model.parameters"] == "31850"
    assert setup["input.shape"] == "3x16x16"
    assert setup["micro_batches"] == "2"
    assert setup["torch.seed"] == "0"
    assert setup["threads"] == setup["env.OMP_NUM_THREADS"] == "1"
    assert setup["version.torch"]
    assert len(setup["code.plain.py:main"]) == 8
    assert setup["code.commit"] == "0123456789ab"
    assert {name for name in setup if name.startswith("code.") and ":" not in name} == {"code.commit", "code.beside.py"}
    assert len(setup["env.MALLOC_LONG"]) == 900
    assert "env.CUDA_VISIBLE_DEVICES" not in setup
    assert (setup["argv.1"], setup["argv.--lr"], setup["argv.--amp"]) == ("0", "0.1", "given")


def test_secrets_are_not_recorded(setup):
    assert "hidden" not in json.dumps(setup)
    assert setup["env.NCCL_DEBUG"] == "WARN"
    assert setup["argv.--api-key"] == "***"


def test_digests_change_with_code_alone():
    source = "import a\ndef f():\n    return 1\nclass C:\n    x = 1\n    def g(self):\n        return 2\n"
    before = dict(digest_functions(source))
    assert set(before) == {"f", "C", "C.g", "module"}
    assert dict(digest_functions(source.replace("return 1", "return 1  # one"))) == before
    after = dict(digest_functions(source.replace("return 2", "return 3")))
    assert {name for name in before if before[name] != after[name]} == {"C.g"}


def test_arguments_are_grouped_by_name():
    words = ["python", "train.py", "data", "--lr", "-0.1", "--amp", "--x=1", "key=2"]
    assert group_arguments(words) == {
        "1": ["python"],
        "2": ["train.py"],
        "3": ["data"],
        "--lr": ["--lr", "-0.1"],
        "--amp": ["--amp"],
        "--x": ["--x=1"],
        "key": ["key=2"],
    }
    assert [word for each in group_arguments(words).values() for word in each] == words


def test_a_part_that_cannot_be_read_leaves_the_others():
    torch = SimpleNamespace(__version__="2.6.0")
    values = SetupRecorder().describe(torch, {"OMP_NUM_THREADS": "3"}, [object()], [object()], micro_batches=1)
    assert values["env.OMP_NUM_THREADS"] == "3"
    assert "version.python" in values


def describe(environ=None, loaders=(), optimizer=None):
    recorder = SetupRecorder()
    recorder.see_optimizer(optimizer)
    return recorder.describe(SimpleNamespace(), environ or {}, loaders, [], micro_batches=1)


def test_a_change_at_the_end_of_a_long_text_is_seen():
    values = [describe({"MALLOC_X": "x" * 2000 + end})["env.MALLOC_X"] for end in "ab"]
    assert values[0] != values[1]
    assert [len(each) for each in values] == [1000, 1000]
    assert not any(map(is_whole, values))
    assert is_whole(describe({"MALLOC_X": "x" * 999})["env.MALLOC_X"])


class Unreadable:
    def __repr__(self):
        raise AssertionError("code of the script")

    __str__ = __repr__


def test_a_learning_rate_in_a_tensor_is_not_read():
    group = {"lr": Unreadable(), "betas": (0.9, Unreadable()), "eps": 1e-8, "params": []}
    values = describe(optimizer=SimpleNamespace(param_groups=[group]))
    assert {name for name in values if name.startswith("optimizer.")} == {
        "optimizer.class",
        "optimizer.groups",
        "optimizer.eps",
    }


def test_a_transform_of_the_script_is_named_but_not_printed():
    transforms = pytest.importorskip("torchvision.transforms")
    for members, text in (
        ([transforms.CenterCrop(8), Unreadable()], "Compose(CenterCrop, Unreadable)"),
        ([transforms.CenterCrop(8)], "Compose( CenterCrop(size=(8, 8)) )"),
    ):
        dataset = SimpleNamespace(transform=transforms.Compose(members))
        loader = SimpleNamespace(dataset=dataset, sampler=None, collate_fn=None)
        assert describe(loaders=[loader])["loader.transform"] == text
