"""`paceline ladder --script`: add settings to a training script one by one, and keep each that makes it faster."""

import hashlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.cli.experiment import Session, refuse_launcher, run_experiment, with_steps_time
from paceline.cli.options import LadderOptions
from paceline.cli.tables import print_rows
from paceline.cli.watch import name_script
from paceline.core.errors import PacelineError, RecipeError
from paceline.core.experiments.results import LadderResult, ScriptChanges
from paceline.core.host import usable_cores
from paceline.core.units import count
from paceline.lab.runner import RUN_TIMEOUT_S
from paceline.lab.script_ladder import ScriptHost, ScriptLadderRunner, ScriptOutcome, count_base_runs
from paceline.lab.script_ladder_file import ScriptLadder, describe_rung, load_script_ladder
from paceline.lab.script_settings import ScriptSettings
from paceline.parallel.environ import count_gpus
from paceline.watch.launch import find_program
from paceline.watch.measured_run import MeasuredRun, read_measured, run_measured


def script_ladder(options: LadderOptions, name: str) -> int:
    """Run `paceline ladder --script NAME -- COMMAND`, and return the exit code."""
    ladder, summary = load_script_ladder(name)
    if options.list_only:
        _show_rungs(ladder, summary, as_json=options.as_json)
        return 0
    refuse_launcher("ladder", "put the launcher into the command, behind --")
    _refuse_options(options)
    if not options.args:
        raise RecipeError("--script: no command to measure (add it after --: -- python train.py)")
    find_program(options.args, os.environ)
    changes = {"steps": options.steps, "repeats": options.repeats}
    ladder = ladder.model_copy(update={key: value for key, value in changes.items() if value is not None})
    script = name_script(options.args)
    host = ScriptHost(gpus=count_gpus(os.environ), cores=usable_cores())
    key = {
        "verb": "ladder --script",
        "ladder": ladder.model_dump(mode="json"),
        "command": list(options.args),
        "files": _digest_files(options.args),
        "folder": str(Path.cwd()),
        "host": [socket.gethostname(), host.gpus, host.cores],
    }
    total = count_base_runs(ladder.repeats) + 2 * ladder.repeats * len(ladder.rungs)

    def run(session: Session) -> LadderResult:
        steps = count(ladder.warmup_steps + ladder.steps, "step")
        session.print_line(f"ladder {Path(name).stem}: up to {count(total, 'run')} of {steps} of {script}")
        folder = session.folder.path

        def run_script(settings: ScriptSettings, folder: Path) -> MeasuredRun:
            known = read_measured(
                settings.command, folder, warmup=ladder.warmup_steps, steps=ladder.steps, patches=settings.patches
            )
            if known is not None:  # of an interrupted ladder
                return known
            shutil.rmtree(folder, ignore_errors=True)
            try:
                return run_measured(
                    settings.command,
                    settings.apply_environ(os.environ),
                    folder,
                    warmup=ladder.warmup_steps,
                    steps=ladder.steps,
                    timeout_s=RUN_TIMEOUT_S,
                    patches=settings.patches,
                )
            except OSError as error:
                reason = error.strerror or str(error)
                raise PacelineError(f"{folder}: cannot be written: {reason} (name another --run-dir)") from None

        settings = ScriptSettings(tuple(options.args))
        runner = ScriptLadderRunner(
            ladder.rungs, settings, run_script, folder, host, ladder.repeats, session.print_line
        )
        return _build_result(ladder, name, summary, options.args, runner.run(), folder)

    return run_experiment(f"ladder-{script}", key, options, run)


def _refuse_options(options: LadderOptions) -> None:
    given = {
        "--ranks": options.ranks != "auto",
        "--recipe": options.recipe is not None,
        "--task": options.task is not None,
        "--trust-code": options.trust_code,
        "--oversubscribe": options.oversubscribe,
    }
    for option, is_given in given.items():
        if is_given:
            fix = "put torchrun into the command" if option == "--ranks" else "leave it out"
            raise RecipeError(f"{option}: has no effect with --script ({fix})")


def _digest_files(command: Sequence[str]) -> dict[str, str]:
    """Return a digest of the script, without which an unfinished ladder would go on with another one."""
    found = {str(Path(word)): _read_script(word) for word in command}
    return {name: hashlib.sha256(text).hexdigest() for name, text in found.items() if text is not None}


def _names_option(source: bytes, option: str) -> bool:
    return any(f"{quote}{option}{quote}".encode() in source for quote in "'\"")


def _read_script(word: str) -> bytes | None:
    """Return the content of a script that the command names."""
    path = Path(word)
    return path.read_bytes() if word.endswith(".py") and os.access(word, os.R_OK) and path.is_file() else None


def _build_result(
    ladder: ScriptLadder, name: str, summary: str, command: Sequence[str], outcome: ScriptOutcome, folder: Path
) -> LadderResult:
    first = outcome.first.result
    settings = outcome.settings
    if first.framework == "timm":
        sources = [text for word in command if (text := _read_script(word)) is not None]
        settings = settings.with_timm_options(lambda option: any(_names_option(text, option) for text in sources))
    return LadderResult(
        ladder=Path(name).stem,
        summary=summary,
        recipe=name_script(command),
        recipe_hash="",
        ranks=first.world_size,
        steps=ladder.steps,
        warmup_steps=ladder.warmup_steps,
        repeats=ladder.repeats,
        batch_size=0,
        rungs=tuple(with_steps_time(rung, ladder.steps) for rung in outcome.rungs),
        best=outcome.best,
        best_patch=(),
        wall_s=outcome.wall_s,
        command=("paceline", *sys.argv[1:]),
        provenance={"torch": first.torch, "python": first.python, "host": ", ".join(first.hosts)},
        script=ScriptChanges(
            command=tuple(command),
            best_command=settings.command_line(),
            best_code=settings.code_lines("cuda" if first.has_gpu else "cpu", first.framework),
            note=outcome.note,
        ),
    )


def _show_rungs(ladder: ScriptLadder, summary: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(ladder.model_dump(mode="json"), indent=2))
        return
    print_rows([(rung.name, " ".join(describe_rung(rung)), rung.explains) for rung in ladder.rungs], summary)
