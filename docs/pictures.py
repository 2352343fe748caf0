"""Small pictures of the default run's main figures for README.md and the pages beside this file: docs/pictures/*.png.

Made from the png that a run wrote, so that they show nothing that no run gave. Does not draw.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from PIL import Image

from kvferry.errors import KvferryError
from kvferry.files import written_whole

FIGURES = (
    "fig2_r2_heatmap_24l-to-30l",
    "fig4_coqa_drift",
    "fig6_accuracy_vs_k",
    "fig7_component_removal",
    "fig9_latency",
)
PICTURES = Path(__file__).parent / "pictures"
MOST_BYTES = 60_000
# Widths in pixels and numbers of colours: the first that is small enough is taken.
SIZES = ((1000, 256), (1000, 64), (1000, 32), (900, 32), (800, 32), (700, 32), (600, 32))


def pictures(figures: Path) -> None:
    """Write a picture of each of FIGURES, all or none.

    Raises:
        KvferryError: one is missing, unreadable, or does not become small enough.
    """
    missing = [name for name in FIGURES if not (figures / f"{name}.png").is_file()]
    if missing:
        raise KvferryError(f"{figures}: lacks {', '.join(missing)}; run `make demo` first")
    made = {name: small(figures / f"{name}.png") for name in FIGURES}
    for name, data in made.items():
        with written_whole(PICTURES / f"{name}.png") as temporary:
            temporary.write_bytes(data)


def small(path: Path) -> bytes:
    """The png of a figure in the first of SIZES that takes at most MOST_BYTES.

    Raises:
        KvferryError: the figure cannot be read, or is not small enough in any of them.
    """
    try:
        with Image.open(path) as figure:
            whole = figure.convert("RGB")
    except (OSError, SyntaxError) as error:
        raise KvferryError(f"{path}: not a picture ({error}); delete it and run again") from error
    for width, colours in SIZES:
        data = _png(whole, width, colours)
        if len(data) <= MOST_BYTES:
            return data
    raise KvferryError(f"{path}: takes {len(data):,} bytes at the least, {MOST_BYTES:,} are allowed; draw less in it")


def _png(whole: Image.Image, width: int, colours: int) -> bytes:
    """At most `width` pixels wide and high, in so many colours."""
    image = whole.copy()
    image.thumbnail((width, width), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.quantize(colours, dither=Image.Dither.NONE).save(buffer, format="png", optimize=True)
    return buffer.getvalue()


if __name__ == "__main__":
    try:
        pictures(Path(*sys.argv[1:] or ["figures"]))
    except KvferryError as error:
        sys.exit(str(error))
