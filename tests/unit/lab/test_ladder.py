"""A ladder is measured in pairs: a rung is kept if it is faster and trains alike."""

import json
import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paceline.core.errors import DataError
from paceline.core.results import AccountResult, MemoryResult, RunResult, StageResult, ThroughputResult, TimeResult
from paceline.core.run_dir import RunDir
from paceline.lab.ladder import LadderHardware, LadderRunner
from paceline.lab.ladder_file import Ladder, Rung
from paceline.lab.prepare_data import PreparedData
from paceline.lab.process import start_process
from paceline.lab.runner import ReusePolicy, TrialError, TrialRunner
from paceline.lab.trial import apply_patch, build_run_name
from paceline.recipe.load import Patch, load
from paceline.recipe.schema.source import Pack

from .simulated_machine import Described, starved

TWO_CORES = LadderHardware(gpus=0, cores=2, ranks=1)
RECIPE = load("digits", Patch((("measure.warmup_steps", 0),))).recipe
STEPS = 4
FASTER = {"train.precision=bf16": 2.0, "optim.nesterov=false": 0.5, "data.source.name=pack": 4.0}
"""How many times as fast a setting makes the machine below."""
SCATTER = (1.0, 1.01, 0.99)
"""By the number of the run, so that ratios within a pair do not scatter."""


@dataclass
class Machine:
    """Runs a recipe without training it: its speed is that of its settings, its loss 2, or 3 at a `TRAINS` setting.

    Runs with one of the words `busy` share the cores with other programs.
    """

    commands: list[list[str]] = field(default_factory=list)
    fails: dict[str, tuple[int, str]] = field(default_factory=dict)
    loss: dict[str, float] = field(default_factory=dict)
    losses: dict[str, Sequence[float]] = field(default_factory=dict)
    scatter: dict[str, Sequence[float]] = field(default_factory=dict)
    busy: tuple[str, ...] = ()
    verdict: dict[str, str] = field(default_factory=lambda: {"bottleneck": "unknown", "evidence": "None.", "try": ""})

    def start(self, command: Sequence[str]) -> "Child | Described":
        if "paceline.measure.machine" in command:
            return Described({"logical_cores": 2})
        self.commands.append(list(command))
        return Child(self, list(command))

    @property
    def folders(self) -> list[str]:
        return [Path(command[command.index("--run-dir") + 1]).name for command in self.commands]


@dataclass
class Child:
    machine: Machine
    command: list[str]
    returncode: int | None = None

    def communicate(self, *, timeout: float | None = None) -> tuple[str | None, str | None]:
        words = self.command[self.command.index("train") + 2 :]
        self.returncode, said = next(
            (self.machine.fails[word] for word in words if word in self.machine.fails), (0, "")
        )
        if not self.returncode:
            self._write(words)
        return None, said

    def _write(self, words: list[str]) -> None:
        folder = Path(words[words.index("--run-dir") + 1])
        folder.mkdir(parents=True)
        turn = int(folder.name.rpartition("-")[2])
        rate = 100.0 * SCATTER[turn - 1]
        for word in words:
            rate *= FASTER.get(word, 1.0) * self.machine.scatter.get(word, (1.0, 1.0, 1.0))[turn - 1]
        loss = next((self.machine.loss[word] for word in words if word in self.machine.loss), 2.0)
        loss = next((self.machine.losses[word][turn - 1] for word in words if word in self.machine.losses), loss)
        (folder / "steps.jsonl").write_text(json.dumps({"step": STEPS, "loss": loss}) + "\n", encoding="utf-8")
        patch = Patch.parse([word for word in words if "=" in word])
        ranks = int(words[words.index("--ranks") + 1])
        found = result(rate, apply_patch(RECIPE, patch).hash, ranks, self.machine.verdict)
        RunDir(folder).write_result(starved(found) if set(self.machine.busy) & set(words) else found)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        raise AssertionError("nothing is waited for that has ended")

    def terminate(self) -> None:
        raise AssertionError("nothing is ended that has ended")

    kill = terminate


