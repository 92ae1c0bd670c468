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
from cab_hf.calibration.density import densities, fit_threshold, require_target
from cab_hf.call.call import Call
from cab_hf.checks import is_share, is_whole, require, require_finite
from cab_hf.config import CabConfig
from cab_hf.data.documents import Document, recall_document, with_copies
from cab_hf.data.needles import Tokens, split_sentences
from cab_hf.experiment.offline_models import built_in_text
from cab_hf.hf.fit import layer_index, number, origin_of, positions, require_layers
from cab_hf.hf.layers import attention_layers, transformers_model, window
from cab_hf.hf.model_config import cab_config_of
from cab_hf.patches.switch import Settings, apply_cab, config_of
from cab_hf.patches.watching import watched
from cab_hf.plan import KeyRanges
from cab_hf.predictors import LayerContext

# defaults of `calibrate`
TARGET_DENSITY = 0.25
LENGTH = 8192
DOCUMENTS = 3
# number of keys per document: numbers of named persons that the document states and repeats
KEYS = 12
# number of passages per document that the document contains twice
COPIES = 4
# tokens per passage
PASSAGE = 128
# first tokens of a copy, from which a model recognises the passage. They have no needles
RECOGNISED = 16
# distance in tokens between the tokens of a copy that have needles
EVERY = 8


def calibrate(
    model: PreTrainedModel,
    tokenizer: Any,
    texts: str | Sequence[str] | None = None,
    target_density: float = TARGET_DENSITY,
    *,
    config: Settings | None = None,
    anchors: int | None = None,
    length: int | None = None,
    documents: int = DOCUMENTS,
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
    _require_numbers(
        target_density=target_density,
        anchors=anchors,
        length=length,
        documents=documents,
        seed=seed,
    )
    text_config = transformers_model(model).config.get_text_config()
    require(callable(tokenizer), "tokenizer", tokenizer, "the tokenizer of the model")
    config = cab_config_of(text_config) if config is None else config_of(config)
    require_layers(config, text_config)
    max_length = positions(text_config)
    length = length or min(LENGTH, max_length or LENGTH)
    accepted = f"at most {max_length}, the number of positions of the model"
    require(max_length is None or length <= max_length, "length", length, accepted)
    measured_documents = _documents(tokenizer, texts, length, count=documents, seed=seed)
    largest_token = max(max(tokens) for tokens, _ in measured_documents)
    _require_in_vocabulary(largest_token, number(text_config, "vocab_size"))
    require_target(config, target_density, length)
    # an upper bound: some layers that cannot be sparse are detected only when they are called
    num_sparse = sum(
        layer not in config.dense_layers and window(module) is None
        for layer, module in attention_layers(model)
    )
    if anchors is not None and num_sparse:
        anchor_calibration.require_anchors(anchors, num_sparse)
    with tqdm(desc="calibrate", total=documents * num_sparse, unit="layer") as bar:
        fit = partial(
            _fit_threshold,
            model,
            measured_documents,
            target=target_density,
            layer_done=bar.update,
        )
        if anchors is None:
            result = fit(config)
        else:
            measured = [
                kept_of(model, tokens, needles, config=config, layer_done=bar.update)
                for tokens, needles in measured_documents
            ]
            result = anchor_calibration.fit_cascade(
                config,
                anchor_calibration.mean_coverage([kept for _, kept in measured]),
                layers=measured[0][0],
                num_layers=text_config.num_hidden_layers,
                num_anchors=anchors,
                target=target_density,
            )
            if result.mass_threshold == anchor_calibration.THRESHOLDS[-1]:
                # the comparison of anchors tries few thresholds, and the lowest can be too high for
                # the target; search the threshold of the cascade without this limit
                bar.total += documents * num_sparse
                result = fit(result)
    result = dataclasses.replace(result, origin=origin_of(text_config, length))
    apply_cab(model, result)
    return result


def _require_numbers(
    *,
    target_density: float,
    anchors: int | None,
    length: int | None,
    documents: int,
    seed: int,
) -> None:
    """Raise a ValueError for a number that is invalid as an argument of `calibrate`."""
    is_density = is_share(target_density) and target_density > 0
    require(is_density, "target_density", target_density, "in (0, 1]")
    for name, count in (("documents", documents), ("anchors", anchors), ("length", length)):
        is_left_out = count is None and name != "documents"
        require(is_left_out or is_whole(count), name, count, "a whole number >= 1")
    is_seed = isinstance(seed, int) and not isinstance(seed, bool)
    require(is_seed, "seed", seed, "a whole number")


def _fit_threshold(
    model: PreTrainedModel,
    measured_documents: Sequence[tuple[Tokens, Needles]],
    config: CabConfig,
    *,
    target: float,
    layer_done: Callable[[], Any],
) -> CabConfig:
    """Return ``config`` with the ``mass_threshold`` at which the mean density is ``target``.

    The mean is over the measured layers and the documents.

    Args:
        model: the model.
        measured_documents: the documents, as in `_documents`.
        config: settings of the model.
        target: target density, in (0, 1].
        layer_done: function that is called after each measured layer.
    """
    measure = partial(densities, config=config)
    layer_densities = [
        _layer_by_layer(model, tokens, config, measure=measure, layer_done=layer_done)
        for tokens, _ in measured_documents
    ]
    return fit_threshold(config, layer_densities, target)


def _require_in_vocabulary(token: int, vocabulary: int | None) -> None:
    """Raise a ValueError if a token is outside the vocabulary, which would crash a GPU kernel."""
    if vocabulary is not None and token >= vocabulary:
        raise ValueError(
            f"tokenizer must produce tokens below {vocabulary}, the vocabulary of the model, got "
            f"token {token}. Pass the tokenizer of this model."
        )


def _documents(
    tokenizer: Any, texts: str | Sequence[str] | None, length: int, *, count: int, seed: int
) -> list[tuple[Tokens, Needles]]:
    """Build ``count`` documents from sentences of ``texts``; arguments as in `calibrate`.

    Returns:
        The result (tokens, needles) of `with_needles` for each document.
    """
    texts = [built_in_text()] if texts is None else [texts] if isinstance(texts, str) else texts
    are_texts = isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts)
    accepted = "a text or a list of texts that contain words"
    require(are_texts and any(text.strip() for text in texts), "texts", texts, accepted)
    sentences = split_sentences("\n\n".join(texts))
    try:
        return [
            with_needles(
                recall_document(
                    tokenizer, sentences, length=length, keys=KEYS, index=index, seed=seed
                )
            )
            for index in range(count)
        ]
    except ValueError as error:
        # the original message recommends fewer keys, which the user cannot change
        raise ValueError(
            f"length must have room for {KEYS} hidden keys per document, got {length}. Pass a "
            "larger length, or texts with shorter sentences."
        ) from error


