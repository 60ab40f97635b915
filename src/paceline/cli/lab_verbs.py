"""The verbs of the lab. Each verb's work is in its own file, imported when it is called."""

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.arguments import Json, Ranks, Words


def profile(
    words: Words = None,
    ranks: Ranks = "auto",
    run_dir: Annotated[Path | None, typer.Option(help="Where it is written (runs/profile-RECIPE-TIME).")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps after the warm-up that are measured.")] = 40,
    repeats: Annotated[int, typer.Option(min=1, help="How often the run and each probe is measured, in turns.")] = 1,
    probes: Annotated[bool, typer.Option("--probes/--no-probes", help="Measure what free data and such give.")] = True,
    trace: Annotated[bool, typer.Option("--trace", help="Write a Chrome trace of all ranks.")] = False,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Mark stages for Nsight Systems; prints its command.")] = False,
    as_json: Json = False,
) -> int:
    """Train for a few steps, and say where each second went and what would save it."""
    from paceline.cli.profile import profile as work

    return work(
        words or [],
        ranks,
        run_dir,
        steps=steps,
        repeats=repeats,
        probes=probes,
        trace=trace,
        nvtx=nvtx,
        as_json=as_json,
    )
