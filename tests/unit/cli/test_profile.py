"""What `paceline profile` refuses, measures and shows, with runs that were never run."""

import json
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import profile as verb
from paceline.cli.options import ProfileOptions
from paceline.cli.profile import show_profile
from paceline.core.errors import RecipeError
from paceline.core.results import (
    BucketResult,
    CommunicationResult,
    LoaderResult,
    RunResult,
    StageResult,
    StragglerResult,
    ThroughputResult,
    TimeResult,
)
from paceline.core.run_dir import RunDir
from paceline.core.world import World
from paceline.lab.probes import SkippedProbe
from paceline.lab.profile import ProbeResult, Profile, ThroughputSummary
from paceline.lab.runner import TrialError
from paceline.lab.trial import Trial, TrialOutcome
from paceline.measure.bottleneck import Ceilings
from paceline.recipe.load import Patch

STAGES = {
    "data_wait": StageResult(host_s=0.2, device_s=0.2, share=0.25),
    "forward": StageResult(host_s=0.16, device_s=0.16, share=0.2),
    "backward": StageResult(host_s=0.4, device_s=0.4, share=0.5),
}
LOADER = LoaderResult(
    workers=2,
    batches=50,
    images=3200,
    read_s=0.1,
    decode_s=0.2,
    augment_s=0.05,
    collate_s=0.01,
    wait_s=0.2,
    queue_depth=1.25,
    ready=0.75,
    bytes_read=50_000_000,
    bytes_made=100_000_000,
    busy=0.5,
)
COMMUNICATION = CommunicationResult(
    exposed_s=0.003,
    share=0.15,
    bytes=45_000_000,
    wire_s=0.01,
    overlap=0.7,
    buckets=(BucketResult(bytes=45_000_000, ready_s=0.0, wire_s=0.01, n=40),),
)
COST = {
    "parameters": 11_173_962,
    "flops_per_image": 3.34e9,
    "achieved_flops_per_s": 3.34e12,
    "peak_flops_per_s": 33.4e12,
    "peak_source": "a data sheet",
    "mfu": 0.1,
    "roofline_images_per_s": 4000.0,
    "roofline_share": 0.25,
}


ACCOUNT = {"wall_s": 4.0, "start_up_s": 1.0, "compile_s": 0.0, "warmup_s": 2.2, "stages_s": 0.76, "counted_steps": 40,
           "pauses": {}, "finish_s": 0.0, "residual_s": 0.04, "explained": 0.99}  # fmt: skip


def result(images_per_s: float = 1000.0, **more: object) -> RunResult:
    values = {
        "status": "completed",
        "recipe_hash": "0123456789ab",
        "world_size": 2,
        "epochs": 1.5,
        "steps": 50,
        "images_seen": 3200,
        "eval": None,
        "best": None,
        "throughput": ThroughputResult(
            images_per_s=images_per_s, spread=(images_per_s - 100, images_per_s + 100), n=4, excluded_s=1.0
        ),
        "time": TimeResult(wall_s=4.0, startup_s=1.0, train_s=2.0, eval_s=0, checkpoint_s=0, to_target_s=None),
        "stages": STAGES,
        "account": ACCOUNT,
        "loader": LOADER,
        "verdict": {
            "bottleneck": "input-bound",
            "evidence": "Waiting for data took 0.2 s of 0.8 s.",
            "ceiling": "at most 1.3x without waiting for data",
            "try": "data.workers=4",
        },
        "lr": "0.1 at 64",
        "weights_sha256": "ab" * 32,
        "provenance": {},
    }
    return RunResult.model_validate({**values, **more})


def profile(**more: Any) -> Profile:
    base = result()
    values = {
        "recipe": "ba9876543210",
        "steps": 40,
        "ranks": 2,
        "result": base,
        "base": ThroughputSummary.from_results([base]),
        "probes": (),
        "left_out": (),
        "ceilings": Ceilings(),
        "cost": {},
    }
    return Profile(**{**values, **more})


FREE_DATA = Trial("free-data", Patch((("data.replay", "host"),)), 2, "reading")


