"""Long runs on a model: what they will take, told before they begin, and memory that runs out."""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from cab_hf.eval.experiment import PROG, SAMPLES, Row
from cab_hf.eval.methods import Cab, Full, Method
from cab_hf.eval.on_model import OnModel, OnModelSettings
from cab_hf.eval.report import digits
from cab_hf.eval.shares import run_shares, shared_by, take_gpu
from cab_hf.eval.speed.timing import in_a_sentence, ran_out
from cab_hf.finetune.meter import ATTENTION, FROZEN, GIB, Cost, peak_flops
from cab_hf.runs.log import is_there, read_log
from cab_hf.runs.models import load_config, skeleton
from cab_hf.runs.provenance import device_name
from cab_hf.runs.settings import flag, read_settings

# what is assumed of a run before it begins: the density of sparse prefill, the share of a GPU's
# peak that prefill reaches, what a case takes beside (hooks, fitting, launches), and a layer in a
# step of decode called from Python
ASSUMED_DENSITY, SHARE, SECONDS_A_CASE, SECONDS_A_STEP = 0.25, 0.4, 1.0, 1e-3
# forward passes over those that a training step counts
FORWARD, ATTEND = 2 / FROZEN, 4 / ATTENTION
# positions whose logits are in float32 at the same time, twice
FLOAT_LOGITS = 1024


class Load(NamedTuple):
    """What a case has the model read.

    Attributes:
        tokens: of each text.
        density: of its prefill.
        texts: read at once.
        steps: tokens that are read or written one at a time.
        logits: positions whose logits are there at once.
    """

    tokens: int
    density: float = 1.0
    texts: int = 1
    steps: int = 0
    logits: int = 1

    def flops(self, cost: Cost) -> float:
        """Of the prefill. A window is what it is at any density."""
        pairs = cost.pairs(torch.arange(self.tokens)[None])
        shares = (self.density if window is None else 1.0 for window in cost.windows)
        attended = [n * share for n, share in zip(pairs, shares, strict=True)]
        attention = ATTEND * sum(cost.attention(attended))
        return self.texts * (FORWARD * cost.products(self.tokens) + attention)

    def bytes(self, cost: Cost, itemsize: int, chunk: int) -> float:
        """Beside the weights: the cache, a layer that computes, and logits."""
        config = cost.config
        channels, kv = max(cost.channels), 2 * max(cost.kv_channels)
        cache = self.tokens * 2 * sum(cost.kv_channels)
        # what comes in and its norm; q, k, v and the output of attention, or the MLP
        layer = 2 * config.hidden_size + max(2 * channels + kv, 3 * cost.inner)
        working = min(self.tokens, chunk or self.tokens) * layer
        logits = itemsize * self.logits + 8 * min(self.logits, FLOAT_LOGITS)
        return self.texts * (itemsize * (cache + working) + config.vocab_size * logits)


def is_sparse(method: type[Method]) -> bool:
    """Whether its prefill leaves pairs out."""
    return issubclass(method, Cab) and method is not Full


@dataclass(frozen=True)
class LongRunSettings(OnModelSettings):
    """Of runs that say what they will take."""

    dry_run: bool = flag("say what the run will take, and end")


