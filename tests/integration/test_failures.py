"""What goes wrong is said once, in one line, by the rank it happened to; and no process is left."""

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

SMALL = ("train.steps=3", "model.width=0.1", "data.batch_size=12", "parallel.threads=1")


def photographs(root: Path, *, per_class: int = 6) -> Path:
    for split in ("train", "val"):
        for label, name in enumerate(("cat", "dog")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(per_class):
                Image.new("RGB", (40, 30), (label * 200, number * 9, 90)).save(folder / f"{number}.jpg")
    return root


def folder_words(root: Path, *words: str) -> tuple[str, ...]:
    source = ("data.source.name=folder", f"data.source.root={root}", "data.image_size=16")
    return ("train", *source, "train.epochs=1", "model.width=0.1", "data.batch_size=4", "parallel.threads=1", *words)


def test_an_unknown_recipe(paceline) -> None:
    paceline("train", "digit").says("'digit'", "did you mean 'digits'?")


def test_a_misspelt_key(paceline) -> None:
    paceline("train", "data.batch_siz=3").says("data.batch_siz", "did you mean 'batch_size'?")


def test_a_misspelt_verb_and_option(paceline) -> None:
    paceline("trian").says("trian", "--help")
    paceline("train", "--rank", "2").says("--rank")


def test_a_batch_that_does_not_divide(paceline) -> None:
    paceline("train", "data.batch_size=500", "--ranks", "8").says(
        "data.batch_size: 500 does not divide over 8 ranks (try 504)"
    )


@pytest.mark.parametrize(
    "verb",
    [
        ("train", "--dry-run"),
        ("train", "data.batch_size=500"),  # which would not divide over them either
        ("doctor",),
        ("scale",),
        ("scale", "--collective"),
        ("profile",),
        ("ladder", "cpu"),
        ("tune",),
    ],
    ids=" ".join,
)
def test_more_ranks_than_the_machine_can_bear_are_refused_before_one_is_started(
    paceline, verb: tuple[str, ...]
) -> None:
    cores = usable_cores()
    most = max(16, 4 * cores)
    where = f"--ranks: {most + 1} on {cores} CPU core"
    paceline(*verb, "--ranks", str(most + 1)).says(where, f"start at most {most}", "--oversubscribe")


def test_more_ranks_are_started_for_who_insists(paceline) -> None:
    """A dry run starts none, and says how many there would be."""
    ranks = max(16, 4 * usable_cores()) + 1
    ended = paceline("train", f"data.batch_size={ranks}", "--dry-run", "--ranks", str(ranks), "--oversubscribe")
    assert ended.code == 0 and f"devices: {ranks} x cpu" in ended.out, ended.err


def test_insisting_is_refused_where_slurm_would_start_the_ranks(paceline) -> None:
    paceline("scale", "--nodes", "2", "--oversubscribe").says("--oversubscribe: ", "--nodes", "leave it out")


def test_a_missing_root(paceline, tmp_path: Path) -> None:
    paceline(*folder_words(tmp_path / "nowhere"), "--ranks", "2").says(str(tmp_path / "nowhere"))


def test_what_is_refused_leaves_the_run_directory_free(paceline, tmp_path: Path) -> None:
    paceline(*folder_words(tmp_path / "nowhere"), "--run-dir", "run").says("nowhere")
    assert not (tmp_path / "run").exists()


def test_16_bits_are_refused_where_they_would_train_by_a_wrong_gradient_and_not_where_nothing_is_trained(
    paceline, tmp_path: Path
) -> None:
    words = (
        "digits",
        "model.name=torchvision:resnet18",
        "model.width=1.0",
        "train.steps=1",
        "data.batch_size=8",
        "parallel.threads=1",
    )
    paceline("train", *words, "train.precision=bf16", "--run-dir", "a").says("train.precision: bf16 on a CPU")
    assert paceline("train", *words, "--run-dir", "b").code == 0
    recipe = tmp_path / "b" / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("precision: fp32", "precision: bf16"))
    assert paceline("eval", "b").code == 0


def test_a_model_that_cannot_be_is_refused_before_anything_is_written(paceline, tmp_path: Path) -> None:
    for words in (("model.name=resnet19_cifar",), ("model.name=torchvision:vgg11", "model.width=1.0")):
        for flag in ("--dry-run", "--json"):
            paceline("train", *words, flag).says("model.name")
    assert not list(tmp_path.iterdir())


def test_two_runs_of_one_second_do_not_meet(paceline, tmp_path: Path) -> None:
    both = [paceline.start("train", *SMALL) for _ in range(2)]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_ranks_that_contradict_the_launcher_are_refused_by_one_rank(paceline) -> None:
    environ = {"WORLD_SIZE": "2", "MASTER_PORT": "29999"}
    paceline("train", *SMALL, "--ranks", "3", RANK="0", **environ).says(
        "--ranks: 3, but 2 ranks were started by torchrun"
    )
    other = paceline("train", *SMALL, "--ranks", "3", RANK="1", **environ)
    assert (other.code, other.err) == (2, "")


