"""A small SVG writer: boxes, lines, words, and things that appear step by step."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d", "#eeca3b")
_BRIGHT = ("#eeca3b", "#72b7b2")  # white words on these cannot be read
GREY, LIGHT, DARK = "#9aa0a6", "#e8eaed", "#202124"


class Picture:
    """A picture on white paper, so that it can be read on dark pages, too."""

    def __init__(self, width: float, height: float, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        words: str = "",
        *,
        size: float = 11,
        step: int | None = None,
    ) -> None:
        """A rectangle with words in its middle; with ``step`` it is lit in that step only."""
        ink = DARK if fill in _BRIGHT else "#fff"
        style = f' class="s{step}"' if step is not None else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="#fff"'
            f' stroke-width="1"{style}/>'
        )
        if words:
            self.words(
                x + width / 2, y + height / 2 + size * 0.35, words, ink=ink, size=size, at="middle", step=step
            )

    def words(
        self,
        x: float,
        y: float,
        words: str,
        *,
        ink: str = DARK,
        size: float = 12,
        at: str = "start",
        bold: bool = False,
        step: int | None = None,
    ) -> None:
        style = f' class="s{step}"' if step is not None else ""
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{at}" fill="{ink}"{weight}{style}>'
            f"{escape(words)}</text>"
        )

    def line(self, points: Sequence[tuple[float, float]], ink: str = DARK, *, arrow: bool = False) -> None:
        end = ' marker-end="url(#end)"' if arrow else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{ink}" stroke-width="1.5"{end}/>')

    def text(self, steps: int = 0, seconds: float = 1.2) -> str:
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}"'
                f' width="{self.width:g}" font-family="Helvetica, Arial, sans-serif" role="img">',
                f"<title>{escape(self.title)}</title>",
                '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
                f' orient="auto"><path d="M0 0 8 4 0 8z" fill="{DARK}"/></marker></defs>',
                *([f"<style>{_steps(steps, seconds)}</style>"] if steps else []),
                '<rect width="100%" height="100%" rx="6" fill="#fff"/>',
                *self.parts,
                "</svg>\n",
            ]
        )

    def save(self, folder: Path, name: str, steps: int = 0) -> None:
        (folder / f"{name}.svg").write_text(self.text(steps))


def _steps(steps: int, seconds: float) -> str:
    """Styles that light the classes ``s0``, ``s1``, ... one after the other, again and again."""
    share = 100 / steps
    frames = f"@keyframes on{{0%,{share:.2f}%{{opacity:1}}{share + 0.01:.2f}%,100%{{opacity:0}}}}"
    each = "".join(
        f".s{i}{{animation:on {steps * seconds:g}s step-end {(i - steps) * seconds:g}s infinite}}"
        for i in range(steps)
    )
    return frames + each
