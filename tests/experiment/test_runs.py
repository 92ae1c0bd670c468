"""Basis of experiments: settings from command lines and files, provenance, and logs."""

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
    spelled,
)

IDENTITY = {"seed": 0, "config": {"mass_threshold": 0.08, "engine": "auto"}}
KEY = ("length", "index")


# --- the log


def record(index, **more):
    return {"length": 8, "index": index, **more}


@pytest.fixture
def path(tmp_path):
    """Write a log of two records and return its path."""
    path = tmp_path / "deep" / "samples.jsonl"
    with Log(path, IDENTITY, KEY) as opened:
        opened.append(record(0, needle=(1, 2)))
        opened.append(record(1, needle=None))
    return path


def indices(path):
    return [each["index"] for each in read_log(path)[1]]


def test_records_are_read_back(path):
    identity, records = read_log(path)
    assert identity == IDENTITY
    assert records == [record(0, needle=[1, 2]), record(1, needle=None)]
    with Log(path, IDENTITY, KEY) as opened:
        assert opened.records == records and opened.started.endswith("+00:00")
        assert record(1) in opened and record(2) not in opened


def test_records_with_equal_keys_count_once(path):
    with Log(path, IDENTITY, KEY) as opened:
        opened.append(record(1, needle="another"))
        opened.append(record(2))
        assert indices(path) == [0, 1, 2]
    # nor does one that got into the file
    content = path.read_text()
    path.write_text(content + content.splitlines()[1] + "\n")
    with Log(path, IDENTITY, KEY) as opened:
        assert [each["index"] for each in opened.records] == [0, 1, 2]
    assert indices(path) == [0, 1, 2, 0]
    assert [each["index"] for each in read_log(path, KEY)[1]] == [0, 1, 2]
    # without a key every record counts
    with Log(path, IDENTITY) as opened:
        assert [each["index"] for each in opened.records] == [0, 1, 2, 0]


def test_new_key_fields_have_defaults_in_old_records(path):
    added, key = {"world": 1, "needle": 5}, (*KEY, "world")
    content = path.read_bytes()
    with pytest.raises(LogError, match="line 2 has no 'world'"):
        Log(path, IDENTITY, key)
    with Log(path, IDENTITY, key, added) as opened:
        # fields of a record override the defaults
        assert opened.records == [
            record(0, needle=[1, 2], world=1),
            record(1, world=1, needle=None),
        ]
        assert record(1, world=1) in opened and record(1, world=2) not in opened
        opened.append(record(1, world=2))
    assert path.read_bytes().startswith(content)
    assert [each["world"] for each in read_log(path, key, added)[1]] == [1, 1, 2]


def test_packed_log_can_be_continued(path):
    complete = path.read_bytes()
    with Log(path, IDENTITY, KEY) as opened:
        opened.append(record(2))
    before = path.read_bytes()
    pack(path)
    pack(path)
    packed = path.with_name("samples.jsonl.xz")
    assert not path.exists() and packed.stat().st_size < len(before)
    assert indices(path) == [0, 1, 2]
    with pytest.raises(LogError, match="was made with seed 0, this run has 1"):
        Log(path, {**IDENTITY, "seed": 1}, KEY)
    assert list(path.parent.iterdir()) == [packed]
    with Log(path, IDENTITY, KEY) as opened:
        assert path.read_bytes() == before and len(opened.records) == 3
    assert list(path.parent.iterdir()) == [path]
    # a packed file left next to an unpacked log by a kill is older than the log
    packed.write_bytes(lzma.compress(complete))
    assert indices(path) == [0, 1, 2]
    path.unlink()
    assert indices(path) == [0, 1]
    packed.write_bytes(packed.read_bytes()[:-9])
    for opening in (lambda: read_log(path), lambda: Log(path, IDENTITY, KEY)):
        with pytest.raises(LogError, match="samples.jsonl.xz is not a complete xz file"):
            opening()
    assert list(path.parent.iterdir()) == [packed]


def lines_of(count, torn=b""):
    """Return (a log) -> its first lines and the part of the next line that a kill left."""
    return lambda content: b"".join(content.splitlines(keepends=True)[:count]) + torn


@pytest.mark.parametrize(
    ("half", "left"),
    [
        pytest.param(lines_of(3, b'{"length": 8, "ind'), 2, id="record"),
        pytest.param(lines_of(3, b'{"length": 8, "index": 2'), 2, id="but-brace"),
        pytest.param(lines_of(3, b'{"a": "\\ud8'), 2, id="character"),
        pytest.param(lambda content: content[:-1], 1, id="newline"),
        pytest.param(lambda content: lines_of(1)(content)[:-1], 0, id="header-newline"),
        pytest.param(lambda content: lines_of(1)(content)[:-2], 0, id="header-brace"),
        *(pytest.param(lambda c, n=n: c[:n], 0, id=f"header-{n}") for n in (0, 1, 20)),
    ],
)
def test_torn_last_line_is_dropped(path, half, left):
    complete = path.read_bytes()
    path.write_bytes(half(complete))
    # nor is it read
    assert left == 0 or indices(path) == [0, 1][:left]
    with Log(path, IDENTITY, KEY) as opened:
        assert len(opened.records) == left
        assert left == 0 or path.read_bytes() == lines_of(1 + left)(complete)
        opened.append(record(7))
    assert indices(path) == [0, 1][:left] + [7] and read_log(path)[0] == IDENTITY


