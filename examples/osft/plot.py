"""Accuracy over learning rates as an SVG, without a library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP = 420, 320, 52, 44
WIDE, TALL = WIDTH - LEFT - 16, HEIGHT - TOP - 48
COLORS = ("#c0392b", "#1f6fb2", "#2e8b57")


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One of the pictures that stand side by side."""

    title: str
    lines: Mapping[str, Sequence[Sequence[float]]]
    """Name of a line -> for each position of the horizontal axis, a value for each seed."""
    level: float | None = None
    """Where a dashed line is drawn, if anywhere."""
    marked: Mapping[str, int]
    """Name of a line -> the position with a ring."""


def draw(panels: Sequence[Panel], ticks: Sequence[str], label: str, low: float) -> str:
    """Return the picture: a line goes through the means, and a dot is one seed.

    Args:
        panels: from left to right.
        ticks: names of the positions of the horizontal axis.
        label: of that axis.
        low: where the vertical axis begins; it ends at 1.
    """
    drawn = [_panel(panel, ticks, label, low, number * WIDTH) for number, panel in enumerate(panels)]
    begin = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH * len(panels)} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>'
    )
    return "\n".join([begin, *drawn, "</svg>\n"])


def _panel(panel: Panel, ticks: Sequence[str], label: str, low: float, offset: int) -> str:
    def x(position: int) -> float:
        return LEFT + WIDE * (position + 0.5) / len(ticks)

    def y(value: float) -> float:
        return TOP + TALL * (1 - max(value, low)) / (1 - low)

    parts = [f'<g transform="translate({offset} 0)">', _text(LEFT, 22, panel.title, 'font-size="14"')]
    for step in range(5):
        value = low + (1 - low) * step / 4
        parts.append(_line(y(value), 'stroke="#dddddd"'))
        parts.append(_text(LEFT - 6, y(value) + 4, f"{value:.0%}", 'text-anchor="end"'))
    parts += [
        _text(x(position), TOP + TALL + 18, tick, 'text-anchor="middle"')
        for position, tick in enumerate(ticks)
    ]
    parts.append(_text(LEFT + WIDE / 2, HEIGHT - 8, label, 'text-anchor="middle"'))
    if panel.level is not None:
        parts.append(_line(y(panel.level), 'stroke="#666666" stroke-dasharray="5 4"'))
    for number, (name, values) in enumerate(panel.lines.items()):
        color = COLORS[number % len(COLORS)]
        means = [sum(each) / len(each) for each in values]
        points = " ".join(f"{x(at):.1f},{y(mean):.1f}" for at, mean in enumerate(means))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.5"/>')
        parts += [
            f'<circle cx="{x(at):.1f}" cy="{y(value):.1f}" r="2.5" fill="{color}" opacity="0.5"/>'
            for at, each in enumerate(values)
            for value in each
        ]
        at = panel.marked[name]
        parts.append(
            f'<circle cx="{x(at):.1f}" cy="{y(means[at]):.1f}" r="7" fill="none" stroke="{color}" stroke-width="2"/>'
        )
        parts.append(_text(LEFT + 10, TOP + TALL - 10 - 17 * number, name, f'fill="{color}"'))
    return "\n".join([*parts, "</g>"])


def _line(y: float, look: str) -> str:
    return f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + WIDE}" y2="{y:.1f}" {look}/>'


def _text(x: float, y: float, text: str, look: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'
