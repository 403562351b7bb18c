"""The page of a proof: a verdict, tables, and bars of memory and time as inline SVG.

One offline HTML file; no script and no network; readable in print and in dark mode.
"""

from __future__ import annotations

import html

from .._page import _STYLE

_COLOURS = {"dense": "#c2571a", "fused": "#2468b0"}


def bars(title: str, unit: str, values: dict[str, float]) -> str:
    """Horizontal bars from zero, one a contender, each with its figure."""
    most = max(values.values(), default=0.0) or 1.0
    height = 34 * len(values) + 8
    parts = [
        f'<h2>{html.escape(title)}</h2><svg viewBox="0 0 720 {height}" role="img" '
        f'aria-label="{html.escape(title)}">'
    ]
    for i, (name, value) in enumerate(values.items()):
        y = 4 + 34 * i
        parts.append(
            f'<text x="70" y="{y + 19}" font-size="13" text-anchor="end" fill="currentColor">'
            f'{html.escape(name)}</text><rect x="80" y="{y}" height="26" '
            f'width="{max(1.0, 500 * value / most):.1f}" fill="{_COLOURS.get(name, "#3a8a50")}"/>'
            f'<text x="{90 + max(1.0, 500 * value / most):.1f}" y="{y + 19}" font-size="13" '
            f'fill="currentColor">{value:.4g} {html.escape(unit)}</text>'
        )
    return "".join(parts) + "</svg>"


def table(header: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(h)}</th>" for h in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def page(title: str, verdict: str, parts: list[str]) -> str:
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><p><strong>{html.escape(verdict)}</strong></p>"
        + "".join(parts)
        + "</html>\n"
    )
