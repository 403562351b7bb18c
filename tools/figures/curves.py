"""What: curves over a logarithmic axis as an SVG that is the same for the same numbers.
Why: a figure drawn from receipts can be compared with the committed one.
Never: knows a receipt, or draws a value that is not there.
"""

import math

LEFT, TOP, WIDTH, HEIGHT = 72, 16, 480, 260


def draw(title, below, points, curves, low, high, unit):
    """curves: (name, colour, values or None) over points; both axes are logarithmic, low and high decades."""
    first, last = math.log2(points[0]), math.log2(points[-1])

    def x_of(point):
        return LEFT + WIDTH * (math.log2(point) - first) / (last - first)

    def y_of(value):
        return TOP + HEIGHT * (high - math.log10(value)) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {TOP + HEIGHT + 50}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{title}</title>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for decade in range(math.ceil(low), math.floor(high) + 1):
        y = y_of(10.0**decade)
        parts.append(
            f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{decade}{unit}</text>'
        )
    for point in points:
        parts.append(
            f'<text x="{x_of(point):.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{point}</text>'
        )
    parts.append(
        f'<text x="{LEFT + WIDTH / 2:.0f}" y="{TOP + HEIGHT + 40}" text-anchor="middle">{below}</text>'
    )
    names = []
    for name, colour, values in curves:
        there = [(x_of(p), y_of(v)) for p, v in zip(points, values, strict=True) if v is not None]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in there)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        names.append([there[-1][1], there[-1][0], name, colour])
    last_y = -math.inf
    for y, x, name, colour in sorted(
        names
    ):  # names of curves that end together stand one below the other
        last_y = max(y, last_y + 14)
        parts.append(f'<text x="{x + 8:.0f}" y="{last_y + 4:.1f}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def write_or_check(docs, pictures, check, tool):
    """pictures: (file, text). What is stale, as the message of an exit; or None."""
    stale = []
    for name, text in pictures:
        file = docs / name
        if not check:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            stale.append(name)
    return f"{', '.join(stale)}: not what the receipts give; run {tool}" if stale else None
