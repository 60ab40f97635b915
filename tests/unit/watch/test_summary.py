"""The time of watched steps adds up, and the bottleneck is named when it is clear, else not."""

import pytest

from paceline.core.results import CpuResult
from paceline.core.stages import display_name
from paceline.measure.bottleneck import WAITING_SHARE
from paceline.watch.live import LiveLine, describe_progress
from paceline.watch.records import MAX_STEPS, RecordReader
from paceline.watch.summary import choose_ranks, summarize

from .written import STEP_S, end, header, pause, steps, write

COMMAND = ("python", "train.py")
N = 110


@pytest.fixture
def summary_of(tmp_path):
    """Return a function from the records of each process to the result."""

    def build(*processes, warmup=10, code=0, cpu=None, max_steps=MAX_STEPS):
        for number, records in enumerate(processes):
            write(tmp_path, *records, name=f"node-{number}.jsonl")
        reader = RecordReader(tmp_path, max_steps)
        reader.update()
        return summarize(reader.processes(), COMMAND, code, warmup, cpu=cpu)

    return build


def alone(*records, framework="", **steps_of):
    return [header(framework=framework), pause("start_up", 100, 110), *records, *steps(N, **steps_of), end(125.0)]


def test_times_are_those_of_the_steps_after_the_warm_up(summary_of):
    slow_start = steps(10, start_s=109.0, step_s=1.0)
    later = [
        each | {"n": each["n"] + 10, "start_s": each["start_s"] + 9, "end_s": each["end_s"] + 9} for each in steps(20)
    ]
    result = summary_of([header(), *slow_start, *later, end(130.0)])
    assert (result.steps, result.warmup_steps, result.measured_steps) == (30, 10, 20)
    assert result.step_s == pytest.approx(STEP_S)
    assert result.step_spread == pytest.approx((STEP_S, STEP_S))
    assert result.samples_per_s == pytest.approx(320)
    assert result.steps_s == pytest.approx(12)
    assert result.stages["backward"].host_s == pytest.approx(20 * 0.2 / 3)
    assert sum(each.share for each in result.stages.values()) == pytest.approx(1)
    assert (result.command, result.exit_code, result.attributed) == (COMMAND, 0, pytest.approx(1))


def test_samples_of_batches_that_are_requested_ahead_count_once(summary_of):
    records = alone()
    taken = [each for each in records if each["kind"] == "step"]
    taken[0]["samples"], taken[-1]["samples"] = 64, None
    assert summary_of(records).samples_per_s == pytest.approx(320)
    assert summary_of(alone(samples=None)).samples_per_s is None


def test_pauses_inside_of_steps_are_no_part_of_them(summary_of):
    records = alone(pause("evaluate", 115.001, 115.051), pause("checkpoint", 115.06, 115.08))
    paused = next(each for each in records if each.get("n") == 50)
    paused["stages"] = {"forward": 0.03}
    result = summary_of(records)
    assert result.pauses == pytest.approx({"evaluate": 0.05, "checkpoint": 0.02})
    assert result.num_pauses == {"evaluate": 1, "checkpoint": 1}
    assert result.steps_s == pytest.approx(N * STEP_S - 0.07)
    assert result.start_up_s == 10
    assert result.wall_s == 25
    assert sum(each.share for each in result.stages.values()) == pytest.approx(1, abs=1e-3)


CLEAR = {
    "input-bound": {"data_wait": 0.4},
    "copy-bound": {"h2d": 0.4},
    "communication-bound": {"exposed_communication": 0.4},
    "sync-bound": {"sync": 0.4},
    "logging-bound": {"log": 0.4},
    "compute-bound": {"data_wait": 0.1, "log": 0.05, "other": 0.02},
}


@pytest.mark.parametrize("name", CLEAR)
def test_the_largest_avoidable_time_is_the_bottleneck(summary_of, name):
    verdict = summary_of(alone(**CLEAR[name])).verdict
    assert verdict["bottleneck"] == name
    share = "83 %" if name == "compute-bound" else "40 %"
    assert share in verdict["evidence"]
    assert (verdict["try"] == "") == (name == "compute-bound")  # on a CPU


