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
SCRATCH = ".making-"
# temporary folders older than this are removed. Conversions take less than a minute, so that an
# older folder belongs to a killed process
STALE_SECONDS = 3600


def cache_folder() -> Path:
    """Return the cache folder: $CAB_HF_CACHE, else $XDG_CACHE_HOME/cab_hf, else ~/.cache/cab_hf."""
    user_cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("CAB_HF_CACHE") or user_cache / "cab_hf")


def made_once(name: str, make: Callable[[Path], None]) -> Path:
    """Return the path of a file or folder in the cache; call ``make`` first if it does not exist.

    Args:
        name: name of the file or folder in the cache.
        make: function that writes the file or folder to the path that it receives. This path is in
            a temporary folder, and is renamed to ``name`` after ``make`` returns.
    """
    target = cache_folder() / name
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    for old_scratch in target.parent.glob(f"{SCRATCH}*"):
        if time.time() - old_scratch.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(old_scratch, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=target.parent) as scratch:
        result = Path(scratch) / name
        make(result)
        try:
            result.rename(target)
        except OSError:
            # another process has written the same folder meanwhile
            if not target.is_dir():
                raise
    return target


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of the content of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