@pytest.fixture
def seen(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Return a function from a profile to what a person sees, a line each with its columns apart."""
    monkeypatch.setenv("COLUMNS", "220")

    def lines(found: Profile, nsys: str = "") -> list[str]:
        show_profile(found, RunDir(tmp_path), nsys=nsys, as_json=False)
        shown = capsys.readouterr().out
        return [" ".join(line.replace("│", " | ").split()).strip("| ") for line in shown.splitlines()]

    return lines


def test_stages_are_printed_per_step_with_the_residual(seen) -> None:
    """0.8 s of 40 steps: the stages share 95 % of it."""
    shown = seen(profile())
    assert "20 ms per step: the mean of 40 measured steps on rank 0" in shown
    rows = [line for line in shown if line.startswith(("backward", "data wait", "forward", "not attributed"))]
    assert rows == [
        "backward | 10 ms | 50.0 % | 400 ms",
        "data wait | 5 ms | 25.0 % | 200 ms",
        "forward | 4 ms | 20.0 % | 160 ms",
        "not attributed | 1.00 ms | 5.0 % | 40.0 ms",
    ]


def test_device_time_is_printed_if_it_differs(seen) -> None:
    stages = {**STAGES, "forward": StageResult(host_s=0.16, device_s=0.3, share=0.2)}
    shown = seen(profile(result=result(stages=stages)))
    assert "stage | per step | share of a step | total | on the device" in shown
    assert "forward | 4 ms | 20.0 % | 160 ms | 300 ms" in shown


def test_the_loader_is_shown_by_batch_and_by_image(seen) -> None:
    shown = seen(profile())
    assert "decode | 200 ms | 55.6 % | 4 ms | 62.5 µs" in shown
    assert "batches that were ready | 75.0 %" in shown and "workers busy | 50.0 %" in shown


def test_bytes_sent_and_the_straggler_are_printed(seen) -> None:
    straggler = StragglerResult(lost_s=0.002, share=0.1, rank=1, stage="backward", late_s=0.004)
    shown = seen(profile(communication=COMMUNICATION, timed_run="buckets", result=result(straggler=straggler)))
    assert "exposed | 3 ms per step, 15.0 % of it" in shown and "sent | 45 MB per step and rank" in shown
    assert "hidden behind backward | 70.0 % of that" in shown
    assert any("The straggler is rank 1, 4 ms later than the others, mostly in backward." in line for line in shown)


def test_probes_are_shown_beside_the_base_and_their_ceilings_replace_its_estimate(seen) -> None:
    probe = ProbeResult.from_runs(
        {1: result(3000.0), 2: result(4000.0)}, {1: result(1000.0), 2: result(1000.0)}, FREE_DATA
    )
    shown = seen(profile(probes=(probe,), ceilings=Ceilings(free_data=probe.ratio)))
    assert "base | nothing | 1,000 | 900 to 1,100 | 1.00x |" in [f"{line} |" for line in shown]
    assert "free-data | reading | 3,500 | 3,000 to 4,000 | 3.50x (3.00 to 4.00) | data.replay=host" in shown
    assert any("Ceiling: without data loading: at most 3.5x." in line for line in shown)
    assert any(line.endswith("data.workers=4") for line in shown)


def test_without_probes_the_estimate_stands(seen) -> None:
    assert any("Ceiling: at most 1.3x without waiting for data." in line for line in seen(profile()))


def test_a_skipped_probe_is_printed_with_its_reason(seen) -> None:
    assert "free-model | no such model" in seen(profile(left_out=(SkippedProbe("free-model", "no such model"),)))


def test_the_cost_of_the_model_is_printed_as_far_as_known(seen) -> None:
    shown = seen(profile(cost=COST))
    assert "achieved | 3.34 TFLOP/s" in shown and "share of the peak (MFU) | 10.0 %" in shown
    assert "share of the roofline | 25.0 %" in shown and "source of the peak | a data sheet" in shown
    unknown = {**COST, "peak_flops_per_s": None, "mfu": None, "roofline_images_per_s": None, "roofline_share": None}
    assert not [line for line in seen(profile(cost=unknown)) if "MFU" in line or line.startswith("peak")]


def test_the_trace_and_the_nsight_command_are_printed(seen, tmp_path: Path) -> None:
    (tmp_path / "trace.json.gz").touch()
    shown = seen(profile(trace_share=1.002), nsys="nsys profile --trace=cuda paceline train x")
    assert any(line.startswith("trace |") and "ui.perfetto.dev" in line for line in shown)
    assert "stages in rank 0's trace sum to 100.2 % of its measured step time" in shown
    assert "nsys profile --trace=cuda paceline train x" in shown


def test_json_on_stdout_equals_profile_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    probe = ProbeResult.from_runs({1: result(3000.0)}, {1: result(1000.0)}, FREE_DATA)
    found = profile(probes=(probe,), ceilings=Ceilings(free_data=3.0), cost=COST)
    show_profile(found, RunDir(tmp_path), nsys="", as_json=True)
    values = json.loads(capsys.readouterr().out)
    assert values == json.loads(json.dumps(found.to_dict()))
    assert values["base"] == {"images_per_s": 1000, "spread": [900, 1100], "n": 1}
    assert values["probes"] == [
        {
            "name": "free-data",
            "patch": ["data.replay=host"],
            "images_per_s": 3000,
            "spread": [2900, 3100],
            "n": 1,
            "ratio": 3,
            "ratio_spread": None,
            "explains": "reading",
        }
    ]
    assert values["ceilings"] == {"free_data": 3.0}
    assert values["verdict"]["ceiling"] == "without data loading: at most 3.0x"
    assert (values["recipe"], values["steps"], values["ranks"]) == ("ba9876543210", 40, 2)
    assert (values["communication"], values["timed_run"], values["trace_share"]) == (None, "", None)
    assert values["host_to_device"] is None


@pytest.mark.parametrize("word", ["train.steps=5", "train.epochs=2", "measure.clock=off"])
def test_a_length_and_a_clock_that_is_off_are_refused(word: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=rf"^{word.partition('=')[0]}: "):
        run_verb(tmp_path, word)


def run_verb(folder: Path, *words: str, **options: Any) -> int:
    return verb.profile(
        ProfileOptions(args=["digits", *words], ranks="1", run_dir=folder / "run", **{"as_json": True, **options})
    )


@pytest.mark.parametrize(
    ("requested", "words", "message"),
    [
        ({"repeats": 3}, (), "--repeats: 3 needs separate runs"),
        ({"trace": True}, (), "--trace: needs a separate run"),
        ({}, ("measure.trace=5",), "--trace: needs a separate run"),
        ({"nvtx": True}, (), "--nvtx: needs a separate run"),
    ],
)
def test_options_that_need_more_runs_are_refused_on_ranks_of_a_launcher(
    requested: dict[str, Any], words: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "enter_world", lambda: World(launcher="torchrun"))
    with pytest.raises(RecipeError, match=rf"^{message}.* torchrun .*\(leave it out"):
        run_verb(tmp_path, *words, **requested)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[TrialOutcome]:
    """Return a list to fill with how runs end, in the place of running them; results lie in their run directories."""
    ended: list[TrialOutcome] = []

    def run(*args: object) -> Iterator[TrialOutcome]:
        yield from ended

    monkeypatch.setattr(verb, "run_interleaved", run)
    return ended


def test_a_refused_base_run_ends_the_profile_without_files(outcomes, tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    outcomes.append(TrialOutcome(Trial("base"), 1, rundir, None, "data.source: no such folder", 2, "error: ..."))
    with pytest.raises(TrialError, match=r"^data\.source: no such folder$") as raised:
        run_verb(tmp_path)
    assert raised.value.exit_code == 2
    assert not list((tmp_path / "run").iterdir())


def test_the_traceback_of_a_bug_is_printed(outcomes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = "Traceback\n  somewhere\nerror: rank 0 of 1: KeyError: 'x'\n"
    outcomes.append(
        TrialOutcome(Trial("base"), 1, RunDir(tmp_path / "run"), None, "rank 0 of 1: KeyError: 'x'", 1, printed)
    )
    with pytest.raises(TrialError):
        run_verb(tmp_path)
    assert capsys.readouterr().err == "4 runs of 50 steps\nTraceback\n  somewhere\n"


def test_the_warning_that_slurm_sends_interrupts_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(*args: object) -> Iterator[TrialOutcome]:
        signal.raise_signal(signal.SIGUSR1)
        yield from ()

    monkeypatch.setattr(verb, "run_interleaved", warned)
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_verb(tmp_path)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").touch()
    with pytest.raises(RecipeError, match="already holds a run"):
        run_verb(tmp_path)


@pytest.mark.parametrize("marks", ["on", "ops"])
def test_the_nsight_command_captures_the_range_and_lets_the_run_end(
    outcomes, tmp_path, capsys, monkeypatch, marks: str
) -> None:
    """The options are those of NVIDIA's user guide; what follows them is a training that this program starts."""
    monkeypatch.setenv("COLUMNS", "200")
    rundir = RunDir(tmp_path / "run")
    outcomes.append(TrialOutcome(Trial("base"), 1, rundir, result()))
    monkeypatch.setattr("paceline.lab.profile.compute_efficiency", lambda *args: {})
    monkeypatch.setattr("paceline.cli.report.try_write_report", lambda rundir: None)
    assert run_verb(tmp_path, *(["measure.nvtx=ops"] if marks == "ops" else []), nvtx=marks == "on", as_json=False) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("nsys"))
    words = shlex.split(line)
    program = words.index("paceline")
    assert words[:program] == [
        *("nsys", "profile", "--trace=cuda,nvtx,osrt", "--capture-range=nvtx", "--nvtx-capture=PROFILE"),
        *("--capture-range-end=stop", "--env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0", f"--output={rundir.path}/nsys"),
    ]
    assert words[program:][:4] == ["paceline", "train", f"{rundir.path}/base.yaml", f"measure.nvtx={marks}"]
