"""A failure is reported in one line, by the rank where it happened, and no process is left running."""

import os
import pickle
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from PIL import Image

from paceline.core.host import usable_cores

BARE = ("data.workers=0", "log.tensorboard=off", "log.report=off")
SMALL = ("train.steps=3", "model.width=0.1", "data.batch_size=12", "parallel.threads=1", *BARE)


def write_image_folder(root: Path, *, per_class: int = 6) -> Path:
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(per_class):
                Image.new("RGB", (40, 30), (label * 200, number * 9, 90)).save(folder / f"{number}.jpg")
    return root


def folder_args(root: Path, *args: str) -> tuple[str, ...]:
    source = ("data.source.name=folder", f"data.source.root={root}", "data.image_size=16")
    small = ("train.epochs=1", "model.width=0.1", "data.batch_size=4", "parallel.threads=1", *BARE)
    return ("train", *source, *small, *args)


def test_an_unknown_recipe_is_refused_with_a_suggestion(paceline) -> None:
    paceline("train", "digit").assert_error("'digit'", "did you mean 'digits'?")


def test_a_misspelt_key_is_refused_with_a_suggestion(paceline) -> None:
    paceline("train", "data.batch_siz=3").assert_error("data.batch_siz", "did you mean 'data.batch_size'?")


def test_a_misspelt_verb_or_option_is_refused(paceline) -> None:
    paceline("trian").assert_error("trian", "--help")
    paceline("train", "--rank", "2").assert_error("--rank")


def test_an_indivisible_batch_size_is_refused_with_a_valid_one(paceline) -> None:
    paceline("train", "data.batch_size=500", "--ranks", "8").assert_error(
        "data.batch_size: 500 does not divide evenly over 8 ranks (try 504)"
    )


@pytest.mark.parametrize(
    "verb",
    [
        ("train", "--dry-run"),
        ("train", "data.batch_size=500"),  # the check of the batch size would fail too
        ("doctor",),
        ("scale",),
        ("allreduce",),
        ("profile",),
        ("ladder", "cpu"),
        ("tune",),
    ],
    ids=" ".join,
)
def test_too_many_ranks_for_the_cores_are_refused_before_any_starts(paceline, verb: tuple[str, ...]) -> None:
    cores = usable_cores()
    most = max(16, 4 * cores)
    where = f"--ranks: {most + 1} on {cores} CPU core"
    paceline(*verb, "--ranks", str(most + 1)).assert_error(where, f"start at most {most}", "--oversubscribe")


def test_oversubscribe_allows_more_ranks_than_cores(paceline) -> None:
    """A dry run prints the number of ranks without starting them."""
    ranks = max(16, 4 * usable_cores()) + 1
    completed = paceline("train", f"data.batch_size={ranks}", "--dry-run", "--ranks", str(ranks), "--oversubscribe")
    assert completed.code == 0 and f"devices: {ranks} CPU rank" in completed.out, completed.err


def test_oversubscribe_is_refused_with_nodes(paceline) -> None:
    paceline("scale", "--nodes", "2", "--oversubscribe").assert_error("--oversubscribe: ", "--nodes", "leave it out")


def test_a_missing_data_root_is_refused(paceline, tmp_path: Path) -> None:
    paceline(*folder_args(tmp_path / "nowhere"), "--ranks", "2").assert_error(str(tmp_path / "nowhere"))


def test_a_refused_run_does_not_create_the_run_directory(paceline, tmp_path: Path) -> None:
    paceline(*folder_args(tmp_path / "nowhere"), "--run-dir", "run").assert_error("nowhere")
    assert not (tmp_path / "run").exists()


def test_bf16_with_wrong_cpu_gradients_is_refused_for_training_but_not_for_evaluation(paceline, tmp_path: Path) -> None:
    args = (
        "digits",
        "model.name=torchvision:resnet18",
        "model.width=1.0",
        "train.steps=1",
        "data.batch_size=8",
        "parallel.threads=1",
        *BARE,
    )
    paceline("train", *args, "train.precision=bf16", "--run-dir", "a").assert_error("train.precision: bf16 on a CPU")
    assert paceline("train", *args, "--run-dir", "b").code == 0
    recipe = tmp_path / "b" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("precision: fp32", "precision: bf16"))
    assert paceline("eval", "b").code == 0


def test_an_impossible_model_is_refused_before_anything_is_written(paceline, tmp_path: Path) -> None:
    for args in (("model.name=resnet19_cifar",), ("model.name=torchvision:vgg11", "model.width=1.0")):
        for flag in ("--dry-run", "--json"):
            paceline("train", *args, flag).assert_error("model.name")
    assert not list(tmp_path.iterdir())


def test_two_runs_of_the_same_second_get_different_directories(paceline, tmp_path: Path) -> None:
    both = [paceline.start("train", *SMALL) for _ in range(2)]
    output = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], output
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_contradiction_with_the_launcher_is_reported_by_one_rank(paceline) -> None:
    environ = {"WORLD_SIZE": "2", "MASTER_PORT": "29999"}
    paceline("train", *SMALL, "--ranks", "3", RANK="0", **environ).assert_error(
        "--ranks: 3, but 2 ranks were started by torchrun"
    )
    other = paceline("train", *SMALL, "--ranks", "3", RANK="1", **environ)
    assert (other.code, other.err) == (2, "")


