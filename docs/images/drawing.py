"""Draw figures of bars, lines, dots and text as SVG.

Colors follow the reader's color scheme (`prefers-color-scheme`), and no meaning depends on color alone. A figure
has its own background, keeps text as text for screen readers, and fetches nothing.
"""

from dataclasses import dataclass, field
from typing import Final, Literal
from xml.sax.saxutils import escape

WIDTH: Final = 400
SHOWN_WIDTH: Final = 520  # in pixels, 1.3 times the units of the drawing; a phone scales it to its screen

# CSS class of a color: `a` for the subject, `b` for its contrast, `c` for the rest.
Kind = Literal["a", "b", "c"]

STYLE: Final = """
  .ground { fill: #ffffff; stroke: #d0d7de; }
  text { fill: #1f2328; font: 14px system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; }
  .head { font-weight: 600; font-size: 16px; }
  .small { fill: #59636e; font-size: 13px; }
  .on { fill: #ffffff; }
  .grid { stroke: #d8dee4; fill: none; }
  .line { stroke: #1f2328; stroke-width: 1.5; fill: none; }
  .a { fill: #0969da; stroke: #0969da; }
  .b { fill: #bc4c00; stroke: #bc4c00; }
  .c { fill: #6e7781; stroke: #6e7781; }
  .band { fill-opacity: 0.3; }
  .hollow { fill: #ffffff; stroke-width: 2; }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #151b23; stroke: #3d444d; }
    text { fill: #f0f6fc; }
    .small { fill: #a5afba; }
    .on { fill: #0d1117; }
    .grid { stroke: #3d444d; }
    .line { stroke: #f0f6fc; }
    .a { fill: #58a6ff; stroke: #58a6ff; }
    .b { fill: #f0883e; stroke: #f0883e; }
    .c { fill: #7d8590; stroke: #7d8590; }
    .hollow { fill: #151b23; }
  }
"""


@dataclass(frozen=True)
class Scale:
    """Map values from `low` to `high` linearly to positions from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the position of `value`, which must lie within the scale."""
        assert self.low <= value <= self.high, f"{value} is not in {self.low} to {self.high}"
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


@dataclass
class Drawing:
    """A figure of `WIDTH` by `height` units; add elements from back to front; y grows downwards."""

    title: str
    description: str
    height: int
    _parts: list[str] = field(default_factory=list)

    def text(
        self, x: float, y: float, text: str, style: str = "", *, anchor: Literal["start", "middle", "end"] = "start"
    ) -> None:
        """Draw `text` with its baseline at `y`."""
        shown = f' class="{style}"' if style else ""
        aligned = "" if anchor == "start" else f' text-anchor="{anchor}"'
        self._parts.append(f'<text x="{_short(x)}" y="{_short(y)}"{shown}{aligned}>{escape(text)}</text>')

    def heading(self, *lines: str) -> None:
        """Draw the title, and `lines` below it."""
        self.text(16, 28, self.title, "head")
        for number, line in enumerate(lines):
            self.text(16, 48 + 18 * number, line, "small")

    def bar(self, x: float, y: float, width: float, height: float, kind: Kind) -> None:
        """Draw a filled rectangle."""
        box = f'x="{_short(x)}" y="{_short(y)}" width="{_short(width)}" height="{_short(height)}"'
        self._parts.append(f'<rect class="{kind}" {box}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, style: str = "line") -> None:
        """Draw a straight line."""
        ends = f'x1="{_short(x1)}" y1="{_short(y1)}" x2="{_short(x2)}" y2="{_short(y2)}"'
        self._parts.append(f'<line class="{style}" {ends}/>')

    def curve(self, points: list[tuple[float, float]], style: str = "line") -> None:
        """Draw straight lines from each of `points` to the next."""
        shown = " ".join(f"{_short(x)},{_short(y)}" for x, y in points)
        self._parts.append(f'<polyline class="{style}" points="{shown}"/>')

    def dot(self, x: float, y: float, kind: Kind, *, hollow: bool = False) -> None:
        """Draw a dot, or a ring with `hollow`."""
        style = f"{kind} hollow" if hollow else kind
        self._parts.append(f'<circle class="{style}" cx="{_short(x)}" cy="{_short(y)}" r="5.5"/>')

    def band(self, corners: list[tuple[float, float]], kind: Kind) -> None:
        """Fill the area between `corners`."""
        points = " ".join(f"{_short(x)},{_short(y)}" for x, y in corners)
        self._parts.append(f'<polygon class="{kind} band" points="{points}"/>')

    def svg(self) -> str:
        """Return the figure as an SVG file."""
        size = f'width="{SHOWN_WIDTH}" height="{_short(self.height * SHOWN_WIDTH / WIDTH)}"'
        view = f'viewBox="0 0 {WIDTH} {self.height}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} {view} role="img" aria-labelledby="title desc">',
            f'<title id="title">{escape(self.title)}</title>',
            f'<desc id="desc">{escape(self.description)}</desc>',
            f"<style>{STYLE}</style>",
            f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" height="{self.height - 1}" rx="8"/>',
            *self._parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _short(number: float) -> str:
    """Return `number` with one decimal, or none if it is whole."""
    return f"{number:.1f}".removesuffix(".0")
