"""Report the results of `paceline profile`: probes, ceilings and the achieved share of peak FLOP/s."""

from collections.abc import Callable
from typing import Any, Final

from paceline.core.units import flops, number, share
from paceline.report.blocks import Block, KeyValueList, PageSection, Paragraph, Table, TableCell, TableColumn
from paceline.report.run import RunData
from paceline.report.sections import cells
from paceline.report.words import clean_text, finite_or_none

_COST_LABELS: Final[dict[str, tuple[str, Callable[[float], str]]]] = {
    "parameters": ("parameters", number),
    "flops_per_image": ("FLOPs per image, forward and backward", flops),
    "achieved_flops_per_s": ("achieved", lambda value: f"{flops(value)}/s"),
    "peak_flops_per_s": ("peak", lambda value: f"{flops(value)}/s"),
    "roofline_images_per_s": ("ceiling of the roofline", lambda value: f"{number(value)} images/s"),
}
_SHARE_LABELS: Final = {"mfu": "share of the peak (MFU)", "roofline_share": "share of the roofline"}


def profile_section(run: RunData) -> PageSection | None:
    """Return probes, ceilings and cost; None if the run was not profiled."""
    if not run.profile:
        return None
    recorded = run.profile  # of any version: use the keys that are present
    blocks = [
        *_probe_blocks(recorded),
        *_ceiling_blocks(recorded.get("ceilings")),
        *_cost_blocks(recorded.get("cost")),
        *_skipped_probes(recorded),
    ]
    nothing = cells.missing_paragraph("profile.json has no known fields.")
    return PageSection("profile", "What would be faster", blocks or [nothing])


def _probe_blocks(profile: dict[str, Any]) -> list[Block]:
    probes = _only_objects(profile.get("probes"))
    if not probes:
        return []
    sentence = "Each probe repeats the run with one part of its work removed. The ratio shows the cost of that part."
    columns = [
        TableColumn("run", is_number=False),
        TableColumn("free", is_number=False),
        TableColumn("images/s"),
        TableColumn("range"),
    ]
    columns += [TableColumn("ratio"), TableColumn("recipe patch", is_number=False)]
    base = profile.get("base")
    first = [{**base, "name": "base", "explains": "nothing", "ratio": 1.0}] if isinstance(base, dict) else []
    rows = [_probe_row(each) for each in [*first, *probes[:50]]]
    return [Paragraph(sentence), Table("Probes", columns, rows)]


def _probe_row(probe: dict[str, Any]) -> list[TableCell]:
    ratio = finite_or_none(probe.get("ratio"))
    times = "" if ratio is None else f"{ratio:.2f}x{_format_range(probe.get('ratio_spread'), '.2f')}"
    return [
        cells.text_cell(probe.get("name", "")),
        cells.text_cell(probe.get("explains", ""), 300),
        cells.number_cell(finite_or_none(probe.get("images_per_s"))),
        TableCell(_format_range(probe.get("spread"), ",.0f").strip(" ()")),
        TableCell(times, ratio),
        TableCell(_format_patch(probe.get("patch")), is_code=True),
    ]


def _format_range(spread: object, spec: str) -> str:
    ends = [finite_or_none(each) for each in spread] if isinstance(spread, list) else []
    if len(ends) != 2 or ends[0] is None or ends[1] is None:
        return ""
    return f" ({ends[0]:{spec}} to {ends[1]:{spec}})"


def _skipped_probes(profile: dict[str, Any]) -> list[Block]:
    rows = [[cells.text_cell(each.get("name", "")), cells.text_cell(each.get("reason", ""), 300)]
            for each in _only_objects(profile.get("left_out"))[:50]]  # fmt: skip
    columns = [TableColumn("probe", is_number=False), TableColumn("reason", is_number=False)]
    return [Table("Not measured", columns, rows)] if rows else []


def _only_objects(values: object) -> list[dict[str, Any]]:
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []


def _format_patch(patch: object) -> str:
    match patch:
        case None:
            return ""
        case dict():
            return clean_text(" ".join(f"{key}={value}" for key, value in patch.items()), 300)
        case list():
            return clean_text(" ".join(str(each) for each in patch), 300)
        case _:
            return clean_text(patch, 300)


def _ceiling_blocks(ceilings: object) -> list[Block]:
    if not isinstance(ceilings, dict):
        return []
    values = [(clean_text(key).replace("_", " "), finite_or_none(value)) for key, value in list(ceilings.items())[:20]]
    rows = [(name, TableCell(f"{value:.2f}x", value)) for name, value in values if value is not None]
    return [KeyValueList(rows, "Ceilings: maximum speed-up")] if rows else []


def _cost_blocks(cost: object) -> list[Block]:
    if not isinstance(cost, dict):
        return []
    rows: list[tuple[str, TableCell]] = []
    for key, (name, format_value) in _COST_LABELS.items():
        value = finite_or_none(cost.get(key))
        if value is not None:
            rows.append((name, TableCell(format_value(value), value)))
    shares = [(name, finite_or_none(cost.get(key))) for key, name in _SHARE_LABELS.items()]
    rows += [(name, TableCell(share(value), value)) for name, value in shares if value is not None]
    if isinstance(cost.get("peak_source"), str) and cost["peak_source"]:
        rows.append(("source of the peak", cells.text_cell(cost["peak_source"], 300)))
    return [KeyValueList(rows, "Arithmetic")] if rows else []
