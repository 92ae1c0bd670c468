"""Load the model and open the data of a run from its settings."""

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
from cab_hf.finetune.sources import (
    Source,
    TextSource,
    first_held_out,
    make_source,
    refuse_overlap,
)
from cab_hf.hf.token_mixers import refuse_token_mixers


def build(settings: Settings, device: torch.device) -> tuple[nn.Module, Any]:
    """Load the model of the settings for training; return the model and its tokenizer.

    The model gets LoRA adapters, or with ``--train all`` all of its weights require gradients. The
    weights of ``--adapter`` are loaded if the settings name one.
    """
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
    """Add LoRA adapters to ``model``, or with ``--train all`` make all weights require gradients.

    Raises:
        UsageError: layers other than attention mix tokens.
        ValueError: as in `with_lora`.
    """
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
    """Open the training and the held-out sequences of this process's replica.

    Args:
        settings: the settings of the run.
        tokenizer: the tokenizer of the model.
        parallel: the replicas.
        notify: function that prints a sentence. It is called for each source with held-out
            documents.
        vocabulary: number of tokens in the model's vocabulary.

    Returns:
        packed: the training sequences.
        held_out_sequences: sequences for the held-out loss; may be empty.
        sha256_of: a dict for each of the settings "data" and "validation", from the name of a
            source to its SHA-256.
    """
    training, validation = (
        open_sources(settings, settings.sources(x)) for x in ("data", "validation")
    )
    refuse_overlap(training, validation)
    sha256_of = {
        setting: {
            name: source.sha256
            for (name, _), (source, _) in zip(settings.sources(setting), opened, strict=True)
        }
        for setting, opened in (("data", training), ("validation", validation))
    }
    # training documents are reserved only if there is a held-out loss and no validation source
    hold_out = HOLD_OUT if settings.held_out and not validation else 0
    for source, _ in training if hold_out else ():
        if source.rows:
            notify(held_out_notice(source, tokenizer, hold_out))
    packed = Packed(
        tokenizer=tokenizer,
        sources=training,
        length=settings.length,
        seed=settings.seed,
        rank=parallel.replica,
        world=parallel.replicas,
        hold_out=hold_out,
        vocabulary=vocabulary,
    )
    held_out_sequences = []
    if settings.held_out:
        held_out_sequences = held_out(
            tokenizer=tokenizer,
            sources=validation or training,
            length=settings.length,
            count=settings.held_out,
            # use all documents of validation sources
            hold_out=hold_out or 1,
            vocabulary=vocabulary,
        )
    return packed, held_out_sequences, sha256_of


def held_out_notice(source: TextSource, tokenizer: Any, hold_out: int) -> str:
    """Return a sentence with the numbers of the documents of ``source`` that are held out.

    ``hold_out`` is as in `Packed`.
    """
    first = first_held_out(source, tokenizer, hold_out)
    count = len(range(first, source.rows, hold_out))
    numbers = f"document {first + 1}"
    numbers += f" and every {hold_out}th after it" if count > 1 else ""
    return (
        f"source {source.name!r}: {count} of {source.rows} documents are held out for the loss and "
        f"not trained on ({numbers}); --held-out 0 holds out none."
    )


def open_sources(
    settings: Settings, pairs: Sequence[tuple[str, float]]
) -> list[tuple[Source, float]]:
    """Open the sources in ``pairs`` (name, share); return pairs (source, share)."""
    return [
        (
            make_source(
                name,
                text_field=settings.text_field,
                split=settings.split,
                streaming=settings.streaming,
                seed=settings.seed,
            ),
            share,
        )
        for name, share in pairs
    ]
