"""Load the model and open the data of a run from its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cab_hf.finetune.adapters import initialise_adapter
from cab_hf.finetune.data import HOLD_OUT_EVERY, Packed, pack_held_out
from cab_hf.finetune.models import enable_gradient_checkpointing, load_model, with_lora
from cab_hf.finetune.objective import Batch
from cab_hf.finetune.parallel import Parallel
from cab_hf.finetune.settings import ALL, Settings
from cab_hf.finetune.sources import (
    Source,
    TextSource,
    find_first_held_out,
    make_source,
    refuse_overlap,
)
from cab_hf.hf.token_mixers import refuse_token_mixers


def build_model(settings: Settings, device: torch.device) -> tuple[nn.Module, Any]:
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
        **settings.rope_arguments(),
        qlora=settings.qlora,
        trust_remote_code=settings.trust_remote_code,
    )
    model = make_trainable(settings, model)
    if settings.adapter:
        initialise_adapter(model, Path(settings.adapter))
    if settings.checkpointing:
        enable_gradient_checkpointing(model)
    return model, tokenizer


def make_trainable(settings: Settings, model: nn.Module) -> nn.Module:
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
        hashes_by_setting: a dict for each of the settings "data" and "validation", from the name
            of a source to its SHA-256.
    """
    training_shares, validation_shares = (
        open_sources(settings, settings.parse_sources(setting))
        for setting in ("data", "validation")
    )
    refuse_overlap(training_shares, validation_shares)
    hashes_by_setting = {
        setting: {
            name: source.sha256
            for (name, _), (source, _) in zip(
                settings.parse_sources(setting), opened_shares, strict=True
            )
        }
        for setting, opened_shares in (("data", training_shares), ("validation", validation_shares))
    }
    # training documents are reserved only if there is a held-out loss and no validation source
    hold_out = HOLD_OUT_EVERY if settings.held_out and not validation_shares else 0
    for source, _ in training_shares if hold_out else ():
        if source.num_documents:
            notify(format_held_out_notice(source, tokenizer, hold_out))
    packed = Packed(
        tokenizer=tokenizer,
        sources=training_shares,
        length=settings.length,
        seed=settings.seed,
        rank=parallel.replica_index,
        num_processes=parallel.num_replicas,
        hold_out=hold_out,
        vocabulary=vocabulary,
    )
    held_out_sequences = []
    if settings.held_out:
        held_out_sequences = pack_held_out(
            tokenizer=tokenizer,
            sources=validation_shares or training_shares,
            length=settings.length,
            num_sequences=settings.held_out,
            # use all documents of validation sources
            hold_out=hold_out or 1,
            vocabulary=vocabulary,
        )
    return packed, held_out_sequences, hashes_by_setting


def format_held_out_notice(source: TextSource, tokenizer: Any, hold_out: int) -> str:
    """Return a sentence with the numbers of the documents of ``source`` that are held out.

    ``hold_out`` is as in `Packed`.
    """
    first_number = find_first_held_out(source, tokenizer, hold_out)
    num_held_out = len(range(first_number, source.num_documents, hold_out))
    numbers_phrase = f"document {first_number + 1}"
    numbers_phrase += f" and every {hold_out}th after it" if num_held_out > 1 else ""
    return (
        f"source {source.name!r}: {num_held_out} of {source.num_documents} documents are held out "
        f"for the loss and not trained on ({numbers_phrase}); --held-out 0 holds out none."
    )


def open_sources(
    settings: Settings, name_shares: Sequence[tuple[str, float]]
) -> list[tuple[Source, float]]:
    """Open the sources in ``name_shares`` (name, share); return pairs (source, share)."""
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
        for name, share in name_shares
    ]
