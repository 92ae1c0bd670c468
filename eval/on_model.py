"""The base class of experiments on a model: settings, loading of the model, checks and errors."""

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
from cab_hf.experiment.markdown import escape_markdown
from cab_hf.experiment.models import (
    SMOLLM2,
    TRAINED_MODEL_FOLDER,
    content_sha256,
    is_local_model,
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

# Fields of CabConfig on a CPU without --cab. The default length on a CPU is only 1,536 tokens. With
# the default block sizes, most blocks would be selected, and methods would hardly differ. The
# sample of a query block is the same share of its queries as in the default.
SMALL_BLOCK_FIELDS = {
    **{"query_block": 32, "key_block": 16, "local_blocks": 2, "dense_tail_blocks": 0},
    **{"mass_threshold": 0.02, "outlier_queries": 4, "typical_queries": 8},
}


@dataclass(frozen=True)
class OnModelSettings:
    """Settings of the model, its device and CAB. None: a default that depends on the device."""

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
        fill_by_device(self, self.is_on_cpu)
        require(self, "dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        require(self, "model", self.model, "the name or path of a causal LM")

    @property
    def is_on_cpu(self) -> bool:
        return torch.device(self.device).type == "cpu"

    @property
    def cab_fields(self) -> dict[str, Any]:
        """The fields of `CabConfig` in ``--cab``; the default is `SMALL_BLOCK_FIELDS` on a CPU."""
        if not self.cab:
            return dict(SMALL_BLOCK_FIELDS) if self.is_on_cpu else {}
        return dict(map(parse_assignment, self.cab))


class OnModel(Experiment):
    """The base class of experiments with `OnModelSettings`.

    Attributes:
        MAX_NEW_TOKENS: largest number of tokens that the model generates after a prompt, for which
            the model needs positions.
    """

    MAX_NEW_TOKENS: ClassVar[int] = 0

    @cached_property
    def model(self) -> Any:
        settings = self.settings
        model, _ = load_model(
            settings.model, settings.device, settings.dtype, settings.trust_remote_code
        )
        refuse_non_finite_logits(model)
        return model

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.settings.model, self.settings.trust_remote_code)

    @cached_property
    def model_sha256(self) -> str:
        """The SHA-256 of the content of the model's files, without their folder."""
        if not is_local_model(self.settings.model):
            # load the model before hashing, so that both read the same version from the hub
            _ = self.model
        return content_sha256(self.settings.model)

    def sentences_by_file(self) -> dict[str, Sequence[str]]:
        """Return file name -> sentences, for each text file of the settings.

        The provenance names lengths for which sentences of a file are repeated.
        """
        return {}

    def provenance(self, started: str) -> dict[str, Any]:
        record, lengths = super().provenance(started), sorted(self.settings.lengths)
        repetition_notes = []
        for file_name, sentences in self.sentences_by_file().items():
            num_tokens = count_tokens(self.tokenizer, sentences, lengths[-1])
            longer_lengths = [f"{length:,}" for length in lengths if length > num_tokens]
            if longer_lengths:
                repetition_notes.append(
                    f"{escape_markdown(file_name)} has {num_tokens:,} tokens, so that it repeats "
                    f"in texts of {' and '.join(longer_lengths)} tokens."
                )
        return {**record, "repeated": repetition_notes} if repetition_notes else record

    def measure_with(
        self, method: Method, call_model: Callable[[], Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Call ``call_model`` while ``method`` is active; return its result and three fields.

        Args:
            method: the method that replaces the model's attention during the call.
            call_model: function that calls the model and returns measured fields.

        Returns:
            The fields of ``call_model``.
            ``density``: mean over all layers, with 1 for layers that attend densely.
            ``sparse_density``: mean over layers that do not attend densely; None without such
            layers.
            ``seconds``: duration of the call.
        """
        with convert_value_errors("model"), method.apply_to(self.model) as read_densities:
            start_time = time.perf_counter()
            result = call_model()
            seconds = time.perf_counter() - start_time
            layer_densities = read_densities()
        sparse_densities = [density for density in layer_densities if density is not None]
        return {
            **result,
            "density": fmean(1.0 if density is None else density for density in layer_densities),
            "sparse_density": fmean(sparse_densities) if sparse_densities else None,
            "seconds": round(seconds, 3),
        }

    def check_settings(self) -> None:
        """Raise an error if the model has too few positions for the longest prompt.

        `MAX_NEW_TOKENS` positions are reserved for generated tokens.
        """
        require_positions(self.settings, "lengths", max(self.settings.lengths), self.MAX_NEW_TOKENS)

    def recorded_settings(self) -> dict[str, Any]:
        recorded_settings, model_name = super().recorded_settings(), self.settings.model
        recorded_settings["model"] = (
            _get_folder_name(Path(model_name)) if Path(model_name).exists() else model_name
        )
        if not recorded_settings["trust_remote_code"]:
            del recorded_settings["trust_remote_code"]
        # the model smollm2 never changes, so that its name identifies its content without a hash
        return (
            recorded_settings
            if model_name == SMOLLM2
            else {**recorded_settings, "model_sha256": self.model_sha256}
        )


def require_positions(
    settings: OnModelSettings,
    setting_name: str,
    num_prompt_tokens: int,
    num_generated_tokens: int = 0,
) -> None:
    """Raise an error if prompt plus generated tokens exceed the model's number of positions.

    Args:
        settings: settings that name the model.
        setting_name: name of the setting with the length of the prompt, for the error message.
        num_prompt_tokens: tokens of the prompt.
        num_generated_tokens: tokens that are generated after the prompt.
    """
    max_tokens = max_prompt_tokens(
        load_config(settings.model, settings.trust_remote_code), num_generated_tokens
    )
    if max_tokens is not None and num_prompt_tokens > max_tokens:
        reserved_note = (
            f" minus {num_generated_tokens} generated tokens" if num_generated_tokens else ""
        )
        raise UsageError(
            f"{setting_name} must be at most {max_tokens}, the positions of model "
            f"{settings.model!r}{reserved_note}, "
            f"got {num_prompt_tokens}."
        )


def _get_folder_name(folder: Path) -> str:
    """Return the name of a model's folder.

    Training runs write models to a subfolder `TRAINED_MODEL_FOLDER`, for which the parent's name is
    returned.
    """
    return folder.resolve().parent.name if folder.name == TRAINED_MODEL_FOLDER else folder.name


def average_sparse_density(samples: Sequence[Row]) -> float | None:
    """Return the mean of ``sparse_density`` over samples; None without samples.

    A sample in which all layers attend densely counts as 1.
    """
    if not samples:
        return None
    densities = (sample["sparse_density"] for sample in samples)
    return fmean(1.0 if density is None else density for density in densities)


def refuse_non_finite_logits(model: nn.Module) -> None:
    """Register a hook on ``model`` that raises a UsageError if a logit is not finite."""

    def check_logits(model: Any, _: Any, output: Any) -> None:
        with convert_value_errors("model"):
            require_finite(output.logits, model.config.get_text_config()._attn_implementation)

    model.register_forward_hook(check_logits)


@contextmanager
def convert_value_errors(setting_name: str) -> Iterator[None]:
    """Convert errors about unusable arguments inside the block to a UsageError.

    Only a ValueError or NotImplementedError that a raise statement of cab_hf raised is converted.

    Args:
        setting_name: name of the setting that caused the error, with which the message begins.
    """
    try:
        yield
    except UsageError:
        raise
    except (NotImplementedError, ValueError) as error:
        if not _is_raised_by_cab_hf(error):
            raise
        raise UsageError(f"{setting_name}: {error}") from error


def _is_raised_by_cab_hf(error: BaseException) -> bool:
    """Return True if a raise statement in cab_hf, but not in cab_hf.ops, raised the error."""
    *_, (frame, line_number) = traceback.walk_tb(error.__traceback__)
    module = frame.f_globals.get("__name__", "")
    is_cab_hf_code = module.startswith("cab_hf.") and not module.startswith("cab_hf.ops.")
    # builtins have no frames: if a builtin raised the error, our line that calls it comes last
    is_raise_statement = (
        linecache.getline(frame.f_code.co_filename, line_number).lstrip().startswith("raise ")
    )
    return is_cab_hf_code and is_raise_statement
