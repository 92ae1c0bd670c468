"""`calibrate`: find a threshold or a cascade for a loaded model by dense passes over documents."""

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

from cab_hf.calibration import anchors as of_anchors
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

TARGET_DENSITY = 0.25
LENGTH = 8192
DOCUMENTS = 3
KEYS = 12  # named keys hidden in a document, and repeated in it
COPIES, PASSAGE = 4, 128  # passages that a document contains twice, and their tokens
RECOGNISED = 16  # tokens of a copy after which every 8th token should be predicted
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
    """Find the ``mass_threshold`` at which ``model`` has a density, and apply it to the model.

    The model computes ``documents`` documents once, with dense attention and in eval mode. The
    documents contain hidden keys and copied passages. For each layer, the density is computed for
    many thresholds (`cab_hf.calibration.density`). Nothing is trained.

    With ``anchors``, the function also finds a cascade: anchor layers select blocks, and the layers
    after an anchor reuse its blocks (`cab_hf.calibration.anchors`).

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer.
        texts: one text or a list of texts in which keys are hidden. Use texts like your prompts. By
            default the reference pages that come with Python.
        target_density: mean density of the sparse layers at ``length`` tokens, in (0, 1]. Density
            is attended (query, key) pairs divided by causal pairs.
        config: a `CabConfig`, a dict of its fields or the path of a file that `CabConfig.save`
            wrote; by default the config of the model. All its fields stay, except
            ``mass_threshold``, ``origin``, and with ``anchors`` the fields of the cascade.
        anchors: number of anchor layers to find. By default ``config`` decides: every layer
            selects blocks, or the anchors of ``config`` do.
        length: tokens per document; by default 8,192, or the number of positions of the model if
            that is smaller.
        documents: number of documents.
        seed: seed of the hidden keys and copied passages.

    Returns:
        The config with the fitted ``mass_threshold`` or cascade, and the model and length in
        ``origin``. The model uses this config from now on, as after `apply_cab`; `remove_cab`
        restores the former settings. `CabConfig.save` writes the config to a file.

    Raises:
        ValueError: an argument is invalid; the message names it. ``target_density`` must be between
            the density of the blocks that are always kept and the density that ``max_density``
            allows. ``length`` must have space for the hidden keys and fit the positions of the
            model. The model must have a sparse layer and finite outputs. With ``anchors``, all
            layers must have the same numbers of heads.
    """
    accepted = is_share(target_density) and target_density > 0
    require(accepted, "target_density", target_density, "in (0, 1]")
    for name, count in (("documents", documents), ("anchors", anchors), ("length", length)):
        is_left_out = count is None and name != "documents"
        require(is_left_out or is_whole(count), name, count, "a whole number >= 1")
    is_seed = isinstance(seed, int) and not isinstance(seed, bool)
    require(is_seed, "seed", seed, "a whole number")
    text = transformers_model(model).config.get_text_config()
    require(callable(tokenizer), "tokenizer", tokenizer, "the tokenizer of the model")
    config = cab_config_of(text) if config is None else config_of(config)
    require_layers(config, text)
    most = positions(text)
    length = length or min(LENGTH, most or LENGTH)
    reached = f"at most {most}, the number of positions of the model"
    require(most is None or length <= most, "length", length, reached)
    read = _documents(tokenizer, texts, length, documents, seed)
    _require_known(max(max(tokens) for tokens, _ in read), number(text, "vocab_size"))
    require_target(config, target_density, length)
    # as far as layers are known before they are called
    sparse = sum(
        layer not in config.dense_layers and window(module) is None
        for layer, module in attention_layers(model)
    )
    if anchors is not None and sparse:
        of_anchors.require_anchors(anchors, sparse)
    with tqdm(desc="calibrate", total=documents * sparse, unit="layer") as bar:
        if anchors is None:
            chosen = _fitted(model, read, config, target_density, bar.update)
        else:
            measured = [
                kept_of(model, tokens, needles, config=config, layer_done=bar.update)
                for tokens, needles in read
            ]
            chosen = of_anchors.fit_cascade(
                config,
                of_anchors.mean_coverage([kept for _, kept in measured]),
                layers=measured[0][0],
                num_layers=text.num_hidden_layers,
                num_anchors=anchors,
                target=target_density,
            )
            if chosen.mass_threshold == of_anchors.THRESHOLDS[-1]:
                # the target may need a lower threshold than anchors are compared at
                bar.total += documents * sparse
                chosen = _fitted(model, read, chosen, target_density, bar.update)
    chosen = dataclasses.replace(chosen, origin=origin_of(text, length))
    apply_cab(model, chosen)
    return chosen


def _fitted(
    model: PreTrainedModel,
    read: Sequence[tuple[Tokens, Needles]],
    config: CabConfig,
    target: float,
    layer_done: Callable[[], Any],
) -> CabConfig:
    """Return ``config`` with the threshold at which the mean density is ``target``."""
    measure = partial(densities, config=config)
    spent = [_layer_by_layer(model, x, config, measure, layer_done) for x, _ in read]
    return fit_threshold(config, spent, target)


