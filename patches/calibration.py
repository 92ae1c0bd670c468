"""`calibrate`: fit a threshold or a cascade by running a loaded model densely on documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from cab_hf.calibration import anchors as anchor_calibration
from cab_hf.calibration.anchors import Coverage, LayerMeasurement, Needles
from cab_hf.calibration.density import (
    fit_threshold,
    measure_densities,
    require_reachable_target,
)
from cab_hf.call.call import Call
from cab_hf.checks import is_fraction, is_whole_number, require, require_finite
from cab_hf.config import CabConfig
from cab_hf.data.documents import Document, insert_copies, make_recall_document
from cab_hf.data.needles import Tokens, split_sentences
from cab_hf.experiment.offline_models import built_in_text
from cab_hf.hf.fit import layer_index, make_origin, max_positions, read_int_field, require_layers
from cab_hf.hf.layers import attention_layers, transformers_model, window
from cab_hf.hf.model_config import cab_config_of
from cab_hf.patches.switch import Settings, apply_cab, to_cab_config
from cab_hf.patches.watching import observe_calls
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext

# defaults of `calibrate`
DEFAULT_TARGET_DENSITY = 0.25
DEFAULT_LENGTH_TOKENS = 8192
DEFAULT_NUM_DOCUMENTS = 3
# number of keys per document: numbers of named persons that the document states and repeats
KEYS_PER_DOCUMENT = 12
# number of passages per document that the document contains twice
COPIES_PER_DOCUMENT = 4
# tokens per passage
PASSAGE_TOKENS = 128
# first tokens of a copy, from which a model recognises the passage. They have no needles
COPY_PREFIX_TOKENS = 16
# distance in tokens between the tokens of a copy that have needles
NEEDLE_STRIDE_TOKENS = 8


def calibrate(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: str | Sequence[str] | None = None,
    target_density: float = DEFAULT_TARGET_DENSITY,
    *,
    config: Settings | None = None,
    anchors: int | None = None,
    length: int | None = None,
    documents: int = DEFAULT_NUM_DOCUMENTS,
    seed: int = 0,
) -> CabConfig:
    """Fit ``mass_threshold`` to a target density of ``model``, and apply the result to ``model``.

    The model runs once on every document, with dense attention and in eval mode. The documents
    contain numbers that are stated and repeated, and copied passages. The density of each layer is
    computed for many thresholds (`cab_hf.calibration.density`). No weights are trained.

    With ``anchors``, `calibrate` also finds a cascade: anchor layers select blocks, and the layers
    after an anchor attend to the same blocks (`cab_hf.calibration.anchors`).

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        texts: one text or a list of texts, into which keys are inserted. Use texts like your
            prompts. None means the reference pages of Python.
        target_density: mean density of the sparse layers at ``length`` tokens, in (0, 1]. Density
            is attended (query, key) pairs divided by causal pairs.
        config: a `CabConfig`, a dict of its fields or the path of a file that `CabConfig.save`
            wrote. None means the config of the model. All fields stay as they are, except
            ``mass_threshold``, ``origin``, and with ``anchors`` the fields of the cascade.
        anchors: number of anchor layers to find. None means the predictor of ``config``, in which
            every layer or the anchors of ``config`` select blocks.
        length: tokens per document. None means 8,192, or the number of positions of the model if
            that number is smaller.
        documents: number of documents.
        seed: seed of the numbers and copied passages in the documents.

    Returns:
        The config with the fitted ``mass_threshold`` or cascade, and the model and length in
        ``origin``. The model has this config afterwards, as after `apply_cab`; `remove_cab`
        restores the former settings. `CabConfig.save` writes the config to a file.

    Raises:
        ValueError: an argument is invalid; the message names the argument. ``target_density`` must
            be between the density of the blocks that are always selected and the density that
            ``max_density`` allows. ``length`` must have space for the keys and must not
            exceed the positions of the model. The model must have a sparse layer and finite
            outputs. With ``anchors``, all layers must have the same numbers of heads.
    """
    _require_valid_numbers(
        target_density=target_density,
        anchors=anchors,
        length=length,
        documents=documents,
        seed=seed,
    )
    text_config = transformers_model(model).config.get_text_config()
    require(callable(tokenizer), "tokenizer", tokenizer, "the tokenizer of the model")
    config = cab_config_of(text_config) if config is None else to_cab_config(config)
    require_layers(config, text_config)
    max_length = max_positions(text_config)
    length = length or min(DEFAULT_LENGTH_TOKENS, max_length or DEFAULT_LENGTH_TOKENS)
    requirement = f"at most {max_length}, the number of positions of the model"
    require(max_length is None or length <= max_length, "length", length, requirement)
    measured_documents = _build_documents(
        tokenizer, texts, length, num_documents=documents, seed=seed
    )
    largest_token = max(max(tokens) for tokens, _ in measured_documents)
    _require_in_vocabulary(largest_token, read_int_field(text_config, "vocab_size"))
    require_reachable_target(config, target_density, length)
    # an upper bound: some layers that cannot be sparse are detected only when they are called
    num_sparse_layers = sum(
        layer not in config.dense_layers and window(module) is None
        for layer, module in attention_layers(model)
    )
    if anchors is not None and num_sparse_layers:
        anchor_calibration.require_num_anchors(anchors, num_sparse_layers)
    with tqdm(desc="calibrate", total=documents * num_sparse_layers, unit="layer") as progress_bar:
        fit_config_threshold = partial(
            _fit_threshold,
            model,
            measured_documents,
            target_density=target_density,
            on_layer_done=progress_bar.update,
        )
        if anchors is None:
            fitted_config = fit_config_threshold(config)
        else:
            document_coverages = [
                measure_coverage(
                    model, tokens, needles, config=config, on_layer_done=progress_bar.update
                )
                for tokens, needles in measured_documents
            ]
            fitted_config = anchor_calibration.fit_cascade(
                config,
                anchor_calibration.average_coverage(
                    [coverage for _, coverage in document_coverages]
                ),
                sparse_layers=document_coverages[0][0],
                num_layers=text_config.num_hidden_layers,
                num_anchors=anchors,
                target_density=target_density,
            )
            if fitted_config.mass_threshold == anchor_calibration.THRESHOLDS[-1]:
                # the comparison of anchors tries few thresholds, and the lowest can be too high for
                # the target; search the threshold of the cascade without this limit
                progress_bar.total += documents * num_sparse_layers
                fitted_config = fit_config_threshold(fitted_config)
    fitted_config = dataclasses.replace(fitted_config, origin=make_origin(text_config, length))
    apply_cab(model, fitted_config)
    return fitted_config


def _require_valid_numbers(
    *,
    target_density: float,
    anchors: int | None,
    length: int | None,
    documents: int,
    seed: int,
) -> None:
    """Raise a ValueError for a number that is invalid as an argument of `calibrate`."""
    is_valid_density = is_fraction(target_density) and target_density > 0
    require(is_valid_density, "target_density", target_density, "in (0, 1]")
    for argument_name, argument_value in (
        ("documents", documents),
        ("anchors", anchors),
        ("length", length),
    ):
        is_omitted_option = argument_value is None and argument_name != "documents"
        require(
            is_omitted_option or is_whole_number(argument_value),
            argument_name,
            argument_value,
            "a whole number >= 1",
        )
    is_valid_seed = isinstance(seed, int) and not isinstance(seed, bool)
    require(is_valid_seed, "seed", seed, "a whole number")


def _fit_threshold(
    model: PreTrainedModel,
    measured_documents: Sequence[tuple[Tokens, Needles]],
    config: CabConfig,
    *,
    target_density: float,
    on_layer_done: Callable[[], Any],
) -> CabConfig:
    """Return ``config`` with the ``mass_threshold`` at which the mean density equals the target.

    The mean is over the measured layers and the documents.

    Args:
        model: the model.
        measured_documents: the documents, as in `_build_documents`.
        config: settings of the model.
        target_density: target density, in (0, 1].
        on_layer_done: function that is called after each measured layer.
    """
    measure_layer = partial(measure_densities, config=config)
    layer_densities = [
        _measure_layers(
            model, tokens, config, measure_layer=measure_layer, on_layer_done=on_layer_done
        )
        for tokens, _ in measured_documents
    ]
    return fit_threshold(config, layer_densities, target_density)


def _require_in_vocabulary(token: int, vocabulary_size: int | None) -> None:
    """Raise a ValueError if a token is outside the vocabulary, which would crash a GPU kernel."""
    if vocabulary_size is not None and token >= vocabulary_size:
        raise ValueError(
            f"tokenizer must produce tokens below {vocabulary_size}, the vocabulary of the model, "
            f"got token {token}. Pass the tokenizer of this model."
        )


def _build_documents(
    tokenizer: Any, texts: str | Sequence[str] | None, length: int, *, num_documents: int, seed: int
) -> list[tuple[Tokens, Needles]]:
    """Build ``num_documents`` documents from sentences of ``texts``; arguments as in `calibrate`.

    Returns:
        The result (tokens, needles) of `add_needles` for each document.
    """
    texts = [built_in_text()] if texts is None else [texts] if isinstance(texts, str) else texts
    are_texts = isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts)
    requirement = "a text or a list of texts that contain words"
    require(are_texts and any(text.strip() for text in texts), "texts", texts, requirement)
    sentences = split_sentences("\n\n".join(texts))
    try:
        return [
            add_needles(
                make_recall_document(
                    tokenizer,
                    sentences,
                    length=length,
                    num_keys=KEYS_PER_DOCUMENT,
                    index=document_index,
                    seed=seed,
                )
            )
            for document_index in range(num_documents)
        ]
    except ValueError as error:
        # the original message recommends fewer keys, which the user cannot change
        raise ValueError(
            f"length must have room for {KEYS_PER_DOCUMENT} hidden keys per document, got "
            f"{length}. Pass a larger length, or texts with shorter sentences."
        ) from error


@torch.no_grad()
def _measure_layers(
    model: PreTrainedModel,
    tokens: Tokens,
    config: CabConfig,
    *,
    measure_layer: Callable[[Tensor, Tensor, LayerContext], Any],
    on_layer_done: Callable[[], Any],
) -> dict[int, Any]:
    """Call ``measure_layer`` for every layer that can be sparse, in one dense pass over a document.

    Layers with a sliding window and layers in ``dense_layers`` are left out.

    Args:
        model: the model.
        tokens: tokens of the document, N.
        config: settings of the model.
        measure_layer: function of q [1, H, N, D], k [1, H_kv, N, D] and the `LayerContext` of the
            layer.
        on_layer_done: function that is called after each layer.

    Returns:
        Results of ``measure_layer`` by index of the layer.
    """
    measurement_by_layer: dict[int, Any] = {}

    def observe_call(call: Call) -> None:
        q, k = call.q, call.k
        for tensor in (q, k):
            require_finite(tensor, "dense")
        if call.mask.window is not None:
            return
        layer_idx = layer_index(call.layer)
        if layer_idx is None:
            raise ValueError(
                "model must have one attention module per layer, got "
                f"{type(call.layer).__name__}, which serves several layers. Set mass_threshold "
                "instead of calibrating the model."
            )
        if layer_idx in config.dense_layers:
            return
        key_ranges = KeyRanges.causal(1, q.shape[2], k.shape[2], q.device)
        measurement_by_layer[layer_idx] = measure_layer(q, k, call.make_layer_context(key_ranges))
        on_layer_done()

    input_ids = torch.tensor([tokens], device=model.device)
    with observe_calls(model, observe_call):
        require_finite(model(input_ids, use_cache=False, logits_to_keep=1).logits, "dense")
    return measurement_by_layer


def add_needles(document: Document) -> tuple[Tokens, Needles]:
    """Copy passages inside a document, and list the tokens that queries must attend to.

    Returns:
        tokens: tokens of the document with copied passages.
        needles: queries, and for each query the range of tokens (its needle) from which the next
            token can be predicted. The needle of a query before a digit of a repeated key
            is the statement of the key. The needle of a query inside a copy is the same token in
            the passage, and the token after it.
    """
    document, copied_passages = insert_copies(document, COPIES_PER_DOCUMENT, PASSAGE_TOKENS)
    # (index of the query, first token of its needle, index after the last token of its needle)
    needle_rows = [
        (query_index, needle_start, needle_stop)
        for (needle_start, needle_stop), (answer_start, answer_end) in zip(
            document.needles, document.answers, strict=True
        )
        # a token predicts the digit after it
        for query_index in range(answer_start - 1, answer_end - 1)
    ]
    needle_rows += [
        (copy_start + token_offset, passage_start + token_offset, passage_start + token_offset + 2)
        for passage_start, copy_start in copied_passages
        for token_offset in range(COPY_PREFIX_TOKENS, PASSAGE_TOKENS - 1, NEEDLE_STRIDE_TOKENS)
    ]
    return document.tokens, Needles(*torch.tensor(needle_rows).unbind(1))


def measure_coverage(
    model: PreTrainedModel,
    tokens: Tokens,
    needles: Needles,
    config: CabConfig,
    on_layer_done: Callable[[], Any],
) -> tuple[list[int], list[Coverage]]:
    """Measure how much of each layer's attention mass is in the blocks that other layers select.

    Args:
        model: the model.
        tokens: tokens of a document.
        needles: needles of the document's queries.
        config: settings of the model.
        on_layer_done: function that is called after each layer.

    Returns:
        sparse_layers: indices of the layers that can be sparse, sorted.
        coverage: the `Coverage` of these layers at each of `cab_hf.calibration.anchors.THRESHOLDS`.

    Raises:
        ValueError: the layers have different numbers of heads, no layer can be sparse, or a module
            serves several layers.
    """
    head_counts: set[tuple[int, int]] = set()

    def measure_layer_coverage(
        q: Tensor, k: Tensor, layer_context: LayerContext
    ) -> list[LayerMeasurement]:
        head_counts.add((q.shape[1], k.shape[1]))
        device_needles = Needles(*(needle_tensor.to(q.device) for needle_tensor in needles))
        return anchor_calibration.measure_layer(q, k, layer_context, config, device_needles)

    with _measure_input_changes(model) as importance_by_layer:
        measurement_by_layer = _measure_layers(
            model, tokens, config, measure_layer=measure_layer_coverage, on_layer_done=on_layer_done
        )
    if not measurement_by_layer:
        raise ValueError(
            "anchors must be left out for a model without sparse layers. None of the layers "
            "attends sparsely, so none can be an anchor."
        )
    if len(head_counts) > 1:
        head_counts_text = ", ".join(
            f"{num_heads} query heads over {num_kv_heads} KV heads"
            for num_heads, num_kv_heads in sorted(head_counts)
        )
        raise ValueError(
            "anchors must be left out for a model whose layers differ in their heads, got layers "
            f"with {head_counts_text}. Calibrate without anchors."
        )
    sparse_layers = sorted(measurement_by_layer)
    layer_weights = [importance_by_layer[layer] for layer in sparse_layers]
    layers_by_threshold = zip(
        *(measurement_by_layer[layer] for layer in sparse_layers), strict=True
    )
    return sparse_layers, [
        anchor_calibration.compute_coverage(threshold_measurements, layer_weights)
        for threshold_measurements in layers_by_threshold
    ]


@contextmanager
def _measure_input_changes(model: PreTrainedModel) -> Iterator[dict[int, float]]:
    """Measure the change of hidden states by each decoder layer inside a ``with`` statement.

    Yields:
        A dict from the index of a layer to 1 - mean over tokens of cos(input, output), where input
        and output are hidden states. The dict is empty at first; a forward pass inside the ``with``
        statement fills the dict.
    """
    input_change_by_layer: dict[int, float] = {}
    module_names = {id(module): module_name for module_name, module in model.named_modules()}

    def record_change(
        decoder_layer_index: int, _: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        layer_input = args[0] if args else kwargs["hidden_states"]
        layer_output = output[0] if isinstance(output, tuple) else output
        cosine_similarity = F.cosine_similarity(layer_input.float(), layer_output.float(), dim=-1)
        input_change_by_layer[decoder_layer_index] = float(1 - cosine_similarity.mean())

    with ExitStack() as hook_stack:
        for decoder_layer_index, module in attention_layers(model):
            parent_name = module_names[id(module)].rpartition(".")[0]
            # a decoder layer with two attention modules has them in a list
            while isinstance(model.get_submodule(parent_name), nn.ModuleList):
                parent_name = parent_name.rpartition(".")[0]
            forward_hook = partial(record_change, decoder_layer_index)
            decoder_layer = model.get_submodule(parent_name)
            hook_stack.enter_context(
                decoder_layer.register_forward_hook(forward_hook, with_kwargs=True)
            )
        yield input_change_by_layer
