"""The settings of a fine-tuning run: options of its command line and of a YAML file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cab_hf.config import NAMES, CabConfig
from cab_hf.experiment.settings import (
    UsageError,
    comma_separated,
    flag,
    number_or_auto,
    option,
    parse_assignment,
    parse_flag,
    parse_length,
    read_settings,
    require,
    spell,
)

# this module does not import torch, so that a command line is parsed in a second
PROG = "finetune/lora.py"
DTYPES = ("bfloat16", "float32")
ROPES = ("linear", "dynamic", "yarn", "llama3", "theta")
# tokens per process above which tiles are the default, and tokens per tile
TILED_ABOVE, TILE = 2**17, 2**13
# values of --train
ADAPTER, ALL = "adapter", "all"
NAMED = comma_separated(str)
# lower bounds of numeric settings
LEAST = {
    1: ("rank", "steps", "micro_batch", "save_every", "cp"),
    2: ("length",),
    0: (
        *("warmup", "tokens_per_step", "held_out", "eval_every", "passkeys", "rope_factor"),
        *("rope_theta", "weight_decay", "clip", "peak_tflops", "gpu_gib", "host_gib"),
        *("tile_tokens", "offload_layers"),
    ),
}
# settings that may change when a run resumes: they determine where and how often, not what
FREE = (
    *("out", "save_every", "eval_every", "dry_run", "cpu", "peak_tflops"),
    *("offload_layers", "gpu_gib", "host_gib", "link_gbs", "data_workers"),
)


@dataclass(frozen=True)
class Settings:
    """Options of ``finetune/lora.py``; lengths and rates are in tokens and steps.

    Raises:
        ValueError: an option is out of range. The message contains its name and value.
    """

    # model
    model: str = option(
        "smollm2", "smollm2 or another built-in model, tiny, a folder, or a name on the hub"
    )
    attention: str = option("cab", "attn_implementation during training: cab, cab_frc, sdpa, ...")
    cab: tuple[str, ...] = option((), "field=value of CabConfig; repeatable", repeatable=True)
    calibration: str = option("", "calibration file with a budget for each head")
    train: str = option(ADAPTER, "weights to train: adapter (LoRA, other weights frozen) or all")
    dtype: str = option("bfloat16", "dtype of frozen weights, or of products with --train all")
    rope: str = option("none", f"method that extends rotary positions: none, {', '.join(ROPES)}")
    rope_factor: float = option(
        0.0, "factor of the number of positions; 0: the factor that --length needs", float
    )
    rope_theta: float = option(0.0, "RoPE base of --rope theta; 0: computed from the factor", float)
    trust_remote_code: bool = flag("run Python code that comes with the model")
    checkpointing: bool = option(True, "gradient checkpointing of the decoder layers", parse_flag)
    tile_tokens: int | None = option(
        None,
        f"tokens per tile of MLPs, norms and adapters; 0: no tiles; auto (default): {TILE} if a "
        f"process has more than {TILED_ABOVE} tokens",
        number_or_auto,
    )
    offload_layers: int | None = option(
        None,
        "number of layers with offloaded inputs; auto (default): as few as fit",
        number_or_auto,
    )
    # adapter
    targets: tuple[str, ...] = option(
        ("q_proj", "k_proj", "v_proj", "o_proj"), "linear layers that get LoRA adapters", NAMED
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
        "sources of texts, each NAME or NAME=WEIGHT: hub data sets, files, manuals, retrieval:...",
        NAMED,
    )
    text_field: str = option("text", "field of a record that contains its text")
    split: str = option("train", "split of hub data sets")
    streaming: bool = flag("stream hub data sets")
    length: int = option(8192, "tokens per packed sequence", parse_length)
    held_out: int = option(8, "number of sequences for the held-out loss; 0: none", int)
    validation: tuple[str, ...] = option(
        (), "sources of the held-out sequences (default: documents reserved from --data)", NAMED
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
        choices = {"train": (ADAPTER, ALL), "dtype": DTYPES, "adapter_dtype": DTYPES}
        for name, accepted in {**choices, "rope": ("none", *ROPES)}.items():
            require(self, name, getattr(self, name) in accepted, f"one of {', '.join(accepted)}")
        for least, names in LEAST.items():
            for name in names:
                value = getattr(self, name)
                require(self, name, value is None or value >= least, f"{least} or more")
        adapted, scaled = self.train == ADAPTER, self.rope != "none"
        offloading = self.checkpointing or not self.offload_layers
        reach = 2 <= max(self.passkey_lengths, default=2) <= self.length
        for name, holds, accepted in (
            ("lr", self.lr > 0, "a number above 0"),
            ("alpha", self.alpha > 0, "a number above 0"),
            ("link_gbs", self.link_gbs > 0, "a number above 0"),
            ("data_workers", self.data_workers in (0, 1), "0 or 1"),
            ("dropout", 0 <= self.dropout < 1, "in [0, 1)"),
            ("beta2", 0 <= self.beta2 < 1, "in [0, 1)"),
            ("lr_end", 0 <= self.lr_end <= 1, "in [0, 1]"),
            ("offload_layers", offloading, "0 without checkpointing"),
            ("dropout", adapted or not self.dropout, "0 with train=all"),
            ("qlora", adapted or not self.qlora, "off with train=all"),
            ("adapter", adapted or not self.adapter, "left out with train=all"),
            ("rope_factor", scaled or not self.rope_factor, "0 without rope"),
            ("rope_theta", self.rope == "theta" or not self.rope_theta, "0 without rope=theta"),
            ("data", self.data, "at least one source, such as text.jsonl"),
            ("targets", self.targets, "at least one linear layer, such as q_proj"),
            ("warmup", self.warmup < self.steps, f"less than steps={self.steps}"),
            ("passkey_lengths", reach, f"at most length={self.length}, and 2 or more"),
        ):
            require(self, name, holds, accepted)
        for name in ("targets", "rank", "alpha"):
            usual = getattr(Settings, name)
            accepted = f"left out, or {spell(usual)}, with train=all, because only LoRA uses it"
            require(self, name, adapted or getattr(self, name) == usual, accepted)
        if self.cp > 1:
            from cab_hf.plan import DENSE_BLOCK_SIZE

            # only these attend to a sequence that is sharded over processes
            accepted = f"one of {', '.join(NAMES)} with cp={self.cp}"
            require(self, "attention", self.attention in NAMES, accepted)
            # an early and a late chunk of a document for each process
            least = 2 * self.cp * DENSE_BLOCK_SIZE
            require(self, "length", self.length >= least, f"{least} or more with cp={self.cp}")
        # these raise errors for values that cannot be parsed
        self.cab_config(), self.sources(), self.sources("validation")

    def sources(self, field: str = "data") -> list[tuple[str, float]]:
        """Return (name, weight) of every source in ``data``, or in ``validation``.

        A path that exists under its whole name, such as a folder ``year=2024``, has no weight.
        """
        results = []
        for text in getattr(self, field):
            weighed = "=" in text and not os.path.exists(os.path.expanduser(text))
            name, weight = text.rsplit("=", 1) if weighed else (text, "1")
            try:
                number = float(weight)
            except ValueError:
                number = -1.0
            accepted = "NAME or NAME=WEIGHT with a weight of 0 or more"
            require(self, field, name and 0 <= number < float("inf"), accepted, text)
            results.append((name, number))
        return results

    @property
    def weights_dtype(self) -> str:
        """The dtype of the loaded weights: trained weights are never rounded."""
        return "float32" if self.train == ALL else self.dtype

    def positions(self) -> dict[str, Any]:
        """The arguments of `models.stretch_positions`; without ``rope`` positions do not change."""
        return {
            "length": self.length,
            "rope": None if self.rope == "none" else self.rope,
            "rope_factor": self.rope_factor or None,
            "rope_theta": self.rope_theta or None,
        }

    def cab_config(self) -> dict[str, Any]:
        """Return the fields of CabConfig from --cab, or all fields if --calibration is set.

        Raises:
            ValueError: if the calibration cannot be read, or refuses a field of --cab.
        """
        fields = dict(map(parse_assignment, self.cab))
        if not self.calibration:
            # the model refuses unknown fields when it is loaded
            return fields
        try:
            saved = CabConfig.calibrated(self.calibration)
        except ValueError as error:
            raise ValueError(f"calibration {error}") from None
        return saved.changed(**fields).to_dict()

    def replicas(self, processes: int) -> int:
        """Return the number of groups of ``cp`` processes, each with its own sequence.

        Raises:
            UsageError: ``cp`` does not divide the number of processes.
        """
        if processes % self.cp:
            raise UsageError(f"cp must divide the {processes} processes of the run, got {self.cp}.")
        return processes // self.cp

    def accumulation(self, processes: int) -> int:
        """Return the micro batches of each of the `replicas` per optimizer step.

        Raises:
            UsageError: as in `replicas`, or ``tokens_per_step`` is no multiple of the tokens that
                all processes compute at once.
        """
        replicas = self.replicas(processes)
        at_once = replicas * self.length * self.micro_batch
        micro_batches, rest = divmod(self.tokens_per_step or at_once, at_once)
        if rest:
            who = "processes" if self.cp == 1 else f"groups of {self.cp} processes"
            raise UsageError(
                f"tokens_per_step must be a multiple of {at_once} ({replicas} {who} x length "
                f"{self.length} x micro_batch {self.micro_batch}), got {self.tokens_per_step}."
            )
        return micro_batches

    def evaluated_lengths(self) -> tuple[int, ...]:
        """The lengths in tokens of the documents with hidden keys."""
        return self.passkey_lengths or (self.length // 2, self.length)

    def identity(self, world: int) -> dict[str, Any]:
        """Return the facts, JSON-able, that two runs must share to use the same checkpoints."""
        fields = {name: value for name, value in asdict(self).items() if name not in FREE}
        return {"run": "lora", **fields, "processes": world}


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return the likely meaning of an unknown name, or all known names."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}."


def read(words: Sequence[str]) -> Settings:
    """Parse a command line to settings; errors end the process with status 2."""
    purpose = "Fine-tune a causal language model on long documents, by LoRA or with all weights."
    return read_settings(Settings, words, PROG, purpose)
