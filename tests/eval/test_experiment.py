"""The experiment runner: measured cases, output files, printed text and resumed runs."""

import csv
import errno
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from cab_hf.eval import __main__, experiment, readme, speed
from cab_hf.eval.experiment import Experiment, render, run
from cab_hf.eval.report import markdown_table
from cab_hf.experiment import provenance
from cab_hf.experiment.log import LogError, pack_file, read_log
from cab_hf.experiment.settings import UsageError, comma_separated, option

RUN_FILE_NAMES = {"samples.jsonl", "results.json", "results.csv", "report.md", "figure.png"}
# lengths that `Powers` has measured in the current test
MEASURED_LENGTHS: list[int] = []
# the function that the fixture `powers_command` replaces
ORIGINAL_IMPORT_EXPERIMENT = experiment.import_experiment


@dataclass(frozen=True)
class Settings:
    """Settings of `Powers`."""

    lengths: tuple[int, ...] = option((1, 2), "tokens", comma_separated(int))
    power: int = option(2, "of the length", int)
    out: str = option("powers", "folder")


class Powers(Experiment):
    """Experiment that computes length ** power of each length, then of the longest length + 1.

    The last case has the field ``sought``, like the cases of a search for the longest prompt.
    """

    name = "powers"
    purpose = "raise lengths to a power"
    title = "Powers"
    caption = "nothing to see"
    Settings = Settings
    CASE_FIELDS = ("length",)
    EXTENSIBLE_SETTINGS = ("lengths",)

    def cases(self, samples):
        for length in self.settings.lengths:
            yield {"length": length}
        yield {
            "length": max(sample["length"] for sample in samples if not sample["sought"]) + 1,
            "sought": True,
        }

    def measure(self, case):
        MEASURED_LENGTHS.append(case["length"])
        return {"sought": case.get("sought", False), "value": case["length"] ** self.settings.power}

    @staticmethod
    def rows(samples, settings):
        sorted_samples = sorted(samples, key=lambda sample: sample["length"])
        return [{**sample, "power": settings["power"]} for sample in sorted_samples]

    @staticmethod
    def tables(rows):
        values_table = markdown_table(rows, ["length", "value"])
        return {"Values": values_table, "Powers": markdown_table(rows, ["power"])}

    @staticmethod
    def summary_sentences(rows):
        return [f"The last is {rows[-1]['value']}."]

    @staticmethod
    def notes(settings):
        return f"Power: {settings['power']}."

    @staticmethod
    def draw(path, rows):
        path.write_bytes(b"drawn")


@pytest.fixture(autouse=True)
def powers_command(monkeypatch):
    """Register `Powers` as the command "powers", and clear `MEASURED_LENGTHS`."""
    MEASURED_LENGTHS.clear()
    monkeypatch.setattr(
        experiment,
        "import_experiment",
        lambda name: {"powers": Powers}.get(name) or ORIGINAL_IMPORT_EXPERIMENT(name),
    )


def run_powers(out_folder, **setting_fields):
    """Run `Powers` with ``setting_fields`` in the folder ``out_folder``, and return the rows."""
    return run(Powers(Settings(out=str(out_folder), **setting_fields)))


