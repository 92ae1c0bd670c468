"""Results as files with provenance: an evaluation appends samples and derives all else from them.

`SampleLog` is the one place where a score is written down. Rows, tables and figures are computed
from it, so nothing is scored twice and nothing is typed in by hand.
"""

from __future__ import annotations

import csv
import datetime
import hashlib
import io
import json
import math
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

Z_95 = 1.959963984540054  # the normal quantile of a two-sided 95 % interval
WIDEST_FIGURE = 14  # grid columns side by side, over all panels


def utc_now() -> str:
    """The time, to the second, as ISO 8601 in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def fingerprint(settings: Mapping[str, Any]) -> str:
    """Twelve hex digits that change when any of ``settings`` (JSON-able) does."""
    canonical = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


# --- intervals


def wilson(correct: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval (low, high) of a proportion (Wilson 1927), within [0, 1].

    Unlike the normal approximation it is honest at 0 of n and n of n: 10 of 10 gives [0.72, 1].
    """
    if n <= 0 or not 0 <= correct <= n:
        raise ValueError(f"correct must be 0 to n, and n over 0; got correct={correct}, n={n}.")
    share = correct / n
    spread = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    middle = share + z * z / (2 * n)
    scale = 1 + z * z / n
    # rounding must not push an end past the share itself, which it equals at 0 of n and n of n
    return (
        min(share, max(0.0, (middle - spread) / scale)),
        max(share, min(1.0, (middle + spread) / scale)),
    )


def paired_difference(
    ours: Sequence[bool], base: Sequence[bool], z: float = Z_95
) -> tuple[float, float, float]:
    """Difference of two accuracies measured on the same samples, with its interval.

    The interval is Newcombe's for paired proportions (Newcombe 1998, Statistics in Medicine 17,
    2635-2650, method 10): it joins the two Wilson intervals through the correlation of the
    outcomes. It keeps a sensible width where the two never disagree; Wald's has none there.

    Args:
        ours, base: n outcomes each, outcome i of both being of the same sample.

    Returns:
        (accuracy of ours minus accuracy of base, low, high).
    """
    n = len(ours)
    if n == 0 or n != len(base):
        raise ValueError(f"ours and base must be of one length over 0; got {n} and {len(base)}.")
    pairs = list(zip(map(bool, ours), map(bool, base), strict=True))
    both, only_ours = pairs.count((True, True)), pairs.count((True, False))
    only_base, neither = pairs.count((False, True)), pairs.count((False, False))
    p, q = (both + only_ours) / n, (both + only_base) / n
    p_low, p_high = wilson(both + only_ours, n, z)
    q_low, q_high = wilson(both + only_base, n, z)

    product = both * neither - only_ours * only_base
    if product > 0:  # the continuity correction that makes it method 10
        product = max(product - n / 2, 0.0)
    right, base_right = both + only_ours, both + only_base
    margins = right * (n - right) * base_right * (n - base_right)
    phi = product / math.sqrt(margins) if margins else 0.0

    def joined(a: float, b: float) -> float:
        return math.sqrt(max(a * a - 2 * phi * a * b + b * b, 0.0))

    return p - q, p - q - joined(p - p_low, q_high - q), p - q + joined(p_high - p, q - q_low)