class LongRun(OnModel):
    """Base of experiments whose cases are known before any is measured, all but what some match.

    A case that finds no memory is recorded with its ``error`` and passed over; a later run tries it
    again. Several processes share the cases, see `shares`.

    Attributes:
        CELL: fields of a case that say what is measured, and not on what.
        FITTED: the field that holds what a cell is to match, a density or a time, which may follow
            from samples.
    """

    FAILED = "error"
    CELL: ClassVar[tuple[str, ...]]
    FITTED: ClassVar[str]

    @abstractmethod
    def planned(self) -> Iterator[dict[str, Any]]:
        """All cases in order, by the fields in `CASE` alone."""

    @abstractmethod
    def waits(self, case: Mapping[str, Any]) -> bool:
        """Whether what it is to match follows from samples of other cases, which do not wait."""

    def alone(self, case: Mapping[str, Any]) -> bool:
        """Whether it is timed, so that no process may measure another case beside it."""
        return False

    @abstractmethod
    def fitted(self, case: Mapping[str, Any], samples: Sequence[Row]) -> Any:
        """What a case of this cell is to match; None where samples that tell it are missing."""

    @abstractmethod
    def question(self, case: Mapping[str, Any]) -> tuple[Any, ...]:
        """What all methods are asked alike; cases that are measured at once have one."""

    @abstractmethod
    def load(self, case: Mapping[str, Any]) -> Load | None:
        """What the model reads for it; None where an earlier case has read it."""

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        return self.with_match(self.planned(), samples)

    def with_match(
        self, cases: Iterable[dict[str, Any]], samples: Sequence[Row]
    ) -> Iterator[dict[str, Any]]:
        """The ``cases``, each with what its cell is to match."""
        cell_of, matches = itemgetter(*self.CELL), {}
        for case in cases:
            if cell_of(case) not in matches:
                matches[cell_of(case)] = self.fitted(case, samples)
            yield {**case, self.FITTED: matches[cell_of(case)]}

    @classmethod
    def main(cls, words: Sequence[str]) -> int:
        rank, ranks = shared_by()
        take_gpu(ranks)
        experiment = cls(read_settings(cls.Settings, words, f"{PROG} {cls.name}", cls.purpose))
        if rank == 0:
            experiment.check()
            print(experiment.ahead(ranks), flush=True)
        if not experiment.settings.dry_run:
            run_shares(experiment, rank, ranks)
        return 0

    def recorded(self) -> dict[str, Any]:
        return {name: value for name, value in super().recorded().items() if name != "dry_run"}

    def sample(self, case: Mapping[str, Any]) -> dict[str, Any]:
        if self.waits(case) and case[self.FITTED] is None:
            return {**case, self.FAILED: "the density to match could not be measured"}
        try:
            return super().sample(case)
        except Exception as error:
            if not ran_out(error):
                raise
            why = in_a_sentence(error)
        # behind the handler: the frames of the error hold what was allocated
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return {**case, self.FAILED: why}

    def ahead(self, ranks: int = 1) -> str:
        """What the cases that are left will take, as far as config and device tell."""
        case_of, samples = itemgetter(*self.CASE), self._measured()
        seen = set(map(case_of, samples))
        left = [case for case in self.planned() if case_of(case) not in seen]
        if not left:
            return "nothing is left to measure"
        loads = [load for load in map(self.load, left) if load is not None]
        tokens = sum(load.texts * load.tokens for load in loads)
        there = f" ({len(seen):,} are there)" if seen else ""
        try:
            told = self._told(loads, len(left), ranks)
        except Exception as error:
            # a model that is unlike others: that ends no run
            told = f"hours and memory are not known ({in_a_sentence(error)})"
        return f"{len(left):,} cases{there} of {tokens:,} tokens; {told}"

    def _told(self, loads: Sequence[Load], cases: int, ranks: int) -> str:
        settings, cost = self.settings, Cost.of(self._skeleton())
        device, itemsize = torch.device(settings.device), getattr(torch, settings.dtype).itemsize
        chunk = getattr(settings, "prefill_chunk", 0)
        most = max((load.bytes(cost, itemsize, chunk) for load in set(loads)), default=0.0)
        memory = _memory(cost.weight_bytes + most, device)
        if (peak := peak_flops(device)) is None:
            return memory
        gpus = min(ranks, torch.cuda.device_count())
        return f"{_hours(cost, loads, cases, peak, device_name(device), gpus)}; {memory}"

    def _measured(self) -> list[Row]:
        path = Path(self.settings.out) / SAMPLES
        if not is_there(path):
            return []
        _, records = read_log(path, self.CASE, self.ADDED, self.FAILED)
        return [record for record in records if record.get(self.FAILED) is None]

    def _skeleton(self) -> nn.Module:
        name, trusted = self.settings.model, self.settings.trust_remote_code
        model = skeleton(load_config(name, trusted), trusted, dtype=self.settings.dtype)
        return model.requires_grad_(False)


def _hours(
    cost: Cost, loads: Sequence[Load], cases: int, peak: float, device: str, gpus: int
) -> str:
    """GPU hours on a ``device`` of that ``peak`` in FLOP/s, and what they are counted by."""
    if cost.uncounted:
        return f"GPU hours are not known: {cost.uncounted}"
    each = {load: load.flops(cost) for load in set(loads)}
    steps = sum(load.steps for load in loads) * cost.config.num_hidden_layers
    seconds = sum(map(each.__getitem__, loads)) / (SHARE * peak)
    seconds += cases * SECONDS_A_CASE + steps * SECONDS_A_STEP
    on = f" on {gpus} GPUs" if gpus > 1 else ""
    return (
        f"about {digits(seconds / 3600)} GPU hours{on} ({device} at {SHARE:.0%} of "
        f"{peak / 1e12:,.0f} TFLOP/s, sparse prefill at density {ASSUMED_DENSITY:g}, "
        f"{SECONDS_A_CASE:g} s a case, {1e3 * SECONDS_A_STEP:g} ms a layer and decode step)"
    )


def _memory(needed: float, device: torch.device) -> str:
    """GiB at the peak, and of how many."""
    shown = f"about {digits(needed / GIB)} GiB of memory at the peak"
    if device.type != "cuda":
        return shown
    room = torch.cuda.get_device_properties(device).total_memory
    shown += f", of {room / GIB:.1f}"
    return shown if needed <= room else f"{shown}: cases that find none are passed over"