def result(rate: float, recipe_hash: str, ranks: int, verdict: dict[str, str]) -> RunResult:
    step_s = RECIPE.data.batch_size / rate
    return RunResult(
        status="completed",
        recipe_hash=recipe_hash,
        world_size=ranks,
        epochs=1.0,
        steps=STEPS,
        images_seen=STEPS * RECIPE.data.batch_size,
        eval=None,
        best=None,
        throughput=ThroughputResult(images_per_s=rate, spread=(rate, rate), n=1, excluded_s=0),
        time=TimeResult(wall_s=9.0, startup_s=3.0, train_s=5.0, eval_s=0, checkpoint_s=0, to_target_s=None),
        stages={"forward": StageResult(host_s=STEPS * step_s, device_s=STEPS * step_s, share=1.0)},
        account=AccountResult(
            wall_s=9.0,
            start_up_s=2.0,
            compile_s=1.0,
            warmup_s=0.0,
            stages_s=5.0,
            counted_steps=STEPS,
            pauses={},
            finish_s=0.0,
            residual_s=1.0,
            explained=0.9,
        ),
        memory=MemoryResult(host_bytes=1000),
        verdict=verdict,
        lr="0.1",
        weights_sha256="ab",
        provenance={"device": "cpu", "logical_cores": 2},
    )


@pytest.fixture
def climbing(tmp_path):
    """Return a function that climbs rungs on a machine, and what it said on the way."""
    said: list[str] = []

    def build(
        rungs,
        machine,
        *,
        repeats=3,
        goes_on=False,
        here=TWO_CORES,
        prepare=None,
        propose=None,
        root=tmp_path,
        **runs,
    ):
        runner = TrialRunner(
            RECIPE,
            root / "measured.yaml",
            here.ranks,
            get_folder=lambda trial, repeat: root / "trials" / build_run_name(trial, RECIPE, trial.ranks, repeat),
            reuse_policy=ReusePolicy(root / "replaced", said.append),
            **{"spawn": machine.start, **runs},
        )
        return LadderRunner(
            ladder=Ladder(name="own", recipe="digits", rungs=tuple(rungs), then="auto" if goes_on else "stop"),
            recipe=RECIPE,
            runner=runner,
            hardware=here,
            repeats=repeats,
            prepare=prepare or (lambda form: pytest.fail("nothing is to be made")),
            propose=propose or (lambda recipe, state: "nothing is left"),
            report=said.append,
        )

    def climb(rungs, machine, **options):
        return build(rungs, machine, **options).run()

    climb.said, climb.build = said, build
    return climb


BASE = Rung(name="base")
BF16 = Rung(name="bf16", set={"train.precision": "bf16"}, expects=("forward",))
SLOWER = Rung(name="plain", set={"optim.nesterov": False})
SAME = Rung(name="rare", set={"log.every": "50st"})


def test_what_is_faster_is_kept_and_what_is_not_is_dropped_with_the_reason(climbing):
    climbed = climbing([BASE, BF16, SLOWER, SAME], Machine())
    assert [(rung.name, rung.status) for rung in climbed.rungs] == [
        ("base", "kept"),
        ("bf16", "kept"),
        ("plain", "dropped"),
        ("rare", "dropped"),
    ]
    _, bf16, plain, rare = climbed.rungs
    assert bf16.why == "faster: 2.00x (2.00 to 2.00) in 3 pairs"
    assert plain.why == "slower: 0.50x (0.50 to 0.50) in 3 pairs"
    assert rare.why == "no measurable gain: 1.00x (1.00 to 1.00) in 3 pairs"
    assert (climbed.best.name, climbed.best.patch) == ("bf16", BF16.patch)


