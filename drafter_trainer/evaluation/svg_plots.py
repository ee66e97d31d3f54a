"""The plots of the report, as SVG text: nothing to load, nothing to run."""

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, MARGIN = 640, 44
LINE_HEIGHT = 26
COLOURS = ("#0b6bcb", "#c2410c", "#15803d", "#7e22ce", "#a16207", "#be123c", "#0f766e", "#475569")


def line_plot(lines: Mapping[str, Sequence[float]], x_label: str) -> str:
    """Lines of values between 0 and 1 over positions 1, 2, …, with a legend."""
    height, bottom = 300, 300 - MARGIN
    longest = max((len(values) for values in lines.values()), default=0)
    if longest == 0:
        return ""
    step = (WIDTH - 2 * MARGIN) / max(1, longest - 1)
    parts = [_text(WIDTH / 2, height - 8, x_label, "middle")]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _height(share, bottom)
        parts += [_rule(MARGIN, y, WIDTH - MARGIN, y), _text(MARGIN - 6, y + 4, f"{share:.0%}", "end")]
    for position in range(longest):
        parts.append(_text(MARGIN + position * step, bottom + 16, str(position + 1), "middle"))
    for number, (name, values) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{MARGIN + i * step:.1f},{_height(value, bottom):.1f}" for i, value in enumerate(values))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = 16 + 18 * number
        parts.append(f'<rect x="{WIDTH - 170}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(_text(WIDTH - 154, y, name))
    return _svg(height, parts, x_label)


def bar_plot(bars: Sequence[tuple[str, float, Sequence[float] | None]], title: str, form: str = ".2f") -> str:
    """Horizontal bars of (name, value, interval or None), from 0."""
    finite = [bar for bar in bars if math.isfinite(bar[1])]
    if not finite:
        return ""
    largest = max(max(value, *(interval or (value,))) for _, value, interval in finite) or 1.0
    left, scale = 230, (WIDTH - 230 - 70) / largest
    parts = []
    for number, (name, value, interval) in enumerate(finite):
        y = LINE_HEIGHT * number + 8
        parts.append(_text(left - 8, y + 13, name, "end"))
        parts.append(f'<rect x="{left}" y="{y}" width="{value * scale:.1f}" height="16" fill="{COLOURS[0]}"/>')
        end = value
        if interval is not None:
            low, end = interval
            middle = y + 8
            parts.append(_rule(left + low * scale, middle, left + end * scale, middle, "interval"))
        parts.append(_text(left + max(value, end) * scale + 6, y + 13, f"{value:{form}}"))
    return _svg(LINE_HEIGHT * len(finite) + 16, parts, title)


def _height(share: float, bottom: float) -> float:
    return bottom - share * (bottom - MARGIN / 2)


def _rule(x1: float, y1: float, x2: float, y2: float, kind: str = "grid") -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    body = "\n".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">\n{body}\n</svg>'
