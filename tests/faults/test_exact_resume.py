"""A run depends only on its recipe: repeated, resumed, or with other workers or ranks, it is the same run."""

import functools
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.parallel.strategy import SingleDevice
from paceline.recipe.load import Patch, load
from paceline.recipe.schema.optim import Constant
from paceline.training.lr_schedule import build_lr_schedule
from paceline.training.optim.extra_state import ExtraOptimizerState
from paceline.training.precision import DynamicLossScaler, Precision
from paceline.training.process import Invocation
from paceline.training.run import run
from paceline.training.saver import TrainingState
from paceline.training.state import TrainState

EPOCH, STEPS = 5, 10
ARGS = (
    "train",
    "synthetic",
    "model.width=0.1",
    "data.source.num_images=65",
    "data.source.num_val_images=21",
    "data.source.image_size=16",
    "data.batch_size=12",
    "data.augment=[pad_crop,flip]",
    "optim.lr=0.01",
    "train.epochs=2",
    "train.ema=on",
    "log.every=1st",
    "log.samples=true",
    "log.tensorboard=off",
    "log.report=off",
    "checkpoint.every=1st",
    "checkpoint.keep=99",
    "parallel.threads=1",
    "parallel.bucket_mb=0.1",  # several buckets, whose order must not depend on the step of an interruption
    "--json",
)
STOPS = (1, 3, EPOCH, EPOCH + 2, EPOCH + 3)


@pytest.fixture(scope="module")
def whole(ranks_in, tmp_path_factory) -> Callable[[int], Path]:
    """Return a function from a number of ranks to an uninterrupted run of `ARGS` on them."""
    folder = tmp_path_factory.mktemp("whole")

    @functools.cache
    def run_on(num_ranks: int) -> Path:
        ranks_in(folder)(*ARGS, "--run-dir", str(num_ranks), ranks=num_ranks).result  # noqa: B018
        return folder / str(num_ranks)

    return run_on


def result_of(run: Path) -> dict:
    return json.loads((run / "result.json").read_text())


def samples(run: Path, worlds: Mapping[int, int], lines_of) -> list[list[tuple[int, int]]]:
    """Return (sample, checksum of its pixels) of each step, ranks in order; `worlds[S]` ranks ran from step S on."""
    found: list[list[tuple[int, int]]] = []
    for step in range(STEPS):
        world_size = worlds[max(first for first in worlds if first <= step)]
        rows = [
            next(row for row in lines_of(run / f"steps.rank{rank}.jsonl") if row["step"] == step)
            for rank in range(world_size)
        ]
        found.append([pair for row in rows for pair in zip(row["samples"], row["crc32"], strict=True)])
    return found


def records(run: Path, lines_of) -> list[dict]:
    """Return a run's records of steps and evaluations without those that depend on the clock."""
    rows = [row for name in ("steps.jsonl", "evals.jsonl") for row in lines_of(run / name)]
    times = ("trained_s", "train_s", "epoch_s", "images_per_s")
    return [{key: row[key] for key in row if key not in times and not key.endswith("_share")} for row in rows]


# matrix: 1
@pytest.mark.parametrize("num_ranks", [1, 3, *(pytest.param(each, marks=pytest.mark.long) for each in (2, 4))])
def test_weights_do_not_depend_on_the_loader(
    ranks, whole, tmp_path: Path, lines_of, state_digest, num_ranks: int
) -> None:
    runs = [whole(num_ranks)]
    for name, workers in (("again", 0), ("ahead", 2)) if num_ranks == 1 else (("ahead", 2),):
        ranks(*ARGS, f"data.workers={workers}", "--run-dir", name, ranks=num_ranks).result  # noqa: B018
        runs.append(tmp_path / name)
    found = [(result_of(run)["weights_sha256"], state_digest(run), records(run, lines_of)) for run in runs]
    assert found[1:] == found[:1] * (len(runs) - 1)
    assert found[0][1].keys() == {"model", "optimizer", "average", "values", "step"}