def test_a_rung_stands_on_the_last_one_that_was_kept(climbing):
    machine = Machine()
    climbed = climbing([BASE, SLOWER, BF16, SAME], machine)
    assert [rung.below for rung in climbed.rungs] == ["", "base", "base", "bf16"]
    last = [command for command in machine.commands if "04-rare" in command[command.index("--run-dir") + 1]]
    assert all("train.precision=bf16" in command and "optim.nesterov=false" not in command for command in last)


def test_ratios_over_the_first_are_products_of_those_that_were_kept(climbing):
    _, bf16, plain = climbing([BASE, BF16, SLOWER], Machine()).rungs
    assert bf16.over_first.value == pytest.approx(2.0, rel=1e-12)  # rounding of logarithms
    assert plain.over_first.value == pytest.approx(1.0, rel=1e-12)


def test_pairs_swap_their_order_and_share_their_seed(climbing):
    machine = Machine()
    climbing([BASE, BF16], machine)
    order = [name.split("-")[1] for name in machine.folders]
    assert order == ["base"] * 3 + ["below", "bf16", "bf16", "below", "below", "bf16"]
    seeds = [next(word for word in command if word.startswith("seed=")) for command in machine.commands]
    assert seeds == ["seed=0", "seed=1", "seed=2", "seed=0", "seed=0", "seed=1", "seed=1", "seed=2", "seed=2"]


def test_no_gain_is_claimed_where_pairs_scatter(climbing):
    machine = Machine(scatter={"log.every=50st": (1.3, 0.9, 1.2)})
    rare = climbing([BASE, SAME], machine).rungs[1]
    assert rare.over_below.value > 1.1
    assert rare.status == "dropped"
    assert rare.why.startswith("no measurable gain: 1.12x")


def test_what_trains_otherwise_is_dropped_however_fast_it_is(climbing):
    rung = BF16.model_copy(update={"keep": "always"})
    bf16 = climbing([BASE, rung], Machine(loss={"train.precision=bf16": 3.0})).rungs[1]
    assert (bf16.status, bf16.parity.verdict) == ("dropped", "differs")
    assert bf16.why.startswith("trains differently: loss +50.00% (+50.00% to +50.00%) in 3 pairs: beyond 2%")


def test_what_trains_otherwise_on_average_is_dropped_though_its_losses_scatter(climbing):
    machine = Machine(losses={"train.precision=bf16": (2.08, 2.10, 2.06)})
    bf16 = climbing([BASE, BF16], machine).rungs[1]
    assert (bf16.status, bf16.parity.verdict) == ("dropped", "open")
    assert bf16.why.startswith("trains differently: loss +4.00%")


def test_what_is_kept_without_losses_to_compare_is_noted(climbing):
    bf16 = climbing([BASE, BF16], Machine(loss={"train.precision=bf16": math.nan})).rungs[1]
    assert (bf16.status, bf16.parity) == ("kept", None)
    assert "; not proved to train alike: no losses of the same steps were recorded" in bf16.why


def test_what_is_meant_to_train_otherwise_is_not_compared_by_its_losses(climbing):
    rung = BF16.model_copy(update={"parity": "free"})
    bf16 = climbing([BASE, rung], Machine(loss={"train.precision=bf16": 3.0})).rungs[1]
    assert (bf16.status, bf16.parity) == ("kept", None)
    assert "alike" not in bf16.why


def test_a_rung_that_is_always_kept_is_however_slow(climbing):
    plain = climbing([BASE, SLOWER.model_copy(update={"keep": "always"})], Machine()).rungs[1]
    assert (plain.status, plain.why) == ("kept", "slower, and kept at any speed: 0.50x (0.50 to 0.50) in 3 pairs")


def test_a_single_pair_proves_no_gain(climbing):
    bf16 = climbing([BASE, BF16], Machine(), repeats=1).rungs[1]
    assert (bf16.status, bf16.why) == (
        "dropped",
        "one pair proves nothing: 2.00x in 1 pair (ask for --repeats 3)",
    )


