"""Functions that open the model and the data of a run from its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cab_hf.finetune.adapters import begin_with
from cab_hf.finetune.data import HOLD_OUT, Packed, held_out
from cab_hf.finetune.models import enable_gradient_checkpointing, load_model, with_lora
from cab_hf.finetune.objective import Batch
from cab_hf.finetune.parallel import Parallel
from cab_hf.finetune.settings import ALL, Settings
from cab_hf.finetune.sources import Source, first_held_out, make_source, refuse_overlap
from cab_hf.hf.token_mixers import refuse_token_mixers


def build(settings: Settings, device: torch.device) -> tuple[nn.Module, Any]:
    """Return the model with its trained weights on ``device``, and its tokenizer."""
    model, tokenizer = load_model(
        settings.model,
        attn_implementation=settings.attention,
        cab_config=settings.cab_config() or None,
        dtype=settings.weights_dtype,
        device=device,
        **settings.positions(),
        qlora=settings.qlora,
        trust_remote_code=settings.trust_remote_code,
    )
    model = adapted(settings, model)
    if settings.adapter:
        begin_with(model, Path(settings.adapter))
    if settings.checkpointing:
        enable_gradient_checkpointing(model)
    return model, tokenizer


def adapted(settings: Settings, model: nn.Module) -> nn.Module:
    """Return ``model`` with the adapter of the settings, or with all weights trained."""
    refuse_token_mixers(
        model,
        "such layers would mix documents that are packed into one sequence. Train a model in "
        "which only attention mixes tokens.",
    )
    if settings.train == ALL:
        return model.requires_grad_(True)
    return with_lora(
        model,
        targets=settings.targets,
        rank=settings.rank,
        alpha=settings.alpha,
        dropout=settings.dropout,
        norms=settings.norms,
    )


def open_data(
    settings: Settings,
    tokenizer: Any,
    parallel: Parallel,
    notify: Callable[[str], None],
    vocabulary: int,
) -> tuple[Packed, list[Batch], dict[str, dict[str, str | None]]]:
    """Open the sequences of this process's replica and those of the held-out loss.

    The third result maps setting and name to the SHA-256 of each source.

    Args:
        settings: the settings of the run.
        tokenizer: the tokenizer of the model.
        parallel: the replicas.
        notify: prints a sentence about each source with held-out documents.
        vocabulary: as in `Packed`.
    """
    training, own = (open_sources(settings, settings.sources(x)) for x in ("data", "validation"))
    refuse_overlap(training, own)
    read = {
        setting: {
            name: source.sha256
            for (name, _), (source, _) in zip(settings.sources(setting), opened, strict=True)
        }
        for setting, opened in (("data", training), ("validation", own))
    }
    # hold out documents only if the loss needs them
    hold_out = HOLD_OUT if settings.held_out and not own else 0
    for source, _ in training if hold_out else ():
        if source.rows:
            first = first_held_out(source, tokenizer, hold_out)
            count = len(range(first, source.rows, hold_out))
            which = f"document {first + 1}"
            which += f" and every {hold_out}th after it" if count > 1 else ""
            notify(
                f"source {source.name!r}: {count} of {source.rows} documents are held out for the "
                f"loss and not trained on ({which}); --held-out 0 holds out none."
            )
    length, count = settings.length, settings.held_out
    how = {"hold_out": hold_out, "vocabulary": vocabulary}
    place = {"rank": parallel.replica, "world": parallel.replicas}
    packed = Packed(tokenizer, training, length, settings.seed, **place, **how)
    how["hold_out"] = hold_out or 1
    kept = held_out(tokenizer, own or training, length, count, **how) if count else []
    return packed, kept, read


def open_sources(
    settings: Settings, named: Sequence[tuple[str, float]]
) -> list[tuple[Source, float]]:
    """Open the sources ``named``, each with its share."""
    names = ("text_field", "split", "streaming", "seed")
    how = {name: getattr(settings, name) for name in names}
    return [(make_source(name, **how), share) for name, share in named]
