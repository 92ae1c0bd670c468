"""A log that survives a kill: one JSON object a line, each on disk before the next is made.

The first line says what run it is, ``{"identity": {...}, "started": ...}``; every other line is a
record. What several runs may write is told by the identity: a run goes on with a log of its own
identity and refuses any other. A log may be packed, which runs and readers need not know of.
"""

from __future__ import annotations

import errno
import fcntl
import json
import lzma
import os
import platform
import re
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from cab_hf.renamed import renamed_in
from cab_hf.runs.provenance import utc_now
from cab_hf.runs.settings import UsageError

Record = dict[str, Any]
_open: WeakSet[Log] = WeakSet()
# a file system without locks says one of these
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
PACKED = ".xz"  # behind the name of a log that `pack` has compressed
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class LogError(UsageError):
    """Files that a run cannot go on with or cannot write."""


def as_json(value: Any, path: Path) -> str:
    """``value`` as JSON, which knows no NaN and no infinity.

    Raises:
        LogError: it holds such a number, for the file ``path``.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise LogError(
            f"{path} cannot hold a number that is not finite (NaN or infinite), and one was "
            "measured; give another model, dtype or text."
        ) from error


class Log:
    """The log of a run, open for it alone.

    A lock on the file, which dies with its process, keeps a second writer out; who holds it stands
    in a hidden file beside it, which is gone when the log is closed. All of an existing file is
    read and checked before anything is changed; then a last line that a kill tore off is dropped,
    and one that only lacks its newline gets it. A record that cannot be written leaves the file as
    it was.

    Args:
        identity: JSON-able; what two records must share to stand in one log.
        key: names of the fields that tell records apart, so that none counts twice; without them
            every record counts.
        added: fields that records of earlier versions lack, and what they would have had; a record
            is read with them, and the file stays as it is.
        failed: name of a field that says, where it is there, why a record is none: it stays in the
            file and counts for nothing, so that one of its key takes its place.

    Attributes:
        records: all records, in order, as JSON reads them; it grows as they are appended.
        failures: those that failed and whose place nothing has taken, the latest of each key.
        started: when the log was begun, as ISO 8601 in UTC.

    Raises:
        LogError: another process writes the file, it is a symbolic link or no file, it belongs to a
            run of another identity, a whole line is no JSON object or lacks a field of ``key``, or
            nothing can be written there.
    """

    def __init__(
        self,
        path: Path | str,
        identity: Mapping[str, Any],
        key: Sequence[str] = (),
        added: Mapping[str, Any] | None = None,
        failed: str | None = None,
    ) -> None:
        self.path = Path(path)
        self.key = tuple(key)
        self.added = added or {}
        self.failed = failed
        self.records: list[Record] = []
        self._failures: dict[str, Record] = {}
        self._seen: set[str] = set()
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            was_packed = _is_packed(self.path)
            if was_packed:
                write_atomically(self.path, _unpacked(self.path))
            self._file = _open_locked(self.path)
        _open.add(self)
        try:
            with writing(self.path):
                self._sign()
                self._read(as_recorded(identity))
                drop_packed(self.path)
        except BaseException:
            self.close()
            if was_packed:
                self.path.unlink(missing_ok=True)
            raise

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others write."""
        if self._file >= 0:
            # while the lock is held, lest the next writer's be removed
            with suppress(OSError):
                if _is_open_at(self._file, self.path):
                    _writer_of(self.path).unlink()
            self._let_go()

    def _let_go(self) -> None:
        os.close(self._file)
        self._file = -1
        _open.discard(self)

    def __contains__(self, record: Mapping[str, Any]) -> bool:
        """Whether there is a record of the same key; without a key no two are the same."""
        return bool(self.key) and _key(record, self.key) in self._seen

    @property
    def failures(self) -> list[Record]:
        return list(self._failures.values())

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one JSON-able record; one whose key is there already is passed over.

        Raises:
            LogError: it cannot be written, or the file has been taken away.
        """
        line = as_json(record, self.path)
        if record in self:
            return
        if not _is_open_at(self._file, self.path):
            raise LogError(
                f"{self.path} was removed or replaced while this run wrote it; start it again, in "
                "a folder that nothing else writes."
            )
        with writing(self.path):
            self._write(line)
        self._count(json.loads(line))

    def _sign(self) -> None:
        """Say in a file beside the log who writes it; it proves nothing, the lock does."""
        writer = _writer_of(self.path)
        write_atomically(writer, f"process {os.getpid()} on {platform.node()} since {utc_now()}")

    def _read(self, identity: Mapping[str, Any]) -> None:
        content = _read_all(self._file)
        self.started = utc_now()
        header = json.dumps({"identity": identity, "started": self.started})
        if _is_torn_header(content, header):
            os.ftruncate(self._file, 0)
            self._write(header)
            return
        result, records, complete = _parse(self.path, content, self.key, self.added, identity)
        self.started = result["started"]
        for record in records:
            self._count(record)
        os.ftruncate(self._file, complete)
        if not content[:complete].endswith(b"\n"):
            self._write("")

    def _count(self, record: Record) -> None:
        if record in self:
            return
        key = _key(record, self.key)
        if _has_failed(record, self.failed):
            self._failures[key] = record
            return
        self._failures.pop(key, None)
        self._seen.add(key)
        self.records.append(record)

    def _write(self, line: str) -> None:
        size = os.fstat(self._file).st_size
        try:
            left = line.encode() + b"\n"
            while left:
                left = left[os.write(self._file, left) :]
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, size)
            raise


def read_log(
    path: Path | str,
    key: Sequence[str] = (),
    added: Mapping[str, Any] | None = None,
    failed: str | None = None,
) -> tuple[dict[str, Any], list[Record]]:
    """(identity, records) of a log, which is neither locked nor changed; LogError as for `Log`.

    Of records that share the fields ``key`` the first is taken, and all are read with what is
    ``added``, as by `Log`. Those that have ``failed`` come last, where nothing has taken their
    place.
    """
    path = Path(path)
    try:
        content = read_file(path)
    except OSError as error:
        raise LogError(
            f"{path} cannot be read ({error.strerror}); give the run's folder."
        ) from None
    header, records, _ = _parse(path, content, key, added or {})
    if key:
        first: dict[str, Record] = {}
        for record in sorted(records, key=lambda each: _has_failed(each, failed)):
            first.setdefault(_key(record, key), record)
        records = list(first.values())
    return header["identity"], records


def pack(path: Path | str) -> None:
    """Compress a file that no run writes, if there is one; `Log` and `read_file` take it so."""
    path = Path(path)
    if path.is_file():
        data = lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME)
        write_atomically(_packed(path), data)
        path.unlink()


def is_there(path: Path) -> bool:
    """Whether there is a file at ``path``, or what `pack` has made of it."""
    return path.exists() or _is_packed(path)


def _is_packed(path: Path) -> bool:
    """Whether of the file at ``path`` there is only what `pack` has made."""
    return not os.path.lexists(path) and _packed(path).exists()


def read_file(path: Path) -> bytes:
    """The bytes of the file at ``path``, or of what `pack` has made of it."""
    return _unpacked(path) if _is_packed(path) else path.read_bytes()


def drop_packed(path: Path) -> None:
    """Remove what `pack` has made of an earlier file at ``path``."""
    _packed(path).unlink(missing_ok=True)


def _packed(path: Path) -> Path:
    return path.with_name(path.name + PACKED)


def _unpacked(path: Path) -> bytes:
    try:
        return lzma.decompress(_packed(path).read_bytes())
    except lzma.LZMAError as error:
        raise LogError(f"{_packed(path)} is no whole xz file ({error}); restore it.") from None


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """What the file system refuses inside becomes a `LogError` that names ``path``."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        refused = _refused_by_file_system(error)
        if refused is None:
            raise
        raise LogError(
            f"{path} cannot be written ({refused}); make room there or give another --out."
        ) from error


