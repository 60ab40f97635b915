"""Scripts that are patched from outside: what torch then does, and why a patch found no place."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.lab.script_ladder_file import ScriptPatch
from paceline.watch.measured_run import run_measured

SCRIPT = Path(__file__).parent / "scripts" / "patched.py"
FLOAT16 = SCRIPT.with_name("float16.py")
PATCHES = {
    "workers": 2,
    "persistent_workers": True,
    "prefetch_factor": 3,
    "channels_last": True,
    "autocast": "bfloat16",
    "fused_optimizer": True,
    "ddp_bucket_mb": 7,
    "gradient_as_bucket_view": True,
    "static_graph": True,
    "threads": 2,
}


def measure(folder: Path, kind: str, patches: dict, *args: str, script: Path = SCRIPT, steps: int = 8):
    command = [sys.executable, str(script), kind, *args]
    # One thread compiles in this process; more are another program, which imports torch.
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    # The script takes so many steps: it ends by itself.
    run = run_measured(command, environ, folder, warmup=0, steps=steps, timeout_s=120, patches=patches)
    assert not run.failure, (folder / "output.log").read_text()
    return run, json.loads((folder / "output.log").read_text().splitlines()[-1])


def test_patches_reach_loaders_ddp_optimizer_and_model(tmp_path):
    run, facts = measure(tmp_path, "all", PATCHES)
    assert run.unapplied == {}
    assert facts == {
        "workers": 2, "persistent": True, "prefetch": 3, "fused": True, "bucket_mb": 7, "view": True, "static": True,
        "layout": True, "output": "torch.float32", "threads": 2, "pinned": False, "foreach": None, "compiled": False,
        "dtypes": ["torch.bfloat16", "torch.float32"],  # autocast begins with the second step
    }  # fmt: skip


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory):
    """Return a run whose patches change nothing, and its facts."""
    patches = {"workers": 0, "persistent_workers": True, "cudnn_benchmark": True}
    return measure(tmp_path_factory.mktemp("unchanged"), "all", patches)


def test_a_patched_script_trains_the_same(unchanged, tmp_path):
    same = {name: value for name, value in PATCHES.items() if name not in ("autocast", "threads")}
    plain, facts = unchanged
    patched, _ = measure(tmp_path, "all", same)
    assert (facts["workers"], facts["persistent"], facts["fused"], facts["layout"]) == (0, False, None, False)
    assert list(plain.losses) == list(range(1, 9))
    assert patched.losses == pytest.approx(plain.losses, rel=1e-5)


def test_patches_without_a_place_say_so(tmp_path):
    others = {name: value for name, value in PATCHES.items() if name not in ("channels_last", "autocast", "threads")}
    others["native_jpegs"] = True
    run, _ = measure(tmp_path, "none", others)
    assert set(run.unapplied) == set(others)
    assert run.unapplied["workers"] == "no DataLoader was created"
    assert run.unapplied["static_graph"] == "no DistributedDataParallel was created"
    assert "no optimizer" in run.unapplied["fused_optimizer"]
    assert "no JPEG" in run.unapplied["native_jpegs"]


def test_patches_that_change_nothing_say_so(unchanged):
    run, _ = unchanged
    assert run.unapplied == {
        "workers": "the script has num_workers=0 already",
        "persistent_workers": "the DataLoader has no workers",
        "cudnn_benchmark": "the script trains without a GPU",
    }


@pytest.mark.parametrize("first", ["torch", "pillow"])
def test_jpegs_are_decoded_natively_in_worker_processes(tmp_path, forking, first):
    file = tmp_path / "image.jpg"
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8))
    image.save(file, quality=95)
    out, err = forking.start([str(SCRIPT), "jpegs", str(file), first], tmp_path, {}).communicate()
    assert json.loads(out) == {"kinds": ["Image"]}, err
    run, facts = measure(tmp_path / "patched", "jpegs", {"native_jpegs": True}, str(file), first)
    assert (facts, run.unapplied) == ({"kinds": ["_UndecodedImage"]}, {})


def test_other_patches_reach_their_place(tmp_path):
    """Without them a script has none of this, as the facts of the other patches say."""
    run, facts = measure(tmp_path, "all", {"pin_memory": True, "foreach_optimizer": True, "compile": True})
    assert run.unapplied == {}
    assert (facts["pinned"], facts["foreach"], facts["compiled"]) == (True, True, True)


def test_float16_trains_like_a_script_with_a_gradient_scaler(tmp_path):
    _, plain = measure(tmp_path / "plain", "plain", {}, script=FLOAT16)
    own, scaled = measure(tmp_path / "scaled", "scaled", {}, script=FLOAT16, steps=7)
    run, patched = measure(tmp_path / "patched", "plain", {"autocast": "float16"}, script=FLOAT16)
    assert run.unapplied == {}
    assert (plain["num_changed"], scaled["num_changed"]) == (8, 7)  # the step that overflows is left out
    assert patched == scaled and patched["weights"] != plain["weights"]
    assert run.losses[2] == pytest.approx(own.losses[2] / 2**16)  # the script's own scaler scales the loss itself
    refused, _ = measure(tmp_path / "both", "scaled", {"autocast": "float16"}, script=FLOAT16, steps=7)
    assert refused.unapplied == {"autocast": "the script scales its losses already"}


def test_every_patch_of_a_ladder_is_known_here():
    tested = {*PATCHES, "cudnn_benchmark", "pin_memory", "compile", "foreach_optimizer", "native_jpegs"}
    assert set(ScriptPatch.model_fields) == tested
