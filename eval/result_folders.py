"""Read folders of results, and describe the source of their rows for a line below a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cab_hf.config import CabConfig
from cab_hf.eval import experiment
from cab_hf.eval.experiment import (
    RESULTS_FILE,
    Experiment,
    Row,
    drop_unset_share,
    find_changed_fields,
    find_experiment_class,
    has_current_fields,
)
from cab_hf.experiment.log import add_default_fields, file_exists, read_file


@dataclass(frozen=True)
class Results:
    """The content of a folder of results.

    Attributes:
        name: name of the folder.
        rows: the rows of results.json.
        provenance: settings, device and versions of the run.
        experiment_class: class of the experiment that ran, or an `ArchivedRun`.
        folder: path of the folder.
    """

    name: str
    rows: Sequence[Row]
    provenance: Mapping[str, Any]
    experiment_class: type[Experiment]
    folder: Path


def read_results(folder: Path) -> Results:
    """Read the results in ``folder``; fields that earlier versions did not write are added.

    Raises:
        ValueError: the folder contains no results of an experiment.
    """
    path = folder / RESULTS_FILE
    if not file_exists(path):
        raise ValueError(f"{folder} has no {RESULTS_FILE}. Measure it again or remove the folder.")
    provenance = experiment.read_provenance(folder)
    if "experiment" not in provenance:
        raise ValueError(f"{path} names no experiment in its provenance. Measure it again.")
    experiment_class = find_experiment_class(provenance, folder)
    rows = [
        add_default_fields(row, experiment_class.ADDED_DEFAULTS)
        for row in json.loads(read_file(path))["rows"]
    ]
    return Results(
        name=folder.name,
        rows=rows,
        provenance=provenance,
        experiment_class=experiment_class,
        folder=folder,
    )


def read_all_results(results: Path) -> list[Results]:
    """Read the results in all subfolders of ``results``, sorted by name."""
    return list(map(read_results, sorted(filter(Path.is_dir, results.iterdir()))))


def uses_default_config(result: Results) -> bool:
    """Return True if a run of `fidelity` measured CAB with the default config of its version.

    ``min_length`` may differ from the default. Returns False if `CabConfig` no longer has all
    fields of the config.
    """
    methods = {row.get("method") for row in result.rows}
    if result.provenance["experiment"] != "fidelity" or "cab" not in methods:
        return False
    configs = result.provenance["settings"].get("cab_configs", {})
    config = drop_unset_share(configs.get("cab", {}))
    if not config or not has_current_fields(config):
        return False
    return find_changed_fields({**config, "min_length": CabConfig.min_length}) == {}


def describe_source(results: Sequence[Results]) -> str:
    """Return a sentence with the devices, torch versions and commits of runs.

    A second sentence names cab_hf 0.2 if one of the runs has settings of that version.
    """
    provenance_records = [result.provenance for result in results]
    # recorded devices may end with ", code of" and a compute capability
    devices = _join_distinct(
        record["device"].partition(", code of")[0] for record in provenance_records
    )
    versions = _join_distinct(record["versions"]["torch"] for record in provenance_records)
    commits = _join_distinct(
        _shorten_commit(record["commit"] or "unknown") for record in provenance_records
    )
    sentence = f"Measured on {devices} with torch {versions} at commit {commits}."
    has_old_configs = [_has_old_config(record["settings"]) for record in provenance_records]
    if any(has_old_configs):
        sentence += (
            f" {'All' if all(has_old_configs) else 'Some'} runs select blocks as cab_hf 0.2 did."
        )
    return sentence


def _join_distinct(names: Iterable[str]) -> str:
    """Join the distinct names in their order, as in "a, b and c"."""
    *first_names, last_name = dict.fromkeys(names)
    return f"{', '.join(first_names)} and {last_name}" if first_names else last_name


def _has_old_config(settings: Row) -> bool:
    """Return True if a config of the run has fields that `CabConfig` no longer has."""
    configs = [settings.get("cab_config"), *settings.get("cab_configs", {}).values()]
    return any(config and not has_current_fields(config) for config in configs)


def _shorten_commit(commit: str) -> str:
    """Return the first seven digits of a commit, and a suffix such as "-dirty" if there is one."""
    hash_digits, *suffix = commit.split("-", 1)
    return "-".join([hash_digits[:7], *suffix])
