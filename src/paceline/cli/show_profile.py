"""Show a profile: tables for a person, `profile.json` for a program."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from paceline.cli.show import print_rows
from paceline.core.results import CommunicationResult, LoaderResult, StragglerResult
from paceline.core.rundir import RunDir
from paceline.core.units import count
from paceline.data.sources.places import printable
from paceline.lab.profile import Probed, Profile, Rate


def show_profile(profile: Profile, rundir: RunDir, *, nsys: str, as_json: bool) -> None:
    """Print what was found; `nsys` is the command for Nsight Systems, where it was asked for."""
    if as_json:
        print(json.dumps(profile.to_dict(), indent=2))
        return
    _print_stages(profile)
    if profile.result.loader is not None and profile.result.loader.batches:
        _print_loader(profile.result.loader)
    if profile.result.communication is not None:
        rows = [*_communication(profile.result.communication), *_straggler(profile.result.straggler)]
        print_rows(rows, "between the ranks")
    if profile.probes:
        _print_probes(profile.base, profile.probes)
    print_rows(_rows(profile, rundir), f"profile of recipe {profile.recipe}")
    if nsys:
        print(f"Nsight Systems:\n  {nsys}")
    print(f"run directory: {printable(rundir.path)}")


def _print_stages(profile: Profile) -> None:
    """Print what a step was spent on; the device's own time only where it is not the host's."""
    result, steps = profile.result, profile.steps
    stages = sorted(result.stages.items(), key=lambda item: -item[1].host_s)
    has_device = any(stage.device_s != stage.host_s for _, stage in stages)
    share = sum(stage.share for _, stage in stages)
    wall_s = sum(stage.host_s for _, stage in stages) / share if share else 0.0
    rows = [
        (name, _ms(stage.host_s / steps), *((_ms(stage.device_s / steps),) if has_device else ()), f"{stage.share:.1%}")
        for name, stage in stages
    ]
    rows.append(
        ("no stage", _ms((1 - share) * wall_s / steps), *(("",) if has_device else ()), f"{max(0.0, 1 - share):.1%}")
    )
    headings = ("stage", "ms", *(("ms of the device",) if has_device else ()), "share")
    where = f"mean of {count(steps, 'step')}" + (", rank 0" if profile.ranks > 1 else "")
    where += ", turn 1" if profile.base.n > 1 else ""
    _print_table(f"a step: {_ms(wall_s / steps)} ms ({where})", headings, rows)


def _print_loader(loader: LoaderResult) -> None:
    """Print what making a batch took: beside the steps, and with several workers at once."""
    parts = {
        "read": loader.read_s,
        "decode": loader.decode_s,
        "augment": loader.augment_s,
        "collate": loader.collate_s,
    }
    rows = [
        (name, _ms(seconds / loader.batches), _us(seconds / max(1, loader.images))) for name, seconds in parts.items()
    ]
    workers = count(loader.workers, "worker") if loader.workers else "the rank itself"
    _print_table(f"a batch, made by {workers}", ("part", "ms a batch", "us an image"), rows)
    facts = [f"{_bytes(loader.bytes_read / loader.batches)} read and {_bytes(loader.bytes_made / loader.batches)} made"]
    if loader.workers:
        facts += [f"{loader.ready:.0%} of batches were ready when asked for", f"{loader.queue_depth:.1f} lay waiting"]
    if loader.busy is not None:
        facts.append(f"workers were busy {loader.busy:.0%} of the time")
    print(f"a batch: {', '.join(facts)}")


def _communication(measured: CommunicationResult) -> Iterable[tuple[str, str]]:
    yield "exposed", f"{_ms(measured.exposed_s)} ms a step ({measured.share:.1%})"
    if measured.bytes is not None:
        yield "sent", f"{_bytes(measured.bytes)} a step, in {count(len(measured.buckets), 'bucket')}"
    if measured.wire_s is not None:
        hidden = "" if measured.overlap is None else f", {measured.overlap:.0%} of it behind backward"
        yield "on the wire", f"{_ms(measured.wire_s)} ms a step{hidden}"


def _straggler(found: StragglerResult | None) -> Iterable[tuple[str, str]]:
    if found is None:
        return
    whom = "now one rank and now another"
    if found.rank is not None:
        whom = f"rank {found.rank}, by {_ms(found.late_s)} ms" + (f", in {found.stage}" if found.stage else "")
    yield "waiting for the latest", f"{_ms(found.lost_s)} ms a step ({found.share:.1%}): {whom}"


def _print_probes(base: Rate, probes: Sequence[Probed]) -> None:
    rows = [("base", *_rate(base), "1.00x", "nothing")]
    for probe in probes:
        spread = probe.ratio_spread
        ratio = f"{probe.ratio:.2f}x" + (f" ({spread[0]:.2f} to {spread[1]:.2f})" if spread else "")
        rows.append((probe.trial.name, *_rate(probe.rate), ratio, probe.trial.explains))
    turns = f"{count(base.n, 'turn')} of each"
    _print_table(
        f"with a part of the work for free ({turns})", ("run", "images/s", "from", "to", "ratio", "free"), rows
    )


def _rate(rate: Rate) -> tuple[str, str, str]:
    return f"{rate.images_per_s:,.0f}", f"{rate.spread[0]:,.0f}", f"{rate.spread[1]:,.0f}"


def _rows(profile: Profile, rundir: RunDir) -> list[tuple[str, str]]:
    base, verdict = profile.base, profile.verdict
    low, high = base.spread
    rows = [("throughput", f"{base.images_per_s:,.0f} images/s ({low:,.0f} to {high:,.0f})")]
    rows += _cost(profile.cost)
    rows.append(("verdict", f"{verdict['bottleneck']}. {verdict['evidence']}"))
    if verdict.get("ceiling"):
        rows.append(("ceiling", verdict["ceiling"]))
    if verdict["try"]:
        rows.append(("try", verdict["try"]))
    rows += [(each.name, f"left out: {each.reason}") for each in profile.left_out]
    if rundir.merged_trace.exists():
        rows.append(("trace", f"{printable(rundir.merged_trace)}: open it on https://ui.perfetto.dev"))
        rows.append(("", f"{printable(rundir.trace)}: each rank's own, for HolisticTraceAnalysis"))
    return rows


def _cost(cost: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what the model asks for and what the device gives, as far as either is known."""
    if not cost:
        return
    yield "model", f"{cost['parameters']:,} parameters, {_flops(cost['flops_per_image'])} an image to train on"
    reached = f"{_flops(cost['achieved_flops_per_s'])}/s"
    if cost["mfu"] is None:
        yield "computing", f"{reached} on each rank"
        return
    peak = f"{_flops(cost['peak_flops_per_s'])}/s ({cost['peak_source']})"
    yield "computing", f"{reached} on each rank, an MFU of {cost['mfu']:.1%} of {peak}"
    if cost["roofline_share"] is not None:
        bound = f"{cost['roofline_images_per_s']:,.0f} images/s that memory and arithmetic would allow"
        yield "roofline", f"{cost['roofline_share']:.1%} of the {bound}"


def _flops(flops: float) -> str:
    """Return `3.3 GFLOP`."""
    for prefix, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if flops >= scale:
            return f"{flops / scale:,.3g} {prefix}FLOP"
    return f"{flops / 1e6:,.3g} MFLOP"


def _print_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table whose first column names, whose last one tells when it is words, and whose others are numbers."""
    table = Table(box=box.ROUNDED)
    for number, heading in enumerate(headings):
        is_text = number == 0 or heading == "free"
        style = "bold" if number == 0 else ""
        table.add_column(heading, justify="left" if is_text else "right", style=style, no_wrap=not is_text)
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, markup=False)
    console.print(title, style="bold", soft_wrap=True)  # a table would fold its title at its own width
    console.print(table)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f}" if abs(seconds) < 0.1 else f"{1e3 * seconds:,.0f}"


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.1f}"


def _bytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.3g} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:,.3g} kB"
