"""Render a report as HTML."""

from paceline.report.blocks import Page
from paceline.report.heat import grid
from paceline.report.plot import plot


def to_html(page: Page) -> str:
    """Return a page as one self-contained HTML file, without network access, scripts or fonts."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # slow to import, and training does not need it

    environment = Environment(
        loader=PackageLoader("paceline.report"),
        autoescape=True,  # names in a run directory are untrusted
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plot": plot, "grid": grid}
    return environment.get_template("page.html.j2").render(page=page)