def read_contents_by_name(folder):
    """Return {file name: bytes} of the files in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_run_writes_five_files_and_prints_paths(tmp_path, capsys):
    rows = run_powers(tmp_path)
    assert [(row["length"], row["value"]) for row in rows] == [(1, 1), (2, 4), (3, 9)]
    assert read_contents_by_name(tmp_path).keys() == RUN_FILE_NAMES
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["rows"] == rows
    assert content["provenance"]["experiment"] == "powers"
    assert content["provenance"]["settings"] == {"lengths": [1, 2], "power": 2}
    with open(tmp_path / "results.csv", newline="") as file:
        assert [line["value"] for line in csv.DictReader(file)] == ["1", "4", "9"]
    report_text = (tmp_path / "report.md").read_text()
    assert report_text.startswith(Path(__file__).with_name("powers.md").read_text().rstrip("\n"))
    assert report_text.endswith("```\npython -m cab_hf.eval powers\n```\n")
    printed_text = capsys.readouterr().out
    assert (
        "| 3 | 9 |" in printed_text
        and "The last is 9." in printed_text
        and "| power |" not in printed_text
    )
    assert (
        str(tmp_path / "figure.png") in printed_text and str(tmp_path / "report.md") in printed_text
    )


def test_interrupted_run_continues(tmp_path, monkeypatch):
    def interrupt_at_length_2(powers, case):
        if case["length"] == 2:
            raise KeyboardInterrupt
        return original_measure(powers, case)

    original_measure = Powers.measure
    monkeypatch.setattr(Powers, "measure", interrupt_at_length_2)
    with pytest.raises(KeyboardInterrupt):
        run_powers(tmp_path / "killed")
    monkeypatch.setattr(Powers, "measure", original_measure)
    run_powers(tmp_path / "killed")
    assert MEASURED_LENGTHS == [1, 2, 3]
    run_powers(tmp_path / "whole")
    run_logs = (
        read_log(tmp_path / folder_name / "samples.jsonl") for folder_name in ("whole", "killed")
    )
    assert next(run_logs) == next(run_logs)


class PowersOutOfMemory(Powers):
    """`Powers` on a device that runs out of memory at some lengths.

    Attributes:
        failing_lengths: the lengths whose case fails.
    """

    ERROR_FIELD = "error"
    failing_lengths: tuple[int, ...] = ()

    def measure_sample(self, case):
        if case["length"] in self.failing_lengths:
            return {**case, "error": "out of memory"}
        return super().measure_sample(case)


def test_failed_case_is_reported_and_retried(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(PowersOutOfMemory, "failing_lengths", (2,))
    settings = Settings(out=str(tmp_path / "out"), lengths=(1, 2, 3))
    rows = run(PowersOutOfMemory(settings))
    assert [row["length"] for row in rows] == MEASURED_LENGTHS == [1, 3, 4]
    assert "1 cases failed (out of memory). The report lists them" in capsys.readouterr().out
    report = (tmp_path / "out" / "report.md").read_text()
    table = "| length | cases | why |\n| --- | --- | --- |\n| 2 | 1 | out of memory |"
    assert f"## Not measured yet\n\n{table}" in report
    monkeypatch.setattr(experiment, "import_experiment", {"powers": PowersOutOfMemory}.get)
    assert render(tmp_path / "out") == rows
    assert (tmp_path / "out" / "report.md").read_text() == report
    monkeypatch.setattr(PowersOutOfMemory, "failing_lengths", ())
    rows = run(PowersOutOfMemory(settings))
    assert MEASURED_LENGTHS == [1, 3, 4, 2] and [row["length"] for row in rows] == [1, 2, 3, 4]
    report = (tmp_path / "out" / "report.md").read_text()
    assert "Not measured yet" not in report and render(tmp_path / "out") == rows
    # a run without any successful case writes no report
    monkeypatch.setattr(PowersOutOfMemory, "failing_lengths", (1, 2))
    monkeypatch.setattr(PowersOutOfMemory, "cases", lambda *_: [{"length": 1}, {"length": 2}])
    with pytest.raises(UsageError, match="no case could be measured: out of memory. Give shorter"):
        run(PowersOutOfMemory(Settings(out=str(tmp_path / "none"))))
    assert read_contents_by_name(tmp_path / "none").keys() == {"samples.jsonl"}


def test_sample_without_field_of_rows_is_refused(tmp_path, monkeypatch):
    run_powers(tmp_path)
    log_path = tmp_path / "samples.jsonl"
    log_path.write_text(log_path.read_text().replace('"value": 4', '"worth": 4'))
    monkeypatch.setattr(
        Powers,
        "rows",
        staticmethod(lambda samples, _: [{"value": sample["value"]} for sample in samples]),
    )
    with pytest.raises(LogError, match=r"samples\.jsonl has a sample without 'value'. Repair it"):
        run_powers(tmp_path)
    monkeypatch.setattr(Powers, "rows", staticmethod(lambda samples, settings: settings["none"]))
    log_path.write_text(log_path.read_text().replace('"worth": 4', '"none": 1, "value": 4'))
    monkeypatch.setattr(Powers, "measured_fields", staticmethod(lambda sample: ("value", "none")))
    with pytest.raises(LogError, match=r"samples\.jsonl, line 2 has no 'none'\. Repair it"):
        run_powers(tmp_path)


def test_repeated_run_keeps_samples_and_provenance(tmp_path, monkeypatch):
    run_powers(tmp_path)
    files_before = read_contents_by_name(tmp_path)
    monkeypatch.setattr(provenance, "utc_now", lambda: "later")
    run_powers(tmp_path)
    assert MEASURED_LENGTHS == [1, 2, 3] and read_contents_by_name(tmp_path) == files_before
    # packed samples are read as well
    pack_file(tmp_path / "samples.jsonl")
    (tmp_path / "results.csv").unlink()
    render(tmp_path)
    assert read_contents_by_name(tmp_path).keys() == (RUN_FILE_NAMES - {"samples.jsonl"}) | {
        "samples.jsonl.xz"
    }
    run_powers(tmp_path)
    assert MEASURED_LENGTHS == [1, 2, 3] and read_contents_by_name(tmp_path) == files_before


def test_extended_run_updates_command(tmp_path, monkeypatch):
    run_powers(tmp_path)
    closed_bars = []

    class RecordingBar(experiment.tqdm):
        def close(self):
            closed_bars.append((self.n, self.initial, self.smoothing))
            super().close()

    monkeypatch.setattr(experiment, "tqdm", RecordingBar)
    rows = run_powers(tmp_path, lengths=(1, 2, 5))
    # final count 4, initial count 2 (the cases in the log), and smoothing 0, so that tqdm estimates
    # the remaining time from the cases of this run only
    assert closed_bars[0] == (4, 2, 0)
    assert [row["length"] for row in rows] == [1, 2, 3, 5, 6]
    assert MEASURED_LENGTHS == [1, 2, 3, 5, 6]
    assert "powers --lengths 1,2,5\n" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("method_name", ["measure", "rows"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_number_is_not_written(tmp_path, monkeypatch, method_name, value):
    method_result = {"value": value, "sought": False}
    monkeypatch.setattr(
        Powers, method_name, lambda *_: [method_result] if method_name == "rows" else method_result
    )
    with pytest.raises(LogError, match="must contain finite numbers only"):
        run(Powers(Settings(out=str(tmp_path))))
    assert not (tmp_path / "results.json").exists()
    assert "NaN" not in (log_content := (tmp_path / "samples.jsonl").read_text())
    assert "Infinity" not in log_content


def test_report_lists_repeated_texts_of_all_runs(tmp_path, monkeypatch, capsys):
    repeat_sentences, original_provenance = [], Powers.provenance
    monkeypatch.setattr(
        Powers,
        "provenance",
        lambda powers, started: {
            **original_provenance(powers, started),
            "repeated": list(repeat_sentences),
        },
    )
    for length in (1, 5):
        repeat_sentences[:] = [f"texts of {length} tokens repeat it."]
        run_powers(tmp_path, lengths=(length,))
        assert repeat_sentences[0] in capsys.readouterr().out
    report = (tmp_path / "report.md").read_text()
    assert "texts of 1 tokens repeat it." in report and "texts of 5 tokens repeat it." in report


def test_conflicting_folder_is_refused_before_writing(tmp_path, monkeypatch):
    class Roots(Powers):
        name = "roots"

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "report.md").write_text("mine")
    with pytest.raises(LogError, match="contains report.md and no samples.jsonl"):
        run_powers(tmp_path / "mine")
    assert (
        read_contents_by_name(tmp_path / "mine") == {"report.md": b"mine"} and not MEASURED_LENGTHS
    )
    run_powers(tmp_path / "out")
    files_before = read_contents_by_name(tmp_path / "out")
    with pytest.raises(LogError, match="made with power 2, this run has 3. Give another --out"):
        run_powers(tmp_path / "out", power=3)
    with pytest.raises(LogError, match="made with experiment 'powers', this run has 'roots'"):
        run(Roots(Settings(out=str(tmp_path / "out"))))
    assert read_contents_by_name(tmp_path / "out") == files_before

    def raise_usage_error(powers):
        raise UsageError("lengths must be short")

    monkeypatch.setattr(Powers, "check_settings", raise_usage_error)
    with pytest.raises(UsageError):
        run_powers(tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"provenance": {}}', "\0"])
def test_invalid_results_file_is_refused_before_measuring(tmp_path, content):
    run_powers(tmp_path)
    MEASURED_LENGTHS.clear()
    (tmp_path / "results.json").write_text(content)
    for run_or_render in (lambda: run_powers(tmp_path, lengths=(7,)), lambda: render(tmp_path)):
        with pytest.raises(LogError, match="results.json must contain results of a run"):
            run_or_render()
    assert not MEASURED_LENGTHS


def test_write_error_names_the_folder(tmp_path, monkeypatch):
    def fail_on_full_disk(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(experiment, "write_atomically", fail_on_full_disk)
    with pytest.raises(LogError, match=f"{tmp_path} cannot be written .No space left on device"):
        run_powers(tmp_path)
    monkeypatch.undo()
    run_powers(tmp_path)
    assert (
        MEASURED_LENGTHS == [1, 2, 3] and read_contents_by_name(tmp_path).keys() == RUN_FILE_NAMES
    )


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UsageError("length 3 is\n too short."), "length 3 is too short."),
        (
            OSError(errno.ENOSPC, "No space left"),
            "No space left. Free disk space, and the run continues.",
        ),
        *((LogError("no log."), "no log."), (ValueError("a bug"), None)),
        (OSError(errno.EBADF, "Bad file descriptor"), None),
    ],
    ids=["refused", "full disk", "log", "bug", "bug with files"],
)
def test_usage_error_prints_one_line_and_bug_raises(monkeypatch, capsys, error, message):
    def raise_error(arguments):
        raise error

    monkeypatch.setattr(readme, "main", raise_error)
    if message is None:
        with pytest.raises(type(error)):
            __main__.main(["readme"])
        return
    assert __main__.main(["readme"]) == 2
    assert capsys.readouterr().err == f"python -m cab_hf.eval: readme: {message}\n"


def test_listing_commands_does_not_import_torch():
    script = (
        "import sys; from cab_hf.eval.__main__ import main;"
        "main(['--help']); main(['speed', '-h']);"
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert process.stdout.splitlines()[-1] == "[]"


def test_commands_are_listed_and_unknown_ones_refused(capsys):
    for command_name in ("fidelity", "passkey", *(f"speed {op}" for op in speed.COMMANDS)):
        experiment_class = experiment.import_experiment(command_name)
        assert __main__._read_purpose(experiment_class.__module__) == experiment_class.purpose
    assert __main__.main(["--help"]) == 0
    help_text = capsys.readouterr().out
    # the column of names is as wide as the longest name
    assert f"  {'passkey':10}  find a number hidden in a long text\n" in help_text
    assert "  calibrate  " in help_text and "families" not in help_text
    for arguments in (["magic"], []):
        assert __main__.main(arguments) == 2
        assert "command must be one of calibrate, fidelity" in capsys.readouterr().err
