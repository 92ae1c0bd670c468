"""Parts that experiments share: record logs, settings (command line, file), and provenance."""

import errno
import fcntl
import json
import lzma
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest

from cab_hf.eval import experiment
from cab_hf.experiment import log, provenance
from cab_hf.experiment.log import Log, LogError, pack_file, read_log
from cab_hf.experiment.settings import (
    by_device,
    comma_separated,
    fill_by_device,
    flag,
    operands,
    option,
    parse_length,
    read_settings,
    require,
    to_command_line,
)

RUN_IDENTITY = {"seed": 0, "config": {"mass_threshold": 0.08, "engine": "auto"}}
KEY_FIELDS = ("length", "index")


def make_record(index, **fields):
    return {"length": 8, "index": index, **fields}


@pytest.fixture
def log_path(tmp_path):
    """Write a log of two records and return its path."""
    log_path = tmp_path / "deep" / "samples.jsonl"
    with Log(log_path, RUN_IDENTITY, KEY_FIELDS) as opened_log:
        opened_log.append(make_record(0, needle=(1, 2)))
        opened_log.append(make_record(1, needle=None))
    return log_path


def read_indices(log_path):
    _, records = read_log(log_path)
    return [record["index"] for record in records]


def test_records_are_read_back(log_path):
    identity, records = read_log(log_path)
    assert identity == RUN_IDENTITY
    assert records == [make_record(0, needle=[1, 2]), make_record(1, needle=None)]
    with Log(log_path, RUN_IDENTITY, KEY_FIELDS) as opened_log:
        assert opened_log.records == records and opened_log.started.endswith("+00:00")
        assert make_record(1) in opened_log and make_record(2) not in opened_log


def test_records_with_equal_keys_count_once(log_path):
    with Log(log_path, RUN_IDENTITY, KEY_FIELDS) as opened_log:
        opened_log.append(make_record(1, needle="another"))
        opened_log.append(make_record(2))
        assert read_indices(log_path) == [0, 1, 2]
    # a record that the file contains twice is read once
    content = log_path.read_text()
    log_path.write_text(content + content.splitlines()[1] + "\n")
    with Log(log_path, RUN_IDENTITY, KEY_FIELDS) as opened_log:
        assert [record["index"] for record in opened_log.records] == [0, 1, 2]
    assert read_indices(log_path) == [0, 1, 2, 0]
    assert [record["index"] for record in read_log(log_path, KEY_FIELDS)[1]] == [0, 1, 2]
    # without a key, duplicates are not detected
    with Log(log_path, RUN_IDENTITY) as opened_log:
        assert [record["index"] for record in opened_log.records] == [0, 1, 2, 0]


def test_new_key_fields_have_defaults_in_old_records(log_path):
    added_defaults, key_fields = {"world": 1, "needle": 5}, (*KEY_FIELDS, "world")
    content_before = log_path.read_bytes()
    with pytest.raises(LogError, match="line 2 has no 'world'"):
        Log(log_path, RUN_IDENTITY, key_fields)
    with Log(log_path, RUN_IDENTITY, key_fields, added_defaults) as opened_log:
        # `added_defaults` has defaults for missing fields; fields of a record have priority
        assert opened_log.records == [
            make_record(0, needle=[1, 2], world=1),
            make_record(1, world=1, needle=None),
        ]
        assert make_record(1, world=1) in opened_log and make_record(1, world=2) not in opened_log
        opened_log.append(make_record(1, world=2))
    assert log_path.read_bytes().startswith(content_before)
    _, stored_records = read_log(log_path, key_fields, added_defaults)
    assert [record["world"] for record in stored_records] == [1, 1, 2]
    # added fields follow the fields of the record
    assert list(stored_records[0]) == [*make_record(0, needle=[1, 2]), "world"]


