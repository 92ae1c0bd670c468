"""Shared parts of experiments on a model: settings that name it, and loading on demand."""

from __future__ import annotations

import linecache
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
from torch import nn

from cab_hf.checks import require_finite
from cab_hf.data.documents import count_tokens
from cab_hf.eval.experiment import Experiment, Row
from cab_hf.eval.methods import Method
from cab_hf.experiment.markdown import plain
from cab_hf.experiment.models import (
    SMOLLM2,
    TRAINED,
    content_sha256,
    is_local,
    load_config,
    load_model,
    load_tokenizer,
    max_prompt_tokens,
)
from cab_hf.experiment.provenance import computing_device
from cab_hf.experiment.settings import (
    UsageError,
    by_device,
    fill_by_device,
    flag,
    option,
    parse_assignment,
    require,
)

DTYPES = ("bfloat16", "float16", "float32", "float64")

# fields of CabConfig on a CPU, if none are given: 1,536 tokens are cut into so small blocks, and so
# few pairs are attended, that methods differ as on a long prompt
SMALL = {
    **{"query_block": 32, "key_block": 16, "local_blocks": 2, "dense_tail_blocks": 0},
    **{"mass_threshold": 0.02, "outlier_queries": 8},
}


@dataclass(frozen=True)
class OnModelSettings:
    """The model and its device. None means a default that depends on the device."""

    model: str = option(
        "smollm2",
        "name or path of a causal LM; smollm2, smollm2-32k, smollm2-128k and tiny need no hub",
    )
    trust_remote_code: bool = flag("run Python code that comes with the model")
    cab: tuple[str, ...] = option(
        (),
        "field=value of CabConfig, e.g. mass_threshold=0.004; repeatable (default on CPU: small "
        "blocks, which any --cab replaces)",
        repeatable=True,
    )
    seed: int = option(0, "random seed of prompts, documents and keys", int)
    device: str | None = option(None, "torch device (default: cuda if there is one)")
    dtype: str | None = by_device("bfloat16", "float32", f"one of {', '.join(DTYPES)}")

    def __post_init__(self) -> None:
        device = self.device
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        computing_device(device)
        object.__setattr__(self, "device", device)
        fill_by_device(self, self.on_cpu)
        require(self, "dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        require(self, "model", self.model, "the name or path of a causal LM")

    @property
    def on_cpu(self) -> bool:
        return torch.device(self.device).type == "cpu"

    @property
    def cab_fields(self) -> dict[str, Any]:
        """The fields of `CabConfig` in ``--cab``; by default those of the device."""
        if not self.cab:
            return dict(SMALL) if self.on_cpu else {}
        return dict(map(parse_assignment, self.cab))


class OnModel(Experiment):
    """The base class of experiments with `OnModelSettings`.

    Attributes:
        WRITTEN: number of tokens that are generated after a prompt.
    """

    WRITTEN: ClassVar[int] = 0

    @cached_property
    def model(self) -> Any:
        settings = self.settings
        model, _ = load_model(
            settings.model, settings.device, settings.dtype, settings.trust_remote_code
        )
        refuse_not_finite(model)
        return model

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.settings.model, self.settings.trust_remote_code)

    @cached_property
    def content(self) -> str:
        """The identity of the model, independent of the place of its files."""
        if not is_local(self.settings.model):
            # the hub may have a newer version than the loaded one
            _ = self.model
        return content_sha256(self.settings.model)

    def running(self) -> dict[str, Sequence[str]]:
        """The sentences of the text files by name, repeated if necessary."""
        return {}

    def provenance(self, started: str) -> dict[str, Any]:
        record, lengths = super().provenance(started), sorted(self.settings.lengths)
        said = []
        for name, sentences in self.running().items():
            tokens = count_tokens(self.tokenizer, sentences, lengths[-1])
            longer = [f"{length:,}" for length in lengths if length > tokens]
            if longer:
                said.append(
                    f"{plain(name)} has {tokens:,} tokens, so that it repeats in texts of "
                    f"{' and '.join(longer)} tokens."
                )
        return {**record, "repeated": said} if said else record

    def under(self, method: Method, read: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the result of ``read`` under ``method``, its seconds, and densities.

        ``density`` includes dense layers as 1, and ``sparse_density`` leaves them out.
        """
        with refusing("model"), method.applied(self.model) as densities:
            started = time.perf_counter()
            result = read()
            seconds = time.perf_counter() - started
            layers = densities()
        sparse = [density for density in layers if density is not None]
        return {
            **result,
            "density": fmean(1.0 if density is None else density for density in layers),
            "sparse_density": fmean(sparse) if sparse else None,
            "seconds": round(seconds, 3),
        }

    def check(self) -> None:
        """Raise an error for lengths beyond the positions of the model."""
        require_positions(self.settings, "lengths", max(self.settings.lengths), self.WRITTEN)

    def recorded(self) -> dict[str, Any]:
        recorded, name = super().recorded(), self.settings.model
        recorded["model"] = _called(Path(name)) if Path(name).exists() else name
        if not recorded["trust_remote_code"]:
            del recorded["trust_remote_code"]
        # smollm2 is one file with its own hash
        return recorded if name == SMOLLM2 else {**recorded, "model_sha256": self.content}


def require_positions(settings: OnModelSettings, name: str, tokens: int, written: int = 0) -> None:
    """Raise an error for more tokens than positions, with the name of the setting ``name``.

    Args:
        settings: the settings.
        name: the name of the setting.
        tokens: tokens of the prompt.
        written: tokens that are generated after it.
    """
    most = max_prompt_tokens(load_config(settings.model, settings.trust_remote_code), written)
    if most is not None and tokens > most:
        behind = f" minus {written} generated tokens" if written else ""
        raise UsageError(
            f"{name} must be at most {most}, the positions of model {settings.model!r}{behind}, "
            f"got {tokens}."
        )


def _called(folder: Path) -> str:
    """Return the name of a model's folder, or the run's name if a training run wrote it."""
    return folder.resolve().parent.name if folder.name == TRAINED else folder.name


def realised_density(samples: Sequence[Row]) -> float | None:
    """Return the mean density of a method in layers that are not dense, or None without samples."""
    if not samples:
        return None
    result = (sample["sparse_density"] for sample in samples)
    return fmean(1.0 if density is None else density for density in result)


def refuse_not_finite(model: nn.Module) -> None:
    """Make ``model`` raise a UsageError if any of its logits is not finite."""

    def look(model: Any, _: Any, output: Any) -> None:
        with refusing("model"):
            require_finite(output.logits, model.config.get_text_config()._attn_implementation)

    model.register_forward_hook(look)


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Turn errors of cab_hf inside the block into a UsageError about the setting ``name``."""
    try:
        yield
    except UsageError:
        raise
    except (NotImplementedError, ValueError) as error:
        if not _raised_by_us(error):
            raise
        raise UsageError(f"{name}: {error}") from error


def _raised_by_us(error: BaseException) -> bool:
    """Return True if a raise statement of cab_hf, outside of ops, raised the error."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    module = frame.f_globals.get("__name__", "")
    ours = module.startswith("cab_hf.") and not module.startswith("cab_hf.ops.")
    # the last frame of an error from a builtin is its caller's
    stated = linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")
    return ours and stated
