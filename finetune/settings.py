"""Settings of a fine-tuning run, from the command line and a YAML file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cab_hf.config import IMPLEMENTATION_NAMES, CabConfig
from cab_hf.experiment.settings import (
    UsageError,
    comma_separated,
    flag,
    option,
    parse_assignment,
    parse_flag,
    parse_length,
    parse_number_or_auto,
    read_settings,
    require,
    spell_value,
)

# this module must not import torch, so that --help prints within a second
PROG = "finetune/lora.py"
DTYPE_NAMES = ("bfloat16", "float32")
ROPE_SCALINGS = ("linear", "dynamic", "yarn", "llama3", "theta")
MAX_UNTILED_TOKENS = 2**17  # tokens per process above which MLPs compute in tiles by default
DEFAULT_TILE_TOKENS = 2**13  # default number of tokens per tile
# values of --train
TRAIN_ADAPTER, TRAIN_ALL = "adapter", "all"
parse_names = comma_separated(str)
# names of numeric settings, by the smallest value that they accept
SETTINGS_BY_LOWER_BOUND = {
    1: ("rank", "steps", "micro_batch", "save_every", "cp"),
    2: ("length",),
    0: (
        *("warmup", "tokens_per_step", "held_out", "eval_every", "passkeys", "rope_factor"),
        *("rope_theta", "weight_decay", "clip", "peak_tflops", "gpu_gib", "host_gib"),
        *("tile_tokens", "offload_layers"),
    ),
}
# settings that may change when a run resumes, because they do not change the trained weights
CHANGEABLE_SETTINGS = (
    *("out", "save_every", "eval_every", "dry_run", "cpu", "peak_tflops"),
    *("offload_layers", "gpu_gib", "host_gib", "link_gbs", "data_workers"),
)


@dataclass(frozen=True)
class Settings:
    """Options of ``finetune/lora.py``; lengths are in tokens, intervals in optimizer steps.

    Raises:
        ValueError: an option is out of range. The message contains the name and the value.
    """

    # model
    model: str = option(
        "smollm2", "smollm2 or another built-in model, tiny, a folder, or a name on the hub"
    )
    attention: str = option("cab", "attn_implementation during training: cab, cab_frc, sdpa, ...")
    cab: tuple[str, ...] = option((), "field=value of CabConfig; repeatable", repeatable=True)
    calibration: str = option("", "calibration file with a budget for each head")
    train: str = option(
        TRAIN_ADAPTER, "weights to train: adapter (LoRA, other weights frozen) or all"
    )
    dtype: str = option("bfloat16", "dtype of frozen weights, or of products with --train all")
    rope: str = option(
        "none", f"method that extends rotary positions: none, {', '.join(ROPE_SCALINGS)}"
    )
    rope_factor: float = option(
        0.0, "factor of the number of positions; 0: the factor that --length needs", float
    )
    rope_theta: float = option(0.0, "RoPE base of --rope theta; 0: computed from the factor", float)
    trust_remote_code: bool = flag("run Python code that comes with the model")
    checkpointing: bool = option(True, "gradient checkpointing of the decoder layers", parse_flag)
    tile_tokens: int | None = option(
        None,
        "tokens per tile of MLPs, norms and adapters; 0: no tiles; auto (default): "
        f"{DEFAULT_TILE_TOKENS} if a "
        f"process has more than {MAX_UNTILED_TOKENS} tokens",
        parse_number_or_auto,
    )
    offload_layers: int | None = option(
        None,
        "number of layers with offloaded inputs; auto (default): as few as fit",
        parse_number_or_auto,
    )
    # adapter
    targets: tuple[str, ...] = option(
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        "linear layers that get LoRA adapters",
        parse_names,
    )
    rank: int = option(16, "rank of the LoRA adapters", int)
    alpha: float = option(32.0, "LoRA products are scaled by alpha / rank", float)
    dropout: float = option(0.0, "dropout of the inputs of LoRA adapters", float)
    norms: bool = flag("train norms too")
    adapter: str | None = option(None, "folder of an adapter to start from", str)
    adapter_dtype: str = option("float32", "dtype of the saved adapter or model")
    qlora: bool = flag("keep frozen weights in 4 bits (bitsandbytes)")
    # data
    data: tuple[str, ...] = option(
        (),
        "sources of texts, each NAME or NAME=WEIGHT: hub data sets, files, manuals of PyPI "
        "packages (manuals), retrieval:...",
        parse_names,
    )
    text_field: str = option("text", "field of a record that contains its text")
    split: str = option("train", "split of hub data sets")
    streaming: bool = flag("stream hub data sets")
    length: int = option(8192, "tokens per packed sequence", parse_length)
    held_out: int = option(8, "number of sequences for the held-out loss; 0: none", int)
    validation: tuple[str, ...] = option(
        (),
        "sources of the held-out sequences (default: documents reserved from --data)",
        parse_names,
    )
    data_workers: int = option(
        1, "number of processes that prepare sequences: 1, or 0 for none", int
    )
    # optimisation
    steps: int = option(200, "number of optimizer steps", int)
    lr: float = option(2e-4, "peak learning rate", float)
    lr_end: float = option(0.1, "learning rate of the last step as a share of the peak", float)
    warmup: int = option(10, "number of warm-up steps", int)
    weight_decay: float = option(0.0, "weight decay of AdamW", float)
    beta2: float = option(0.95, "beta2 of AdamW", float)
    clip: float = option(1.0, "norm to which gradients are clipped; 0: no clipping", float)
    tokens_per_step: int = option(0, "tokens per step; 0: one micro batch per process", int)
    micro_batch: int = option(1, "sequences per micro batch of a process", int)
    cp: int = option(1, "number of processes over which each sequence is sharded", int)
    seed: int = option(0, "random seed of the adapter, dropout and the data", int)
    # run
    out: str = option("runs/lora", "folder for the log, checkpoints, adapter and curve")
    save_every: int = option(50, "steps between checkpoints; the two newest are kept", int)
    eval_every: int = option(50, "steps between evaluations; 0: none", int)
    passkeys: int = option(4, "number of keys per length of an evaluation; 0: none", int)
    passkey_lengths: tuple[int, ...] = option(
        (),
        "lengths of these documents (default: half of --length, and --length)",
        comma_separated(parse_length),
    )
    peak_tflops: float = option(
        0.0, "peak TFLOP/s of the GPU in bfloat16; 0: looked up by its name", float
    )
    gpu_gib: float = option(0.0, "GiB of the GPU for the estimate; 0: all of its memory", float)
    host_gib: float = option(0.0, "GiB of the host for the estimate; 0: all of its memory", float)
    link_gbs: float = option(50.0, "GB/s between host and GPU for the estimate", float)
    cpu: bool = flag("compute on the CPU even if there is a GPU")
    dry_run: bool = flag("print the settings, their cost and whether they fit, then exit")

    def __post_init__(self) -> None:
        choices_by_setting = {
            "train": (TRAIN_ADAPTER, TRAIN_ALL),
            "dtype": DTYPE_NAMES,
            "adapter_dtype": DTYPE_NAMES,
        }
        for setting, accepted_values in {
            **choices_by_setting,
            "rope": ("none", *ROPE_SCALINGS),
        }.items():
            require(
                self,
                setting,
                getattr(self, setting) in accepted_values,
                f"one of {', '.join(accepted_values)}",
            )
        for lower_bound, setting_names in SETTINGS_BY_LOWER_BOUND.items():
            for setting in setting_names:
                setting_value = getattr(self, setting)
                require(
                    self,
                    setting,
                    setting_value is None or setting_value >= lower_bound,
                    f"{lower_bound} or more",
                )
        trains_adapter, scales_rope = self.train == TRAIN_ADAPTER, self.rope != "none"
        can_offload = self.checkpointing or not self.offload_layers
        has_valid_passkeys = 2 <= max(self.passkey_lengths, default=2) <= self.length
        for setting, is_valid_setting, accepted_values in (
            ("lr", self.lr > 0, "a number above 0"),
            ("alpha", self.alpha > 0, "a number above 0"),
            ("link_gbs", self.link_gbs > 0, "a number above 0"),
            ("data_workers", self.data_workers in (0, 1), "0 or 1"),
            ("dropout", 0 <= self.dropout < 1, "in [0, 1)"),
            ("beta2", 0 <= self.beta2 < 1, "in [0, 1)"),
            ("lr_end", 0 <= self.lr_end <= 1, "in [0, 1]"),
            ("offload_layers", can_offload, "0 without checkpointing"),
            ("dropout", trains_adapter or not self.dropout, "0 with train=all"),
            ("qlora", trains_adapter or not self.qlora, "off with train=all"),
            ("adapter", trains_adapter or not self.adapter, "left out with train=all"),
            ("rope_factor", scales_rope or not self.rope_factor, "0 without rope"),
            ("rope_theta", self.rope == "theta" or not self.rope_theta, "0 without rope=theta"),
            ("data", self.data, "at least one source, such as text.jsonl"),
            ("targets", self.targets, "at least one linear layer, such as q_proj"),
            ("warmup", self.warmup < self.steps, f"less than steps={self.steps}"),
            ("passkey_lengths", has_valid_passkeys, f"at most length={self.length}, and 2 or more"),
        ):
            require(self, setting, is_valid_setting, accepted_values)
        for setting in ("targets", "rank", "alpha"):
            default_value = getattr(Settings, setting)
            accepted_values = (
                f"left out, or {spell_value(default_value)}, with train=all, because only LoRA "
                "uses it"
            )
            require(
                self,
                setting,
                trains_adapter or getattr(self, setting) == default_value,
                accepted_values,
            )
        if self.cp > 1:
            from cab_hf.plan import DENSE_BLOCK_SIZE

            # other attention implementations would attend to the shard of one process only
            accepted_values = f"one of {', '.join(IMPLEMENTATION_NAMES)} with cp={self.cp}"
            require(self, "attention", self.attention in IMPLEMENTATION_NAMES, accepted_values)
            # each process gets an early and a late chunk, to balance causal attention
            min_length = 2 * self.cp * DENSE_BLOCK_SIZE
            require(
                self, "length", self.length >= min_length, f"{min_length} or more with cp={self.cp}"
            )
        # called only to raise errors for values that cannot be parsed
        self.get_cab_fields()
        self.parse_sources()
        self.parse_sources("validation")

    def parse_sources(self, setting: str = "data") -> list[tuple[str, float]]:
        """Parse the sources ``NAME`` or ``NAME=WEIGHT`` of a setting to pairs (name, weight).

        The weight of ``NAME`` is 1. If a path such as ``year=2024`` exists, the complete string is
        the name. ``setting`` is "data" or "validation".
        """
        sources = []
        for source_text in getattr(self, setting):
            has_weight = "=" in source_text and not os.path.exists(os.path.expanduser(source_text))
            source_name, weight_text = (
                source_text.rsplit("=", 1) if has_weight else (source_text, "1")
            )
            try:
                weight = float(weight_text)
            except ValueError:
                weight = -1.0
            is_valid_source = bool(source_name) and 0 <= weight < float("inf")
            accepted_form = "NAME or NAME=WEIGHT with a weight of 0 or more"
            require(self, setting, is_valid_source, accepted_form, value=source_text)
            sources.append((source_name, weight))
        return sources

    @property
    def weights_dtype(self) -> str:
        """Return the name of the dtype in which weights are loaded."""
        return "float32" if self.train == TRAIN_ALL else self.dtype

    def get_rope_arguments(self) -> dict[str, Any]:
        """Return ``length`` and the RoPE arguments of `models.stretch_positions`."""
        return {
            "length": self.length,
            "rope": None if self.rope == "none" else self.rope,
            "rope_factor": self.rope_factor or None,
            "rope_theta": self.rope_theta or None,
        }

    def get_cab_fields(self) -> dict[str, Any]:
        """Return the fields of CabConfig that --cab sets, or all fields if --calibration is set.

        Raises:
            ValueError: the calibration cannot be read, or a field of --cab is invalid.
        """
        cab_fields = dict(map(parse_assignment, self.cab))
        if not self.calibration:
            # `models.load_model` raises errors for invalid fields
            return cab_fields
        try:
            calibrated_config = CabConfig.calibrated(self.calibration)
        except ValueError as error:
            raise ValueError(f"calibration {error}") from None
        return calibrated_config.changed(**cab_fields).to_dict()

    def count_replicas(self, num_processes: int) -> int:
        """Return the number of replicas, groups of ``cp`` processes with different sequences.

        Raises:
            UsageError: ``cp`` does not divide the number of processes.
        """
        if num_processes % self.cp:
            raise UsageError(
                f"cp must divide the {num_processes} processes of the run, got {self.cp}."
            )
        return num_processes // self.cp

    def count_micro_batches(self, num_processes: int) -> int:
        """Return the number of micro batches that a replica accumulates per optimizer step.

        Raises:
            UsageError: as in `count_replicas`, or ``tokens_per_step`` is no multiple of the tokens
                in one micro batch of all replicas.
        """
        num_replicas = self.count_replicas(num_processes)
        tokens_per_micro_batch = num_replicas * self.length * self.micro_batch
        num_micro_batches, num_remaining_tokens = divmod(
            self.tokens_per_step or tokens_per_micro_batch, tokens_per_micro_batch
        )
        if num_remaining_tokens:
            replica_noun = "processes" if self.cp == 1 else f"groups of {self.cp} processes"
            raise UsageError(
                f"tokens_per_step must be a multiple of {tokens_per_micro_batch} ({num_replicas} "
                f"{replica_noun} x length {self.length} x micro_batch {self.micro_batch}), "
                f"got {self.tokens_per_step}."
            )
        return num_micro_batches

    def get_passkey_lengths(self) -> tuple[int, ...]:
        """Return the lengths in tokens of the pass-key documents in an evaluation."""
        return self.passkey_lengths or (self.length // 2, self.length)

    def get_identity(self, num_processes: int) -> dict[str, Any]:
        """Return the JSON-able settings that must be equal when a run resumes.

        ``num_processes`` is the number of processes.
        """
        fixed_settings = {
            setting: setting_value
            for setting, setting_value in asdict(self).items()
            if setting not in CHANGEABLE_SETTINGS
        }
        return {"run": "lora", **fixed_settings, "processes": num_processes}


def format_suggestion(unknown_name: str, known_names: Sequence[str]) -> str:
    """Return "did you mean X?" for ``unknown_name``, or a sentence with all ``known_names``."""
    close_matches = difflib.get_close_matches(unknown_name, known_names, n=1)
    return (
        f"did you mean {close_matches[0]}?"
        if close_matches
        else f"known are {', '.join(known_names)}."
    )


def read(arguments: Sequence[str]) -> Settings:
    """Parse the words of a command line to settings; exit with status 2 on errors."""
    program_description = (
        "Fine-tune a causal language model on long documents, by LoRA or with all weights."
    )
    return read_settings(Settings, arguments, PROG, program_description)
