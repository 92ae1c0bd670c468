"""`figure`: draw a matplotlib figure without a display, and write the PNG file atomically."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cab_hf.experiment.log import write_atomically

# pixels per inch
DPI = 100
# number of colours in the PNG palette: enough for lines, filled areas and their smooth edges. A
# file with a palette has a third of the bytes of a file in true colour
NUM_PALETTE_COLOURS = 64


@contextmanager
def figure(
    path: Path | str,
    num_rows: int,
    num_columns: int,
    figsize: tuple[float, float],
    **subplot_options: Any,
) -> Iterator[Any]:
    """Yield the axes of a grid of panels, and save the figure as PNG at the end of the block.

    Args:
        path: the PNG file.
        num_rows, num_columns: number of panels in each direction. The axes are an array [rows,
            columns].
        figsize: width and height in inches.
        subplot_options: other arguments of ``Figure.subplots``.
    """
    # imported on demand, because measurements need no figure. pyplot would change the backend of a
    # notebook; `Figure` does not
    from matplotlib.figure import Figure
    from PIL import Image

    matplotlib_figure = Figure(figsize=figsize, layout="constrained")
    yield matplotlib_figure.subplots(num_rows, num_columns, squeeze=False, **subplot_options)
    true_colour_png = io.BytesIO()
    matplotlib_figure.savefig(true_colour_png, dpi=DPI, format="png")
    palette_png = io.BytesIO()
    palette_image = (
        Image.open(true_colour_png)
        .convert("RGB")
        .quantize(NUM_PALETTE_COLOURS, dither=Image.Dither.NONE)
    )
    palette_image.save(palette_png, format="png", optimize=True)
    write_atomically(path, palette_png.getvalue())
