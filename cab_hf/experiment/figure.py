"""Figures of runs, drawn without a display and written atomically."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cab_hf.experiment.log import write_atomically

DPI = 100
# sufficient for lines, shares and their edges: a third of the bytes of true colour
COLOURS = 64


@contextmanager
def figure(
    path: Path | str, rows: int, columns: int, figsize: tuple[float, float], **options: Any
) -> Iterator[Any]:
    """Yield the axes of a grid, an array [rows, columns], and save the figure as PNG on exit."""
    # imported here, because measuring draws nothing. Not pyplot: a notebook has its own backend
    from matplotlib.figure import Figure
    from PIL import Image

    drawing = Figure(figsize=figsize, layout="constrained")
    yield drawing.subplots(rows, columns, squeeze=False, **options)
    drawn = io.BytesIO()
    drawing.savefig(drawn, dpi=DPI, format="png")
    small = io.BytesIO()
    picture = Image.open(drawn).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    picture.save(small, format="png", optimize=True)
    write_atomically(path, small.getvalue())