# matrix: 1
def test_the_number_of_threads_is_recorded_with_the_run(ranks, tmp_path: Path) -> None:
    for threads in (1, 2):
        args = (*ARGS, f"parallel.threads={threads}", "train.epochs=0.4")
        ranks(*args, "--run-dir", str(threads)).result  # noqa: B018
        assert json.loads((tmp_path / str(threads) / "machine.json").read_text())["threads"] == threads


# matrix: 2
# On two and three ranks, the runs with compressed gradients below resume too.
@pytest.mark.parametrize(
    ("num_ranks", "stops"),
    [(1, STOPS), (4, STOPS[1::2]), *(pytest.param(each, STOPS, marks=pytest.mark.long) for each in (2, 3, 4))],
    ids=str,
)
def test_a_run_resumed_five_times_equals_an_uninterrupted_one(
    ranks, whole, tmp_path: Path, cut_after, lines_of, state_digest, num_ranks: int, stops: Sequence[int]
) -> None:
    """It stops after the first step, within an epoch, at its end, and twice in the next: once after a resumed part.

    Four ranks stop only twice here, and five times in the long tests.
    """
    uninterrupted = result_of(whole(num_ranks))
    shutil.copytree(whole(num_ranks), tmp_path / "cut")
    for step in stops:
        cut_after(tmp_path / "cut", step)
        resumed = ranks(*ARGS, "--run-dir", "cut", "--resume", ranks=num_ranks).result
        assert resumed["weights_sha256"] == uninterrupted["weights_sha256"], f"stopped after step {step}"
        assert (resumed["steps"], resumed["eval"], resumed["best"]) == (
            STEPS,
            uninterrupted["eval"],
            uninterrupted["best"],
        )
    for step in range(stops[-1], STEPS + 1):
        name = f"checkpoints/step-{step:08d}"
        assert state_digest(tmp_path / "cut" / name) == state_digest(whole(num_ranks) / name)
    assert records(tmp_path / "cut", lines_of) == records(whole(num_ranks), lines_of)
    taken = samples(tmp_path / "cut", {0: num_ranks}, lines_of)
    assert taken == samples(whole(num_ranks), {0: num_ranks}, lines_of)
    for epoch in (taken[:EPOCH], taken[EPOCH:]):
        ids = [sample for step in epoch for sample, _ in step]
        assert len(ids) == len(set(ids)) == EPOCH * 12


# 16-bit compression and a static graph have no state, but torch regroups the gradients after the first steps.
SHORT = (*ARGS, "train.epochs=1.2", "train.ema=off", "log.samples=false")
# PowerSGD sends ten steps uncompressed, so a stop is before it begins, where it begins, or after it has a residual.
LONG = (*SHORT, "train.epochs=3")
LONG_STEPS = 3 * EPOCH


@pytest.fixture(scope="module")
def powersgd_run(ranks_in, tmp_path_factory) -> Path:
    """A completed run of three ranks with PowerSGD."""
    folder = tmp_path_factory.mktemp("factored")
    ranks_in(folder)(*LONG, "parallel.compression=powersgd", "--run-dir", "whole", ranks=3).result  # noqa: B018
    return folder / "whole"


