"""The command of a script with changed arguments, and how the changes are written down."""

import shlex

import pytest

from paceline.lab.script_ladder_file import ScriptRung
from paceline.lab.script_settings import ScriptSettings, set_argument


@pytest.mark.parametrize(
    ("command", "name", "value", "changed"),
    [
        ("python train.py --lr 0.1 --epochs 9", "--lr", 0.5, "python train.py --lr 0.5 --epochs 9"),
        ("python train.py --lr=0.1 --epochs 9", "--lr", 0.5, "python train.py --lr=0.5 --epochs 9"),
        ("python train.py --lr -1 --epochs 9", "--lr", 2, "python train.py --lr 2 --epochs 9"),
        ("python train.py data", "--workers", 4, "python train.py data --workers 4"),
        ("python train.py --lr 1 --lr 2", "--lr", 3, "python train.py --lr 3"),
        ("python train.py --lr-end 1", "--lr", 3, "python train.py --lr-end 1 --lr 3"),
        ("python train.py --amp data", "--amp", True, "python train.py --amp data"),
        ("python train.py data", "--amp", True, "python train.py data --amp"),
        ("python train.py --amp data", "--amp", False, "python train.py data"),
        ("python train.py --lr 0.1 data", "--lr", None, "python train.py data"),
        ("python train.py --lr=0.1 data", "--lr", None, "python train.py data"),
        ("python train.py model=resnet lr=1", "lr", 2, "python train.py model=resnet lr=2"),
        ("python train.py", "amp", False, "python train.py amp=false"),
        ("python train.py lr=1", "lr", None, "python train.py"),
        # Options of the launcher are not the script's.
        ("torchrun --nproc-per-node 2 train.py", "--nproc-per-node", 4, None),
        ("python -m torch.distributed.run --lr 3 train.py --lr 1", "--lr", 2, None),
        ("python -m my.train --config a.py", "--config", "b.py", "python -m my.train --config b.py"),
    ],
)
def test_an_argument_takes_the_place_of_the_same_one(command, name, value, changed):
    expected = (
        changed
        or {
            "--nproc-per-node": "torchrun --nproc-per-node 2 train.py --nproc-per-node 4",
            "--lr": "python -m torch.distributed.run --lr 3 train.py --lr 2",
        }[name]
    )
    assert shlex.join(set_argument(shlex.split(command), name, value)) == expected


def test_settings_add_up_and_can_be_pasted():
    settings = ScriptSettings(("python", "train.py", "--name", "a b"))
    settings = settings.add(ScriptRung(name="one", env={"OMP_NUM_THREADS": 4, "DEBUG": None}, patch={"workers": 2}))
    settings = settings.add(ScriptRung(name="decoder", patch={"native_jpegs": True}))
    settings = settings.add(
        ScriptRung(
            name="two",
            args={"--lr": 0.5},
            patch={"persistent_workers": True, "ddp_bucket_mb": 50, "fused_optimizer": True, "autocast": "bfloat16"},
        )
    )
    assert settings.command_line() == "env -u DEBUG OMP_NUM_THREADS=4 python train.py --name 'a b' --lr 0.5"
    assert settings.apply_environ({"DEBUG": "1", "HOME": "/root"}) == {"HOME": "/root", "OMP_NUM_THREADS": "4"}
    assert settings.code_lines("cpu") == (
        "DataLoader(..., num_workers=2, persistent_workers=True)",
        "DistributedDataParallel(model, ..., bucket_cap_mb=50.0)",
        "the optimizer(..., fused=True)",
        "import paceline.interop; paceline.interop.patch_pillow()  # at the start",
        'with torch.autocast("cpu", torch.bfloat16):  # around the model and its loss',
    )


@pytest.mark.parametrize(
    ("framework", "lines"),
    [
        (
            "lightning",
            (
                "DataLoader(..., num_workers=2)",
                "DDPStrategy(..., bucket_cap_mb=50.0)",
                "Trainer(..., precision='bf16-mixed')",
                "module = torch.compile(module)",
            ),
        ),
        (
            "accelerate",
            (
                "DataLoader(..., num_workers=2)",
                "Accelerator(..., kwargs_handlers=[DistributedDataParallelKwargs(bucket_cap_mb=50.0)])",
                "Accelerator(..., mixed_precision='bf16', dynamo_backend='inductor')",
            ),
        ),
        (
            "transformers",
            (
                "TrainingArguments(..., dataloader_num_workers=2, ddp_bucket_cap_mb=50.0, bf16=True, "
                "torch_compile=True)",
            ),
        ),
    ],
)
def test_code_is_in_the_words_of_the_framework(framework, lines):
    patches = {"compile": True, "autocast": "bfloat16", "workers": 2, "ddp_bucket_mb": 50.0}
    assert ScriptSettings(("python", "train.py"), patches=patches).code_lines("cuda", framework) == lines


@pytest.mark.parametrize(
    ("framework", "lines"),
    [
        (
            "",
            (
                'with torch.autocast("cuda", torch.float16):  # around the model and its loss',
                'scaler = torch.amp.GradScaler("cuda")  # scale(loss).backward(), step(optimizer), update()',
            ),
        ),
        ("lightning", ("Trainer(..., precision='16-mixed')",)),
        ("accelerate", ("Accelerator(..., mixed_precision='fp16')",)),
        ("transformers", ("TrainingArguments(..., fp16=True)",)),
    ],
)
def test_float16_needs_scaled_gradients_which_frameworks_bring(framework, lines):
    settings = ScriptSettings(("python", "train.py"), patches={"autocast": "float16"})
    assert settings.code_lines("cuda", framework) == lines


def test_settings_become_options_of_timms_script_if_it_has_them():
    patches = {"workers": 2, "channels_last": True, "autocast": "bfloat16", "compile": True, "persistent_workers": True}
    settings = ScriptSettings(("python", "train.py", "--workers", "1", "--amp-dtype=float16"), patches=patches)
    changed = settings.with_timm_options(lambda option: option != "--torchcompile")
    assert changed.command_line() == "python train.py --workers 2 --amp-dtype=bfloat16 --channels-last --amp"
    assert changed.patches == {"compile": True, "persistent_workers": True}
