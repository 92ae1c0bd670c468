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
from cab_hf.experiment.log import Log, LogError, pack, read_log
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

IDENTITY = {"seed": 0, "config": {"mass_threshold": 0.08, "engine": "auto"}}
KEY = ("length", "index")


def make_record(index, **fields):
    return {"length": 8, "index": index, **fields}


@pytest.fixture
def path(tmp_path):
    """Write a log of two records and return its path."""
    path = tmp_path / "deep" / "samples.jsonl"
    with Log(path, IDENTITY, KEY) as opened:
        opened.append(make_record(0, needle=(1, 2)))
        opened.append(make_record(1, needle=None))
    return path


def read_indices(path):
    _, records = read_log(path)
    return [record["index"] for record in records]


def test_records_are_read_back(path):
    identity, records = read_log(path)
    assert identity == IDENTITY
    assert records == [make_record(0, needle=[1, 2]), make_record(1, needle=None)]
    with Log(path, IDENTITY, KEY) as opened:
        assert opened.records == records and opened.started.endswith("+00:00")
        assert make_record(1) in opened and make_record(2) not in opened


def test_records_with_equal_keys_count_once(path):
    with Log(path, IDENTITY, KEY) as opened:
        opened.append(make_record(1, needle="another"))
        opened.append(make_record(2))
        assert read_indices(path) == [0, 1, 2]
    # a record that the file contains twice is read once
    content = path.read_text()
    path.write_text(content + content.splitlines()[1] + "\n")
    with Log(path, IDENTITY, KEY) as opened:
        assert [each["index"] for each in opened.records] == [0, 1, 2]
    assert read_indices(path) == [0, 1, 2, 0]
    assert [each["index"] for each in read_log(path, KEY)[1]] == [0, 1, 2]
    # without a key, duplicates are not detected
    with Log(path, IDENTITY) as opened:
        assert [each["index"] for each in opened.records] == [0, 1, 2, 0]


def test_new_key_fields_have_defaults_in_old_records(path):
    added, key = {"world": 1, "needle": 5}, (*KEY, "world")
    content = path.read_bytes()
    with pytest.raises(LogError, match="line 2 has no 'world'"):
        Log(path, IDENTITY, key)
    with Log(path, IDENTITY, key, added) as opened:
        # `added` has defaults for missing fields; fields of a record have priority
        assert opened.records == [
            make_record(0, needle=[1, 2], world=1),
            make_record(1, world=1, needle=None),
        ]
        assert make_record(1, world=1) in opened and make_record(1, world=2) not in opened
        opened.append(make_record(1, world=2))
    assert path.read_bytes().startswith(content)
    assert [each["world"] for each in read_log(path, key, added)[1]] == [1, 1, 2]


def test_packed_log_can_be_continued(path):
    complete = path.read_bytes()
    with Log(path, IDENTITY, KEY) as opened:
        opened.append(make_record(2))
    before = path.read_bytes()
    pack(path)
    pack(path)
    packed = path.with_name("samples.jsonl.xz")
    assert not path.exists() and packed.stat().st_size < len(before)
    assert read_indices(path) == [0, 1, 2]
    with pytest.raises(LogError, match="was made with seed 0, this run has 1"):
        Log(path, {**IDENTITY, "seed": 1}, KEY)
    assert list(path.parent.iterdir()) == [packed]
    with Log(path, IDENTITY, KEY) as opened:
        assert path.read_bytes() == before and len(opened.records) == 3
    assert list(path.parent.iterdir()) == [path]
    # after a kill, the packed and the unpacked log may both exist; the unpacked log is newer
    packed.write_bytes(lzma.compress(complete))
    assert read_indices(path) == [0, 1, 2]
    path.unlink()
    assert read_indices(path) == [0, 1]
    packed.write_bytes(packed.read_bytes()[:-9])
    for open_log in (lambda: read_log(path), lambda: Log(path, IDENTITY, KEY)):
        with pytest.raises(LogError, match="samples.jsonl.xz is not a complete xz file"):
            open_log()
    assert list(path.parent.iterdir()) == [packed]


def make_cutter(count, incomplete=b""):
    """Return a function that cuts a log, bytes, to ``count`` lines and appends ``incomplete``."""
    return lambda content: b"".join(content.splitlines(keepends=True)[:count]) + incomplete