@pytest.mark.parametrize("name", ["evaluate", "checkpoint", "epoch_boundary"])
def test_a_pause_of_more_than_half_of_the_time_is_the_bottleneck(summary_of, name):
    names = {"evaluate": "evaluation-bound", "checkpoint": "checkpoint-bound", "epoch_boundary": "input-bound"}
    result = summary_of(alone(pause(name, 121, 135)))
    assert result.verdict["bottleneck"] == names[name]
    assert ("persistent_workers" in result.verdict["try"]) == (name == "epoch_boundary")
    assert summary_of(alone(pause(name, 121, 124))).verdict["bottleneck"] == "compute-bound"


def test_work_on_batches_in_the_loop_is_told_from_waiting_for_them(summary_of):
    prepares = summary_of(alone(data_wait=0.1, prepare=0.3)).verdict
    assert (prepares["bottleneck"], "30 %" in prepares["evidence"]) == ("input-bound", True)
    assert "into the dataset" in prepares["try"]
    assert "num_workers" in summary_of(alone(data_wait=0.4, prepare=0.3)).verdict["try"]


def test_code_that_is_not_observed_is_not_guessed(summary_of):
    result = summary_of(alone(other=WAITING_SHARE + 0.02))
    assert result.verdict["bottleneck"] == "unknown"
    assert "22.0 %" in result.verdict["evidence"]
    assert result.attributed == pytest.approx(0.78)


def test_a_wait_is_no_bottleneck_if_most_of_a_step_is_not_observed(summary_of):
    assert summary_of(alone(data_wait=0.25, other=0.6)).verdict["bottleneck"] == "unknown"
    assert summary_of(alone(data_wait=0.25, other=0.4)).verdict["bottleneck"] == "input-bound"


def on_gpu(records, **device_shares):
    """Return records with device seconds, as shares of a step."""
    stages = {name: share * STEP_S for name, share in device_shares.items()}
    return [each | {"device_stages": stages} if each["kind"] == "step" else each for each in records]


def test_waiting_for_values_while_the_gpu_computes_costs_nothing(summary_of):
    host = {"sync": 0.7}
    busy = summary_of(on_gpu(alone(**host), forward=0.4, backward=0.55, other=0.05))
    assert busy.verdict["bottleneck"] == "compute-bound"
    assert busy.has_gpu
    assert "autocast" in busy.verdict["try"]
    idle = summary_of(on_gpu(alone(**host), forward=0.2, backward=0.4, sync=0.4))
    assert idle.verdict["bottleneck"] == "sync-bound"


def test_without_times_of_the_gpu_waiting_for_values_is_not_judged(summary_of):
    records = [each | {"memory": 10**9} if each["kind"] == "step" else each for each in alone(sync=0.7)]
    result = summary_of(records)
    assert result.memory_bytes == 10**9
    assert result.verdict["bottleneck"] == "unknown"
    assert "70.0 %" in result.verdict["evidence"]


