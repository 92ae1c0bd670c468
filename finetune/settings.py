"""The settings of a fine-tuning run: options of its command line and of a YAML file."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cab_hf.config import NAMES, CabConfig
from cab_hf.runs.settings import (
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

# nothing here imports torch: a command line is read, or refused, in a second
PROG = "finetune/lora.py"
DTYPES = ("bfloat16", "float32")
ROPES = ("linear", "dynamic", "yarn", "llama3", "theta")
# tokens of a process above which it computes in tiles by default, and tokens of a tile
TILED_ABOVE, TILE = 2**17, 2**13
# what is trained
ADAPTER, ALL = "adapter", "all"
NAMED = comma_separated(str)
# the least values of settings that are numbers
LEAST = {
    1: ("rank", "steps", "micro_batch", "save_every", "cp"),
    2: ("length",),
    0: (
        *("warmup", "tokens_per_step", "held_out", "eval_every", "passkeys", "rope_factor"),
        *("rope_theta", "weight_decay", "clip", "peak_tflops", "gpu_gib", "host_gib"),
        *("tile_tokens", "offload_layers"),
    ),
}
# settings that may change when a run goes on: they decide where and how often, and not what
FREE = (
    *("out", "save_every", "eval_every", "dry_run", "cpu", "peak_tflops"),
    *("offload_layers", "gpu_gib", "host_gib", "link_gbs", "data_workers"),
)


@dataclass(frozen=True)
class Settings:
    """Options of ``finetune/lora.py``; lengths and rates in tokens and steps.

    Raises:
        ValueError: naming the option, the value seen and what is accepted.
    """

    # model
    model: str = option("smollm2", "smollm2, another stand-in, tiny, a folder, or a hub name")
    attention: str = option("cab", "attn_implementation while training: cab, cab_frc, sdpa, ...")
    cab: tuple[str, ...] = option((), "field=value of CabConfig; repeatable", repeatable=True)
    calibration: str = option("", "file that calibrate wrote, with a budget for each head")
    train: str = option(ADAPTER, "adapter (LoRA, all else frozen), or all weights")
    dtype: str = option("bfloat16", "dtype of frozen weights, or of products with --train all")
    rope: str = option("none", f"how positions are stretched: none, {', '.join(ROPES)}")
    rope_factor: float = option(0.0, "times as many positions; 0: what --length needs", float)
    rope_theta: float = option(0.0, "RoPE base of --rope theta; 0: by the factor", float)
    trust_remote_code: bool = flag("run Python code that comes with the model")
    checkpointing: bool = option(True, "gradient checkpointing of the decoder layers", parse_flag)
    tile_tokens: int | None = option(
        None,
        "tokens of a tile of MLPs, norms and adapters; 0: no tiles; auto (default): "
        f"{TILE} where a process has more than {TILED_ABOVE} tokens",
        number_or_auto,
    )
    offload_layers: int | None = option(
        None, "layers with inputs offloaded; auto (default): as few as fit", number_or_auto
    )
    # adapter
    targets: tuple[str, ...] = option(
        ("q_proj", "k_proj", "v_proj", "o_proj"), "linear layers LoRA adds to", NAMED
    )
    rank: int = option(16, "rank of the LoRA adapters", int)
    alpha: float = option(32.0, "LoRA scales its product by alpha / rank", float)
    dropout: float = option(0.0, "dropout of LoRA's inputs", float)
    norms: bool = flag("train norms, too")
    adapter: str | None = option(None, "folder of an adapter to begin with", str)
    adapter_dtype: str = option("float32", "dtype in which the adapter or model is saved")
    qlora: bool = flag("hold frozen weights in 4 bits (bitsandbytes)")
    # data
    data: tuple[str, ...] = option(
        (), "texts, each NAME or NAME=WEIGHT: hub data sets, files, manuals, retrieval:...", NAMED
    )
    text_field: str = option("text", "field of a record that holds its text")
    split: str = option("train", "split of hub data sets")
    streaming: bool = flag("stream hub data sets")
    length: int = option(8192, "tokens of a packed sequence", parse_length)
    held_out: int = option(8, "sequences of the held-out loss; 0: none", int)
    validation: tuple[str, ...] = option(
        (), "sources of the held-out sequences (default: documents kept of --data)", NAMED
    )
    data_workers: int = option(1, "processes that make sequences ahead: 1, or 0 for none", int)
    # optimisation
    steps: int = option(200, "optimizer steps", int)
    lr: float = option(2e-4, "peak learning rate", float)
    lr_end: float = option(0.1, "learning rate of the last step, as a share of the peak", float)
    warmup: int = option(10, "warm-up steps of the learning rate", int)
    weight_decay: float = option(0.0, "weight decay of AdamW", float)
    beta2: float = option(0.95, "beta2 of AdamW", float)
    clip: float = option(1.0, "gradients are clipped to this norm; 0: not at all", float)
    tokens_per_step: int = option(0, "tokens of a step; 0: one micro batch per process", int)
    micro_batch: int = option(1, "sequences a process computes at once", int)
    cp: int = option(1, "processes that each sequence is sharded over", int)
    seed: int = option(0, "random seed of the adapter, dropout and the data", int)
    # run
    out: str = option("runs/lora", "folder of log, checkpoints, adapter and curve")
    save_every: int = option(50, "steps between checkpoints; the newest two are kept", int)
    eval_every: int = option(50, "steps between evaluations; 0: none", int)
    passkeys: int = option(4, "keys looked for at each length of an evaluation; 0: none", int)
    passkey_lengths: tuple[int, ...] = option(
        (), "their lengths (default: half of --length, and --length)", comma_separated(parse_length)
    )
    peak_tflops: float = option(0.0, "peak TFLOP/s of the GPU in bfloat16; 0: by its name", float)
    gpu_gib: float = option(0.0, "GiB of the GPU for the estimate; 0: all it has", float)
    host_gib: float = option(0.0, "GiB of the host for the estimate; 0: all it has", float)
    link_gbs: float = option(50.0, "GB/s between host and GPU, for the estimate", float)
    cpu: bool = flag("compute on the CPU, also where there is a GPU")
    dry_run: bool = flag("print what would run, what it costs and whether it fits; then end")

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
            ("adapter", adapted or not self.adapter, "none with train=all"),
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
            accepted = f"left out, or {spell(usual)}, with train=all: it is LoRA's"
            require(self, name, adapted or getattr(self, name) == usual, accepted)
        if self.cp > 1:
            from cab_hf.plan import EXACT_BLOCK

            # only these attend to a sequence that several processes hold
            accepted = f"one of {', '.join(NAMES)} with cp={self.cp}"
            require(self, "attention", self.attention in NAMES, accepted)
            # an early and a late chunk of a document for each process
            least = 2 * self.cp * EXACT_BLOCK
            require(self, "length", self.length >= least, f"{least} or more with cp={self.cp}")
        # these refuse what cannot be read
        self.cab_config(), self.sources(), self.sources("validation")

    def sources(self, field: str = "data") -> list[tuple[str, float]]:
        """(name, weight) of every source in ``data``, or in ``validation``.

        What is there by all of its name, such as a folder ``year=2024``, has no weight.
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
        """Of the weights that are loaded: those that are trained are never rounded."""
        return "float32" if self.train == ALL else self.dtype

    def positions(self) -> dict[str, Any]:
        """Arguments of `models.stretch_positions`; without ``rope`` positions stay as they are."""
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
        given = dict(map(parse_assignment, self.cab))
        if not self.calibration:
            # the model refuses unknown fields when it is loaded
            return given
        try:
            saved = CabConfig.calibrated(self.calibration)
        except ValueError as error:
            raise ValueError(f"calibration {error}") from None
        return saved.changed(**given).to_dict()

    def replicas(self, processes: int) -> int:
        """How many groups of ``cp`` processes learn, each a sequence of its own.

        Raises:
            UsageError: ``cp`` does not divide the processes.
        """
        if processes % self.cp:
            raise UsageError(f"cp must divide the {processes} processes of the run; got {self.cp}.")
        return processes // self.cp

    def accumulation(self, processes: int) -> int:
        """Micro batches of each of the `replicas` in a step of the optimiser.

        Raises:
            UsageError: as of `replicas`, or ``tokens_per_step`` is no multiple of what all
                processes compute at once.
        """
        replicas = self.replicas(processes)
        at_once = replicas * self.length * self.micro_batch
        micro_batches, rest = divmod(self.tokens_per_step or at_once, at_once)
        if rest:
            who = "processes" if self.cp == 1 else f"groups of {self.cp} processes"
            raise UsageError(
                f"tokens_per_step must be a multiple of {at_once} ({replicas} {who} x length "
                f"{self.length} x micro_batch {self.micro_batch}); got {self.tokens_per_step}."
            )
        return micro_batches

    def evaluated_lengths(self) -> tuple[int, ...]:
        """Tokens of the documents that keys are looked for in."""
        return self.passkey_lengths or (self.length // 2, self.length)

    def identity(self, world: int) -> dict[str, Any]:
        """What two runs must share for one to go on with the other's checkpoints, JSON-able."""
        fields = {name: value for name, value in asdict(self).items() if name not in FREE}
        return {"run": "lora", **fields, "processes": world}


def suggestion(name: str, known: Sequence[str]) -> str:
    """What was meant by an unknown name; else all that are known."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}."


def read(words: Sequence[str]) -> Settings:
    """The settings of a command line; what is refused ends the process with status 2."""
    purpose = "Fine-tune a causal language model on long documents, by LoRA or all of it."
    return read_settings(Settings, words, PROG, purpose)
