"""Find the threshold, or the cascade, with which a model attends a target density.

The command calls `cab_hf.calibrate` for each target density. It writes a config per target, which
`CabConfig.calibrated` reads, and a figure of the density of every layer on the texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from cab_hf.calibration.density import require_reachable_target
from cab_hf.config import CabConfig
from cab_hf.data.documents import Document, make_recall_document
from cab_hf.data.needles import split_sentences
from cab_hf.eval import charts
from cab_hf.eval.experiment import FIGURE_FILE, PROG, Row
from cab_hf.eval.haystack import read_text
from cab_hf.eval.methods import with_known_predictor
from cab_hf.eval.on_model import OnModelSettings, convert_value_errors, require_positions
from cab_hf.eval.report import group_rows, markdown_table
from cab_hf.experiment.log import convert_write_errors
from cab_hf.experiment.models import load_model, load_tokenizer
from cab_hf.experiment.offline_models import built_in_text
from cab_hf.experiment.settings import (
    by_device,
    comma_separated,
    option,
    parse_assignment,
    parse_length,
    read_settings,
    require,
)
from cab_hf.patches.calibration import (
    DEFAULT_LENGTH_TOKENS,
    DEFAULT_NUM_DOCUMENTS,
    KEYS_PER_DOCUMENT,
    calibrate,
)
from cab_hf.patches.inspection import stats
from cab_hf.patches.switch import cab

BUILT_IN_TEXT_NAME = "built-in"


@dataclass(frozen=True)
class Settings(OnModelSettings):
    """Options of ``cab_hf.eval calibrate``. None: a default that depends on the device."""

    cab: tuple[str, ...] = option(
        (), "field=value of CabConfig, e.g. query_block=64; repeatable", repeatable=True
    )
    texts: tuple[str, ...] = option(
        (BUILT_IN_TEXT_NAME,),
        "comma-separated UTF-8 files in which keys are hidden; "
        f"{BUILT_IN_TEXT_NAME}: Python's reference pages",
        comma_separated(str),
    )
    target_densities: tuple[float, ...] | None = by_device(
        (0.25, 0.15),
        (0.5, 0.4),
        "comma-separated target densities",
        comma_separated(float),
    )
    anchors: int = option(
        0,
        "number of layers that select blocks for all layers (a cascade); 0: every layer for itself",
        int,
    )
    length: int | None = by_device(DEFAULT_LENGTH_TOKENS, 2048, "tokens per document", parse_length)
    documents: int | None = by_device(DEFAULT_NUM_DOCUMENTS, 1, "number of documents", int)
    out: str = option("calibration_results", "folder for the configs and the figure")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_setting = partial(require, self)
        for text_name in self.texts:
            is_readable = text_name == BUILT_IN_TEXT_NAME or Path(text_name).is_file()
            require_setting("texts", is_readable, f"UTF-8 files or {BUILT_IN_TEXT_NAME}", text_name)
        require_setting("texts", self.texts and self.text, f"UTF-8 files or {BUILT_IN_TEXT_NAME}")
        target_densities = self.target_densities
        require_setting(
            "target_densities",
            target_densities and all(0 < d <= 1 for d in target_densities),
            "in (0, 1]",
        )
        require_setting("anchors", self.anchors >= 0, "a number of layers, or 0")
        require_setting("length", self.length > 0, "a number of tokens")
        require_setting("documents", self.documents > 0, "at least 1")
        _ = self.cab_config  # raises an error for fields that CabConfig refuses

    @cached_property
    def text(self) -> str:
        """The content of all files in ``texts``, separated by blank lines.

        Raises:
            UsageError: a file is not UTF-8 text.
        """
        return "\n\n".join(
            built_in_text() if text_name == BUILT_IN_TEXT_NAME else read_text("texts", text_name)
            for text_name in self.texts
        )

    @cached_property
    def cab_config(self) -> CabConfig:
        """The config that calibration changes: the default config with the fields of ``--cab``."""
        return with_known_predictor(CabConfig.from_dict(dict(map(parse_assignment, self.cab))))


def main(arguments: Sequence[str]) -> int:
    """Run the command with the options ``arguments``; return the exit status."""
    settings = read_settings(Settings, arguments, f"{PROG} calibrate", __doc__.partition("\n")[0])
    out = Path(settings.out)
    require_positions(settings, "length", settings.length)
    tokenizer = load_tokenizer(settings.model, settings.trust_remote_code)
    with convert_value_errors("length"):
        document = make_recall_document(
            tokenizer=tokenizer,
            sentences=split_sentences(settings.text),
            length=settings.length,
            num_keys=KEYS_PER_DOCUMENT,
            index=0,
            seed=settings.seed,
        )
    with convert_value_errors("target_densities"):
        for target_density in settings.target_densities:
            require_reachable_target(settings.cab_config, target_density, settings.length)
    with convert_write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
    try:
        rows = _calibrate_targets(settings, tokenizer, document, out)
        density_by_target_and_layer = {
            (row["target"], float(row["layer"])): row["density"] for row in rows
        }
        with convert_write_errors(out / FIGURE_FILE):
            charts.draw_heatmap(
                out / FIGURE_FILE,
                {"density": density_by_target_and_layer},
                "target density",
                "layer",
            )
    finally:
        if not any(out.iterdir()):
            out.rmdir()
    summary_rows = []
    for layer_rows in group_rows(rows, ["target"]):
        densities = [row["density"] for row in layer_rows]
        summary = {
            "density": fmean(densities),
            "least": min(densities),
            "most": max(densities),
        }
        summary_rows.append({**layer_rows[0], **summary})
    columns = ["target", "mass_threshold", "density", "least", "most", "config"]
    print(markdown_table(summary_rows, columns))
    print(f"\nfigure: {out / FIGURE_FILE}")
    return 0


def _calibrate_targets(
    settings: Settings, tokenizer: Any, document: Document, out: Path
) -> list[Row]:
    """Calibrate the model for each target density, and save the configs in ``out``.

    Args:
        settings: options of the command.
        tokenizer: the tokenizer of the model.
        document: the document on which the calibrated model's densities are measured.
        out: folder for the configs.

    Returns:
        A row for each target density and each layer that attends sparsely, with the layer's density
        on ``document``.
    """
    model, _ = load_model(
        settings.model, settings.device, settings.dtype, settings.trust_remote_code
    )
    tokens = torch.tensor([document.tokens], device=model.device)
    rows = []
    for target_density in settings.target_densities:
        with convert_value_errors("model"):
            config = calibrate(
                model,
                tokenizer,
                settings.text,
                target_density,
                config=settings.cab_config,
                anchors=settings.anchors or None,
                length=settings.length,
                documents=settings.documents,
                seed=settings.seed,
            )
            with cab(model, config, min_length=0), torch.no_grad():
                stats(model, reset=True)
                model(tokens, use_cache=False, logits_to_keep=1)
                sparse_layers = [row for row in stats(model) if row["density"] is not None]
        path = out / f"cab_config-{target_density:g}.json"
        with convert_write_errors(path):
            config.save(path)
        target_fields = {"target": target_density, "mass_threshold": f"{config.mass_threshold:g}"}
        rows += [{**target_fields, **row, "config": path} for row in sparse_layers]
    return rows
