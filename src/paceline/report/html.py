"""The report as one HTML file that needs nothing else: no network, no script, no font. All text is escaped."""

from paceline.report.blocks import Page
from paceline.report.heat import grid
from paceline.report.plot import plot


def to_html(page: Page) -> str:
    """Return a page as HTML."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # not needed to train, and slow to import

    environment = Environment(
        loader=PackageLoader("paceline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"plot": plot, "grid": grid}
    return environment.get_template("page.html.j2").render(page=page)
