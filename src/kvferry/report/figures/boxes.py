"""Rows of boxes with text, and arrows between them. Does not know what they mean; leaves colours and files to `style`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.text import Text

from kvferry.errors import KvferryError
from kvferry.report import style

# Inches: a column of text, what is between boxes, the margins of text in a box, and the place of the title.
WIDTH, ACROSS, DOWN, PADDING, TITLE = 3.4, 0.12, 0.19, 0.05, 0.42
MARGIN = 0.04
FONT, LEAST_FONT, STEP = 7.0, 3.0, 0.25  # points
LINE = 1.3 * FONT / 72  # inches
TINT = 0.14


@dataclass(frozen=True)
class Box:
    """What is written in a box, and the names of the boxes that arrows lead to from it, in rows below.

    role: one of `style.SYSTEMS`, whose colour the box takes; any other word makes it grey.
    """

    name: str
    role: str
    lines: tuple[str, ...]
    leads_to: tuple[str, ...] = ()


@dataclass(frozen=True)
class Placed:
    """A box with its edges in inches from the lower left corner of the figure."""

    box: Box
    left: float
    right: float
    bottom: float
    top: float


def draw_boxes(rows: Sequence[Sequence[Box | None]], title: str, stem: Path, shares: Sequence[float] = ()) -> None:
    """Write the figure of `rows` from top to bottom, and a csv of every box's text and where its arrows lead.

    None leaves a place empty. A row of as many places as there are `shares` divides the width by them, any other evenly.

    Raises:
        KvferryError: an arrow leads to a box that is not there, or is not below, or a file cannot be written.
    """
    placed = place(rows, shares)
    height = max(own.top for own in placed.values()) + MARGIN + TITLE
    with style.house_style():
        figure = Figure(figsize=(WIDTH + 2 * MARGIN, height))
        FigureCanvasAgg(figure)  # what a text takes can be measured on a canvas alone
        ax = figure.add_axes((0, 0, 1, 1))
        ax.set(xlim=(0, WIDTH + 2 * MARGIN), ylim=(0, height))
        ax.set_axis_off()
        for own in placed.values():
            _draw(ax, own)
            for name in own.box.leads_to:
                _arrow(ax, own, _known(placed, own, name))
        style.entitle(figure, title)
        style.save(figure, drawn(placed), stem)


def place(rows: Sequence[Sequence[Box | None]], shares: Sequence[float] = ()) -> dict[str, Placed]:
    """Boxes by name; a row is as high as the most lines in it ask for."""
    placed, bottom = {}, MARGIN
    for row in reversed(rows):
        top = bottom + 2 * PADDING + LINE * max(len(box.lines) for box in row if box)
        edges = _edges(shares if len(row) == len(shares) else [1.0] * len(row))
        for box, (left, right) in zip(row, edges, strict=True):
            if box:
                placed[box.name] = Placed(box, left, right, bottom, top)
        bottom = top + DOWN
    return {box.name: placed[box.name] for row in rows for box in row if box}


def _edges(shares: Sequence[float]) -> list[tuple[float, float]]:
    """Left and right edges of places that divide the width."""
    unit = (WIDTH - ACROSS * (len(shares) - 1)) / sum(shares)
    edges, left = [], MARGIN
    for share in shares:
        edges.append((left, left + unit * share))
        left += unit * share + ACROSS
    return edges


def drawn(placed: Mapping[str, Placed]) -> pd.DataFrame:
    """A row a box: its name, role and text, and the boxes that its arrows lead to."""
    boxes = [own.box for own in placed.values()]
    rows = [(box.name, box.role, " | ".join(box.lines), "; ".join(box.leads_to)) for box in boxes]
    return pd.DataFrame(rows, columns=["box", "role", "label", "leads_to"])


def _draw(ax: Axes, own: Placed) -> None:
    colour = style.SYSTEMS[own.box.role]["color"] if own.box.role in style.SYSTEMS else "0.45"
    size = (own.right - own.left, own.top - own.bottom)
    shape = "round,pad=0,rounding_size=0.05"
    look = {"facecolor": (colour, TINT), "edgecolor": colour, "linewidth": 1}
    ax.add_patch(FancyBboxPatch((own.left, own.bottom), *size, boxstyle=shape, **look))
    x, y = (own.left + own.right) / 2, (own.bottom + own.top) / 2
    _shrink(ax.text(x, y, "\n".join(own.box.lines), ha="center", va="center", fontsize=FONT), size[0] - 2 * PADDING)


def _shrink(text: Text, width: float) -> None:
    """Make letters smaller until the text takes no more than `width` inches: names of models may be long."""
    figure = text.get_figure(root=True)
    while figure and text.get_window_extent().width > width * figure.dpi and text.get_fontsize() > LEAST_FONT:
        text.set_fontsize(text.get_fontsize() - STEP)


def _known(placed: Mapping[str, Placed], own: Placed, name: str) -> Placed:
    if name not in placed:
        raise KvferryError(f"box {own.box.name!r}: its arrow leads to {name!r}, which is no box; name another")
    return placed[name]


def _arrow(ax: Axes, start: Placed, end: Placed) -> None:
    """Straight down, in the middle of the width that both boxes have."""
    left, right = max(start.left, end.left), min(start.right, end.right)
    if left >= right or end.top >= start.bottom:
        raise KvferryError(f"box {start.box.name!r}: {end.box.name!r} is not below it, where arrows lead; move it")
    middle = (left + right) / 2
    look = {"arrowstyle": "-|>", "linewidth": 1, "color": "0.25", "shrinkA": 0, "shrinkB": 0, "mutation_scale": 7}
    ax.annotate("", xy=(middle, end.top), xytext=(middle, start.bottom), arrowprops=look)
