"""One offline HTML page of a parity run: verdict, figures, curves as inline SVG.

No script and no network; readable in print and in dark mode.
"""

from __future__ import annotations

import html
import math

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:52em;margin:2em auto;padding:0 1em;
color:#1a1a1a;background:#fff}table{border-collapse:collapse}td,th{padding:.2em .8em;text-align:left;
border-bottom:1px solid #9994}td+td{text-align:right}svg{width:100%;height:auto}
@media(prefers-color-scheme:dark){body{color:#e4e4e4;background:#161616}}"""
_COLOURS = ("#2468b0", "#c2571a", "#3a8a50")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 260, 60, 30


def chart(title: str, curves: dict[str, list[float]], logarithmic: bool) -> str:
    """Curves over steps; values that a logarithmic axis cannot show are left out."""
    kept = {
        name: [(i, math.log10(v) if logarithmic else v) for i, v in enumerate(values)
               if math.isfinite(v) and (v > 0 or not logarithmic)]
        for name, values in curves.items()
    }  # fmt: skip
    points = [p for values in kept.values() for p in values]
    if not points:
        return f"<p>{html.escape(title)}: nothing to show.</p>"
    low, high = min(v for _, v in points), max(v for _, v in points)
    last, span = max(i for i, _ in points) or 1, (high - low) or 1.0

    def place(i, v):
        x = _LEFT + i / last * (_WIDTH - _LEFT - 10)
        return f"{x:.1f},{10 + (high - v) / span * (_HEIGHT - _BOTTOM - 10):.1f}"

    shown = (lambda v: f"{10**v:.1e}") if logarithmic else (lambda v: f"{v:.3f}")
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">']
    for share in (0.0, 0.5, 1.0):
        y = 10 + share * (_HEIGHT - _BOTTOM - 10)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y}" y2="{y}" stroke="#8885"/>'
            f'<text x="{_LEFT - 6}" y="{y + 4}" font-size="11" text-anchor="end" '
            f'fill="currentColor">{shown(high - share * span)}</text>'
        )
    for colour, values in zip(_COLOURS, kept.values(), strict=False):
        line = " ".join(place(i, v) for i, v in values)
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.3"/>'
        )
    for k, (colour, name) in enumerate(zip(_COLOURS, kept, strict=False)):
        parts.append(
            f'<text x="{_LEFT + 190 * k}" y="{_HEIGHT - 8}" font-size="12" fill="{colour}">'
            f"{html.escape(name)}</text>"
        )
    parts.append("</svg>")
    return f"<h2>{html.escape(title)}</h2>" + "".join(parts)


def page(title: str, passed: bool, rows: list[tuple[str, str]], charts: list[str]) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(k)}</td><td>{html.escape(str(v))}</td></tr>" for k, v in rows
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>"
        f"<p><strong>{'PASSED' if passed else 'FAILED'}</strong></p><table>{cells}</table>"
        + "".join(charts)
        + "</html>\n"
    )
