"""Render a report as HTML."""

from paceline.report.blocks import ReportPage
from paceline.report.heat import layout_heat_map
from paceline.report.plot import layout_chart


def render_html(page: ReportPage) -> str:
    """Return a page as one self-contained HTML file, without network access, scripts or fonts."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # slow to import, and training does not need it

    environment = Environment(
        loader=PackageLoader("paceline.report"),
        autoescape=True,  # names in a run directory are untrusted
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plot": layout_chart, "grid": layout_heat_map}
    return environment.get_template("page.html.j2").render(page=page)