@pytest.mark.parametrize(
    ("cut", "num_records"),
    [
        pytest.param(make_cutter(3, b'{"length": 8, "ind'), 2, id="record"),
        pytest.param(make_cutter(3, b'{"length": 8, "index": 2'), 2, id="but-brace"),
        pytest.param(make_cutter(3, b'{"a": "\\ud8'), 2, id="character"),
        pytest.param(lambda content: content[:-1], 1, id="newline"),
        pytest.param(lambda content: make_cutter(1)(content)[:-1], 0, id="header-newline"),
        pytest.param(lambda content: make_cutter(1)(content)[:-2], 0, id="header-brace"),
        *(pytest.param(lambda c, n=n: c[:n], 0, id=f"header-{n}") for n in (0, 1, 20)),
    ],
)
def test_torn_last_line_is_dropped(path, cut, num_records):
    complete = path.read_bytes()
    path.write_bytes(cut(complete))
    # without a complete header line, `read_log` raises an error, so it is not called
    assert num_records == 0 or read_indices(path) == [0, 1][:num_records]
    with Log(path, IDENTITY, KEY) as opened:
        assert len(opened.records) == num_records
        assert num_records == 0 or path.read_bytes() == make_cutter(1 + num_records)(complete)
        opened.append(make_record(7))
    assert read_indices(path) == [0, 1][:num_records] + [7] and read_log(path)[0] == IDENTITY


def test_full_disk_leaves_log_unchanged(path, monkeypatch):
    complete, write = path.read_bytes(), os.write

    def write_to_full_disk(file, data):
        if len(data) <= 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[:10])

    with Log(path, IDENTITY, KEY) as opened:
        monkeypatch.setattr(log.os, "write", write_to_full_disk)
        with pytest.raises(LogError, match="cannot be written .No space left on device.. Free"):
            opened.append(make_record(2))
        assert path.read_bytes() == complete and make_record(2) not in opened
        monkeypatch.setattr(log.os, "write", write)
        opened.append(make_record(2))
    assert read_indices(path) == [0, 1, 2]


@pytest.mark.parametrize("remove", [os.unlink, lambda path: os.replace(path, f"{path}.old")])
def test_removed_or_replaced_log_is_not_appended(path, remove):
    with Log(path, IDENTITY, KEY) as first:
        remove(path)
        # another run may create a file at the same path
        with Log(path, IDENTITY, KEY) as second:
            with pytest.raises(LogError, match="was removed or replaced while this run wrote it"):
                first.append(make_record(2))
            first.close()
            second.append(make_record(7))
            with pytest.raises(LogError, match="another process"):
                Log(path, IDENTITY, KEY)
    assert read_indices(path) == [7]


HEADER = json.dumps({"identity": IDENTITY, "started": "then"}) + "\n"
OTHER_ENGINE = {**IDENTITY, "config": {"mass_threshold": 0.08, "engine": "flex"}}


@pytest.mark.parametrize(
    ("content", "identity", "message"),
    [
        (HEADER, {**IDENTITY, "seed": 1}, "seed 0, this run has 1"),
        (HEADER + '{"of": "others"}\n{"torn', OTHER_ENGINE, "engine 'auto', this run has 'flex'"),
        (HEADER, {**IDENTITY, "more": 2}, "more None, this run has 2"),
        (HEADER, {"seed": 0}, "config {'mass_threshold'"),
        ('{"index": 0}\n', IDENTITY, "header of a run"),
        ('{"torn', IDENTITY, "header of a run"),
        (f"{HEADER}[1]\n{{}}\n", IDENTITY, "line 2 is no JSON object"),
        (f'{HEADER}{{"a"\n{{"to', IDENTITY, "line 2 is no JSON"),
        (f"{HEADER}\n{{}}\n", IDENTITY, "line 2 is no JSON"),
        (f"{HEADER}{{}}\n", IDENTITY, "line 2 has no 'length'"),
    ],
)
def test_foreign_file_raises_and_is_unchanged(tmp_path, content, identity, message):
    path = tmp_path / "samples.jsonl"
    path.write_text(content)
    with pytest.raises(LogError, match=re.escape(message)):
        Log(path, identity, KEY)
    assert path.read_text() == content


def test_second_writer_raises(path):
    with Log(path, IDENTITY, KEY) as first:
        with pytest.raises(LogError, match="written by another process. Wait for it"):
            Log(path, IDENTITY, KEY)
        first.append(make_record(2))
    with pytest.raises(LogError):
        Log(path, {}, KEY)
    # a `LogError` releases the lock
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert list(path.parent.iterdir()) == [path]


