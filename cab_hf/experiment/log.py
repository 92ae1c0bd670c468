"""A log that survives a kill: one JSON object per line, each on disk before the next is made.

The first line identifies the run: ``{"identity": {...}, "started": ...}``. Every other line is a
record. A run continues a log of its own identity, and raises an error for any other log. A line
without a newline at its end is torn and dropped. A log may be compressed (`pack`); runs and readers
accept it in both forms.
"""

from __future__ import annotations

import errno
import fcntl
import json
import lzma
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from cab_hf.experiment.provenance import utc_now
from cab_hf.experiment.settings import UsageError

Record = dict[str, Any]
FieldsOf = Callable[[Record], Iterable[str]]
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
PACKED = ".xz"  # suffix of a log that `pack` has compressed
HEADER = b'{"identity": '  # start of every log


class LogError(UsageError):
    """An error for files that a run cannot continue or cannot write."""


def as_json(value: Any, path: Path) -> str:
    """Convert ``value`` to JSON for the file ``path``; LogError if it contains NaN or infinity."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise LogError(
            f"{path} must contain finite numbers only, got NaN or infinity as a measurement. Give "
            "another model, dtype or text."
        ) from error


class _Records:
    """The records of a `Log`; records with the same key count once."""

    def __init__(self, key: Sequence[str], failed: str | None) -> None:
        self.key, self.failed = tuple(key), failed
        self.records: list[Record] = []
        self._failures: dict[str, Record] = {}
        self._seen: set[str] = set()

    def __contains__(self, record: Mapping[str, Any]) -> bool:
        """Return True if a record has the same key. Without a key no two records are the same."""
        return bool(self.key) and self._key(record) in self._seen

    @property
    def failures(self) -> list[Record]:
        return list(self._failures.values())

    def count(self, record: Record) -> None:
        """Add a record that was read or written."""
        key = self._key(record)
        if record in self:
            return
        if self.failed is not None and record.get(self.failed) is not None:
            self._failures[key] = record
            return
        self._failures.pop(key, None)
        self._seen.add(key)
        self.records.append(record)

    def _key(self, record: Mapping[str, Any]) -> str:
        return json.dumps([record.get(name) for name in self.key])


class Log(_Records):
    """The log of a run, locked so that no other process can write it.

    The file itself is locked by `flock`: the lock ends with the process, and no lock file stays in
    a folder of results. An existing file is checked completely before any change. If a record
    cannot be written, the file stays as it was.

    Args:
        path: the file.
        identity: JSON-able; a log contains records of one identity only.
        key: names of the fields that identify a record, so that no record counts twice. Without a
            key every record counts.
        added: values of fields that records of earlier versions lack; the file does not change.
        failed: name of the field that contains the reason of a failed measurement. Such a record
            stays in the file, and a later record with its key replaces it.
        fields_of: returns the fields that a record must have in addition to ``key``.

    Attributes:
        records: all records that did not fail, in order; `append` extends the list.
        failures: the latest record of each key that only failed.
        started: when the log was started, in ISO 8601, UTC.

    Raises:
        LogError: another process writes the file; it belongs to a run of another identity; a line
            is no JSON object or lacks a field; or it cannot be written.
    """

    def __init__(
        self,
        path: Path | str,
        identity: Mapping[str, Any],
        key: Sequence[str] = (),
        added: Mapping[str, Any] | None = None,
        failed: str | None = None,
        fields_of: FieldsOf | None = None,
    ) -> None:
        super().__init__(key, failed)
        self.path, identity = Path(path), as_recorded(identity)
        self._fields_of = fields_of
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if is_there(self.path) and not self.path.exists():
                content = read_file(self.path)
                _parse(self.path, content, key, added or {}, identity, fields_of)
                write_atomically(self.path, content)
            self._file = FileIO(self.path, "a+")
            try:
                self._lock()
                self._read(identity, added or {})
                drop_packed(self.path)
            except BaseException:
                self._file.close()
                raise

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock, also if a forked process has inherited the file."""
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one JSON-able record, unless the log contains a record with its key.

        Raises:
            LogError: the record cannot be written, or the file was removed or replaced.
        """
        line = as_json(record, self.path)
        if record in self:
            return
        with writing(self.path):
            there = self.path.exists()
            if not there or not os.path.samestat(os.stat(self._file.fileno()), self.path.stat()):
                raise LogError(
                    f"{self.path} was removed or replaced while this run wrote it. Start the run "
                    "again, in a folder that nothing else writes."
                )
            self._write(line)
        self.count(json.loads(line))

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LogError(
                f"{self.path} is being written by another process. Wait for it, or give another "
                "--out."
            ) from None

    def _read(self, identity: Mapping[str, Any], added: Mapping[str, Any]) -> None:
        self._file.seek(0)
        content = self._file.read()
        complete = len(content) - len(content.rpartition(b"\n")[2])
        if not complete and HEADER.startswith(content[: len(HEADER)]):
            # the file is new, or its header is torn
            self.started = utc_now()
            self._file.truncate(0)
            self._write(json.dumps({"identity": identity, "started": self.started}))
            return
        header, records = _parse(self.path, content, self.key, added, identity, self._fields_of)
        self.started = header["started"]
        for record in records:
            self.count(record)
        self._file.truncate(complete)

    def _write(self, line: str) -> None:
        size = os.stat(self._file.fileno()).st_size
        try:
            left = line.encode() + b"\n"
            while left:
                left = left[os.write(self._file.fileno(), left) :]
            os.fsync(self._file)
        except OSError:
            self._file.truncate(size)
            raise


def read_log(
    path: Path | str,
    key: Sequence[str] = (),
    added: Mapping[str, Any] | None = None,
    failed: str | None = None,
    fields_of: FieldsOf | None = None,
) -> tuple[dict[str, Any], list[Record]]:
    """Read (identity, records) of a log without locking or changing it; LogError as for `Log`.

    Records with the same ``key`` count once, as in `Log`. Records that only failed come last.
    """
    path = Path(path)
    try:
        content = read_file(path)
    except OSError as error:
        raise LogError(
            f"{path} cannot be read ({error.strerror}). Give the folder of the run."
        ) from None
    header, records = _parse(path, content, key, added or {}, fields_of=fields_of)
    counted = _Records(key, failed)
    for record in records:
        counted.count(record)
    return header["identity"], counted.records + counted.failures


def pack(path: Path | str) -> None:
    """Compress a file that no run writes, if it exists; `Log` and `read_file` accept both forms."""
    path = Path(path)
    if path.is_file():
        data = lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME)
        write_atomically(_packed(path), data)
        path.unlink()


def is_there(path: Path) -> bool:
    """Return True if a file exists at ``path``, compressed or not."""
    return path.exists() or _packed(path).exists()


def read_file(path: Path) -> bytes:
    """Return the bytes of the file at ``path``, decompressed if `pack` has compressed it."""
    if path.exists() or not _packed(path).exists():
        return path.read_bytes()
    try:
        return lzma.decompress(_packed(path).read_bytes())
    except lzma.LZMAError as error:
        text = f"{_packed(path)} is not a complete xz file ({error}). Restore it."
        raise LogError(text) from None


def drop_packed(path: Path) -> None:
    """Remove the compressed version of an earlier file at ``path``."""
    _packed(path).unlink(missing_ok=True)


def _packed(path: Path) -> Path:
    return path.with_name(path.name + PACKED)


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turn errors of the file system inside the block into a `LogError` that names ``path``."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        # libraries may wrap it in their own errors, or word it as Rust does
        cause = error if isinstance(error, OSError) else error.__context__
        rust = re.search(r"([^:]+) \(os error \d+\)", str(error))
        if isinstance(cause, OSError):
            why = cause.strerror or cause
        elif rust:
            why = rust[1].strip()
        else:
            raise
        raise LogError(
            f"{path} cannot be written ({why}). Free disk space there, or give another --out."
        ) from error


def _parse(
    path: Path,
    content: bytes,
    key: Sequence[str],
    added: Mapping[str, Any],
    identity: Mapping[str, Any] | None = None,
    fields_of: FieldsOf | None = None,
) -> tuple[dict[str, Any], list[Record]]:
    """Parse the complete lines of a log: (header, records). ``identity`` is checked if given."""
    values = list(map(_value, content.split(b"\n")[:-1]))
    header = values[0] if values else None
    if not isinstance(header, dict) or not {"identity", "started"} <= header.keys():
        raise LogError(f"{path} must start with the header of a run. Give another --out.")
    if identity is not None:
        # before the records, whose fields differ in a log of another experiment
        require_identity(path, header["identity"], identity)
    records = []
    for number, record in enumerate(values[1:], 2):
        wrong = "is no JSON object"
        if isinstance(record, dict):
            record = {**added, **record}
            records.append(record)
            missing = [name for name in key if name not in record]
            if not missing and fields_of is not None:
                missing = [name for name in fields_of(record) if name not in record]
            wrong = f"has no {missing[0]!r}" if missing else None
        if wrong:
            raise LogError(f"{path}, line {number} {wrong}. Repair it, or give another --out.")
    return header, records


def _value(line: bytes) -> Any:
    """Parse a line as JSON; None if it is not JSON."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def as_recorded(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity as JSON stores it."""
    return json.loads(json.dumps(identity))


def require_identity(path: Path, seen: Any, wanted: Any, name: str = "") -> None:
    """Raise an error unless the run of ``path`` had the identity ``wanted``.

    Raises:
        LogError: the identities differ. The message names the first differing field.
    """
    if isinstance(seen, dict) and isinstance(wanted, dict):
        for field in dict.fromkeys((*wanted, *seen)):
            inner = f"{name}.{field}" if name else field
            require_identity(path, seen.get(field), wanted.get(field), inner)
    elif seen != wanted:
        raise LogError(
            f"{path} was made with {name or 'identity'} {seen!r}, this run has {wanted!r}. Give "
            "another --out, or continue with the settings of the first run."
        )


def write_atomically(path: Path | str, data: str | bytes) -> None:
    """Write str or bytes so that a reader sees the old file or the new file, never a part."""
    path = Path(path)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
        os.chmod(temporary, 0o644)
        # a link is replaced and not followed
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
