"""A log of measurements as JSON lines, from which a killed run continues.

Every line is on disk before the next measurement begins. The first line, the header, identifies the
run: ``{"identity": {...}, "started": ...}``. Every other line is a record, the result of one
measurement. A run continues a log with the same identity, and raises an error for any other log. A
last line without a newline was written incompletely, and is dropped. `pack_file` compresses a log;
`Log` and `read_log` accept compressed logs too.
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
# function: record -> names of the fields that the record must have
RequiredFieldsFunction = Callable[[Record], Iterable[str]]
# error numbers of a full disk and of an exceeded quota
DISK_FULL_ERRORS = (errno.ENOSPC, errno.EDQUOT)
# suffix of a file that `pack_file` has compressed
PACKED_SUFFIX = ".xz"
# first bytes of every log
HEADER_START = b'{"identity": '


class LogError(UsageError):
    """An error about a file that a run cannot read, continue or write."""


def to_json(value: Any, path: Path) -> str:
    """Convert ``value`` to JSON.

    Args:
        value: the value.
        path: the file that will contain the value, named in the error message.

    Raises:
        LogError: the value contains NaN or infinity.
    """
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise LogError(
            f"{path} must contain finite numbers only, but a measurement is NaN or infinite. Use "
            "another model, dtype or text."
        ) from error


class _LogRecords:
    """The records of a `Log`, without duplicates and without failures that a later run repaired.

    Attributes:
        key_fields: names of the fields that identify a record: records with equal values in these
            fields are duplicates. () if there are no duplicates.
        error_field: name of the field with the reason why a measurement failed; None if
            measurements cannot fail.
        records: the records that did not fail.
    """

    def __init__(self, key_fields: Sequence[str], error_field: str | None) -> None:
        self.key_fields, self.error_field = tuple(key_fields), error_field
        self.records: list[Record] = []
        self._failure_by_key: dict[str, Record] = {}
        self._successful_keys: set[str] = set()

    def __contains__(self, record: Mapping[str, Any]) -> bool:
        """Return True if a successful record has the same values in the ``key_fields``."""
        return bool(self.key_fields) and self._make_record_key(record) in self._successful_keys

    @property
    def failures(self) -> list[Record]:
        """Return the latest failed record of each measurement that has no successful record."""
        return list(self._failure_by_key.values())

    def count_record(self, record: Record) -> None:
        """Add a record of the file to `records`, or to `failures` if its measurement failed.

        A record with the key of a successful record is ignored.
        """
        record_key = self._make_record_key(record)
        if record in self:
            return
        if self.error_field is not None and record.get(self.error_field) is not None:
            self._failure_by_key[record_key] = record
            return
        self._failure_by_key.pop(record_key, None)
        self._successful_keys.add(record_key)
        self.records.append(record)

    def _make_record_key(self, record: Mapping[str, Any]) -> str:
        """Return the values of the fields in ``key_fields``, joined to one string as a dict key."""
        return json.dumps([record.get(field_name) for field_name in self.key_fields])


class Log(_LogRecords):
    """The log of a run, locked so that no other process can write the file.

    `flock` locks the file itself: the lock ends with the process, and no separate lock file is left
    in the folder of results. The constructor checks all lines of an existing file before it changes
    the file. If a record cannot be written, the file does not change.

    Args:
        path: the file.
        identity: what determines the results of the run, such as settings and model, as a mapping
            that JSON can store. A log contains records of one identity only.
        key_fields: names of the fields that identify a record. A record whose values in these
            fields are equal to those of a successful record is a duplicate and is ignored. () means
            that no record is a duplicate.
        added_defaults: fields that records of earlier versions lack, with their values. The fields
            are added to `records` only, and not to the file.
        error_field: name of the field with the reason why a measurement failed; None if
            measurements cannot fail. The file keeps failed records. A failed record is in
            `failures` until a later record with the same key replaces it.
        required_fields: function of a record that returns the names of the fields that the record
            must have in addition to ``key_fields``; None to require ``key_fields`` only.

    Attributes:
        records: all records that did not fail, in order; `append` extends the list.
        failures: the latest failed record of each measurement that has no successful record.
        started: time of the first start of the run, in ISO 8601, UTC.

    Raises:
        LogError: another process writes the file, the identity of the file differs, a line is no
            JSON object or lacks a field, or the file cannot be written.
    """

    def __init__(
        self,
        path: Path | str,
        identity: Mapping[str, Any],
        key_fields: Sequence[str] = (),
        added_defaults: Mapping[str, Any] | None = None,
        error_field: str | None = None,
        required_fields: RequiredFieldsFunction | None = None,
    ) -> None:
        super().__init__(key_fields, error_field)
        self.path, identity = Path(path), convert_through_json(identity)
        self._required_fields = required_fields
        with convert_write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if file_exists(self.path) and not self.path.exists():
                content = read_file(self.path)
                _parse_log(
                    self.path,
                    content,
                    key_fields=key_fields,
                    added_defaults=added_defaults or {},
                    identity=identity,
                    required_fields=required_fields,
                )
                write_atomically(self.path, content)
            self._file = FileIO(self.path, "a+")
            try:
                self._lock_file()
                self._read_records(identity, added_defaults or {})
                remove_packed_file(self.path)
            except BaseException:
                self._file.close()
                raise

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock and close the file.

        The file is unlocked explicitly, because a forked process that has inherited the open file
        would keep the lock.
        """
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record, unless `records` contains a record with the same key.

        Args:
            record: a mapping that JSON can store.

        Raises:
            LogError: the record cannot be written, or the file was removed or replaced.
        """
        line = to_json(record, self.path)
        if record in self:
            return
        with convert_write_errors(self.path):
            has_file = self.path.exists()
            if not has_file or not os.path.samestat(os.stat(self._file.fileno()), self.path.stat()):
                raise LogError(
                    f"{self.path} was removed or replaced while this run wrote it. Start the run "
                    "again, in a folder that nothing else writes."
                )
            self._write_line(line)
        self.count_record(json.loads(line))

    def _lock_file(self) -> None:
        """Lock the file, or raise a LogError if another process has locked the file."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LogError(
                f"{self.path} is being written by another process. Wait for it, or give another "
                "--out."
            ) from None

    def _read_records(self, identity: Mapping[str, Any], added_defaults: Mapping[str, Any]) -> None:
        """Read the records of the file, or write the header of a new file."""
        self._file.seek(0)
        content = self._file.read()
        # bytes of the lines that end with a newline
        num_complete_bytes = len(content) - len(content.rpartition(b"\n")[2])
        if not num_complete_bytes and HEADER_START.startswith(content[: len(HEADER_START)]):
            # the file is new, or its header was written incompletely
            self.started = utc_now()
            self._file.truncate(0)
            self._write_line(json.dumps({"identity": identity, "started": self.started}))
            return
        header, records = _parse_log(
            self.path,
            content,
            key_fields=self.key_fields,
            added_defaults=added_defaults,
            identity=identity,
            required_fields=self._required_fields,
        )
        self.started = header["started"]
        for record in records:
            self.count_record(record)
        self._file.truncate(num_complete_bytes)

    def _write_line(self, line: str) -> None:
        """Append a line and wait until it is on disk; on an error, restore the file."""
        num_bytes_before = os.stat(self._file.fileno()).st_size
        try:
            remaining_bytes = line.encode() + b"\n"
            while remaining_bytes:
                remaining_bytes = remaining_bytes[os.write(self._file.fileno(), remaining_bytes) :]
            os.fsync(self._file)
        except OSError:
            self._file.truncate(num_bytes_before)
            raise


