"""The user's cache: folders and files that are made once, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# a conversion takes under a minute: an older half-made one belongs to a killed process
STALE_SECONDS = 3600


def cache_folder() -> Path:
    """For converted models: $CAB_HF_CACHE, else $XDG_CACHE_HOME/cab_hf, else ~/.cache/cab_hf."""
    shared = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("CAB_HF_CACHE") or shared / "cab_hf")


@contextmanager
def scratch_beside(target: Path, prefix: str) -> Iterator[Path]:
    """A folder to make ``target`` in, so that one rename is the last step.

    Args:
        prefix: of its name; half-made ones that killed processes have left are removed.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f"{prefix}*"):
        if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as scratch:
        yield Path(scratch)


def keep_first(made: Path, target: Path) -> None:
    """Rename a folder to ``target``, unless another process was first: its copy is as good."""
    try:
        made.rename(target)
    except OSError:
        if not target.is_dir():
            raise


def file_sha256(path: Path) -> str:
    """SHA-256 of what is in a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