def test_a_rung_that_fails_is_reported_and_the_others_go_on(climbing):
    machine = Machine(fails={"optim.nesterov=false": (1, "error: broke\n"), "log.every=50st": (2, "error: refused\n")})
    climbed = climbing([BASE, SLOWER, SAME, BF16], machine)
    assert [(rung.status, rung.why) for rung in climbed.rungs[1:3]] == [("failed", "broke"), ("left_out", "refused")]
    assert climbed.rungs[3].status == "kept"
    assert climbed.rungs[1].images_per_s is None


def test_a_rung_is_not_run_again_once_it_has_failed(climbing):
    machine = Machine(fails={"optim.nesterov=false": (1, "error: broke\n")})
    climbing([BASE, SLOWER], machine)
    assert len(machine.commands) == 3 + 2  # the first rung, and one pair


def test_the_second_run_of_a_pair_is_not_made_once_the_first_has_failed(climbing):
    machine = Machine()

    def start(command):
        machine.fails = {"--json": (1, "error: broke\n")} if len(machine.commands) == 3 else {}
        return Machine.start(machine, command)

    left = climbing([BASE, BF16], machine, spawn=start).rungs[1]
    assert (left.status, left.why) == ("failed", "base: broke")
    assert len(machine.commands) == 3 + 1


def test_a_rung_that_has_no_room_is_reported_as_that(climbing):
    machine = Machine(fails={"train.precision=bf16": (1, "error: rank 1 of 2: CUDA out of memory. Tried to\n")})
    bf16 = climbing([BASE, BF16], machine).rungs[1]
    assert (bf16.status, bf16.why) == ("failed", "out of memory")


def test_data_that_are_gone_before_a_run_leave_the_rung_out(climbing):
    def begins(trial, repeat):
        if trial.name == "02 bf16":
            raise DataError("/data: is gone (fix it)")

    climbed = climbing([BASE, BF16, SLOWER], Machine(), before_run=begins)
    assert [(rung.status, rung.why[:8]) for rung in climbed.rungs[1:]] == [
        ("left_out", "/data: i"),
        ("dropped", "slower: "),
    ]


def test_a_first_rung_that_fails_ends_the_ladder_with_its_exit_code(climbing):
    with pytest.raises(TrialError, match="own: plain: broke") as raised:
        climbing([SLOWER, BF16], Machine(fails={"optim.nesterov=false": (3, "error: broke\n")}))
    assert raised.value.exit_code == 3


@pytest.mark.parametrize(
    ("rung", "here", "why"),
    [
        ({"on": "cuda"}, LadderHardware(0, 2, 1), "only helps with a GPU, but there is none"),
        ({"on": "cpu"}, LadderHardware(1, 2, 1), "only helps without a GPU"),
        ({"on": "ranks"}, LadderHardware(0, 2, 1), "only helps with more than one rank (add --ranks 2)"),
        ({"ranks": 4}, LadderHardware(0, 2, 1), "needs 4 cores (2 here)"),
        ({"ranks": 2}, LadderHardware(1, 8, 1), "needs 2 GPUs (1 here)"),
        ({"set": {"seed": 0}}, LadderHardware(0, 2, 1), "changes nothing: base already has all of it on this machine"),
        ({"set": {"train.precison": "bf16"}}, LadderHardware(0, 2, 1), "train.precison: no such field"),
        ({"ranks": 2, "set": {"data.batch_size": 3}}, LadderHardware(0, 2, 1), "data.batch_size: 3 does not divide"),
    ],
)
def test_what_does_not_fit_is_left_out_before_anything_runs(climbing, rung, here, why):
    machine = Machine()
    left_out = climbing([BASE, Rung(name="rung", **rung)], machine, here=here).rungs[1]
    assert left_out.status == "left_out"
    assert left_out.why.startswith(why)
    assert len(machine.commands) == 3