# matrix: 2
@pytest.mark.parametrize(
    ("sent", "num_ranks", "stops"),
    [
        pytest.param("compression=bf16", 3, (3,), marks=pytest.mark.long),
        pytest.param("compression=fp16", 3, (3,), marks=pytest.mark.long),
        pytest.param("static_graph=true", 3, (3,), marks=pytest.mark.long),
        ("compression=bf16 static_graph=true", 3, (3,)),
        pytest.param("compression=powersgd", 2, (4, 10, 12), marks=pytest.mark.long),
        ("compression=powersgd", 3, (4, 11, 13)),
        ("compression=powersgd static_graph=true", 2, (12,)),
    ],
)
def test_a_resumed_run_has_the_same_weights_with_any_gradient_compression(
    request, ranks, tmp_path: Path, cut_after, lines_of, state_digest, sent: str, num_ranks: int, stops: Sequence[int]
) -> None:
    args = (*(LONG if "powersgd" in sent else SHORT), *(f"parallel.{each}" for each in sent.split()))
    if (sent, num_ranks) == ("compression=powersgd", 3):
        uninterrupted = request.getfixturevalue("powersgd_run")
    else:
        uninterrupted = tmp_path / "whole"
        ranks(*args, "--run-dir", "whole", ranks=num_ranks).result  # noqa: B018
    shutil.copytree(uninterrupted, tmp_path / "cut")
    for step in stops:
        cut_after(tmp_path / "cut", step)
        ranks(*args, "--run-dir", "cut", "--resume", ranks=num_ranks).result  # noqa: B018
        assert "resumed without" not in str(json.loads((tmp_path / "cut" / "plan.json").read_text())["notes"])
    for step in range(stops[0], result_of(uninterrupted)["steps"] + 1):
        name = f"checkpoints/step-{step:08d}"
        assert state_digest(tmp_path / "cut" / name) == state_digest(uninterrupted / name), step
    assert records(tmp_path / "cut", lines_of) == records(uninterrupted, lines_of)
    assert ("powersgd" in sent) == ("compression" in state_digest(uninterrupted))


# matrix: 3
@pytest.mark.parametrize("piece", ["held back by rank 2", "factors", "steps"])
def test_every_part_of_the_compression_state_matters(
    ranks, tmp_path: Path, cut, state_digest, powersgd_run: Path, piece: str
) -> None:
    cut(powersgd_run, tmp_path / "cut", 13)
    checkpoint = tmp_path / "cut" / "checkpoints" / "step-00000013"
    tensors = load_file(checkpoint / "compression.safetensors")
    values = json.loads((checkpoint / "state.json").read_text())
    if piece == "steps":
        values["compression"]["steps"] = 3
    elif piece == "factors":
        rights = [name for name in tensors if name.endswith(".right")]
        assert len(rights) == len(values["compression"]["buckets"]) > 2
        tensors |= {name: torch.ones_like(tensors[name]) for name in rights}
    else:
        for name in (name for name in tensors if name.endswith(".error")):
            tensors[name][int(piece[-1])] = 0
    save_file(tensors, checkpoint / "compression.safetensors")
    (checkpoint / "state.json").write_text(json.dumps(values))
    update_digests(checkpoint, piece)
    ranks(*LONG, "parallel.compression=powersgd", "--run-dir", "cut", "--resume", ranks=3).result  # noqa: B018
    assert state_digest(tmp_path / "cut")["model"] != state_digest(powersgd_run)["model"]


# matrix: 5
@pytest.mark.parametrize(
    ("num_ranks", "args", "why"),
    [
        (2, (), "they are of 3 ranks, and this run has 2; it starts again with 10 uncompressed steps"),
        (
            3,
            ("parallel.bucket_mb=25",),
            "gradients are grouped into other buckets; it starts again with 10 uncompressed steps",
        ),
        (1, (), "a single rank sends no gradients"),
    ],
)
def test_residuals_of_other_shapes_are_dropped_with_a_note(
    ranks, tmp_path: Path, cut, powersgd_run: Path, num_ranks: int, args: Sequence[str], why: str
) -> None:
    cut(powersgd_run, tmp_path / "cut", 13)
    args = (*LONG, *args, "parallel.compression=powersgd", "--run-dir", "cut", "--resume")
    assert ranks(*args, ranks=num_ranks).result["steps"] == LONG_STEPS
    notes = json.loads((tmp_path / "cut" / "plan.json").read_text())["notes"]
    output = [note for note in notes if note.startswith("resumed without PowerSGD's residuals")]
    assert len(output) == 1 and output[0].endswith(f": {why}"), notes