def _refused_by_file_system(error: Exception) -> str | None:
    """What the file system says, which libraries may hide behind errors of their own."""
    said = error if isinstance(error, OSError) else error.__context__
    if isinstance(said, OSError):
        return said.strerror or str(said)
    # safetensors and tokenizers word it as Rust does
    match = re.search(r"([^:]+) \(os error \d+\)", str(error))
    return match and match[1].strip()


def _key(record: Mapping[str, Any], names: Iterable[str]) -> str:
    return json.dumps([record.get(name) for name in names])


def _has_failed(record: Mapping[str, Any], failed: str | None) -> bool:
    return failed is not None and record.get(failed) is not None


def _writer_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.writer")


def _leave_to_the_parent() -> None:
    """In a process that was forked: locks end with the parent, however long the child is there."""
    for log in list(_open):
        log._let_go()


os.register_at_fork(after_in_child=_leave_to_the_parent)


def _open_locked(path: Path) -> int:
    """A descriptor of the file at ``path``, made at need, that holds its lock."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        file = os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise LogError(
            f"{path} is a symbolic link, which a run does not follow; give another --out, or put "
            "the file itself there."
        ) from None
    try:
        _lock(file, path)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise LogError(f"{path} is no file; take it away or give another --out.")
        if _is_open_at(file, path):
            return file
    except BaseException:
        os.close(file)
        raise
    # taken away between opening and locking
    os.close(file)
    return _open_locked(path)


def _lock(file: int, path: Path) -> None:
    try:
        # of the open file: it ends with the process, however that ends
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            raise LogError(
                f"{path} is on a file system without locks ({error.strerror}), where two runs "
                "could write it; give an --out on another."
            ) from None
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise LogError(
            f"{path} is being written by another process{_writer_named(path)}; wait for it, or "
            "give another --out."
        ) from None


def _writer_named(path: Path) -> str:
    try:
        return f" ({_writer_of(path).read_text()})"
    except (OSError, ValueError):
        return ""


def _is_open_at(file: int, path: Path) -> bool:
    """Whether what stands at ``path`` is the open file."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except FileNotFoundError:
        return False