def test_modules_are_not_imported_from_the_working_directory(paceline_anew, tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("raise SystemExit('imported from the current folder')")
    assert paceline_anew("train", *SMALL, "--ranks", "2").code == 0


def test_non_finite_weights_are_not_saved(paceline, tmp_path: Path) -> None:
    args = ("optim.lr=1e20", "model.norm=none", "log.every=9st", "train.eval_every=off", "checkpoint.every=5st")
    completed = paceline("train", *SMALL, *args, "train.steps=20", "--run-dir", "run")
    assert completed.code == 3 and len(completed.err.splitlines()) == 1
    assert completed.err.startswith("error: train: step 2: the loss is NaN or infinite on rank 0 of 1, at lr "), (
        completed.err
    )
    assert "last good checkpoint: none" in completed.err
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_launcher_variable_that_is_not_an_integer_is_refused(paceline) -> None:
    paceline("train", RANK="a", WORLD_SIZE="2").assert_error("RANK: 'a'")


def test_resume_without_a_run_is_refused(paceline) -> None:
    paceline("train", "--resume").assert_error("--resume: runs/ has no run of digits")


def test_an_empty_class_folder_is_refused(paceline, tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "photos")
    (root / "train" / "emu").mkdir()
    paceline(*folder_args(root)).assert_error(str(root / "train" / "emu"))


def test_a_validation_class_without_training_images_is_refused(paceline, tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "photos")
    (root / "val" / "emu").mkdir()
    Image.new("RGB", (9, 9)).save(root / "val" / "emu" / "1.png")
    paceline(*folder_args(root)).assert_error("emu")


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_an_unreadable_image_is_reported_once(paceline, tmp_path, ranks: str, workers: str) -> None:
    root = write_image_folder(tmp_path / "photos")
    bad = root / "train" / "dog" / "3.jpg"
    Image.effect_noise((200, 150), 90).convert("RGB").save(bad)
    bad.write_bytes(bad.read_bytes()[:-2000])
    started = time.monotonic()
    args = folder_args(root, f"data.workers={workers}", "train.epochs=3")
    paceline(*args, "--ranks", ranks).assert_error(str(bad), "truncated")
    assert time.monotonic() - started < 60


def test_a_malicious_pickle_manifest_executes_nothing(paceline, tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Malicious:
        def __reduce__(self):
            return os.system, (f"touch {canary}",)

    for name in ("train.pkl", "val.pkl"):
        (tmp_path / name).write_bytes(pickle.dumps({"a.jpg": Malicious()}))
    args = ("data.source.name=manifest", f"data.source.train={tmp_path}/train.pkl", "data.source.val=val.pkl")
    paceline("train", *args).assert_error(str(tmp_path / "train.pkl"))
    assert not canary.exists()


def test_more_ranks_than_gpus_are_refused(paceline) -> None:
    paceline("train", *SMALL, "parallel.device=cuda", "--ranks", "2", CUDA_VISIBLE_DEVICES="").assert_error(
        "parallel.device: cuda: 2 ranks on a node with 0 GPUs"
    )


# matrix: 42
def test_a_port_in_use_is_refused(paceline) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        paceline("train", *SMALL, "--ranks", "2", "--port", port).assert_error(f"--port: {port}", "in use")
        paceline("train", *SMALL, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port).assert_error(
            f"MASTER_PORT: {port} is in use"
        )


def test_a_killed_rank_ends_the_run_within_ten_seconds_and_no_process_is_left(paceline, tmp_path: Path) -> None:
    process = paceline.start(
        "train", "data.batch_size=63", "train.epochs=500", "model.width=0.1", *BARE, "--ranks", "3", "--run-dir", "run"
    )
    ranks = wait_until_training(process, tmp_path / "run", 3)
    os.kill(ranks[1].pid, signal.SIGKILL)
    killed = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert time.monotonic() - killed < 10
    assert process.returncode == 128 + signal.SIGKILL
    assert "rank 1 of 3 was killed by SIGKILL" in err and "Traceback" not in err
    assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


def wait_until_training(process, run: Path, ranks: int) -> list[psutil.Process]:
    deadline = time.monotonic() + 120
    steps = run / "steps.jsonl"
    while not (steps.exists() and steps.stat().st_size) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    children = psutil.Process(process.pid).children()
    by_rank = sorted(children, key=lambda child: child.pid)  # ranks are started in order
    assert len(by_rank) == ranks
    return by_rank


BUGGY = """
import os
from paceline.training.trainer import Trainer

step = Trainer.train_step

def train_step(self, batch, state):
    if os.environ["RANK"] == "1" and state.step == 3:
        raise RuntimeError("a bug on one rank")
    return step(self, batch, state)

Trainer.train_step = train_step
from paceline.cli import main
main()
"""


def test_an_exception_on_one_rank_is_printed_once_and_ends_all_ranks(paceline, tmp_path: Path) -> None:
    (tmp_path / "buggy.py").write_text(BUGGY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    args = ("train", "train.epochs=50", "model.width=0.1", "parallel.threads=1", *BARE, "--run-dir", "run")
    ranks = [
        paceline.start(*args, program=("buggy",), RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=port) for rank in range(2)
    ]
    output = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1]
    assert output[0] == ""
    assert output[1].startswith("Traceback") and output[1].count("a bug on one rank") == 3
    assert output[1].splitlines()[-1] == "error: rank 1 of 2: RuntimeError: a bug on one rank"


def test_a_rank_reports_a_killed_peer_in_one_line(paceline, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    args = ("train", "train.epochs=500", "model.width=0.1", "parallel.threads=1", *BARE, "--run-dir", "run")
    ranks = [paceline.start(*args, RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=port) for rank in range(2)]
    steps = tmp_path / "run" / "steps.jsonl"
    deadline = time.monotonic() + 120
    while not (steps.exists() and steps.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    ranks[1].kill()
    killed = time.monotonic()
    _, err = ranks[0].communicate(timeout=60)
    ranks[1].communicate(timeout=60)
    assert time.monotonic() - killed < 10
    assert ranks[0].returncode == 1
    assert len(err.splitlines()) == 1 and err.startswith("error: rank 0 of 2: rank 1 is gone (last heartbeat ")