# matrix: 5
def test_ranks_without_synchronisation_resume_from_rank_0_with_a_note(ranks, tmp_path: Path, cut, state_digest) -> None:
    args = (*SHORT, "parallel.sync_gradients=false")
    ranks(*args, "--run-dir", "whole", ranks=2).result  # noqa: B018
    cut(tmp_path / "whole", tmp_path / "cut", 3)
    ranks(*args, "--run-dir", "cut", "--resume", ranks=2).result  # noqa: B018
    found = [state_digest(tmp_path / name) for name in ("cut", "whole")]
    assert found[0]["model"] == found[1]["model"] and found[0]["optimizer"] == found[1]["optimizer"]
    assert found[0]["values"] != found[1]["values"]  # they include the loss and evaluation of rank 1
    notes = [json.loads((tmp_path / name / "plan.json").read_text())["notes"] for name in ("cut", "whole")]
    assert ["resumed with rank 0's weights on every rank" in str(each) for each in notes] == [True, False]


CUT = 7
# A scheduler with state that lowers the rate before the cut; averaged weights; 16-bit weights with master copies.
STATEFUL = (
    *ARGS,
    "train.precision=bf16_master",
    "train.eval_every=2st",
    "schedule.name=plateau",
    "schedule.threshold=0.9",
    "schedule.patience=0",
    "schedule.factor=0.5",
    "log.every=5st",
)
PIECES = (
    "weights", "buffers", "optimizer", "average", "precision", "schedule", "train.step", "train.skipped",
    "train.images_seen", "train.loss_sum", "train.loss_steps",
)  # fmt: skip


def train_stateful(folder: Path, *, resume: bool = False) -> None:
    """Train a run with every kind of state in this process, without the program."""
    recipe = load("synthetic", Patch.parse([word for word in STATEFUL if "=" in word])).recipe
    run(recipe, World.single(), RunDir(folder), resume=resume, invocation=Invocation())


@pytest.fixture(scope="module")
def stateful(tmp_path_factory) -> Path:
    """A completed run with every kind of state."""
    folder = tmp_path_factory.mktemp("stateful") / "whole"
    train_stateful(folder)
    return folder


def reset_piece(piece: str, checkpoint: Path, first: Path) -> None:
    """Reset `piece` of `checkpoint` to its value after the first step, and update the digests."""
    if piece in ("weights", "buffers"):
        new, old = load_file(checkpoint / "model.safetensors"), load_file(first / "model.safetensors")
        is_buffer = {name: "running_" in name or "num_batches" in name for name in new}
        assert set(is_buffer.values()) == {True, False}
        kept = {name: new[name] if is_buffer[name] == (piece == "weights") else old[name] for name in new}
        save_file(kept, checkpoint / "model.safetensors")
    elif (checkpoint / f"{piece}.safetensors").exists():
        shutil.copy(first / f"{piece}.safetensors", checkpoint)
    else:
        section, _, field = piece.partition(".")
        new, old = (json.loads((path / "state.json").read_text()) for path in (checkpoint, first))
        if field == "skipped":
            new[section][field] += 3  # no step was skipped in either
        elif field:
            assert new[section][field] != old[section][field]
            new[section][field] = old[section][field]
        else:
            new[section] = old[section]
        (checkpoint / "state.json").write_text(json.dumps(new))
    update_digests(checkpoint, piece)