def test_a_folder_of_the_working_directory_is_no_module_of_ours(paceline_anew, tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("raise SystemExit('imported from the current folder')")
    assert paceline_anew("train", *SMALL, "--ranks", "2").code == 0


def test_weights_that_are_no_numbers_are_not_saved(paceline, tmp_path: Path) -> None:
    words = ("optim.lr=1e20", "model.norm=none", "log.every=9st", "train.eval_every=off", "checkpoint.every=5st")
    ended = paceline("train", *SMALL, *words, "train.steps=20", "--run-dir", "run")
    assert ended.code == 3 and len(ended.err.splitlines()) == 1
    assert ended.err.startswith("error: train: step 2: the loss is NaN or infinite on rank 0 of 1, at lr "), ended.err
    assert "last good checkpoint: none" in ended.err
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def test_variables_of_a_launcher_that_make_no_sense(paceline) -> None:
    paceline("train", RANK="a", WORLD_SIZE="2").says("RANK: 'a'")


def test_resuming_names_a_run(paceline) -> None:
    paceline("train", "--resume").says("--resume: runs/ has no run of digits")


def test_an_empty_class_folder(paceline, tmp_path: Path) -> None:
    root = photographs(tmp_path / "photos")
    (root / "train" / "emu").mkdir()
    paceline(*folder_words(root)).says(str(root / "train" / "emu"))


def test_a_class_in_val_that_train_lacks(paceline, tmp_path: Path) -> None:
    root = photographs(tmp_path / "photos")
    (root / "val" / "emu").mkdir()
    Image.new("RGB", (9, 9)).save(root / "val" / "emu" / "1.png")
    paceline(*folder_words(root)).says("emu")


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_an_unreadable_image_is_named_by_the_one_rank_that_met_it(paceline, tmp_path, ranks: str, workers: str) -> None:
    root = photographs(tmp_path / "photos")
    bad = root / "train" / "dog" / "3.jpg"
    Image.effect_noise((200, 150), 90).convert("RGB").save(bad)
    bad.write_bytes(bad.read_bytes()[:-2000])
    started = time.monotonic()
    words = folder_words(root, f"data.workers={workers}", "train.epochs=3")
    paceline(*words, "--ranks", ranks).says(str(bad), "truncated")
    assert time.monotonic() - started < 60


def test_an_evil_manifest_runs_nothing(paceline, tmp_path: Path) -> None:
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {canary}",)

    for name in ("train.pkl", "val.pkl"):
        (tmp_path / name).write_bytes(pickle.dumps({"a.jpg": Evil()}))
    words = ("data.source.name=manifest", f"data.source.train={tmp_path}/train.pkl", "data.source.val=val.pkl")
    paceline("train", *words).says(str(tmp_path / "train.pkl"))
    assert not canary.exists()


def test_more_ranks_than_devices(paceline) -> None:
    paceline("train", *SMALL, "parallel.device=cuda", "--ranks", "2", CUDA_VISIBLE_DEVICES="").says(
        "parallel.device: cuda: 2 ranks on a node with 0 GPUs"
    )


# matrix: 42
def test_a_busy_port(paceline) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        paceline("train", *SMALL, "--ranks", "2", "--port", port).says(f"--port: {port}", "in use")
        paceline("train", *SMALL, RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port).says(
            f"MASTER_PORT: {port} is in use"
        )


def test_a_killed_rank_ends_the_run_within_ten_seconds_and_leaves_no_process(paceline, tmp_path: Path) -> None:
    process = paceline.start(
        "train", "data.batch_size=63", "train.epochs=500", "model.width=0.1", "--ranks", "3", "--run-dir", "run"
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
    by_rank = sorted(children, key=lambda child: child.pid)  # they are started in order
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


def test_a_bug_on_one_rank_is_shown_once_and_ends_all_ranks(paceline, tmp_path: Path) -> None:
    (tmp_path / "buggy.py").write_text(BUGGY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ("train", "train.epochs=50", "model.width=0.1", "parallel.threads=1", "--run-dir", "run")
    ranks = [
        paceline.start(*words, program=("buggy",), RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=port)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1]
    assert said[0] == ""
    assert said[1].startswith("Traceback") and said[1].count("a bug on one rank") == 3
    assert said[1].splitlines()[-1] == "error: rank 1 of 2: RuntimeError: a bug on one rank"


def test_a_rank_that_loses_a_silent_peer_says_so_in_one_line(paceline, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    words = ("train", "train.epochs=500", "model.width=0.1", "parallel.threads=1", "--run-dir", "run")
    ranks = [paceline.start(*words, RANK=str(rank), WORLD_SIZE="2", MASTER_PORT=port) for rank in range(2)]
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
