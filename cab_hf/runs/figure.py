"""Figures of runs, drawn without a screen and never half written."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cab_hf.runs.log import write_atomically


@contextmanager
def figure(path: Path | str, rows: int, columns: int, **options: Any) -> Iterator[Any]:
    """The axes of a grid, an array [rows, columns]; on leaving the figure is saved as PNG."""
    # imported here: measuring draws nothing
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    drawing, axes = plt.subplots(rows, columns, squeeze=False, layout="constrained", **options)
    try:
        yield axes
        drawn = io.BytesIO()
        drawing.savefig(drawn, dpi=150, format="png")
    finally:
        plt.close(drawing)
    write_atomically(path, drawn.getvalue())