def read_log(
    path: Path | str,
    key_fields: Sequence[str] = (),
    added_defaults: Mapping[str, Any] | None = None,
    error_field: str | None = None,
    required_fields: RequiredFieldsFunction | None = None,
) -> tuple[dict[str, Any], list[Record]]:
    """Return the identity and the records of a log, without locking or changing the file.

    Args:
        path: the file, compressed or not.
        key_fields, added_defaults, error_field, required_fields: see `Log`.

    Returns:
        identity: the identity of the run that wrote the log.
        records: the records without duplicates. Failed records come last. A failed record is left
            out if a record with the same key succeeded.

    Raises:
        LogError: the file cannot be read, or a line is no JSON object or lacks a field.
    """
    path = Path(path)
    try:
        content = read_file(path)
    except OSError as error:
        raise LogError(
            f"{path} cannot be read ({error.strerror}). Give the folder of the run."
        ) from None
    header, records = _parse_log(
        path,
        content,
        key_fields=key_fields,
        added_defaults=added_defaults or {},
        required_fields=required_fields,
    )
    unique_records = _LogRecords(key_fields, error_field)
    for record in records:
        unique_records.count_record(record)
    return header["identity"], unique_records.records + unique_records.failures


def pack_file(path: Path | str) -> None:
    """Replace the file at ``path``, if it exists, by a compressed file with `PACKED_SUFFIX`.

    No run may write the file meanwhile. `Log` and `read_file` find the compressed file under the
    original path.
    """
    path = Path(path)
    if path.is_file():
        packed_content = lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME)
        write_atomically(_packed_path(path), packed_content)
        path.unlink()


def file_exists(path: Path) -> bool:
    """Return True if a file exists at ``path``, compressed or not."""
    return path.exists() or _packed_path(path).exists()


def read_file(path: Path) -> bytes:
    """Return the bytes of the file at ``path``, decompressed if `pack_file` has compressed it."""
    if path.exists() or not _packed_path(path).exists():
        return path.read_bytes()
    try:
        return lzma.decompress(_packed_path(path).read_bytes())
    except lzma.LZMAError as error:
        raise LogError(
            f"{_packed_path(path)} is not a complete xz file ({error}). Restore the file."
        ) from None


