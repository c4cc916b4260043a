"""The curve of a run as an SVG picture: loss over tokens (logarithmic), held-out accuracy, the rate's shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

PLOT, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 550, 380, 60, 150, 40, 45
KEY = 45
"""Pixels between the plot and the key at its right."""
LETTER = 7
COLOURS: Final = ("#1b6ca8", "#c8553d", "#2a9d57", "#8a5fbf", "#b8860b", "#3aa6a6", "#777777", "#d46a9f")
DASHES: Final = ("", "7 3", "2 3")
"""A kind's colour comes again with the next of these."""

Point = tuple[float, float]


def curve(lines: Sequence[dict[str, Any]], title: str) -> str:
    """The picture of a log: the lines that ``train`` writes."""
    last = max(line["tokens"] for line in lines)
    losses = [(line["tokens"], line["loss"]) for line in lines]
    low, high = math.log10(min(y for _, y in losses)), math.log10(max(y for _, y in losses))
    low, high = math.floor(low * 2) / 2, math.ceil(high * 2) / 2
    watched = [line for line in lines if "held_out" in line]
    keys = [f"{kind} {share[0]:.0%}" for kind, share in (watched[-1]["held_out"] if watched else {}).items()]
    end = LEFT + PLOT
    width = end + max(RIGHT, KEY + LETTER * max(map(len, keys), default=0))
    x = _scale(0, last, LEFT, end)
    loss_y = _scale(low, high, HEIGHT - BOTTOM, TOP)
    share_y = _scale(0, 1, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}"',
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15">{title}</text>',
        *_axes(x, share_y, last),
        _label(LEFT - 48, TOP - 8, "loss", "#222"),
        *(
            _label(LEFT - 48, loss_y(k / 2), f"{10 ** (k / 2):.2g}", "#222")
            for k in range(round(low * 2), round(high * 2) + 1)
        ),
        _line([(x(t), loss_y(math.log10(y))) for t, y in losses], "#222222", 1.2),
    ]
    for index, kind in enumerate(watched[-1]["held_out"] if watched else ()):
        colour, dash = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
        held_out = [(line["tokens"], line["held_out"][kind]) for line in watched if kind in line["held_out"]]
        points = [(x(tokens), share_y(share)) for tokens, (share, _) in held_out]
        parts += [_line(points, colour, 1.8, dash), _label(end + KEY, TOP + 16 * index, keys[index], colour)]
    return "\n".join((*parts, "</svg>")) + "\n"


def write_curve(log: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Writes ``curve`` to a file."""
    path.write_text(curve(log, title))


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _axes(x: Callable[[float], float], share_y: Callable[[float], float], last: float) -> list[str]:
    parts = []
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = share_y(share)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{LEFT + PLOT}" stroke="#ddd"/>')
        parts.append(_label(LEFT + PLOT + 6, y, f"{share:.0%}", "#555"))
    for step in range(6):
        tokens = last * step / 5
        parts.append(_label(x(tokens) - 10, HEIGHT - BOTTOM + 18, f"{tokens / 1e6:.1f}", "#222"))
    parts.append(
        _label(
            LEFT, HEIGHT - 8, "million tokens; black: loss, left scale; colours: held-out replies exact, greedy", "#222"
        )
    )
    return parts


def _label(x: float, y: float, text: str, colour: str) -> str:
    return f'<text x="{x:.1f}" y="{y + 4:.1f}" fill="{colour}">{text}</text>'


def _line(points: Sequence[Point], colour: str, width: float, dash: str = "") -> str:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dashes}/>'