def test_forked_child_does_not_hold_the_lock(tmp_path):
    """Fork while a log is open. The child must not hold the lock, or no run could continue."""
    first_log = Log(tmp_path / "log.jsonl", {})
    exit_reader, exit_writer = os.pipe()
    started_reader, started_writer = os.pipe()
    child = os.fork()
    if child == 0:
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
        for pipe in (exit_writer, exit_reader, started_reader, started_writer):
            os.close(pipe)
        os.waitpid(child, 0)


WRITER = """
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
    killed, complete = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    command = [sys.executable, "-c", WRITER]
    with subprocess.Popen([*command, killed, "60"], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"0\n"
        # while the process runs, its lock prevents a second writer
        with pytest.raises(LogError, match="another process"):
            Log(killed, {"seed": 0})
        os.kill(process.pid, signal.SIGKILL)
    for path in (killed, complete):
        subprocess.run([*command, path, "0"], check=True, capture_output=True)
    assert read_log(killed) == read_log(complete)
    assert len(read_log(killed)[1]) == 100
    assert sorted(tmp_path.iterdir()) == [killed, complete]


def test_failed_atomic_write_leaves_old_file(tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    log.write_atomically(path, "old")

    def replace(*paths):
        raise OSError("disk full")

    monkeypatch.setattr(log.os, "replace", replace)
    with pytest.raises(OSError, match="disk full"):
        log.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


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


def make_words(words, content, folder):
    """Return a command line as a list; ``content`` is passed in a file by ``--config``.

    Without ``content`` (None), the command line is ``words`` only.
    """
    if content is None:
        return words.split()
    (folder / "settings.yaml").write_text(content)
    return [*words.split(), "--config", str(folder / "settings.yaml")]


@pytest.mark.parametrize(
    ("words", "content", "expected"),
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
def test_command_line_and_file_become_settings(tmp_path, words, content, expected):
    assert read_settings(type(expected), make_words(words, content, tmp_path), "try") == expected


@pytest.mark.parametrize(
    ("words", "content", "message"),
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
def test_invalid_options_exit_with_one_line(tmp_path, capsys, words, content, message):
    with pytest.raises(SystemExit) as stop:
        read_settings(Settings, make_words(words, content, tmp_path), "try")
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in error and error.startswith("try: ") and error.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4096", 4096), ("32K", 32768), ("1M", 1 << 20), ("131_072", 131072), ("-1", -1)]
    + [(text, None) for text in ("", "k", "1.5k", "1kk", "many")],
)
def test_lengths_accept_k_and_m_suffixes(text, tokens):
    if tokens is None:
        with pytest.raises(ValueError, match="length must be a number of tokens"):
            parse_length(text)
    else:
        assert parse_length(text) == tokens


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
    ("recorded", "words"),
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
def test_recorded_settings_become_command_line(recorded, words):
    assert to_command_line(recorded, Settings) == words.split()


def test_provenance_has_versions_but_no_host_or_path():
    facts = provenance.provenance({"seed": 3}, "cpu", provenance.utc_now())
    assert facts["settings"] == {"seed": 3} and facts["versions"]["torch"]
    assert facts["finished"].endswith("+00:00")
    # no string starts with "/": absolute paths would reveal the host
    assert '"/' not in json.dumps(facts)


def test_provenance_records_allocator_settings(monkeypatch):
    for name in provenance.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert "environment" not in provenance.provenance({}, "cpu", "")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    facts = provenance.provenance({}, "cpu", "")
    assert facts["environment"] == ["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]
    sentence = experiment.describe_run({"settings": {}, **facts})
    assert ", PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, commit " in sentence


@pytest.mark.parametrize("name", ["gpu", "cpu:x", "", "meta", "cuda:99"])
def test_device_without_compute_raises(name):
    with pytest.raises(ValueError, match=f"device must be .* got '{name}' .+") as refused:
        provenance.computing_device(name)
    assert "\n" not in str(refused.value)


def test_commit_is_of_this_repository_or_none():
    commit = provenance.git_commit()
    assert commit is None or re.fullmatch(r"[0-9a-f]{40}(-dirty)?", commit)


def test_import_loads_no_torch_and_no_eval():
    code = (
        "import sys; from cab_hf.experiment import log, provenance, settings;"
        "print([m for m in ('torch', 'transformers', 'cab_hf.eval') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
