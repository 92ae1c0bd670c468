"""Load the model and open the data of a run from its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cab_hf.finetune.adapters import initialise_adapter
from cab_hf.finetune.data import HOLD_OUT_INTERVAL, SequencePacker, pack_held_out_sequences
from cab_hf.finetune.models import enable_gradient_checkpointing, load_model, with_lora
from cab_hf.finetune.objective import Batch
from cab_hf.finetune.parallel import ContextParallelism
from cab_hf.finetune.settings import TRAIN_ALL, Settings
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
        cab_config=settings.get_cab_fields() or None,
        dtype=settings.weights_dtype,
        device=device,
        **settings.get_rope_arguments(),
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
    if settings.train == TRAIN_ALL:
        return model.requires_grad_(True)
    return with_lora(
        model,
        targets=settings.targets,
        rank=settings.rank,
        alpha=settings.alpha,
        dropout=settings.dropout,
        trains_norms=settings.norms,
    )


def open_data(
    settings: Settings,
    tokenizer: Any,
    parallelism: ContextParallelism,
    print_notice: Callable[[str], None],
    vocabulary_size: int,
) -> tuple[SequencePacker, list[Batch], dict[str, dict[str, str | None]]]:
    """Open the training and the held-out sequences of this process's replica.

    Args:
        settings: the settings of the run.
        tokenizer: the tokenizer of the model.
        parallelism: the replicas.
        print_notice: function that prints a sentence. It is called for each source with held-out
            documents.
        vocabulary_size: number of tokens in the model's vocabulary.

    Returns:
        packer: the training sequences.
        held_out_sequences: sequences for the held-out loss; may be empty.
        hashes_by_setting: a dict for each of the settings "data" and "validation", from the name
            of a source to its SHA-256.
    """
    training_source_shares, validation_source_shares = (
        open_sources(settings, settings.parse_sources(setting))
        for setting in ("data", "validation")
    )
    refuse_overlap(training_source_shares, validation_source_shares)
    hashes_by_setting = {
        setting: {
            source_name: source.sha256
            for (source_name, _), (source, _) in zip(
                settings.parse_sources(setting), opened_source_shares, strict=True
            )
        }
        for setting, opened_source_shares in (
            ("data", training_source_shares),
            ("validation", validation_source_shares),
        )
    }
    # training documents are reserved only if there is a held-out loss and no validation source
    hold_out_every = HOLD_OUT_INTERVAL if settings.held_out and not validation_source_shares else 0
    for source, _ in training_source_shares if hold_out_every else ():
        if source.num_documents:
            print_notice(format_held_out_notice(source, tokenizer, hold_out_every))
    packer = SequencePacker(
        tokenizer=tokenizer,
        source_shares=training_source_shares,
        sequence_tokens=settings.length,
        seed=settings.seed,
        rank=parallelism.replica_index,
        num_processes=parallelism.num_replicas,
        hold_out_every=hold_out_every,
        vocabulary_size=vocabulary_size,
    )
    held_out_sequences = []
    if settings.held_out:
        held_out_sequences = pack_held_out_sequences(
            tokenizer=tokenizer,
            source_shares=validation_source_shares or training_source_shares,
            sequence_tokens=settings.length,
            num_sequences=settings.held_out,
            # use all documents of validation sources
            hold_out_every=hold_out_every or 1,
            vocabulary_size=vocabulary_size,
        )
    return packer, held_out_sequences, hashes_by_setting


def format_held_out_notice(source: TextSource, tokenizer: Any, hold_out_every: int) -> str:
    """Return a sentence with the numbers of the documents of ``source`` that are held out.

    ``hold_out_every`` is as in `SequencePacker`.
    """
    first_held_out_index = find_first_held_out(source, tokenizer, hold_out_every)
    num_held_out = len(range(first_held_out_index, source.num_documents, hold_out_every))
    documents_phrase = f"document {first_held_out_index + 1}"
    documents_phrase += f" and every {hold_out_every}th after it" if num_held_out > 1 else ""
    return (
        f"source {source.name!r}: {num_held_out} of {source.num_documents} documents are held out "
        f"for the loss and not trained on ({documents_phrase}); --held-out 0 holds out none."
    )


def open_sources(
    settings: Settings, source_name_shares: Sequence[tuple[str, float]]
) -> list[tuple[Source, float]]:
    """Open the sources in ``source_name_shares`` (name, share); return pairs (source, share)."""
    return [
        (
            make_source(
                source_name,
                text_field=settings.text_field,
                split=settings.split,
                streaming=settings.streaming,
                seed=settings.seed,
            ),
            share,
        )
        for source_name, share in source_name_shares
    ]