# --- provenance


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def git_commit() -> str | None:
    """The commit of this code, ``-dirty`` where files differ from it.

    A copy without its history may be told by ``$CAB_HF_COMMIT``; None where nobody knows.
    """
    # an installed copy may lie inside somebody else's repository: only a tracked file is ours
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return os.environ.get("CAB_HF_COMMIT")
    return _git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def versions() -> dict[str, str]:
    """Versions of what computes, by package name; those not installed are left out."""
    found = {"python": platform.python_version()}
    for package in ("cab_hf", "torch", "transformers", "triton", "flash-attn-4"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def device_name(device: Any) -> str:
    """The GPU's name, or the processor's architecture. Never a host name."""
    import torch

    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()


def provenance(settings: Mapping[str, Any], device: Any, seed: int, started: str) -> dict[str, Any]:
    """What a reader needs to get the same numbers again; ``started`` is from `utc_now`.

    No paths and no host names: results are committed.
    """
    return {
        "settings": dict(settings),
        "versions": versions(),
        "commit": git_commit(),
        "device": device_name(device),
        "seed": seed,
        "started": started,
        "finished": utc_now(),
    }


# --- files


def write_atomically(path: Path | str, data: str | bytes) -> None:
    """Write str or bytes so that a reader sees the old file or the new one, never half of it."""
    path = Path(path)
    data = data.encode() if isinstance(data, str) else data
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


class SampleLog:
    """An append-only ``samples.jsonl``: one scored sample a line, on disk before the next is made.

    Every line carries the fingerprint of the settings it was made under. Opening the file drops a
    last line that a kill tore off.

    Attributes:
        samples: all that the file holds, in order.

    Raises:
        ValueError: the file holds samples of other settings, or a whole line that is not JSON.
    """

    def __init__(self, path: Path | str, fingerprint: str) -> None:
        self.path = Path(path)
        self.fingerprint = fingerprint
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.samples = self._read_and_repair()

    def _read_and_repair(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with open(self.path, "r+b") as file:
                file.truncate(len(whole))
        samples = []
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                sample = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{self.path}, line {number} is not JSON: {error}.") from error
            if sample.get("fingerprint") != self.fingerprint:
                raise ValueError(
                    f"{self.path}, line {number} was made under other settings "
                    f"({sample.get('fingerprint')}, now {self.fingerprint}); give another --out, "
                    "or the settings of the first run to go on with it."
                )
            samples.append(sample)
        return samples

    def append(self, sample: Mapping[str, Any]) -> None:
        """Add one JSON-able sample to the file and to ``samples``."""
        line = json.dumps({**sample, "fingerprint": self.fingerprint})
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
        # as it will be read: tuples are lists then
        self.samples.append(json.loads(line))


def write_results(
    folder: Path | str, rows: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]
) -> Path:
    """Write ``{"rows": rows, "provenance": provenance}`` to results.json; returns its path."""
    path = Path(folder) / "results.json"
    content = {"rows": list(rows), "provenance": provenance}
    write_atomically(path, json.dumps(content, indent=2) + "\n")
    return path


def as_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows with a header; what is a mapping in a row is a column for each of its keys."""
    flat = []
    for row in rows:
        cells = {}
        for name, value in row.items():
            inner = value if isinstance(value, dict) else {"": value}
            cells |= {f"{name}.{key}".rstrip("."): each for key, each in inner.items()}
        flat.append(cells)
    written = io.StringIO()
    columns = dict.fromkeys(name for cells in flat for name in cells)
    writer = csv.DictWriter(written, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return written.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def markdown_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | Mapping[str, Any]
) -> str:
    """A Markdown table: floats with two decimals, None and missing values a dash.

    Args:
        columns: keys of the rows, in order; or a dict from heading to a key, or to a function of
            the row.
    """
    columns = columns if isinstance(columns, Mapping) else {name: name for name in columns}
    lines = [list(columns), ["---"] * len(columns)]
    for row in rows:
        values = (get(row) if callable(get) else row.get(get) for get in columns.values())
        lines.append([_cell(value) for value in values])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def digits(value: float | None) -> str | None:
    """A number from 0 up with three digits that count, and no exponent."""
    if not value:
        return None if value is None else "0"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(value)))}f}"


def percent(share: float | None) -> str | None:
    """A share as ``12.3 %``."""
    return None if share is None else f"{digits(100 * share)} %"


def listed(lengths: Sequence[int]) -> str:
    """Numbers of tokens in a sentence, shortened where they are many."""
    if len(lengths) > 3:
        return f"{lengths[0]:,} … {lengths[-1]:,} ({len(lengths)} lengths)"
    return " and ".join(", ".join(f"{length:,}" for length in lengths).rsplit(", ", 1))


def told_by_length(
    rows: Sequence[Mapping[str, Any]],
    reasons: Callable[[Mapping[str, Any]], Mapping[str, str]],
    sentence: str,
) -> list[str]:
    """``sentence`` for each (name, why) of ``reasons(row)``, with the lengths it holds at."""
    where: dict[tuple[str, str], dict[int, None]] = {}
    for row in rows:
        for name, why in reasons(row).items():
            where.setdefault((name, why), {})[row["length"]] = None
    told = (
        sentence.format(name=name, why=why, lengths=listed(list(lengths)))
        for (name, why), lengths in where.items()
    )
    return [line[0].upper() + line[1:] for line in told]


def heatmap(
    path: Path | str,
    panels: Mapping[str, Mapping[tuple[float, float], float]],
    x_label: str,
    y_label: str,
    title: str = "",
) -> None:
    """Draw shares from 0 to 1 as one grid a panel and save the figure as PNG.

    Args:
        panels: panel title -> {(x, y): share}. All panels have the same axes; what a panel does not
            have stays white.
    """
    # imported here: most of what uses this file draws nothing
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    xs, ys = (
        sorted({place[axis] for grid in panels.values() for place in grid}) for axis in (0, 1)
    )
    down = -(-len(panels) // max(2, WIDEST_FIGURE // (len(xs) + 1)))
    across = -(-len(panels) // down)
    figure, axes = plt.subplots(
        down,
        across,
        figsize=(1.6 + across * (0.6 + 0.5 * len(xs)), 1.2 + down * (0.4 + 0.35 * len(ys))),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, shares) in zip(axes.flat, panels.items(), strict=False):
        grid = [[shares.get((x, y), math.nan) for x in xs] for y in ys]
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axis.set_title(name, fontsize=9)
        axis.set_xticks(range(len(xs)), [f"{round(x, 2):g}" for x in xs], fontsize=7)
        axis.set_yticks(range(len(ys)), [f"{round(y, 2):g}" for y in ys], fontsize=7)
        for (x, y), share in shares.items():
            place = (xs.index(x), ys.index(y))
            ink = "white" if share < 0.6 else "black"
            axis.annotate(f"{share:.0%}", place, ha="center", va="center", fontsize=6, color=ink)
    figure.supxlabel(x_label, fontsize=9)
    figure.supylabel(y_label, fontsize=9)
    figure.suptitle(title, fontsize=10)
    figure.colorbar(image, ax=axes, label="share")
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150, format="png")
    plt.close(figure)
    write_atomically(path, drawn.getvalue())