def update_digests(checkpoint: Path, piece: str) -> None:
    """Update the digests of `checkpoint` after a change to `piece`."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    digests = {name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() for name in manifest}
    assert digests != manifest, f"{piece} is no part of the state"
    (checkpoint / "manifest.json").write_text(json.dumps(digests))


# matrix: 3
@pytest.mark.parametrize("piece", ["nothing", *PIECES])
def test_every_part_of_the_state_matters(
    tmp_path: Path, cut, lines_of, state_digest, stateful: Path, piece: str
) -> None:
    """The other tests here compare digests and records; each part missing from a checkpoint changes one of them."""
    first = stateful / "checkpoints" / "step-00000001"
    cut(stateful, tmp_path / "cut", CUT)
    if piece != "nothing":
        reset_piece(piece, tmp_path / "cut" / "checkpoints" / f"step-{CUT:08d}", first)
    train_stateful(tmp_path / "cut", resume=True)
    found = state_digest(tmp_path / "cut"), records(tmp_path / "cut", lines_of)
    is_same = found == (state_digest(stateful), records(stateful, lines_of))
    assert is_same == (piece == "nothing")


# matrix: 3
def test_the_loss_scale_is_part_of_the_state() -> None:
    """Only GPUs have the format that needs a loss scale, so this is tested without a run."""
    kept, lost = (persistent() for _ in range(2))
    kept.precision.scaler.backoff()
    snapshot = kept.state_dict(TrainState(), {})
    assert snapshot.values["scale"] != lost.state_dict(TrainState(), {}).values["scale"]
    lost.precision.scaler.load_state_dict(snapshot.values["scale"])
    assert lost.state_dict(TrainState(), {}).values == snapshot.values


def persistent() -> TrainingState:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = build_lr_schedule(Constant(), SimpleNamespace(peak_lr=0.1, steps=lambda duration: 0))
    precision = Precision("cpu", torch.float32, scaler=DynamicLossScaler())
    extra_state = ExtraOptimizerState.from_optimizer(optimizer, "sgd")
    return TrainingState(model, optimizer, schedule, precision, None, SingleDevice(), extra_state)


# matrix: 4
def test_the_number_of_workers_may_change_when_resuming(
    ranks, whole, tmp_path: Path, cut_after, lines_of, state_digest
) -> None:
    shutil.copytree(whole(1), tmp_path / "cut")
    for step, workers in ((3, 2), (EPOCH + 2, 1)):
        cut_after(tmp_path / "cut", step)
        ranks(*ARGS, f"data.workers={workers}", "--run-dir", "cut", "--resume").result  # noqa: B018
    assert state_digest(tmp_path / "cut") == state_digest(whole(1))
    assert records(tmp_path / "cut", lines_of) == records(whole(1), lines_of)
    found = [samples(run, {0: 1}, lines_of) for run in (tmp_path / "cut", whole(1))]
    assert found[0] == found[1]


# matrix: 5
@pytest.mark.parametrize(("worlds", "norm"), [((2, 4, 1), "none"), ((1, 3, 2), "group")], ids=str)
def test_other_numbers_of_ranks_have_the_same_samples_and_losses(
    ranks, tmp_path: Path, cut_after, lines_of, worlds: Sequence[int], norm: str
) -> None:
    args = (*ARGS, f"model.norm={norm}", "train.ema=off")
    ranks(*args, "--run-dir", "whole", ranks=worlds[0]).result  # noqa: B018
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    started = dict(zip((0, 3, EPOCH + 2), worlds, strict=False))
    for step, world_size in list(started.items())[1:]:
        cut_after(tmp_path / "cut", step)
        result = ranks(*args, "--run-dir", "cut", "--resume", ranks=world_size).result
        assert (result["world_size"], result["steps"]) == (world_size, STEPS)
    assert samples(tmp_path / "cut", started, lines_of) == samples(tmp_path / "whole", {0: worlds[0]}, lines_of)
    losses = [[row["loss"] for row in lines_of(tmp_path / name / "steps.jsonl")] for name in ("cut", "whole")]
    # Sums over ranks round in another order at every step: 1e-7 of a loss of 2.3, which 10 steps amplify.
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)


# matrix: 6
def test_an_indivisible_batch_size_is_refused_before_any_work(paceline, tmp_path: Path) -> None:
    started = time.monotonic()
    paceline("train", "synthetic", "data.batch_size=16", "--ranks", "3", "--run-dir", "run").assert_error(
        "data.batch_size: 16 does not divide evenly over 3 ranks (try 15)"
    )
    assert time.monotonic() - started < 5  # it takes less than a second on an idle machine
    assert not list(tmp_path.iterdir())


# matrix: 7
@pytest.mark.parametrize(
    ("changed", "output"),
    [
        ("optim.lr=0.5", "optim.lr=0.01 (now 0.5)"),
        ("model.width=0.2", "model.width=0.1 (now 0.2)"),
        ("data.source.num_classes=7", "data.source.num_classes=10 (now 7)"),
        ("data.batch_size=24", "data.batch_size=12 (now 24)"),
        ("seed=1", "seed=0 (now 1)"),
    ],
)
def test_a_run_is_not_resumed_with_a_changed_recipe(ranks, whole, tmp_path: Path, changed: str, output: str) -> None:
    shutil.copytree(whole(1), tmp_path / "run")
    before = contents(tmp_path / "run")
    completed = ranks(*ARGS, changed, "--run-dir", "run", "--resume")
    assert (completed.codes, completed.out) == ([2], "")
    assert completed.errors[0].startswith("error: --resume: run was started with ") and output in completed.errors[0]
    assert contents(tmp_path / "run") == before


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a run except its lock, which names the process that opened it last."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


PHOTOS = (
    *("train", "data.source.name=folder", "data.source.root=photos", "data.image_size=16", "data.batch_size=4"),
    *("data.workers=0", "train.steps=4", "model.width=0.1", "checkpoint.every=2st", "parallel.threads=1"),
    *("log.tensorboard=off", "log.report=off", "--run-dir", "run", "--json"),
)


@pytest.fixture(scope="module")
def of_photos(ranks_in, tmp_path_factory, cut_after) -> Path:
    """Return a folder with images and a run on them that ended after two of four steps."""
    folder = tmp_path_factory.mktemp("of_photos")
    for name in ("cat", "dog"):
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(12):
            shade = (number, 0, 200 if name == "cat" else 0)
            Image.new("RGB", (16, 16), shade).save(folder / "photos" / name / f"{number}.png")
    ranks_in(folder)(*PHOTOS).result  # noqa: B018
    cut_after(folder / "run", 2)
    return folder


# matrix: 7
@pytest.mark.parametrize("change", ["another image", "an image less", "a class of another name"])
def test_a_run_is_not_resumed_on_other_data(ranks, of_photos: Path, tmp_path: Path, change: str) -> None:
    shutil.copytree(of_photos, tmp_path, dirs_exist_ok=True)
    classes = tmp_path / "photos"
    match change:
        case "another image":
            shutil.copy(classes / "cat" / "3.png", classes / "cat" / "99.png")
        case "an image less":
            (classes / "cat" / "3.png").unlink()
        case _:
            (classes / "dog").rename(classes / "hound")
    completed = ranks(*PHOTOS, "--resume")
    assert completed.codes == [2] and len(completed.errors[0].splitlines()) == 1, completed.errors
    assert completed.errors[0].startswith("error: ") and "data" in completed.errors[0] and "run" in completed.errors[0]


# matrix: 9
def test_evaluation_counts_every_image_once_on_any_number_of_ranks(ranks, whole) -> None:
    """A batch of one image has the same values on any rank, and sums are float64."""
    found = {}
    for num_ranks in (1, 2, 4):
        args = ("eval", str(whole(1)), "data.eval_batch_size=1", "--json")
        found[num_ranks] = ranks(*args, ranks=num_ranks).result
        average = found[num_ranks].pop("ema")
        assert found[num_ranks]["images"] == average["images"] == 21
        found[num_ranks] |= {f"average {name}": value for name, value in average.items()}
    for num_ranks in (2, 4):
        assert found[num_ranks] == pytest.approx(found[1], rel=1e-12, abs=1e-12)
