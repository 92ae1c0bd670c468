"""The base class of experiments on a model: settings, loading, and checks of lengths and errors."""

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

# default fields of CabConfig on a CPU. Short texts of 1,536 tokens need small blocks and a low
# density: otherwise methods would differ less than on a long prompt.
SMALL = {
    **{"query_block": 32, "key_block": 16, "local_blocks": 2, "dense_tail_blocks": 0},
    **{"mass_threshold": 0.02, "outlier_queries": 8},
}


@dataclass(frozen=True)
class OnModelSettings:
    """Settings of the model and its device. None: a default that depends on the device."""

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
        """The fields of `CabConfig` in ``--cab``; without ``--cab``, the default of the device."""
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
        """The hash of the model's content, independent of the folder of its files."""
        if not is_local(self.settings.model):
            # load the model before hashing, so that both read the same version from the hub
            _ = self.model
        return content_sha256(self.settings.model)

    def running(self) -> dict[str, Sequence[str]]:
        """Return file name -> sentences of each text file of the run.

        Texts longer than a file repeat its sentences.
        """
        return {}

    def provenance(self, started: str) -> dict[str, Any]:
        record, lengths = super().provenance(started), sorted(self.settings.lengths)
        repeated = []
        for name, sentences in self.running().items():
            tokens = count_tokens(self.tokenizer, sentences, lengths[-1])
            longer = [f"{length:,}" for length in lengths if length > tokens]
            if longer:
                repeated.append(
                    f"{plain(name)} has {tokens:,} tokens, so that it repeats in texts of "
                    f"{' and '.join(longer)} tokens."
                )
        return {**record, "repeated": repeated} if repeated else record

    def measure_under(
        self, method: Method, read: Callable[[], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Call ``read`` while ``method`` is active, and return its result with three more fields.

        Returns:
            The fields of ``read``; ``density``, the mean over layers, with 1 for dense layers;
            ``sparse_density``, the mean over layers that are not dense, or None without such
            layers; and ``seconds`` of the call.
        """
        with refusing("model"), method.applied(self.model) as densities:
            started = time.perf_counter()
            result = read()
            seconds = time.perf_counter() - started
            layer_densities = densities()
        sparse = [density for density in layer_densities if density is not None]
        return {
            **result,
            "density": fmean(1.0 if density is None else density for density in layer_densities),
            "sparse_density": fmean(sparse) if sparse else None,
            "seconds": round(seconds, 3),
        }

    def check(self) -> None:
        """Raise an error if a length exceeds the number of positions of the model."""
        require_positions(self.settings, "lengths", max(self.settings.lengths), self.WRITTEN)

    def recorded(self) -> dict[str, Any]:
        recorded, name = super().recorded(), self.settings.model
        recorded["model"] = _name_of(Path(name)) if Path(name).exists() else name
        if not recorded["trust_remote_code"]:
            del recorded["trust_remote_code"]
        # smollm2 names one fixed file, so results need no hash of its content
        return recorded if name == SMOLLM2 else {**recorded, "model_sha256": self.content}


def require_positions(settings: OnModelSettings, name: str, tokens: int, written: int = 0) -> None:
    """Raise an error if a prompt and the generated tokens exceed the positions of the model.

    Args:
        settings: settings that name the model.
        name: the setting with the length of the prompt, for the message.
        tokens: tokens of the prompt.
        written: tokens that are generated after the prompt.
    """
    most = max_prompt_tokens(load_config(settings.model, settings.trust_remote_code), written)
    if most is not None and tokens > most:
        reserved = f" minus {written} generated tokens" if written else ""
        raise UsageError(
            f"{name} must be at most {most}, the positions of model {settings.model!r}{reserved}, "
            f"got {tokens}."
        )


def _name_of(folder: Path) -> str:
    """Return the name of a model folder, or of its parent if a training run wrote the model."""
    return folder.resolve().parent.name if folder.name == TRAINED else folder.name


def realised_density(samples: Sequence[Row]) -> float | None:
    """Return the mean density of samples in layers that are not dense; None without samples.

    A sample without such layers counts as 1.
    """
    if not samples:
        return None
    densities = (sample["sparse_density"] for sample in samples)
    return fmean(1.0 if density is None else density for density in densities)


def refuse_not_finite(model: nn.Module) -> None:
    """Register a hook on ``model`` that raises a UsageError if a logit is not finite."""

    def check_logits(model: Any, _: Any, output: Any) -> None:
        with refusing("model"):
            require_finite(output.logits, model.config.get_text_config()._attn_implementation)

    model.register_forward_hook(check_logits)


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Convert errors that cab_hf raises inside the block to a UsageError about setting ``name``."""
    try:
        yield
    except UsageError:
        raise
    except (NotImplementedError, ValueError) as error:
        if not _raised_by_cab_hf(error):
            raise
        raise UsageError(f"{name}: {error}") from error


def _raised_by_cab_hf(error: BaseException) -> bool:
    """Return True if a raise statement of cab_hf, outside of ops, raised the error."""
    *_, (frame, line) = traceback.walk_tb(error.__traceback__)
    module = frame.f_globals.get("__name__", "")
    is_ours = module.startswith("cab_hf.") and not module.startswith("cab_hf.ops.")
    # an error of a builtin ends in our line that calls the builtin, which is no raise statement
    is_raise = linecache.getline(frame.f_code.co_filename, line).lstrip().startswith("raise ")
    return is_ours and is_raise