def _require_known(token: int, vocabulary: int | None) -> None:
    """Raise an error if a token is outside the vocabulary, which would crash a GPU kernel."""
    if vocabulary is not None and token >= vocabulary:
        raise ValueError(
            f"tokenizer must produce tokens below {vocabulary}, the vocabulary of the model, got "
            f"token {token}. Pass the tokenizer of this model."
        )


def _documents(
    tokenizer: Any, texts: str | Sequence[str] | None, length: int, count: int, seed: int
) -> list[tuple[Tokens, Needles]]:
    """Return ``count`` documents that contain ``texts``, each as `sought` returns it."""
    texts = [built_in_text()] if texts is None else [texts] if isinstance(texts, str) else texts
    some = isinstance(texts, Sequence) and all(isinstance(text, str) for text in texts)
    accepted = "a text or a list of texts that contain words"
    require(some and any(text.strip() for text in texts), "texts", texts, accepted)
    sentences = split_sentences("\n\n".join(texts))
    try:
        return [
            sought(recall_document(tokenizer, sentences, length, KEYS, index, seed))
            for index in range(count)
        ]
    except ValueError as error:
        # the caller cannot change the number of keys
        raise ValueError(
            f"length must have room for {KEYS} hidden keys per document, got {length}. Pass a "
            "larger length, or texts with shorter sentences."
        ) from error


@torch.no_grad()
def _layer_by_layer(
    model: PreTrainedModel,
    tokens: Tokens,
    config: CabConfig,
    measure: Callable[[Tensor, Tensor, LayerContext], Any],
    layer_done: Callable[[], Any],
) -> dict[int, Any]:
    """Apply ``measure`` to q and k of each layer that can be sparse, in one dense pass.

    Layers with a sliding window are left out.
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
                "yourself instead of calibrating."
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


def sought(document: Document) -> tuple[Tokens, Needles]:
    """Return the tokens of a document with copied passages, and the needles of its queries."""
    document, copies = with_copies(document, COPIES, PASSAGE)
    looking = [
        (query, *needle)
        for needle, (start, end) in zip(document.needles, document.answers, strict=True)
        # the token before predicts a digit
        for query in range(start - 1, end - 1)
    ]
    looking += [
        # the token that followed the first time
        (target + at, source + at, source + at + 2)
        for source, target in copies
        for at in range(RECOGNISED, PASSAGE - 1, EVERY)
    ]
    return document.tokens, Needles(*torch.tensor(looking).unbind(1))


def kept_of(
    model: PreTrainedModel,
    tokens: Tokens,
    needles: Needles,
    config: CabConfig,
    layer_done: Callable[[], Any],
) -> tuple[list[int], list[Coverage]]:
    """Return the layers that can attend sparsely, and the mass that each layer's blocks keep.

    The mass is measured for every layer and every threshold of `THRESHOLDS`.

    Raises:
        ValueError: the layers of the model differ in their heads, or have no index.
    """
    heads: set[tuple[int, int]] = set()

    def measure(q: Tensor, k: Tensor, call: LayerContext) -> list[LayerMeasurement]:
        heads.add((q.shape[1], k.shape[1]))
        here = Needles(*(x.to(q.device) for x in needles))
        return of_anchors.measure_layer(q, k, call, config, here)

    with _changes(model) as importance:
        views = _layer_by_layer(model, tokens, config, measure, layer_done)
    if not views:
        raise ValueError(
            "anchors must be left out for a model without sparse layers. None of the layers "
            "attends sparsely, so none can be an anchor."
        )
    if len(heads) > 1:
        text = ", ".join(f"{q} query heads over {k} KV heads" for q, k in sorted(heads))
        raise ValueError(
            "anchors must be left out for a model whose layers differ in their heads, got layers "
            f"with {text}. Calibrate without anchors."
        )
    layers = sorted(views)
    weights = [importance[layer] for layer in layers]
    by_threshold = zip(*(views[layer] for layer in layers), strict=True)
    return layers, [of_anchors.coverage_of_layers(some, weights) for some in by_threshold]


@contextmanager
def _changes(model: PreTrainedModel) -> Iterator[dict[int, float]]:
    """Return how much each layer changes its input: 1 - cosine, averaged over tokens, by index."""
    result: dict[int, float] = {}
    names = {id(module): name for name, module in model.named_modules()}

    def note(index: int, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        after = output[0] if isinstance(output, tuple) else output
        cosine = F.cosine_similarity(before.float(), after.float(), dim=-1)
        result[index] = float(1 - cosine.mean())

    with ExitStack() as hooks:
        for index, module in attention_layers(model):
            around = names[id(module)].rpartition(".")[0]
            # for a layer that attends twice, in a list
            while isinstance(model.get_submodule(around), nn.ModuleList):
                around = around.rpartition(".")[0]
            hook = partial(note, index)
            layer = model.get_submodule(around)
            hooks.enter_context(layer.register_forward_hook(hook, with_kwargs=True))
        yield result
