"""What experiments on a model share: settings that name it, and its late opening."""

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
from cab_hf.eval.experiment import Experiment, Row
from cab_hf.eval.methods import Method
from cab_hf.runs.markdown import plain
from cab_hf.runs.models import (
    SMOLLM2,
    TRAINED,
    content_sha256,
    is_local,
    load_config,
    load_model,
    load_tokenizer,
    most_tokens,
)
from cab_hf.runs.provenance import computing_device
from cab_hf.runs.settings import (
    UsageError,
    by_device,
    fill_by_device,
    flag,
    option,
    parse_assignment,
    require,
)
from cab_hf.texts.documents import least_tokens

DTYPES = ("bfloat16", "float16", "float32", "float64")

# of CabConfig on a CPU, where nothing is set: 1,536 tokens are cut so small, and so few pairs are
# attended, that methods differ as on a long prompt
SMALL = {
    **{"query_block": 32, "key_block": 16, "local_blocks": 2, "dense_tail_blocks": 0},
    **{"mass_threshold": 0.02, "outlier_queries": 8},
}


@dataclass(frozen=True)
class OnModelSettings:
    """The model, and where it runs. None is a default that depends on the device."""

    model: str = option(
        "smollm2",
        "a causal LM's name or path; smollm2, smollm2-32k, smollm2-128k, tiny need no hub",
    )
    trust_remote_code: bool = flag("run Python code that comes with the model")
    cab: tuple[str, ...] = option(
        (),
        "field=value of CabConfig, e.g. mass_threshold=0.004; repeatable (default on CPU: small "
        "blocks, in whose place comes whatever is set)",
        repeatable=True,
    )
    seed: int = option(0, "random seed of prompts, documents and keys", int)
    device: str | None = option(None, "torch device (default: cuda where there is one)")
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
        """Fields of `CabConfig` that ``--cab`` names; where it names none, the device's."""
        if not self.cab:
            return dict(SMALL) if self.on_cpu else {}
        return dict(map(parse_assignment, self.cab))


class OnModel(Experiment):
    """Base of experiments whose settings are `OnModelSettings`.

    Attributes:
        WRITTEN: tokens that are written behind it.
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
        """What the model is, wherever its files are."""
        if not is_local(self.settings.model):
            # a hub may have another by now: it is what is loaded
            _ = self.model
        return content_sha256(self.settings.model)

    def running(self) -> dict[str, Sequence[str]]:
        """Name -> sentences of the files that what is read is made of, over again if need be."""
        return {}

    def provenance(self, started: str) -> dict[str, Any]:
        made, lengths = super().provenance(started), sorted(self.settings.lengths)
        said = []
        for name, sentences in self.running().items():
            tokens = least_tokens(self.tokenizer, sentences, lengths[-1])
            longer = [f"{length:,}" for length in lengths if length > tokens]
            if longer:
                said.append(
                    f"{plain(name)} has {tokens:,} tokens, so that texts of "
                    f"{' and '.join(longer)} tokens repeat it."
                )
        return {**made, "repeated": said} if said else made

    def under(self, method: Method, read: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """What ``read`` finds while ``method`` is on, its seconds, and the density of all layers.

        Dense layers count 1 in it, and nothing in ``sparse_density``.
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
        """Refuse lengths that the model has no positions for."""
        require_positions(self.settings, "lengths", max(self.settings.lengths), self.WRITTEN)

    def recorded(self) -> dict[str, Any]:
        given, name = super().recorded(), self.settings.model
        given["model"] = _called(Path(name)) if Path(name).exists() else name
        if not given["trust_remote_code"]:
            del given["trust_remote_code"]
        # smollm2 is one file, by its own hash
        return given if name == SMOLLM2 else {**given, "model_sha256": self.content}


def require_positions(settings: OnModelSettings, name: str, tokens: int, written: int = 0) -> None:
    """Refuse, by the setting ``name``, more tokens than the model has positions for.

    Args:
        written: tokens that are written behind them.
    """
    most = most_tokens(load_config(settings.model, settings.trust_remote_code), written)
    if most is not None and tokens > most:
        behind = f" with {written} tokens written behind" if written else ""
        raise UsageError(
            f"{name} must be at most {most}, as far as the positions in the config of model "
            f"{settings.model!r} reach{behind}; got {tokens}."
        )


def _called(folder: Path) -> str:
    """The name of a model's folder, and of what a training run wrote that of the run."""
    return folder.resolve().parent.name if folder.name == TRAINED else folder.name


def realised_density(samples: Sequence[Row]) -> float | None:
    """What a method takes in the layers that are not dense, the mean over what it has read.

    None where it has read nothing.
    """
    if not samples:
        return None
    result = (sample["sparse_density"] for sample in samples)
    return fmean(1.0 if density is None else density for density in result)


def refuse_not_finite(model: nn.Module) -> None:
    """Have ``model`` raise a UsageError when any of its logits is not finite."""

    def look(model: Any, _: Any, output: Any) -> None:
        with refusing("model"):
            require_finite(output.logits, model.config.get_text_config()._attn_implementation)

    model.register_forward_hook(look)


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """What cab_hf refuses inside, the user has asked for by the setting ``name``."""
    try:
        yield
    except UsageError:
        raise
    except (NotImplementedError, ValueError) as error:
        if not _raised_by_us(error):
            raise
        raise UsageError(f"{name}: {error}") from error


def _raised_by_us(error: BaseException) -> bool:
    """Whether a statement of cab_hf raised it, above the ops; else it is a bug, ours or not."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    module = frame.f_globals.get("__name__", "")
    ours = module.startswith("cab_hf.") and not module.startswith("cab_hf.ops.")
    # what a builtin raises ends in the frame that called it
    stated = linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")
    return ours and stated