def _read_all(file: int) -> bytes:
    with os.fdopen(os.dup(file), "rb") as complete:
        complete.seek(0)
        return complete.read()


def _is_torn_header(content: bytes, header: str) -> bool:
    """Whether ``content`` is all that a kill left of ``header``."""
    # the time was another then: only what is before it is known
    known = header[: header.rindex('"started"')].encode()
    begun = known.startswith(content) or content.startswith(known)
    return begun and b"\n" not in content and _object(content) is None


def _parse(
    path: Path,
    content: bytes,
    key: Sequence[str],
    added: Mapping[str, Any],
    identity: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Any], list[Record], int]:
    """(header, records, length of what is whole) of a log's bytes; of a run with ``identity``."""
    lines = content.split(b"\n")
    complete = len(content)
    if not _is_json(lines[-1]):
        # torn off by a kill, or nothing behind the last newline
        complete -= len(lines.pop())
    results = [_object(line) for line in lines]
    if not results or not {"identity", "started"} <= (results[0] or {}).keys():
        raise LogError(f"{path} does not begin with the header of a run; give another --out.")
    if identity is not None:
        # before the records, which are of other fields in a log of another experiment
        require_identity(path, results[0]["identity"], identity)
    # what is no object is refused below
    records = [record if record is None else {**added, **record} for record in results[1:]]
    for number, record in enumerate(records, 2):
        lacking = [name for name in key if name not in (record or {})]
        if record is None or lacking:
            text = "is no JSON object" if record is None else f"has no {lacking[0]!r}"
            raise LogError(f"{path}, line {number} {text}; repair it or give another --out.")
    return results[0], records, complete


def as_recorded(identity: Mapping[str, Any]) -> dict[str, Any]:
    """An identity as JSON reads it, with today's names."""
    return renamed_in(json.loads(json.dumps(identity)))


def require_identity(path: Path, seen: Any, wanted: Mapping[str, Any]) -> None:
    """Refuse what is at ``path`` unless a run of the identity ``wanted`` has made it.

    Raises:
        LogError: naming the first field by which both, as of `as_recorded`, differ.
    """
    for name, theirs, mine in _differences(seen, wanted):
        raise LogError(
            f"{path} was made with {name} {theirs!r}, this run has {mine!r}; give another --out, "
            "or what the first run had to go on with it."
        )


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _object(line: bytes) -> dict[str, Any] | None:
    value = json.loads(line) if _is_json(line) else None
    return renamed_in(value) if isinstance(value, dict) else None


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
        # a link is replaced and not followed
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