def test_packed_log_can_be_continued(log_path):
    complete_content = log_path.read_bytes()
    with Log(log_path, RUN_IDENTITY, KEY_FIELDS) as opened_log:
        opened_log.append(make_record(2))
    content_before = log_path.read_bytes()
    pack_file(log_path)
    pack_file(log_path)
    packed_path = log_path.with_name("samples.jsonl.xz")
    assert not log_path.exists() and packed_path.stat().st_size < len(content_before)
    assert read_indices(log_path) == [0, 1, 2]
    with pytest.raises(LogError, match="was made with seed 0, this run has 1"):
        Log(log_path, {**RUN_IDENTITY, "seed": 1}, KEY_FIELDS)
    assert list(log_path.parent.iterdir()) == [packed_path]
    with Log(log_path, RUN_IDENTITY, KEY_FIELDS) as opened_log:
        assert log_path.read_bytes() == content_before and len(opened_log.records) == 3
    assert list(log_path.parent.iterdir()) == [log_path]
    # after a kill, the packed and the unpacked log may both exist; the unpacked log is newer
    packed_path.write_bytes(lzma.compress(complete_content))
    assert read_indices(log_path) == [0, 1, 2]
    log_path.unlink()
    assert read_indices(log_path) == [0, 1]
    packed_path.write_bytes(packed_path.read_bytes()[:-9])
    for read_or_open_log in (
        lambda: read_log(log_path),
        lambda: Log(log_path, RUN_IDENTITY, KEY_FIELDS),
    ):
        with pytest.raises(LogError, match="samples.jsonl.xz is not a complete xz file"):
            read_or_open_log()
    assert list(log_path.parent.iterdir()) == [packed_path]


def make_log_cutter(num_lines, incomplete_line=b""):
    """Return a function that cuts a log to ``num_lines`` lines and appends ``incomplete_line``."""
    return lambda content: b"".join(content.splitlines(keepends=True)[:num_lines]) + incomplete_line


@pytest.mark.parametrize(
    ("cut_content", "num_records"),
    [
        pytest.param(make_log_cutter(3, b'{"length": 8, "ind'), 2, id="record"),
        pytest.param(make_log_cutter(3, b'{"length": 8, "index": 2'), 2, id="but-brace"),
        pytest.param(make_log_cutter(3, b'{"a": "\\ud8'), 2, id="character"),
        pytest.param(lambda content: content[:-1], 1, id="newline"),
        pytest.param(lambda content: make_log_cutter(1)(content)[:-1], 0, id="header-newline"),
        pytest.param(lambda content: make_log_cutter(1)(content)[:-2], 0, id="header-brace"),
        *(pytest.param(lambda c, n=n: c[:n], 0, id=f"header-{n}") for n in (0, 1, 20)),
    ],
)
def test_torn_last_line_is_dropped(log_path, cut_content, num_records):
    complete_content = log_path.read_bytes()
    log_path.write_bytes(cut_content(complete_content))
    # without a complete header line, `read_log` raises an error, so it is not called
    assert num_records == 0 or read_indices(log_path) == [0, 1][:num_records]
    with Log(log_path, RUN_IDENTITY, KEY_FIELDS) as opened_log:
        assert len(opened_log.records) == num_records
        assert num_records == 0 or log_path.read_bytes() == make_log_cutter(1 + num_records)(
            complete_content
        )
        opened_log.append(make_record(7))
    assert (
        read_indices(log_path) == [0, 1][:num_records] + [7]
        and read_log(log_path)[0] == RUN_IDENTITY
    )


def test_full_disk_leaves_log_unchanged(log_path, monkeypatch):
    complete_content, original_write = log_path.read_bytes(), os.write

    def write_to_full_disk(file_descriptor, data):
        if len(data) <= 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original_write(file_descriptor, data[:10])

    with Log(log_path, RUN_IDENTITY, KEY_FIELDS) as opened_log:
        monkeypatch.setattr(log.os, "write", write_to_full_disk)
        with pytest.raises(LogError, match="cannot be written .No space left on device.. Free"):
            opened_log.append(make_record(2))
        assert log_path.read_bytes() == complete_content and make_record(2) not in opened_log
        monkeypatch.setattr(log.os, "write", original_write)
        opened_log.append(make_record(2))
    assert read_indices(log_path) == [0, 1, 2]


@pytest.mark.parametrize("remove_log", [os.unlink, lambda path: os.replace(path, f"{path}.old")])
def test_removed_or_replaced_log_is_not_appended(log_path, remove_log):
    with Log(log_path, RUN_IDENTITY, KEY_FIELDS) as first_log:
        remove_log(log_path)
        # another run may create a file at the same path
        with Log(log_path, RUN_IDENTITY, KEY_FIELDS) as second_log:
            with pytest.raises(LogError, match="was removed or replaced while this run wrote it"):
                first_log.append(make_record(2))
            first_log.close()
            second_log.append(make_record(7))
            with pytest.raises(LogError, match="another process"):
                Log(log_path, RUN_IDENTITY, KEY_FIELDS)
    assert read_indices(log_path) == [7]


