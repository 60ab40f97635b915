"""Report the results of `paceline profile`: probes, ceilings and the achieved share of peak FLOP/s."""

from collections.abc import Callable
from typing import Any, Final

from paceline.core.units import flops, number, share
from paceline.report.blocks import Block, Cell, Column, Facts, Paragraph, Section, Table
from paceline.report.run import Run
from paceline.report.sections import cells
from paceline.report.words import clean, finite

_COST: Final[dict[str, tuple[str, Callable[[float], str]]]] = {
    "parameters": ("parameters", number),
    "flops_per_image": ("FLOPs per image, forward and backward", flops),
    "achieved_flops_per_s": ("achieved", lambda value: f"{flops(value)}/s"),
    "peak_flops_per_s": ("peak", lambda value: f"{flops(value)}/s"),
    "roofline_images_per_s": ("ceiling of the roofline", lambda value: f"{number(value)} images/s"),
}
_SHARES: Final = {"mfu": "share of the peak (MFU)", "roofline_share": "share of the roofline"}


def profile(run: Run) -> Section | None:
    """Return probes, ceilings and cost; None if the run was not profiled."""
    if not run.profile:
        return None
    recorded = run.profile  # of any version: use the keys that are present
    blocks = [
        *_probes(recorded),
        *_ceilings(recorded.get("ceilings")),
        *_cost(recorded.get("cost")),
        *_left_out(recorded),
    ]
    nothing = cells.missing("profile.json has no known fields.")
    return Section("profile", "What would be faster", blocks or [nothing])


def _probes(profile: dict[str, Any]) -> list[Block]:
    probes = _objects(profile.get("probes"))
    if not probes:
        return []
    sentence = "Each probe repeats the run with one part of its work removed. The ratio shows the cost of that part."
    columns = [Column("run", is_number=False), Column("free", is_number=False), Column("images/s"), Column("range")]
    columns += [Column("ratio"), Column("recipe patch", is_number=False)]
    base = profile.get("base")
    first = [{**base, "name": "base", "explains": "nothing", "ratio": 1.0}] if isinstance(base, dict) else []
    rows = [_probe(each) for each in [*first, *probes[:50]]]
    return [Paragraph(sentence), Table("Probes", columns, rows)]


def _probe(probe: dict[str, Any]) -> list[Cell]:
    ratio = finite(probe.get("ratio"))
    times = "" if ratio is None else f"{ratio:.2f}x{_range(probe.get('ratio_spread'), '.2f')}"
    return [
        cells.text(probe.get("name", "")),
        cells.text(probe.get("explains", ""), 300),
        cells.plain(finite(probe.get("images_per_s"))),
        Cell(_range(probe.get("spread"), ",.0f").strip(" ()")),
        Cell(times, ratio),
        Cell(_patch(probe.get("patch")), is_code=True),
    ]


def _range(spread: object, spec: str) -> str:
    ends = [finite(each) for each in spread] if isinstance(spread, list) else []
    if len(ends) != 2 or ends[0] is None or ends[1] is None:
        return ""
    return f" ({ends[0]:{spec}} to {ends[1]:{spec}})"


def _left_out(profile: dict[str, Any]) -> list[Block]:
    rows = [[cells.text(each.get("name", "")), cells.text(each.get("reason", ""), 300)]
            for each in _objects(profile.get("left_out"))[:50]]  # fmt: skip
    columns = [Column("probe", is_number=False), Column("reason", is_number=False)]
    return [Table("Not measured", columns, rows)] if rows else []


def _objects(values: object) -> list[dict[str, Any]]:
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []


def _patch(patch: object) -> str:
    match patch:
        case None:
            return ""
        case dict():
            return clean(" ".join(f"{key}={value}" for key, value in patch.items()), 300)
        case list():
            return clean(" ".join(str(each) for each in patch), 300)
        case _:
            return clean(patch, 300)


def _ceilings(ceilings: object) -> list[Block]:
    if not isinstance(ceilings, dict):
        return []
    values = [(clean(key).replace("_", " "), finite(value)) for key, value in list(ceilings.items())[:20]]
    rows = [(name, Cell(f"{value:.2f}x", value)) for name, value in values if value is not None]
    return [Facts(rows, "Ceilings: maximum speed-up")] if rows else []


def _cost(cost: object) -> list[Block]:
    if not isinstance(cost, dict):
        return []
    rows: list[tuple[str, Cell]] = []
    for key, (name, format_value) in _COST.items():
        value = finite(cost.get(key))
        if value is not None:
            rows.append((name, Cell(format_value(value), value)))
    shares = [(name, finite(cost.get(key))) for key, name in _SHARES.items()]
    rows += [(name, Cell(share(value), value)) for name, value in shares if value is not None]
    if isinstance(cost.get("peak_source"), str) and cost["peak_source"]:
        rows.append(("source of the peak", cells.text(cost["peak_source"], 300)))
    return [Facts(rows, "Arithmetic")] if rows else []