def test_ranks_of_a_rung_hold_for_those_above_it(climbing):
    machine = Machine()
    rungs = [BASE, Rung(name="two", ranks=2, keep="always", parity="free"), BF16]
    climbed = climbing(rungs, machine)
    ranks = [command[command.index("--ranks") + 1] for command in machine.commands]
    assert ranks == ["1"] * 3 + ["1", "2", "2", "1", "1", "2"] + ["2"] * 6
    assert climbed.best.ranks == 2


def test_nothing_that_is_there_is_run_again(climbing):
    first = climbing([BASE, BF16], Machine())
    again = Machine()
    assert climbing([BASE, BF16, SAME], again).rungs[:2] == first.rungs
    assert {name.split("-")[0] for name in again.folders} == {"03"}
    assert climbing.said.count("02 bf16, run 1 of 3, known: 200 images/s") == 1


def test_a_rung_is_not_left_out_because_its_machine_did_not_report_what_it_is(climbing, tmp_path):
    """The same command is given again, and finds that it does."""
    climbing([BASE, BF16], Machine())
    for path in (tmp_path / "trials").glob("01-base-*"):
        shutil.rmtree(path)
    silent = Machine()

    def start(command):
        if "paceline.measure.machine" in command:
            return start_process([sys.executable, "-S", "-c", "raise SystemExit('no GPU answers')"])
        return silent.start(command)

    with pytest.raises(TrialError, match="cannot describe its machine: no GPU answers"):
        climbing([BASE, BF16], silent, spawn=start)
    assert {name.split("-")[0] for name in silent.folders} == {"01"}


def test_data_are_made_once_a_rung_and_read_by_those_above_until_the_source_is_requested(climbing):
    made = []

    def prepare(form):
        made.append(form)
        return PreparedData(Pack(root="/made.pack"), 12.5, 100)

    back = Rung(name="back", data="source", keep="always")
    machine = Machine()
    _, packed, bf16, last = climbing(
        [BASE, Rung(name="packed", data="pack"), BF16, back], machine, prepare=prepare
    ).rungs
    assert (made, packed.prepare_s, bf16.prepare_s) == (["pack"], 12.5, 0.0)
    assert packed.patch == ("data.source.name=pack", "data.source.root=/made.pack")
    reads = {
        name[:2] + name.split("-")[1]: command for name, command in zip(machine.folders, machine.commands, strict=True)
    }
    assert "data.source.name=pack" in reads["03bf16"]
    assert "data.source.name=pack" not in reads["04back"]
    assert "train.precision=bf16" in reads["04back"]
    assert last.over_below.value == pytest.approx(0.25, rel=1e-12)  # rounding of logarithms


def test_data_that_cannot_be_made_leave_the_rung_out(climbing):
    def prepare(form):
        raise DataError("/data: is gone (fix it)")

    packed = climbing([BASE, Rung(name="packed", data="pack")], Machine(), prepare=prepare).rungs[1]
    assert (packed.status, packed.why) == ("left_out", "/data: is gone (fix it)")


def test_a_result_has_what_its_runs_measured(climbing):
    bf16 = climbing([BASE, BF16], Machine()).rungs[1]
    assert bf16.images_per_s.value == pytest.approx(200.0, rel=1e-12)  # rounding of a mean of three
    assert bf16.epoch_s == STEPS * RECIPE.data.batch_size / bf16.images_per_s.value
    assert bf16.spread == (198.0, 202.0)
    assert (bf16.host_bytes, bf16.device_bytes, bf16.startup_s, bf16.compile_s) == (1000, None, 3.0, 1.0)
    below_s, here_s = bf16.shrank["forward"]
    assert below_s == pytest.approx(2 * here_s, rel=1e-12)
    assert bf16.stages == {"forward": here_s}
    assert [Path(run).parts[0] for run in bf16.runs] == ["trials"] * 6


