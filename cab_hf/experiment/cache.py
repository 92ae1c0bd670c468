"""The user's cache: folders and files that are made once, completely or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

SCRATCH = ".making-"  # prefix of scratch folders
# a conversion takes under a minute: an older scratch folder belongs to a killed process
STALE_SECONDS = 3600


def cache_folder() -> Path:
    """Return the cache folder: $CAB_HF_CACHE, else $XDG_CACHE_HOME/cab_hf, else ~/.cache/cab_hf."""
    shared = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("CAB_HF_CACHE") or shared / "cab_hf")


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the path ``name`` in the cache; ``make`` writes it if it does not exist yet.

    ``make`` receives a path in a scratch folder. Its result is renamed to ``name`` at the end.
    """
    target = cache_folder() / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f"{SCRATCH}*"):
        if time.time() - leftover.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=target.parent) as scratch:
        made = Path(scratch) / name
        make(made)
        try:
            made.rename(target)
        except OSError:
            # another process was first: its copy is equivalent
            if not target.is_dir():
                raise
    return target


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of the content of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
