"""Train small recipes, uninterrupted and resumed, on one rank and on two: their bits must not change."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from jobs import Case, Job
from values import Record

SHORT = (
    *("train.epochs=auto", "train.steps=6", "train.eval_every=3st", "log.every=1st", "log.samples=true"),
    *("checkpoint.every=2st", "checkpoint.keep=9", "measure.warmup_steps=1", "measure.telemetry=off"),
    *("log.tensorboard=off", "log.report=off", "parallel.threads=1", "parallel.device=cpu"),
)
SYNTHETIC = (
    *("synthetic", "data.source.num_images=96", "data.source.num_val_images=21", "data.source.image_size=16"),
    *("data.batch_size=8", "model.width=0.1"),
)
PHOTOS = ("folder", "model.name=resnet18_cifar", "model.width=0.1", "data.image_size=24", "data.batch_size=8")
FOLDER = (*PHOTOS, "data.source.root=photos")
PACK = (*PHOTOS, "data.source={name: pack, root: photos.pack}")
LMDB = (*PHOTOS, "data.source={name: lmdb, root: photos.lmdb}")

RECIPES: dict[str, tuple[str, ...]] = {
    "digits": ("digits", "train.accuracy=on", "train.eval_train=on"),
    "resnet": (
        *(*SYNTHETIC, "data.augment=[pad_crop,{name: flip, mode: alternating},rotate]", "optim.nesterov=true"),
        *("schedule.name=cosine", "schedule.warmup=2st", "train.label_smoothing=0.1", "model.drop_path=0.1"),
    ),
    "sync-norm": (
        *(*SYNTHETIC, "model.norm=sync_batch", "data.augment=[flip,mixup]", "train.accumulate=2"),
        *("train.clip_norm=0.5", "train.precision=fp64", "optim.layer_decay=0.8"),
    ),
    "wide-resnet": (
        *(*SYNTHETIC, "model.name=wideresnet_course", "data.source.channels=1", "optim={name: novograd, lr: 0.02}"),
        *(
            "data.augment=[{name: affine, shear_degrees: 10},random_erasing]",
            "schedule={name: step, milestones: [3st], factor: 0.2}",
        ),
    ),
    "airbench": (
        *("cifar10-94", "data.source={name: synthetic, num_images: 96, num_val_images: 21}", "data.batch_size=16"),
        *("data.eval_batch_size=16", "optim.sgd_lr=0.5", "train.precision=fp32", "model.width=0.25"),
        *("data.loader=device", "data.workers=auto"),
    ),
    "schedule-free": (*SYNTHETIC, "optim.name=schedule_free", "schedule.warmup=2st", "model.norm=group"),
    "lamb-ema": (
        *(*SYNTHETIC, "optim.name=lamb", "train.ema=on", "schedule.name=polynomial"),
        *('train.class_weights={"1": 5, "4": 2}', "train.eval_train=on"),
    ),
    "lars": (*SYNTHETIC, "optim.name=lars", "schedule.name=one_cycle", "train.accumulate=2", "data.augment=[cutout]"),
    "autocast": (
        *(*SYNTHETIC, "optim.name=adamw", "train.precision=bf16", "data.augment=[trivial_augment,cutmix]"),
        *("optim.decay_norm_and_bias=false", "data.eval_views=2"),
    ),
    "processes": (
        *(*FOLDER, "data.loader=processes", "data.workers=2", "data.augment=[random_resized_crop,flip,color_jitter]"),
        *("optim={name: adam}", "model.zero_init_residual=true"),
    ),
    "threads": (
        *(*PHOTOS, "data.source={name: manifest, train: train.csv, val: val.csv}", "data.loader=threads"),
        *("data.workers=2", "data.augment=[random_resized_crop,rand_augment]", "optim={name: rmsprop}"),
    ),
    "native": (*PACK, "data.loader=native", "data.workers=2", "data.augment=[random_resized_crop,flip]"),
    "pack-progressive": (
        *(*PACK, "data.loader=native", "data.workers=1", "schedule.warmup=0st", "schedule.name=linear"),
        "data.progressive={start_size: 16, begin: 20%, end: 70%, multiple: 8}",
    ),
    "lmdb": (*LMDB, "data.loader=processes", "data.workers=1", "data.augment=[resize,pad_crop]", "optim.name=sgd"),
    "sharded": (
        *(*SYNTHETIC, "parallel.strategy=fsdp", "optim={name: adamw}", "train.ema=on", "train.clip_norm=1"),
        *("data.augment=[pad_crop,flip]", "data.augment_on=device", "checkpoint.background=off"),
    ),
    "half-weights": (*SYNTHETIC, "train.precision=bf16_master", "optim.name=sgd", "model.norm=batch"),
    "compressed": (
        *(*SYNTHETIC, "parallel.compression=bf16", "train.precision=bf16", "schedule.name=plateau"),
        *("train.on_nonfinite=skip", "parallel.check_replicas=2st", "model.memory_format=channels_last"),
    ),
}


def training_cases(record: Record, work: Path) -> Iterator[Case]:
    """Return the cases, the longest first."""
    for ranks in (2, 1):
        for name in RECIPES:
            yield _train(record, work, name, ranks)


def _train(record: Record, work: Path, name: str, ranks: int) -> Case:
    uninterrupted, resumed = f"runs/{name}-{ranks}", f"runs/{name}-{ranks}-resumed"
    args = ("train", *RECIPES[name], *SHORT, "--run-dir")
    completed = yield Job((*args, uninterrupted), ranks=ranks)
    if not _put(record, work, f"train/{name}/{ranks} ranks/whole", uninterrupted, completed):
        return
    shutil.copytree(work / uninterrupted, work / resumed)
    for path in (work / resumed / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > 2:
            shutil.rmtree(path)
    completed = yield Job((*args, resumed, "--resume"), ranks=ranks)
    _put(record, work, f"train/{name}/{ranks} ranks/resumed", resumed, completed)


def _put(record: Record, work: Path, place: str, run: str, completed) -> bool:
    record.put(f"{place} exit codes", str(completed.codes))
    if any(completed.codes):
        record.fail(f"{place}: ended with {completed.codes}: {completed.err.strip()[-400:]}")
        return False
    record.put_run(place, work / run)
    return True