def test_a_step_is_as_long_as_its_own_batch_takes(climbing):
    rung = Rung(name="base", set={"data.batch_size": 50})
    assert climbing([rung], Machine(), repeats=1).rungs[0].step_s == 50 / 100


def test_an_open_ended_ladder_tries_proposals_until_there_is_none(climbing):
    proposals = iter([SLOWER, BF16, "bf16 has no more to win"])
    seen = []

    def propose(recipe, state):
        seen.append((state.name, state.tried, recipe.train.precision))
        return next(proposals)

    climbed = climbing([BASE], Machine(), goes_on=True, propose=propose)
    assert climbed.stopped == "bf16 has no more to win"
    assert [(rung.name, rung.status) for rung in climbed.rungs[1:]] == [("plain", "dropped"), ("bf16", "kept")]
    assert seen == [("base", (), "fp32"), ("base", ("plain",), "fp32"), ("bf16", ("plain", "bf16"), "bf16")]


def test_data_that_two_rungs_read_were_made_once(climbing):
    prepared = PreparedData(Pack(root="/made.pack"), 12.5, 100)
    rungs = [BASE, Rung(name="packed", data="pack"), BF16.model_copy(update={"data": "pack"})]
    climbed = climbing(rungs, Machine(), prepare=lambda form: prepared)
    assert [rung.prepare_s for rung in climbed.rungs] == [0.0, 12.5, 0.0]
    assert climbed.rungs[2].status == "kept"


def test_seconds_for_data_are_reported_at_the_rung_that_had_them_made_though_it_was_left_out(climbing):
    prepared = PreparedData(Pack(root="/made.pack"), 12.5, 100)
    rungs = [
        BASE,
        Rung(name="elsewhere", data="pack", on="cuda"),
        Rung(name="wrong", data="pack", set={"train.precison": "bf16"}),
        Rung(name="packed", data="pack"),
    ]
    climbed = climbing(rungs, Machine(), prepare=lambda form: prepared)
    assert [(rung.status, rung.prepare_s) for rung in climbed.rungs[1:]] == [
        ("left_out", 0.0),
        ("left_out", 12.5),
        ("kept", 0.0),
    ]


def test_the_seconds_are_those_of_the_first_rung_that_could_be_made(climbing):
    prepared = PreparedData(Pack(root="/made.pack"), 12.5, 100)
    rungs = [BASE, Rung(name="elsewhere", data="pack", on="cuda"), Rung(name="packed", data="pack")]
    climbed = climbing(rungs, Machine(), prepare=lambda form: prepared)
    assert [rung.prepare_s for rung in climbed.rungs] == [0.0, 0.0, 12.5]


def test_turns_that_were_run_one_by_one_are_those_that_climbing_runs(climbing, tmp_path):
    """In whatever order: `climb` starts none of them again, and comes to what it comes to by itself."""
    rungs = [BASE, BF16, SLOWER.model_copy(update={"keep": "always"}), Rung(name="gpu", on="cuda"), SAME]
    alone, parts, rest = Machine(), Machine(), Machine()
    by_itself = climbing(rungs, alone, root=tmp_path / "alone")
    climber = climbing.build(rungs, parts, root=tmp_path / "parts")
    for number, turn in ((number, turn) for number in (5, 2, 4, 1, 3) for turn in (3, 1, 2)):
        outcomes = climber.run_task(number, turn)
        assert len(outcomes) == {1: 1, 4: 0}.get(number, 2)
    assert climbing(rungs, rest, root=tmp_path / "parts").rungs == by_itself.rungs
    assert rest.commands == []
    assert sorted(parts.folders) == sorted(alone.folders) and len(alone.folders) == 3 + 3 * 6