FRAMEWORKS = {
    "": "num_workers",
    "timm": "--workers",
    "lightning": "num_workers",
    "transformers": "--dataloader_num_workers",
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_advice_is_in_the_words_of_the_framework(summary_of, framework):
    result = summary_of(alone(framework=framework, data_wait=0.5))
    assert FRAMEWORKS[framework] in result.verdict["try"]
    assert result.framework == framework


def two_ranks(late: int, stage: str, number: int = N, **other):
    """Return two ranks of which one spends 40 % of a step more in `stage`, and the other waits for it."""
    ranks = []
    for rank in range(2):
        where = stage if rank == late else "exposed_communication"
        records = steps(number, **{where: 0.4, **other})
        ranks.append([header(rank=rank, world_size=2), *records, end(125.0)])
    return ranks


@pytest.mark.parametrize("stage", ["data_wait", "forward", "backward", "log", "other"])
@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_is_named_with_its_stage(summary_of, late, stage):
    result = summary_of(*two_ranks(late, stage))
    assert result.verdict["bottleneck"] == "straggler-bound"
    assert f"rank {late}" in result.verdict["evidence"]
    assert display_name(stage) in result.verdict["evidence"]
    assert (result.straggler.rank, result.straggler.stage) == (late, stage)
    assert [each.rank for each in result.ranks] == [0, 1]
    assert (result.world_size, result.communication.exposed_s) == (2, pytest.approx(0.04 * (late == 1)))


@pytest.mark.parametrize(
    ("lost", "bottleneck"), [(0.05, "straggler-bound"), (0.15, "straggler-bound"), (0.3, "unknown")]
)
def test_a_rank_is_not_blamed_for_what_other_programs_may_have_taken(summary_of, lost, bottleneck):
    """It is late by 40 % of a step; `lost` is the part of the time in which others held a core that it wanted."""
    cpu = CpuResult(
        rank=0, cores=2, ranks=1, threads=1, wall_s=20.0, run_s=20.0, waited_s=20 * lost, lost_s=20 * lost,
        share=lost / (1 + lost), own_share=0.0, throttled_share=0.0, others_cores=lost, pressure=0.0, switches=0,
    )  # fmt: skip
    verdict = summary_of(*two_ranks(1, "forward"), cpu=cpu).verdict
    assert verdict["bottleneck"] == bottleneck
    assert "rank 1" in verdict["evidence"]


def test_ranks_that_are_late_in_turn_are_not_judged(summary_of):
    both = zip(two_ranks(0, "forward"), two_ranks(1, "forward"), strict=True)
    turns = [[each[n % 2] for n, each in enumerate(zip(*records, strict=True))] for records in both]
    result = summary_of(*turns)
    assert (result.straggler.rank, result.straggler.share) == (None, pytest.approx(0.4))
    assert result.verdict["bottleneck"] == "unknown"
    assert "40.0 %" in result.verdict["evidence"]


def test_equal_ranks_have_no_straggler(summary_of):
    ranks = [[header(rank=rank, world_size=2), *steps(N, exposed_communication=0.1), end(125.0)] for rank in range(2)]
    result = summary_of(*ranks)
    assert result.straggler.rank is None
    assert result.verdict["bottleneck"] == "compute-bound"


def test_ranks_are_compared_in_steps_in_which_none_paused(summary_of):
    """Rank 0 evaluates, and rank 1 waits for it: that is no straggler."""
    ranks = [[header(rank=rank, world_size=2), *steps(N, exposed_communication=0.1)] for rank in range(2)]
    ranks[1][21]["stages"]["exposed_communication"] += 50
    start_s = ranks[0][21]["start_s"]
    ranks[0].insert(21, pause("evaluate", start_s, start_s + 0.05))
    result = summary_of(*([*each, end(125.0)] for each in ranks))
    assert result.straggler.lost_s == pytest.approx(0)


@pytest.mark.parametrize(("text", "share"), [("FSDP: waits are part of forward", 0.02), ("another", 0.0)])
def test_ranks_whose_waits_are_in_other_stages_are_not_judged(summary_of, text, share):
    ranks = [
        [header(rank=rank, world_size=2), *steps(N, exposed_communication=share), {"kind": "note", "text": text}]
        for rank in range(2)
    ]
    result = summary_of(*ranks)
    assert (result.straggler, result.verdict["bottleneck"]) == (None, "unknown")
    assert "other ranks" in result.verdict["evidence"]
    assert text in result.notes


def test_ranks_without_common_steps_are_not_compared(summary_of):
    result = summary_of(*two_ranks(1, "forward", number=5))
    assert result.straggler is None
    assert result.verdict["bottleneck"] == "unknown"
    assert "--warmup" in result.verdict["try"]
    assert result.measured_steps == 0


def test_what_the_records_lack_is_noted(summary_of):
    killed = [header(rank=2, world_size=4), *steps(N), {"kind": "note", "text": "no backward seen"}]
    result = summary_of([header(world_size=4), *steps(N), end(125.0)], killed, code=137)
    assert result.exit_code == 137
    assert result.timeline[1].is_killed
    notes = " ".join(result.notes)
    assert "2 ranks of 4" in notes
    assert "rank 2: no backward seen" in notes
    assert "rank 2: was killed" in notes


def test_without_steps_the_result_says_so(summary_of):
    result = summary_of([header()], code=2)
    assert (result.steps, result.world_size, result.exit_code) == (0, 0, 2)
    assert result.verdict["bottleneck"] == "unknown"


def test_of_several_trainings_the_longest_is_summed_up(tmp_path):
    for number, (rank, started_s, length) in enumerate([(0, 100, 20), (1, 101, 20), (0, 200, 80), (1, 201, 80)]):
        records = [header(rank, 2, pid=number, started_s=started_s), *steps(length), end(300.0)]
        write(tmp_path, *records)
    reader = RecordReader(tmp_path)
    reader.update()
    ranks, notes = choose_ranks(reader.processes())
    assert [(each.process.rank, each.num_steps) for each in ranks] == [(0, 80), (1, 80)]
    assert "2 trainings" in notes[0]


def test_totals_of_a_long_run_count_the_steps_that_are_no_longer_kept(summary_of):
    """Its pauses take 27 % of the run, but more time than the steps that are kept."""
    losses = [{"kind": "loss", "n": n, "loss": 1 / (n + 1)} for n in range(N)]
    records = alone(pause("evaluate", 110.02, 110.07), *losses, pause("checkpoint", 121, 125))
    whole, long = summary_of(records), summary_of(records, max_steps=35)
    assert (whole.measured_steps, long.measured_steps) == (N - 10, 35)
    for name in (
        "steps", "wall_s", "start_up_s", "steps_s", "pauses", "num_pauses", "timeline", "first_losses", "last_losses",
    ):  # fmt: skip
        assert getattr(long, name) == getattr(whole, name), name
    assert long.last_losses == tuple(1 / n for n in range(N - 31, N + 1))
    assert long.pauses == pytest.approx({"evaluate": 0.05, "checkpoint": 4})
    assert long.verdict["bottleneck"] == whole.verdict["bottleneck"] == "compute-bound"
    assert any("last 35 steps" in each for each in long.notes) and not whole.notes


def test_a_long_training_has_a_short_curve(summary_of):
    result = summary_of([header(), *steps(1000, data_wait=0.25), end(220.0)])
    assert 100 < len(result.curve) <= 300
    assert result.curve[-1].step == 999
    assert {round(each.data_wait_s, 6) for each in result.curve} == {0.025}


def test_a_lost_terminal_ends_the_live_line_and_not_the_training(tmp_path):
    class Lost:
        def write(self, text):
            raise OSError("gone")

    times = iter([0, 6, 6, 30])
    write(tmp_path, header(), *steps(20))
    live = LiveLine(RecordReader(tmp_path), Lost(), lambda: next(times))
    live()
    live()


def test_the_live_line_comes_now_and_then_and_only_with_new_steps(tmp_path, capsys):
    import sys

    times = iter([0, 1, 6, 6, 7, 40, 40, 70, 70])
    reader = RecordReader(tmp_path)
    live = LiveLine(reader, sys.stderr, lambda: next(times))
    write(tmp_path, header(), *steps(20, data_wait=0.5))
    live()
    assert capsys.readouterr().err == ""
    live()
    line = capsys.readouterr().err
    assert "step 19, 100 ms per step: data wait 50 %, backward 33 %, forward 17 %" in line
    assert line.endswith("\n")
    for _ in range(3):
        live()
    assert capsys.readouterr().err == ""
    assert describe_progress([]) == ""