def remove_packed_file(path: Path) -> None:
    """Remove the compressed version of the file at ``path``, if it exists."""
    _packed_path(path).unlink(missing_ok=True)


def _packed_path(path: Path) -> Path:
    """Return the path of the compressed version of a file."""
    return path.with_name(path.name + PACKED_SUFFIX)


@contextmanager
def convert_write_errors(path: Path | str) -> Iterator[None]:
    """Convert errors of the file system inside a ``with`` block to a `LogError` about ``path``."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        # libraries wrap errors of the file system in their own exceptions: those in Python have the
        # OSError as __context__, and the message of those in Rust contains "(os error N)"
        cause = error if isinstance(error, OSError) else error.__context__
        rust_message = re.search(r"([^:]+) \(os error \d+\)", str(error))
        if isinstance(cause, OSError):
            reason = cause.strerror or cause
        elif rust_message:
            reason = rust_message[1].strip()
        else:
            raise
        raise LogError(
            f"{path} cannot be written ({reason}). Free disk space there, or give another --out."
        ) from error


def add_default_fields(
    record: Mapping[str, Any], added_defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``record`` with the fields of ``added_defaults`` that it lacks.

    Added fields come last, so that a table of stored records has the columns of the run.
    """
    missing_fields = {name: value for name, value in added_defaults.items() if name not in record}
    return {**record, **missing_fields}


def _parse_log(
    path: Path,
    content: bytes,
    *,
    key_fields: Sequence[str],
    added_defaults: Mapping[str, Any],
    identity: Mapping[str, Any] | None = None,
    required_fields: RequiredFieldsFunction | None = None,
) -> tuple[dict[str, Any], list[Record]]:
    """Parse the complete lines of a log.

    Args:
        path: the file, for error messages.
        content: the bytes of the file.
        key_fields, added_defaults, required_fields: see `Log`.
        identity: the required identity; None to accept any identity.

    Returns:
        header: the content of the first line, with "identity" and "started".
        records: the records with the fields of ``added_defaults``, duplicates included.

    Raises:
        LogError: the identity differs, or a line is no JSON object or lacks a field.
    """
    parsed_lines = [_parse_json(line) for line in content.split(b"\n")[:-1]]
    header = parsed_lines[0] if parsed_lines else None
    if not isinstance(header, dict) or not {"identity", "started"} <= header.keys():
        raise LogError(f"{path} must start with the header of a run. Give another --out.")
    if identity is not None:
        # checked first, because the records of another experiment have other fields
        require_identity(path, header["identity"], identity)
    records = []
    for line_number, record in enumerate(parsed_lines[1:], 2):
        record_problem = "is no JSON object"
        if isinstance(record, dict):
            record = add_default_fields(record, added_defaults)
            records.append(record)
            missing_fields = [field_name for field_name in key_fields if field_name not in record]
            if not missing_fields and required_fields is not None:
                missing_fields = [
                    field_name for field_name in required_fields(record) if field_name not in record
                ]
            record_problem = f"has no {missing_fields[0]!r}" if missing_fields else None
        if record_problem:
            raise LogError(
                f"{path}, line {line_number} {record_problem}. Repair it, or give another --out."
            )
    return header, records


def _parse_json(line: bytes) -> Any:
    """Parse a line as JSON; return None if the line is not JSON."""
    try:
        return json.loads(line)
    except ValueError:
        return None


def convert_through_json(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an identity to JSON and back, as read from a file: tuples become lists."""
    return json.loads(json.dumps(identity))


def require_identity(
    path: Path, recorded_identity: Any, required_identity: Any, field_name: str = ""
) -> None:
    """Raise an error unless two identities are equal.

    Args:
        path: the file with the recorded identity.
        recorded_identity: identity in the file, or a field of the identity.
        required_identity: identity of this run, or a field of the identity.
        field_name: name of the field, such as "settings.seed"; "" for the whole identity.

    Raises:
        LogError: the identities differ. The message names the first differing field.
    """
    if isinstance(recorded_identity, dict) and isinstance(required_identity, dict):
        for inner_field in dict.fromkeys((*required_identity, *recorded_identity)):
            inner_field_name = f"{field_name}.{inner_field}" if field_name else inner_field
            require_identity(
                path,
                recorded_identity.get(inner_field),
                required_identity.get(inner_field),
                inner_field_name,
            )
    elif recorded_identity != required_identity:
        raise LogError(
            f"{path} was made with {field_name or 'identity'} {recorded_identity!r}, this run has "
            f"{required_identity!r}. Give another --out, or continue with the settings of the "
            "first run."
        )


def write_atomically(path: Path | str, content: str | bytes) -> None:
    """Write a file so that readers always read either the complete old or the complete new file."""
    path = Path(path)
    file_descriptor, temporary_path = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(file_descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        os.chmod(temporary_path, 0o644)
        # replaces a symbolic link itself, not the file that it refers to
        os.replace(temporary_path, path)
    except BaseException:
        os.unlink(temporary_path)
        raise