@torch.no_grad()
def _layer_by_layer(
    model: PreTrainedModel,
    tokens: Tokens,
    config: CabConfig,
    *,
    measure: Callable[[Tensor, Tensor, LayerContext], Any],
    layer_done: Callable[[], Any],
) -> dict[int, Any]:
    """Call ``measure`` for every layer that can be sparse, in one dense pass over a document.

    Layers with a sliding window and layers in ``dense_layers`` are left out.

    Args:
        model: the model.
        tokens: tokens of the document, N.
        config: settings of the model.
        measure: function of q [1, H, N, D], k [1, H_kv, N, D] and the `LayerContext` of the layer.
        layer_done: function that is called after each layer.

    Returns:
        Results of ``measure`` by index of the layer.
    """
    result: dict[int, Any] = {}

    def look(call: Call) -> None:
        q, k = call.q, call.k
        for x in (q, k):
            require_finite(x, "dense")
        if call.mask.window is not None:
            return
        layer = layer_index(call.layer)
        if layer is None:
            raise ValueError(
                "model must have one attention module per layer, got "
                f"{type(call.layer).__name__}, which serves several layers. Set mass_threshold "
                "instead of calibrating the model."
            )
        if layer in config.dense_layers:
            return
        ranges = KeyRanges.causal(1, q.shape[2], k.shape[2], q.device)
        result[layer] = measure(q, k, call.context(ranges))
        layer_done()

    ids = torch.tensor([tokens], device=model.device)
    with watched(model, look):
        require_finite(model(ids, use_cache=False, logits_to_keep=1).logits, "dense")
    return result


