"""Calibration: what every head of a model loses at every budget, and the budgets that follow.

Or, with ``--anchors``, what the blocks of every layer keep for every other, and a cascade. Measured
a document at a time by the parts of `cab_hf.calibrate`; a case is one document. Beside the files of
every experiment the folder gets a config for each target density, which `CabConfig.calibrated`
reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from cab_hf.config import CabConfig
from cab_hf.documents import Document, recall_document, split_sentences
from cab_hf.eval import anchors, budgets
from cab_hf.eval.experiment import PROG, SAMPLES, Row, read_provenance, run
from cab_hf.eval.haystack import read_sentences
from cab_hf.eval.methods import known
from cab_hf.eval.on_model import OnModel, OnModelSettings, refusing
from cab_hf.fit import Origin, number
from cab_hf.patches.calibration import DOCUMENTS, KEYS, LENGTH, require_target
from cab_hf.predictors import make_predictor
from cab_hf.predictors.anchors import SHARES
from cab_hf.runs.log import read_log, write_atomically, writing
from cab_hf.runs.models import load_config
from cab_hf.runs.provenance import file_identity
from cab_hf.runs.settings import (
    Refused,
    by_device,
    comma_separated,
    option,
    parse_assignment,
    parse_length,
    read_settings,
    require,
)
from cab_hf.runs.stand_ins import built_in_text

BUILT_IN = "built-in"
HEADS = {"heads": "attention_heads", "kv_heads": "key_value_heads"}


@dataclass(frozen=True)
class Settings(OnModelSettings):
    """What a run is told."""

    texts: tuple[str, ...] = option(
        (BUILT_IN,),
        f"comma-separated UTF-8 files that keys are hidden in; {BUILT_IN}: Python's reference",
        comma_separated(str),
    )
    target_densities: tuple[float, ...] | None = by_device(
        (0.25, 0.15),
        (0.5, 0.35),
        "comma-separated shares of the pairs to spend",
        comma_separated(float),
    )
    anchors: int = option(
        0, "layers that choose blocks for those behind them, which are found; 0: all choose", int
    )
    length: int | None = by_device(LENGTH, 2048, "tokens of a document", parse_length)
    documents: int | None = by_device(DOCUMENTS, 1, "how many documents are read", int)
    out: str = option("calibration_results", "folder for the results; a run found there goes on")

    def __post_init__(self) -> None:
        super().__post_init__()
        check = partial(require, self)
        for text in self.texts:
            there = text == BUILT_IN or Path(text).is_file()
            check("texts", there, f"UTF-8 files or {BUILT_IN}", text)
            if text != BUILT_IN:
                read_sentences("texts", text)
        check("texts", self.texts, f"UTF-8 files or {BUILT_IN}")
        targets = self.target_densities
        check("target_densities", targets and all(0 < d <= 1 for d in targets), "in (0, 1]")
        check("anchors", self.anchors >= 0, "a number of layers, or 0")
        check("length", self.length > 0, "a number of tokens")
        check("documents", self.documents > 0, "at least 1")
        _ = self.cab_config  # refuses bad fields here rather than in the middle of a run

    @cached_property
    def cab_config(self) -> CabConfig:
        """What every head shares: ``--set`` over the defaults."""
        return known(CabConfig.from_dict(dict(map(parse_assignment, self.set))))


class Calibrate(OnModel):
    """A sample is what all heads lose on one document."""

    name = "calibrate"
    purpose = "give each head of a model the budget it needs"
    title = "Budgets a head"
    caption = "what each head attends, layer by layer"
    Settings = Settings
    CASE = ("document",)
    GROWS = ("documents", "target_densities")
    LENGTHS = "length"

    @cached_property
    def sentences(self) -> list[str]:
        texts = (
            built_in_text() if text == BUILT_IN else Path(text).read_text("utf-8")
            for text in self.settings.texts
        )
        return split_sentences("\n\n".join(texts))

    def check(self) -> None:
        super().check()
        settings = self.settings
        text = load_config(settings.model, settings.trust_remote_code).get_text_config()
        layers = text.num_hidden_layers - len(settings.cab_config.dense_layers)
        if settings.anchors > layers:
            raise Refused(
                f"anchors must be at most {layers}, the layers of model {settings.model!r} that "
                f"are not dense; got {settings.anchors}."
            )
        self.document(0)
        with refusing("target_densities"):
            target = min(settings.target_densities)
            require_target(settings.cab_config, settings.anchors > 0, target, settings.length)

    def document(self, index: int) -> Document:
        """What is read of that number."""
        settings = self.settings
        with refusing("length"):
            return recall_document(
                self.tokenizer, self.sentences, settings.length, KEYS, index, settings.seed
            )

    def recorded(self) -> dict[str, Any]:
        settings, told = self.settings, super().recorded()
        told["texts"] = [
            text if text == BUILT_IN else file_identity(text) for text in settings.texts
        ]
        config = settings.cab_config
        told["cab_config"] = config.to_dict()
        if settings.anchors:
            return told
        del told["anchors"]
        options = [dict(option) for option in make_predictor(config).options()]
        return {**told, "options": options}

    def identity(self) -> dict[str, Any]:
        told = super().identity()
        if self.settings.anchors:
            # any number of them follows from the same samples
            del told["anchors"]
            told["shares"] = list(SHARES)
        return told

    def expected(self) -> int:
        return self.settings.documents

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        yield from ({"document": index} for index in range(self.settings.documents))

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """What the document tells, of budgets or of anchors."""
        model, document = self.model, self.document(case["document"])
        way = anchors if self.settings.anchors else budgets
        with refusing("model"):
            found = way.found_in(model, document, self.settings.cab_config)
        text = model.config.get_text_config()
        counts = {name: number(text, f"num_{told}") for name, told in HEADS.items()}
        return {"layers": text.num_hidden_layers, **counts, **found}

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """As `budgets.rows` or `anchors.rows`."""
        return _asked(settings).rows(samples, settings)

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        return _shown(rows).tables(rows)

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        return []

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        return _asked(settings).notes(settings)

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        _shown(rows).draw(path, rows)

    @classmethod
    def main(cls, words: Sequence[str]) -> int:
        """Run, then write a config for each target."""
        settings = read_settings(Settings, words, f"{PROG} {cls.name}", cls.purpose)
        run(cls(settings))
        for path in write_configs(Path(settings.out)):
            print(f"config: {path}")
        return 0


EXPERIMENT = Calibrate


def write_configs(folder: Path) -> list[Path]:
    """``cab_config-DENSITY.json`` for each target density of the run in ``folder``."""
    settings = read_provenance(folder)["settings"]
    _, samples = read_log(folder / SAMPLES, Calibrate.CASE)
    paths = []
    for target in settings["target_densities"]:
        paths.append(folder / f"cab_config-{target:g}.json")
        config = _asked(settings).config_of(samples, settings, target)
        config = replace(config, origin=_origin(settings, samples[0]))
        with writing(paths[-1]):
            write_atomically(paths[-1], json.dumps(config.to_dict()) + "\n")
    return paths


def _origin(settings: Mapping[str, Any], sample: Row) -> Origin:
    """What was measured for; runs from before heads were recorded do not say how many."""
    counts = sample["layers"], sample.get("heads"), sample.get("kv_heads")
    return Origin(Path(settings["model"]).name, *counts, settings["length"])


def _asked(settings: Mapping[str, Any]) -> ModuleType:
    """Who knows what to make of samples that were recorded with these settings."""
    return anchors if "anchors" in settings else budgets


def _shown(rows: Sequence[Row]) -> ModuleType:
    """Who has made these rows, and shows them."""
    return anchors if "anchor" in rows[0] else budgets