LOG_HEADER = json.dumps({"identity": RUN_IDENTITY, "started": "then"}) + "\n"
OTHER_ENGINE_IDENTITY = {**RUN_IDENTITY, "config": {"mass_threshold": 0.08, "engine": "flex"}}


@pytest.mark.parametrize(
    ("file_content", "identity", "error_message"),
    [
        (LOG_HEADER, {**RUN_IDENTITY, "seed": 1}, "seed 0, this run has 1"),
        (
            LOG_HEADER + '{"of": "others"}\n{"torn',
            OTHER_ENGINE_IDENTITY,
            "engine 'auto', this run has 'flex'",
        ),
        (LOG_HEADER, {**RUN_IDENTITY, "more": 2}, "more None, this run has 2"),
        (LOG_HEADER, {"seed": 0}, "config {'mass_threshold'"),
        ('{"index": 0}\n', RUN_IDENTITY, "header of a run"),
        ('{"torn', RUN_IDENTITY, "header of a run"),
        (f"{LOG_HEADER}[1]\n{{}}\n", RUN_IDENTITY, "line 2 is no JSON object"),
        (f'{LOG_HEADER}{{"a"\n{{"to', RUN_IDENTITY, "line 2 is no JSON"),
        (f"{LOG_HEADER}\n{{}}\n", RUN_IDENTITY, "line 2 is no JSON"),
        (f"{LOG_HEADER}{{}}\n", RUN_IDENTITY, "line 2 has no 'length'"),
    ],
)
def test_foreign_file_raises_and_is_unchanged(tmp_path, file_content, identity, error_message):
    log_path = tmp_path / "samples.jsonl"
    log_path.write_text(file_content)
    with pytest.raises(LogError, match=re.escape(error_message)):
        Log(log_path, identity, KEY_FIELDS)
    assert log_path.read_text() == file_content