def test_full_disk_leaves_log_unchanged(path, monkeypatch):
    complete, write = path.read_bytes(), os.write

    def full(file, data):
        if len(data) <= 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[:10])

    with Log(path, IDENTITY, KEY) as opened:
        monkeypatch.setattr(log.os, "write", full)
        with pytest.raises(LogError, match="cannot be written .No space left on device.. Free"):
            opened.append(record(2))
        assert path.read_bytes() == complete and record(2) not in opened
        monkeypatch.setattr(log.os, "write", write)
        opened.append(record(2))
    assert indices(path) == [0, 1, 2]


@pytest.mark.parametrize("taken", [os.unlink, lambda path: os.replace(path, f"{path}.old")])
def test_removed_or_replaced_log_is_not_appended(path, taken):
    with Log(path, IDENTITY, KEY) as first:
        taken(path)
        # another run may write to the folder now
        with Log(path, IDENTITY, KEY) as second:
            with pytest.raises(LogError, match="was removed or replaced while this run wrote it"):
                first.append(record(2))
            first.close()
            second.append(record(7))
            with pytest.raises(LogError, match="another process"):
                Log(path, IDENTITY, KEY)
    assert indices(path) == [7]


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
        first.append(record(2))
    with pytest.raises(LogError):
        Log(path, {}, KEY)
    # a refused log has released its lock
    with open(path) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert list(path.parent.iterdir()) == [path]


def test_forked_child_does_not_hold_the_lock(tmp_path):
    """Otherwise a killed run could not continue before all of its children have exited."""
    log = Log(tmp_path / "log.jsonl", {})
    waiting, go_on = os.pipe()
    is_there, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go_on)
        os.write(there, b".")
        os.read(waiting, 1)
        os._exit(0)
    try:
        assert os.read(is_there, 1) == b"."
        log.append({"number": 1})
        log.close()
        with Log(tmp_path / "log.jsonl", {}) as again:
            assert again.records == [{"number": 1}]
    finally:
        for pipe in (go_on, waiting, is_there, there):
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
        # alive it keeps others out, and its lock dies with it
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

    def fail(*paths):
        raise OSError("disk full")

    monkeypatch.setattr(log.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        log.write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# --- settings


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


FILE = "lengths: [1, 2]\nmass: 0.5\nkv-heads: 2\nset: {a: 1, b: x}\ntext: null\nloud: yes\n"
MIXED = Settings((1, 2), 0.7, 2, ("a=1", "b='x'", "a=2"), loud=True)


def with_file(words, content, folder):
    """Return the words of a command line, with a file of ``content`` at the end, if any."""
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
        ("--mass 0.7 --set a=2", FILE, MIXED),
        ("", None, Folders()),
        ("a,b --out o c", None, Folders(("a,b", "c"), "o")),
        ("", "folders: [a, b]", Folders(("a", "b"))),
        ("c", "folders: [a, b]", Folders(("c",))),
    ],
)
def test_command_line_and_file_become_settings(tmp_path, words, content, expected):
    assert read_settings(type(expected), with_file(words, content, tmp_path), "try") == expected


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
        read_settings(Settings, with_file(words, content, tmp_path), "try")
    said = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in said and said.startswith("try: ") and said.count("\n") == 1


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
    class Some:
        rate: float = option(0.0, "requests a second", float)
        count: int = option(0, "how many", int)
        base: str = option("", "another place")
        text: str | None = option(None, "a file")
        fast: bool = flag("be fast")

    with pytest.raises(SystemExit):
        read_settings(Some, ["--help"], "try")
    shown = " ".join(capsys.readouterr().out.split())
    assert "requests a second (default: 0.0)" in shown and "how many (default: 0)" in shown
    assert shown.count("default") == 2


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
    assert spelled(recorded, Settings) == words.split()


# --- provenance


def test_provenance_has_versions_but_no_host_or_path():
    made = provenance.provenance({"seed": 3}, "cpu", provenance.utc_now())
    assert made["settings"] == {"seed": 3} and made["versions"]["torch"]
    assert made["finished"].endswith("+00:00")
    # results are committed: no value is a path
    assert '"/' not in json.dumps(made)


def test_provenance_records_allocator_settings(monkeypatch):
    for name in provenance.ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    assert "environment" not in provenance.provenance({}, "cpu", "")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    made = provenance.provenance({}, "cpu", "")
    assert made["environment"] == ["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"]
    shown = experiment.made_on({"settings": {}, **made})
    assert ", PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, commit " in shown


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
