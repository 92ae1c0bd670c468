"""Cache of files and folders in the user's home; readers never find an incomplete entry."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# prefix of temporary folders
SCRATCH_PREFIX = ".making-"
# temporary folders older than this are removed. Conversions take less than a minute, so that an
# older folder belongs to a killed process
STALE_SECONDS = 3600


def cache_folder() -> Path:
    """Return the cache folder: $CAB_HF_CACHE, else $XDG_CACHE_HOME/cab_hf, else ~/.cache/cab_hf."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("CAB_HF_CACHE") or user_cache / "cab_hf")


def make_cached_entry(entry_name: str, write_entry: Callable[[Path], None]) -> Path:
    """Return the path of a file or folder in the cache; write a missing one first.

    Args:
        entry_name: name of the file or folder in the cache.
        write_entry: function that writes the file or folder to the path that it receives. This path
            is in a temporary folder, and is renamed to ``entry_name`` after ``write_entry``
            returns.
    """
    cached_path = cache_folder() / entry_name
    if cached_path.exists():
        return cached_path
    cached_path.parent.mkdir(parents=True, exist_ok=True)
    for old_scratch_folder in cached_path.parent.glob(f"{SCRATCH_PREFIX}*"):
        if time.time() - old_scratch_folder.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(old_scratch_folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(
        prefix=SCRATCH_PREFIX, dir=cached_path.parent
    ) as scratch_folder:
        scratch_path = Path(scratch_folder) / entry_name
        write_entry(scratch_path)
        try:
            scratch_path.rename(cached_path)
        except OSError:
            # another process has written the same folder meanwhile
            if not cached_path.is_dir():
                raise
    return cached_path


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of the content of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