def test_second_writer_raises(log_path):
    with Log(log_path, RUN_IDENTITY, KEY_FIELDS) as first_log:
        with pytest.raises(LogError, match="written by another process. Wait for it"):
            Log(log_path, RUN_IDENTITY, KEY_FIELDS)
        first_log.append(make_record(2))
    with pytest.raises(LogError):
        Log(log_path, {}, KEY_FIELDS)
    # a `LogError` releases the lock
    with open(log_path) as log_file:
        fcntl.flock(log_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert list(log_path.parent.iterdir()) == [log_path]


def test_forked_child_does_not_hold_the_lock(tmp_path):
    """Fork while a log is open. The child must not hold the lock, or no run could continue."""
    first_log = Log(tmp_path / "log.jsonl", {})
    exit_reader, exit_writer = os.pipe()
    started_reader, started_writer = os.pipe()
    child_id = os.fork()
    if child_id == 0:
        os.close(exit_writer)
        os.write(started_writer, b".")
        os.read(exit_reader, 1)
        os._exit(0)
    try:
        assert os.read(started_reader, 1) == b"."
        first_log.append({"number": 1})
        first_log.close()
        with Log(tmp_path / "log.jsonl", {}) as second_log:
            assert second_log.records == [{"number": 1}]
    finally:
        for pipe_end in (exit_writer, exit_reader, started_reader, started_writer):
            os.close(pipe_end)
        os.waitpid(child_id, 0)


WRITER_SCRIPT = """
import sys, time
from cab_hf.experiment.log import Log
with Log(sys.argv[1], {"seed": 0}, ("index",)) as log:
    for index in range(100):
        if {"index": index} not in log:
            log.append({"index": index, "value": index * index})
            print(index, flush=True)
            time.sleep(float(sys.argv[2]))
"""


def test_killed_run_continues_with_same_records(tmp_path):
    killed_log_path, complete_log_path = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    writer_command = [sys.executable, "-c", WRITER_SCRIPT]
    with subprocess.Popen(
        [*writer_command, killed_log_path, "60"], stdout=subprocess.PIPE
    ) as writer_process:
        assert writer_process.stdout.readline() == b"0\n"
        # while the process runs, its lock prevents a second writer
        with pytest.raises(LogError, match="another process"):
            Log(killed_log_path, {"seed": 0})
        os.kill(writer_process.pid, signal.SIGKILL)
    for log_path in (killed_log_path, complete_log_path):
        subprocess.run([*writer_command, log_path, "0"], check=True, capture_output=True)
    assert read_log(killed_log_path) == read_log(complete_log_path)
    assert len(read_log(killed_log_path)[1]) == 100
    assert sorted(tmp_path.iterdir()) == [killed_log_path, complete_log_path]


def test_failed_atomic_write_leaves_old_file(tmp_path, monkeypatch):
    results_path = tmp_path / "results.json"
    log.write_atomically(results_path, "old")

    def fail_to_replace(*paths):
        raise OSError("disk full")

    monkeypatch.setattr(log.os, "replace", fail_to_replace)
    with pytest.raises(OSError, match="disk full"):
        log.write_atomically(results_path, "new")
    assert results_path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [results_path]


@dataclass(frozen=True)
class Settings:
    lengths: tuple[int, ...] | None = by_device((8, 16), (4,), "tokens", comma_separated(int))
    mass: float = option(0.9, "share, 90 %", float)
    kv_heads: int | None = option(None, "heads", int)
    set: tuple[str, ...] = option((), "field=value", repeatable=True)
    text: str | None = option(None, "a file")
    device: str = option("cuda", "torch device")
    loud: bool = flag("say more")

    def __post_init__(self):
        fill_by_device(self, self.device == "cpu")
        require(self, "mass", 0 < self.mass <= 1, "in (0, 1]")


@dataclass(frozen=True)
class Folders:
    folders: tuple[str, ...] = operands("what is read")
    out: str = option("out", "a folder")


YAML_SETTINGS = (
    "lengths: [1, 2]\nmass: 0.5\nkv-heads: 2\nset: {a: 1, b: x}\ntext: null\nloud: yes\n"
)
MERGED_SETTINGS = Settings((1, 2), 0.7, 2, ("a=1", "b='x'", "a=2"), loud=True)


def make_command_line(option_text, yaml_content, folder):
    """Return a command line as a list; ``yaml_content`` is passed in a file by ``--config``.

    Without ``yaml_content`` (None), the command line is ``option_text`` only.
    """
    if yaml_content is None:
        return option_text.split()
    (folder / "settings.yaml").write_text(yaml_content)
    return [*option_text.split(), "--config", str(folder / "settings.yaml")]


@pytest.mark.parametrize(
    ("option_text", "yaml_content", "expected_settings"),
    [
        ("", None, Settings((8, 16))),
        ("--device cpu", None, Settings((4,), device="cpu")),
        ("--lengths 2,1 2", None, Settings((2, 1))),
        ("--set a=1 --kv-heads 2 --set b=x", None, Settings(set=("a=1", "b=x"), kv_heads=2)),
        ("--loud --mass 0.5", None, Settings(mass=0.5, loud=True)),
        ("--loud False", None, Settings()),
        ("--mass 0.7 --set a=2", YAML_SETTINGS, MERGED_SETTINGS),
        ("", None, Folders()),
        ("a,b --out o c", None, Folders(("a,b", "c"), "o")),
        ("", "folders: [a, b]", Folders(("a", "b"))),
        ("c", "folders: [a, b]", Folders(("c",))),
    ],
)
def test_command_line_and_file_become_settings(
    tmp_path, option_text, yaml_content, expected_settings
):
    assert (
        read_settings(
            type(expected_settings), make_command_line(option_text, yaml_content, tmp_path), "try"
        )
        == expected_settings
    )


@pytest.mark.parametrize(
    ("option_text", "yaml_content", "error_message"),
    [
        ("--lenghts=1", None, "unknown option '--lenghts'; did you mean --l"),
        ("--zzz 1", None, "the options are --lengths, --mass"),
        ("--mass much", None, "mass: must be a finite number"),
        ("--mass 3", None, "mass must be in (0, 1], got 3.0"),
        ("--set a", None, "set: assignment must be field=value"),
        ("--mass", None, "expected one argument"),
        ("--loud very", None, "loud: must be true or false"),
        ("", "kv_head: 1", "unknown option 'kv_head'; did you mean kv_heads?"),
        ("", "mass: much", "mass: must be a finite"),
        ("", "- mass", "a mapping from option to value"),
        ("", "mass: [", "must be a YAML file"),
    ],
)
def test_invalid_options_exit_with_one_line(
    tmp_path, capsys, option_text, yaml_content, error_message
):
    with pytest.raises(SystemExit) as exit_info:
        read_settings(Settings, make_command_line(option_text, yaml_content, tmp_path), "try")
    error_output = capsys.readouterr().err
    assert exit_info.value.code == 2
    assert (
        error_message in error_output
        and error_output.startswith("try: ")
        and error_output.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("length_text", "num_tokens"),
    [("4096", 4096), ("32K", 32768), ("1M", 1 << 20), ("131_072", 131072), ("-1", -1)]
    + [(text, None) for text in ("", "k", "1.5k", "1kk", "many")],
)
def test_lengths_accept_k_and_m_suffixes(length_text, num_tokens):
    if num_tokens is None:
        with pytest.raises(ValueError, match="length must be a number of tokens"):
            parse_length(length_text)
    else:
        assert parse_length(length_text) == num_tokens


def test_help_shows_zero_defaults_and_omits_empty_ones(capsys):
    @dataclass
    class Options:
        rate: float = option(0.0, "requests a second", float)
        count: int = option(0, "how many", int)
        base: str = option("", "another place")
        text: str | None = option(None, "a file")
        fast: bool = flag("be fast")

    with pytest.raises(SystemExit):
        read_settings(Options, ["--help"], "try")
    help_text = " ".join(capsys.readouterr().out.split())
    assert "requests a second (default: 0.0)" in help_text
    assert "how many (default: 0)" in help_text
    assert help_text.count("default") == 2


@pytest.mark.parametrize(
    ("recorded_settings", "option_text"),
    [
        ({"lengths": [8, 16], "device": "cuda", "mass": 0.9}, ""),
        ({"lengths": [4], "device": "cpu"}, "--device cpu"),
        ({"lengths": [4]}, ""),
        ({"mass": 0.5, "kv_heads": 2}, "--mass 0.5 --kv-heads 2"),
        ({"set": ["a=1", "b=2"]}, "--set a=1 --set b=2"),
        ({"text": {"name": "book.txt", "sha256": "0"}}, "--text book.txt"),
        ({"lengths": [1, 2], "other": 3}, "--lengths 1,2"),
        ({"loud": True}, "--loud True"),
        ({"loud": False}, ""),
    ],
)
def test_recorded_settings_become_command_line(recorded_settings, option_text):
    assert to_command_line(recorded_settings, Settings) == option_text.split()


def test_provenance_has_versions_but_no_host_or_path():
    provenance_record = provenance.provenance({"seed": 3}, "cpu", provenance.utc_now())
    assert provenance_record["settings"] == {"seed": 3} and provenance_record["versions"]["torch"]
    assert provenance_record["finished"].endswith("+00:00")
    # no string starts with "/": absolute paths would reveal the host
    assert '"/' not in json.dumps(provenance_record)


def test_provenance_records_allocator_settings(monkeypatch):
    for variable_name in provenance.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(variable_name, raising=False)
    assert "environment" not in provenance.provenance({}, "cpu", "")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    provenance_record = provenance.provenance({}, "cpu", "")
    assert provenance_record["environment"] == ["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]
    run_description = experiment.describe_run({"settings": {}, **provenance_record})
    assert ", PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, commit " in run_description


@pytest.mark.parametrize("device_name", ["gpu", "cpu:x", "", "meta", "cuda:99"])
def test_device_without_compute_raises(device_name):
    with pytest.raises(ValueError, match=f"device must be .* got '{device_name}' .+") as error_info:
        provenance.computing_device(device_name)
    assert "\n" not in str(error_info.value)


def test_commit_is_of_this_repository_or_none():
    commit = provenance.git_commit()
    assert commit is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", commit)


def test_import_loads_no_torch_and_no_eval():
    import_script = (
        "import sys; from cab_hf.experiment import log, provenance, settings;"
        "print([m for m in ('torch', 'transformers', 'cab_hf.eval') if m in sys.modules])"
    )
    completed_process = subprocess.run(
        [sys.executable, "-c", import_script], check=True, capture_output=True, text=True
    )
    assert completed_process.stdout.strip() == "[]"
