"""A log that survives a kill: one JSON object a line, each on disk before the next is made.

The first line says what run it is, ``{"identity": {...}, "started": ...}``; every other line is a
record. What several runs may write is told by the identity: a run goes on with a log of its own
identity and refuses any other.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cab_hf.runs.provenance import utc_now

Record = dict[str, Any]


class LogError(ValueError):
    """A log that a run cannot go on with; the message is one sentence for whoever started it."""


class Log:
    """The log of a run, open for it alone.

    A lock on the file, which dies with its process, keeps a second writer out. All of an existing
    file is read and checked before anything is changed; then a last line that a kill tore off is
    dropped, and one that only lacks its newline gets it.

    Args:
        identity: JSON-able; what two records must share to stand in one log.
        key: names of the fields that tell records apart, so that none counts twice; without them
            every record counts.

    Attributes:
        records: all records, in order, as JSON reads them; it grows as they are appended.
        started: when the log was begun, as ISO 8601 in UTC.

    Raises:
        LogError: another process writes the file, it is a symbolic link, it belongs to a run of
            another identity, or a whole line is no JSON object.
    """

    def __init__(
        self, path: Path | str, identity: Mapping[str, Any], key: Sequence[str] = ()
    ) -> None:
        self.path = Path(path)
        self.key = tuple(key)
        self.records: list[Record] = []
        self._seen: set[str] = set()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _open_locked(self.path)
        try:
            self._read(json.loads(json.dumps(identity)))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others write."""
        self._file.close()

    def __contains__(self, record: Mapping[str, Any]) -> bool:
        """Whether there is a record of the same key."""
        return self._key(record) in self._seen

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one JSON-able record; one whose key is there already is passed over."""
        line = json.dumps(record)
        if self._count(json.loads(line)):
            self._write(line)

    def _read(self, identity: Mapping[str, Any]) -> None:
        self._file.seek(0)
        content = self._file.read()
        self.started = utc_now()
        header = json.dumps({"identity": identity, "started": self.started})
        # up to the time, which was another then, so much of a torn first line is known
        known = header[: header.rindex('"started"')].encode()
        if b"\n" not in content and (known.startswith(content) or content.startswith(known)):
            self._file.truncate(0)
            self._write(header)
            return
        found, records, whole = _parse(self.path, content)
        for name, seen, wanted in _differences(found["identity"], identity):
            raise LogError(
                f"{self.path} was made with {name} {seen!r}, this run has {wanted!r}; give another "
                "--out, or what the first run had to go on with it."
            )
        self.started = found["started"]
        for record in records:
            self._count(record)
        self._file.truncate(whole)
        if not content[:whole].endswith(b"\n"):
            self._write("")

    def _key(self, record: Mapping[str, Any]) -> str:
        return json.dumps([record.get(name) for name in self.key])

    def _count(self, record: Record) -> bool:
        if self.key and record in self:
            return False
        self._seen.add(self._key(record))
        self.records.append(record)
        return True

    def _write(self, line: str) -> None:
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def read_log(path: Path | str) -> tuple[dict[str, Any], list[Record]]:
    """(identity, records) of a log, which is neither locked nor changed; LogError as for `Log`."""
    path = Path(path)
    header, records, _ = _parse(path, path.read_bytes())
    return header["identity"], records


def _open_locked(path: Path) -> Any:
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    try:
        file = os.fdopen(os.open(path, flags, 0o644), "a+b")
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise LogError(
            f"{path} is a symbolic link, which a run does not follow; give another --out, or put "
            "the file itself there."
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise LogError(
            f"{path} is being written by another process; wait for it, or give another --out."
        ) from None
    return file


def _parse(path: Path, content: bytes) -> tuple[dict[str, Any], list[Record], int]:
    """(header, records, length of what is whole) of a log's bytes."""
    found = [_object(line) for line in content.split(b"\n")]
    whole = len(content)
    if found[-1] is None:
        found.pop()
        whole = content.rfind(b"\n") + 1
    if not found or not {"identity", "started"} <= (found[0] or {}).keys():
        raise LogError(f"{path} does not begin with the header of a run; give another --out.")
    if None in found:
        raise LogError(
            f"{path}, line {found.index(None) + 1} is not JSON; repair it or give another --out."
        )
    return found[0], found[1:], whole


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _differences(seen: Any, wanted: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, seen, wanted) of values that differ, fields of mappings one by one."""
    if isinstance(seen, dict) and isinstance(wanted, dict):
        for field in dict.fromkeys((*wanted, *seen)):
            inner = f"{name}.{field}" if name else field
            yield from _differences(seen.get(field), wanted.get(field), inner)
    elif seen != wanted:
        yield name or "identity", seen, wanted


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