def test_a_turn_has_the_order_that_it_has_in_the_ladder(climbing):
    machine = Machine()
    climber = climbing.build([BASE, BF16], machine)
    climber.run_task(2, 1)
    climber.run_task(2, 2)
    assert [name.split("-")[1] for name in machine.folders] == ["below", "bf16", "bf16", "below"]
    assert climbing.said == [
        "02 below, run 1 of 3: 100 images/s",
        "02 bf16, run 1 of 3: 200 images/s",
        "02 bf16, run 2 of 3: 202 images/s",
        "02 below, run 2 of 3: 101 images/s",
    ]


def test_what_stands_on_a_rung_that_was_not_kept_is_run_again(climbing):
    rungs, parts, rest = [BASE, SLOWER, BF16], Machine(), Machine()
    climber = climbing.build(rungs, parts)
    for number in (1, 2, 3):
        for turn in (1, 2, 3):
            climber.run_task(number, turn)
    assert [rung.status for rung in climbing(rungs, rest).rungs] == ["kept", "dropped", "kept"]
    assert {name.split("-")[0] for name in rest.folders} == {"03"} and len(rest.folders) == 6


def test_a_turn_of_a_rung_that_does_not_fit_here_is_reported_and_done(climbing):
    machine = Machine()
    climber = climbing.build([BASE, Rung(name="gpu", on="cuda"), BF16], machine)
    assert climber.run_task(2, 1) == ()
    assert climbing.said == ["gpu: left out: only helps with a GPU, but there is none"]
    assert machine.commands == []


def test_a_turn_that_fails_is_an_error_unless_the_run_refuses_the_rung(climbing):
    fails = {"optim.nesterov=false": (2, "error: refused\n"), "log.every=50st": (3, "error: broke\n")}
    climber = climbing.build([BASE, SLOWER, SAME], Machine(fails=fails))
    _, refused = climber.run_task(2, 1)
    assert (refused.result, refused.error) == (None, "refused")
    with pytest.raises(TrialError, match="own: rare: refused") as raised:  # below, which is taken to be kept
        climber.run_task(3, 1)
    assert raised.value.exit_code == 2
    with pytest.raises(TrialError, match="own: plain: refused"):  # without its first rung a ladder is none
        climbing.build([SLOWER, BF16], Machine(fails=fails)).run_task(1, 1)


def test_a_turn_makes_the_data_that_the_rungs_below_it_read(climbing):
    made = []

    def prepare(form):
        made.append(form)
        return PreparedData(Pack(root="/made.pack"), 12.5, 100)

    machine = Machine()
    climbing.build([BASE, Rung(name="packed", data="pack"), BF16], machine, prepare=prepare).run_task(3, 1)
    assert made == ["pack"]
    assert all("data.source.root=/made.pack" in command for command in machine.commands)


ALWAYS = Rung(name="bf16", set={"train.precision": "bf16"}, keep="always")


@pytest.mark.parametrize(("rung", "status"), [(BF16, "dropped"), (ALWAYS, "kept")])
def test_no_gain_is_claimed_of_runs_that_shared_the_cores_with_other_programs(climbing, rung, status):
    found = climbing([BASE, rung], Machine(busy=("train.precision=bf16",))).rungs[1]
    assert found.over_below.value == pytest.approx(2.0)
    assert found.status == status
    assert found.why.startswith("unknown")
    assert "held the cores up to 62 % of the time in 3 of 6 runs" in found.starved
    assert found.starved in found.why


def test_runs_that_shared_the_cores_are_made_again_when_the_ladder_is(climbing):
    """And those that did not are not."""
    first = climbing([BASE, BF16], Machine(busy=("train.precision=bf16",)))
    machine = Machine()
    again = climbing([BASE, BF16], machine)
    assert (first.rungs[1].status, again.rungs[1].status) == ("dropped", "kept")
    assert [name.split("-")[1] for name in machine.folders] == ["bf16"] * 3
    assert any("no cores to itself: other processes held the cores 62 % of the time" in line for line in climbing.said)
