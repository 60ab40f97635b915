"""Render a report as one self-contained HTML file: no network, no script, no font. Jinja escapes all text."""

from paceline.report.blocks import Page
from paceline.report.heat import grid
from paceline.report.plot import plot


def to_html(page: Page) -> str:
    """Return a page as HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # slow to import, and training does not need it

    environment = Environment(
        loader=PackageLoader("paceline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plot": plot, "grid": grid}
    return environment.get_template("page.html.j2").render(page=page)