def with_needles(document: Document) -> tuple[Tokens, Needles]:
    """Copy passages inside a document, and list the tokens that queries must attend to.

    Returns:
        tokens: tokens of the document with copied passages.
        needles: queries, and for each query the range of tokens (its needle) from which the next
            token can be predicted. The needle of a query before a digit of a repeated key
            is the statement of the key. The needle of a query inside a copy is the same token in
            the passage, and the token after it.
    """
    document, copies = with_copies(document, COPIES, PASSAGE)
    # (index of the query, first token of its needle, index after the last token of its needle)
    rows = [
        (query, first, last)
        for (first, last), (start, end) in zip(document.needles, document.answers, strict=True)
        # a token predicts the digit after it
        for query in range(start - 1, end - 1)
    ]
    rows += [
        (target + offset, source + offset, source + offset + 2)
        for source, target in copies
        for offset in range(RECOGNISED, PASSAGE - 1, EVERY)
    ]
    return document.tokens, Needles(*torch.tensor(rows).unbind(1))


def kept_of(
    model: PreTrainedModel,
    tokens: Tokens,
    needles: Needles,
    config: CabConfig,
    layer_done: Callable[[], Any],
) -> tuple[list[int], list[Coverage]]:
    """Measure how much of each layer's attention mass is in the blocks that other layers select.

    Args:
        model: the model.
        tokens: tokens of a document.
        needles: needles of the document's queries.
        config: settings of the model.
        layer_done: function that is called after each layer.

    Returns:
        layers: indices of the layers that can be sparse, sorted.
        coverage: the `Coverage` of these layers at each of `cab_hf.calibration.anchors.THRESHOLDS`.

    Raises:
        ValueError: the layers have different numbers of heads, no layer can be sparse, or a module
            serves several layers.
    """
    heads: set[tuple[int, int]] = set()

    def measure(q: Tensor, k: Tensor, call: LayerContext) -> list[LayerMeasurement]:
        heads.add((q.shape[1], k.shape[1]))
        device_needles = Needles(*(x.to(q.device) for x in needles))
        return anchor_calibration.measure_layer(q, k, call, config, device_needles)

    with _input_changes(model) as importance:
        views = _layer_by_layer(model, tokens, config, measure=measure, layer_done=layer_done)
    if not views:
        raise ValueError(
            "anchors must be left out for a model without sparse layers. None of the layers "
            "attends sparsely, so none can be an anchor."
        )
    if len(heads) > 1:
        listing = ", ".join(f"{q} query heads over {k} KV heads" for q, k in sorted(heads))
        raise ValueError(
            "anchors must be left out for a model whose layers differ in their heads, got layers "
            f"with {listing}. Calibrate without anchors."
        )
    layers = sorted(views)
    weights = [importance[layer] for layer in layers]
    layers_by_threshold = zip(*(views[layer] for layer in layers), strict=True)
    return layers, [
        anchor_calibration.coverage_of_layers(measurements, weights)
        for measurements in layers_by_threshold
    ]


@contextmanager
def _input_changes(model: PreTrainedModel) -> Iterator[dict[int, float]]:
    """Measure how much each decoder layer changes its input during forward passes in the block.

    Yields:
        A dict from the index of a layer to 1 - mean over tokens of cos(input, output), where input
        and output are hidden states. A forward pass inside the block fills the dict.
    """
    result: dict[int, float] = {}
    names = {id(module): name for name, module in model.named_modules()}

    def record(index: int, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        cosine = F.cosine_similarity(before.float(), after.float(), dim=-1)
        result[index] = float(1 - cosine.mean())

    with ExitStack() as hooks:
        for index, module in attention_layers(model):
            parent = names[id(module)].rpartition(".")[0]
            # a decoder layer with two attention modules has them in a list
            while isinstance(model.get_submodule(parent), nn.ModuleList):
                parent = parent.rpartition(".")[0]
            hook = partial(record, index)
            layer = model.get_submodule(parent)
            hooks.enter_context(layer.register_forward_hook(hook, with_kwargs=True))
        yield result
