"""Print a profile: tables for people, `profile.json` for programs."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from paceline.cli.show import print_rows, print_stages
from paceline.cli.tables import print_table
from paceline.core.results import CommunicationResult, LoaderResult, StragglerResult
from paceline.core.rundir import RunDir
from paceline.core.stages import display_name
from paceline.core.units import count, flops, milliseconds, number, seconds, share, size
from paceline.data.sources.places import printable

if TYPE_CHECKING:  # imports torch
    from paceline.lab.profile import ProbeResult, Profile, ThroughputSummary


def show_profile(profile: "Profile", rundir: RunDir, *, nsys: str, as_json: bool) -> None:
    """Print the profile; `nsys` is the command for Nsight Systems, or ""."""
    if as_json:
        print(json.dumps(profile.to_dict(), indent=2))
        return
    whose = ["rank 0"] if profile.ranks > 1 else []
    whose += ["repeat 1"] if profile.base.n > 1 else []
    print_stages(profile.result.stages, profile.steps, ", ".join(whose))
    if profile.result.loader is not None and profile.result.loader.batches:
        _print_loader(profile.result.loader)
    if profile.communication is not None:
        rows = [
            *_communication_rows(profile.communication, profile.timed_run),
            *_straggler_row(profile.result.straggler),
        ]
        print_rows(rows, "communication between ranks")
    if profile.probes:
        _print_probes(profile.base, profile.probes)
    print_rows(_profile_rows(profile, rundir), f"profile of recipe {profile.recipe}")
    if nsys:
        print(f"Nsight Systems:\n  {nsys}")
    print(f"run directory: {printable(rundir.path)}")


def _print_loader(loader: LoaderResult) -> None:
    """Print the time to make a batch, which overlaps with steps and other workers."""
    parts = {
        "read": loader.read_s,
        "decode": loader.decode_s,
        "augment": loader.augment_s,
        "collate": loader.collate_s,
    }
    rows = [
        (name, milliseconds(each_s / loader.batches), seconds(each_s / max(1, loader.images)))
        for name, each_s in parts.items()
    ]
    workers = count(loader.workers, "worker") if loader.workers else "the rank itself"
    print_table(f"loading a batch, by {workers}", ("part", "per batch", "per image"), rows)
    facts = [f"{size(loader.bytes_read / loader.batches)} read and {size(loader.bytes_made / loader.batches)} made"]
    if loader.workers:
        facts += [
            f"{share(loader.ready)} of batches were ready when requested",
            f"{number(loader.queue_depth)} in the queue",
        ]
    if loader.busy is not None:
        facts.append(f"workers were busy {share(loader.busy)} of the time")
    print(f"per batch: {', '.join(facts)}")


def _communication_rows(measured: CommunicationResult, timed_run: str) -> Iterable[tuple[str, str]]:
    yield "exposed", f"{milliseconds(measured.exposed_s)} per step ({share(measured.share)})"
    if measured.bytes is not None:
        yield "sent", f"{size(measured.bytes)} per step, in {count(len(measured.buckets), 'bucket')}"
    if measured.wire_s is not None:
        hidden = "" if measured.overlap is None else f", {share(measured.overlap)} of it overlapped with backward"
        where = f" (in the run {timed_run})" if timed_run else ""
        yield "on the wire", f"{milliseconds(measured.wire_s)} per step{hidden}{where}"


def _straggler_row(straggler: StragglerResult | None) -> Iterable[tuple[str, str]]:
    if straggler is None:
        return
    whom = "no rank in particular"
    if straggler.rank is not None:
        whom = f"rank {straggler.rank}, by {milliseconds(straggler.late_s)}" + (
            f", in {display_name(straggler.stage)}" if straggler.stage else ""
        )
    yield "waiting for stragglers", f"{milliseconds(straggler.lost_s)} per step ({share(straggler.share)}): {whom}"


def _print_probes(base: "ThroughputSummary", probes: Sequence["ProbeResult"]) -> None:
    rows = [("base", *_rate_cells(base), "1.00x", "nothing")]
    for probe in probes:
        spread = probe.ratio_spread
        ratio = f"{probe.ratio:.2f}x" + (f" ({spread[0]:.2f} to {spread[1]:.2f})" if spread else "")
        rows.append((probe.trial.name, *_rate_cells(probe.rate), ratio, probe.trial.explains))
    repeats = f"{count(base.n, 'run')} of each"
    headings = ("run", "images/s", "from", "to", "ratio", "free")
    print_table(f"with part of the work for free ({repeats})", headings, rows, text_columns=("free",))


def _rate_cells(rate: "ThroughputSummary") -> tuple[str, str, str]:
    return f"{rate.images_per_s:,.0f}", f"{rate.spread[0]:,.0f}", f"{rate.spread[1]:,.0f}"


def _profile_rows(profile: "Profile", rundir: RunDir) -> list[tuple[str, str]]:
    base, verdict = profile.base, profile.verdict
    low, high = base.spread
    rows = [("throughput", f"{base.images_per_s:,.0f} images/s ({low:,.0f} to {high:,.0f})")]
    if profile.result.host_to_device is not None:
        rows.append(("copy to device", str(profile.result.host_to_device)))
    rows += _cost_rows(profile.cost)
    rows.append(("bottleneck", f"{verdict['bottleneck']}. {verdict['evidence']}"))
    if verdict.get("ceiling"):
        rows.append(("ceiling", verdict["ceiling"]))
    if verdict["try"]:
        rows.append(("try", verdict["try"]))
    rows += [(each.name, f"left out: {each.reason}") for each in profile.left_out]
    if rundir.merged_trace.exists():
        rows.append(("trace", f"{printable(rundir.merged_trace)}: open it on https://ui.perfetto.dev"))
        rows.append(("", f"{printable(rundir.trace)}: one per rank, for HolisticTraceAnalysis"))
    if profile.trace_share is not None:
        rows.append(("", f"stages in rank 0's trace sum to {share(profile.trace_share)} of its measured step time"))
    return rows


def _cost_rows(cost: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the model's FLOPs and the device's rates, as far as known."""
    if not cost:
        return
    yield "model", f"{cost['parameters']:,} parameters, {flops(cost['flops_per_image'])} per training image"
    reached = f"{flops(cost['achieved_flops_per_s'])}/s"
    if cost["mfu"] is None:
        yield "computing", f"{reached} per rank"
        return
    peak = f"{flops(cost['peak_flops_per_s'])}/s ({cost['peak_source']})"
    yield "computing", f"{reached} per rank, an MFU of {share(cost['mfu'])} of {peak}"
    if cost["roofline_share"] is not None:
        bound = f"{cost['roofline_images_per_s']:,.0f} images/s that memory bandwidth and arithmetic allow"
        yield "roofline", f"{share(cost['roofline_share'])} of the {bound}"
