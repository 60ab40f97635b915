"""Render a report as HTML, as Markdown or as data for JSON."""

import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from hashlib import sha256
from importlib import resources
from typing import TYPE_CHECKING, Any

from paceline.core.results import ClassCount
from paceline.core.units import number, share
from paceline.report.charts import MAX_MATRIX_CLASSES, layout_chart, layout_heat_map, spark_points
from paceline.report.document import (
    BarChart,
    BarRow,
    Block,
    ChartRow,
    CodeBlock,
    Command,
    Fold,
    Gallery,
    HeatMap,
    KeyValueList,
    PageFinding,
    Paragraph,
    ReportPage,
    StackedBar,
    Table,
    TableCell,
)
from paceline.report.read_run import FirstRecords, NodeSeries, RunData
from paceline.report.series import Series
from paceline.report.text import to_jsonable

if TYPE_CHECKING:
    from jinja2 import Environment, Template

# Replaced by HTML entities, which every renderer shows as text; not all renderers honor backslashes.
_SPECIAL_CHARACTERS = re.compile(r"[&<>|`\[\]*~\\]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_MAX_MARKDOWN_MATRIX = 20
FORMAT_VERSION = 1


@dataclass(frozen=True)
class LiveVersion:
    """The version of a page that `paceline report --follow` serves, and what it says on the state of the run."""

    version: str
    state: str


def render_html(page: ReportPage, live: LiveVersion | None = None) -> str:
    """Return a page as one self-contained HTML file; with `live` a second script replaces it when its version changes.

    The scripts are allowed by their hashes; nothing is fetched from elsewhere.
    """
    from markupsafe import Markup

    scripts = [_read_template("page.js"), *([_read_template("follow.js")] if live else [])]
    return page_template().render(
        page=page,
        live=live,
        scripts=[Markup(each) for each in scripts],  # noqa: S704 - files of this package
        script_sources=" ".join(map(_csp_hash, scripts)),
    )


def page_template() -> "Template":
    """Return the template of all pages; its parts are compiled once per process, when a page first needs them."""
    return _page_environment().get_template("page.html.j2")


@cache
def _page_environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined  # slow to import, and training does not need it
    from markupsafe import Markup, escape

    environment = Environment(
        loader=PackageLoader("paceline.report"),
        autoescape=True,  # names in a run directory are untrusted
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plot": layout_chart, "grid": layout_heat_map, "spark": spark_points, "number": number}
    environment.filters["breaking"] = lambda code: escape(code).replace("=", Markup("=<wbr>"))  # escaping adds no "="
    return environment


def _read_template(name: str) -> str:
    return (resources.files("paceline.report") / "templates" / name).read_text(encoding="utf-8")


def _csp_hash(script: str) -> str:
    """Return the source expression by which a content security policy allows this inline script."""
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode('ascii')}'"


def render_markdown(page: ReportPage) -> str:
    """Return a page as GitHub-flavored Markdown."""
    lines = [
        f"# {escape_markdown(page.title)}",
        "",
        f"**{escape_markdown(page.status)}** · {escape_markdown(' · '.join(page.subtitle))}",
        "",
    ]
    lines += [f"- could not be read: {escape_markdown(problem)}" for problem in page.problems]
    rows = [[figure.label, figure.cell.text, figure.note] for figure in page.figures]
    lines += ["", *_table_lines(["metric", "value", "note"], rows)]
    if page.findings:
        lines += ["", "## Findings", "", *_finding_lines(page.findings)]
    elif page.verdict is not None:
        bottleneck = page.verdict
        lines += ["", f"## Bottleneck: {escape_markdown(bottleneck.bottleneck)}", ""]
        lines += [escape_markdown(" ".join(filter(None, (bottleneck.evidence, bottleneck.ceiling, bottleneck.advice))))]
        lines += ["", *_fence_code(bottleneck.command, "sh")] if bottleneck.command else []
    for section in page.sections:
        lines += ["", f"## {escape_markdown(section.title)}"]
        for block in section.blocks:
            if not (isinstance(block, BarChart) and block.has_table):
                lines += ["", *_render_block(block)]
    return "\n".join([*lines, "", f"Written by paceline {page.paceline}.", ""])


def _finding_lines(findings: Iterable[PageFinding]) -> Iterator[str]:
    for each in findings:
        text = " ".join(filter(None, (each.evidence, each.advice)))
        yield f"- **{escape_markdown(each.title)}** ({each.area}, {each.severity}): {escape_markdown(text)}"
        if each.command:
            yield from ["", *_fence_code(each.command, "sh"), ""]


def escape_markdown(text: str) -> str:
    """Return text with the special characters of Markdown and HTML as character references."""
    return _SPECIAL_CHARACTERS.sub(lambda match: f"&#{ord(match[0])};", text)


def markdown_table_lines(table: Table) -> list[str]:
    """Return the lines of a table without its title."""
    return _table_lines(
        [column.title for column in table.columns], [[_cell_text(cell) for cell in row] for row in table.rows]
    )


def _cell_text(cell: TableCell) -> str:
    return f"{cell.text} ({cell.note})" if cell.note else cell.text


def _render_block(block: Block) -> Iterator[str]:
    match block:
        case Paragraph():
            yield escape_markdown(block.text)
        case Command():
            yield from _fence_code(block.text, "sh")
        case CodeBlock():
            yield from [f"**{escape_markdown(block.title)}**", "", *_fence_code(block.text, "yaml")]
        case Table():
            rows = [[_cell_text(cell) for cell in row] for row in block.rows]
            yield from _titled_table(block.title, [column.title for column in block.columns], rows)
        case KeyValueList():
            yield from _titled_table(block.title, ["", ""], [[name, _cell_text(cell)] for name, cell in block.rows])
        case Fold():
            yield f"**{escape_markdown(block.title)}**"
            for each in block.blocks:
                yield from ["", *_render_block(each)]
        case StackedBar() | BarChart() | ChartRow() | HeatMap() | Gallery():
            yield from _render_drawing(block)


def _render_drawing(block: StackedBar | BarChart | ChartRow | HeatMap | Gallery) -> Iterator[str]:
    match block:
        case StackedBar(has_legend=False):  # a table follows
            yield escape_markdown(f"{block.title} ({block.note})" if block.note else block.title)
        case StackedBar():
            rows = [[segment.name, segment.text, share(segment.share)] for segment in block.parts]
            yield from _titled_table(
                f"{block.title} ({block.note})" if block.note else block.title, ["part", "", "share"], rows
            )
        case BarChart():
            parts = list(dict.fromkeys(segment.name for row in block.rows for segment in row.parts))
            yield from _titled_table(block.title, ["", *parts, "all"], [_bar_row(row, parts) for row in block.rows])
        case ChartRow():
            yield from _table_lines(["curve", "unit", "first", "last", "lowest", "highest"], _curve_rows(block))
        case HeatMap():
            yield from _render_matrix(block)
        case Gallery():
            rows = [[each.title, ", ".join(each.details), each.name] for each in block.pictures]
            yield from _titled_table(
                f"{block.title} ({block.note})" if block.note else block.title, ["image", "", "file"], rows
            )


def _bar_row(row: BarRow, names: Sequence[str]) -> list[str]:
    texts = {segment.name: segment.text for segment in row.parts}
    return [row.name, *(texts.get(name, "") for name in names), row.text]


def _curve_rows(block: ChartRow) -> list[list[str]]:
    rows = []
    for chart in block.charts:
        for line in chart.lines:
            ys = [y for _, y in line.points]
            name = chart.title if line.name in (chart.title, "") else f"{chart.title}, {line.name}"
            figures = [number(y, 4) for y in (ys[0], ys[-1], min(ys), max(ys))] if ys else [""] * 4
            rows.append([name, chart.y_label, *figures])
    return rows


def _render_matrix(heat: HeatMap) -> Iterator[str]:
    if len(heat.names) > _MAX_MARKDOWN_MATRIX:
        yield "The confusion matrix is in the HTML and JSON reports."
        return
    rows = [
        [name, *(f"{count:,}" if count else "" for count in counts)]
        for name, counts in zip(heat.names, heat.counts, strict=True)
    ]
    yield from _titled_table(heat.title, ["", *heat.names], rows)


def _titled_table(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    if title:
        yield from [f"**{escape_markdown(title)}**", ""]
    yield from _table_lines(headings, rows)


def _table_lines(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(map(escape_markdown, headings))} |", f"|{' --- |' * len(headings)}"]
    return [*lines, *(f"| {' | '.join(map(escape_markdown, row))} |" for row in rows)]


def _fence_code(text: str, language: str) -> list[str]:
    # A fence must be longer than any run of backticks inside.
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", text, fence]


def run_to_data(run: RunData) -> dict[str, Any]:
    """Return a run as plain values for JSON; NaN and infinity are strings."""
    result = run.result.model_dump(mode="json") if run.result is not None else None
    return to_jsonable(  # type: ignore[no-any-return]
        {
            "format_version": FORMAT_VERSION,
            "name": run.name,
            "result": result,
            "recipe": run.recipe,
            "plan": run.plan,
            "machine": run.machine,
            "profile": run.profile or None,
            "evals": run.evals,
            "steps": _series_data(run.steps),
            "telemetry": [_node_data(node) for node in run.nodes],
            "classes": [_class_data(each) for each in run.classes],
            "confusion": run.confusion if len(run.classes) <= MAX_MATRIX_CLASSES else None,
            "calibration": [asdict(each) for each in run.calibration],
            "mistakes": [mistake.record for mistake in run.mistakes],
            "warnings": _records_data(run.warnings),
            "bad_images": _records_data(run.bad_images),
            "attempts": _records_data(run.attempts),
            "pauses": _records_data(run.pauses),
            "inputs": run.inputs or None,
            "problems": run.problems,
        }
    )


def _series_data(series: Series) -> dict[str, Any]:
    return {
        "records": series.num_records,
        "records_per_point": series.per_point,
        "is_sample": series.is_sample,
        "points": list(series.points),
    }


def _node_data(node: NodeSeries) -> dict[str, Any]:
    return {"node": node.number, "gpus": node.gpus, **_series_data(node.series)}


def _class_data(counted: ClassCount) -> dict[str, Any]:
    accuracy = counted.accuracy if counted.images else None
    return {"class": counted.name, "images": counted.images, "correct": counted.correct, "accuracy": accuracy}


def _records_data(records: FirstRecords) -> dict[str, Any]:
    return {"total": records.total, "rows": list(records.rows)}
