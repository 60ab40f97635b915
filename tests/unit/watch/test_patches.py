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


def measure(folder: Path, kind: str, patches: dict, *args: str):
    command = [sys.executable, str(SCRIPT), kind, *args]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    # The script takes 8 steps: it ends by itself.
    run = run_measured(command, environ, folder, warmup=0, steps=8, timeout_s=120, patches=patches)
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


def test_a_patched_script_trains_the_same(tmp_path):
    same = {name: value for name, value in PATCHES.items() if name not in ("autocast", "threads")}
    plain, facts = measure(tmp_path / "plain", "all", {})
    patched, _ = measure(tmp_path / "patched", "all", same)
    assert (facts["workers"], facts["fused"], facts["layout"]) == (0, None, False)
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


def test_patches_that_change_nothing_say_so(tmp_path):
    run, _ = measure(tmp_path, "all", {"workers": 0, "persistent_workers": True, "cudnn_benchmark": True})
    assert run.unapplied == {
        "workers": "the script has num_workers=0 already",
        "persistent_workers": "the DataLoader has no workers",
        "cudnn_benchmark": "the script trains without a GPU",
    }


@pytest.mark.parametrize("first", ["torch", "pillow"])
def test_jpegs_are_decoded_natively_in_worker_processes(tmp_path, first):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8))
    image.save(tmp_path / "image.jpg", quality=95)
    kinds = {}
    for patches in ({}, {"native_jpegs": True}):
        run, facts = measure(tmp_path / str(len(patches)), "jpegs", patches, str(tmp_path / "image.jpg"), first)
        kinds[len(patches)] = facts["kinds"], run.unapplied
    assert kinds == {0: (["Image"], {}), 1: (["_UndecodedImage"], {})}


def test_other_patches_reach_their_place(tmp_path):
    _, facts = measure(tmp_path / "1", "all", {"pin_memory": True, "foreach_optimizer": True})
    assert (facts["pinned"], facts["foreach"]) == (True, True)
    _, facts = measure(tmp_path / "2", "all", {"compile": True})
    assert (facts["pinned"], facts["foreach"], facts["compiled"]) == (False, None, True)


def test_every_patch_of_a_ladder_is_known_here():
    tested = {*PATCHES, "cudnn_benchmark", "pin_memory", "compile", "foreach_optimizer", "native_jpegs"}
    assert set(ScriptPatch.model_fields) == tested
