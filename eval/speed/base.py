"""Shared parts of all speed ops: device-dependent settings, a clock, and the identity of a run."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any, ClassVar

import torch
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.eval.experiment import Experiment, Row, default_of, is_earlier, unlike_default
from cab_hf.eval.methods import known
from cab_hf.eval.report import digits, grouped, seconds
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.reported import Reported, named, varying
from cab_hf.eval.speed.timing import Bench, Timing, bench_on, in_a_sentence, ran_out
from cab_hf.experiment.provenance import computing_device
from cab_hf.experiment.settings import (
    by_device,
    comma_separated,
    fill_by_device,
    option,
    parse_assignment,
    parse_length,
    require,
)

DTYPES = ("bfloat16", "float16", "float32")
# no block is below the threshold, so every row uses its whole budget
KEEPS_ALL = {"mass_threshold": 0.0}
# inputs with the structure of text: directions, tokens that share one, its size relative to the
# noise
TOPICS = 64
TOPIC_TOKENS = 512
TOPIC_STRENGTH = 0.8
INPUTS = "random with the block structure of text (runs of tokens that share a direction)"
AROUND = (0.9, 1.1)  # factors of an estimated length at which a search starts
MADE_BY = ("device", "versions", "baselines", "commit")  # fields of the provenance


def powers(low: int, high: int) -> Any:
    """Declare the option of lengths, by default 2^low to 2^high tokens; few short ones on a CPU."""
    every = tuple(2**n for n in range(low, high + 1))
    return listed(every, (256, 512), "tokens", parse_length)


def listed(gpu: tuple, cpu: tuple | None, help: str, parse: Callable[[str], Any] = str) -> Any:
    """Declare an option of several values, `by_device` unless ``cpu`` is None."""
    words = comma_separated(parse)
    return option(gpu, help, words) if cpu is None else by_device(gpu, cpu, help, words)


def densities(*default: str) -> Any:
    """Declare the option of CAB's budget, which may differ by length."""
    return listed(default, None, "max_density of CAB, or LENGTH:DENSITY for one length")


@dataclass(frozen=True)
class SpeedSettings:
    """Settings of every speed run. None means a default that depends on the device.

    Subclasses define ``method``, a description of the measurement.

    Raises:
        ValueError: an option is out of range. The message contains its name and value.
    """

    # field of a case -> option that lists its values; the last one varies fastest
    KEYS: ClassVar[Mapping[str, str]] = {"length": "lengths"}
    # fields of CabConfig with another default here
    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    # fields with numbers from 1 up, and from 0 up, or lists of them
    POSITIVE: ClassVar[tuple[str, ...]] = ()
    FROM_0: ClassVar[tuple[str, ...]] = ()
    CHOICES: ClassVar[Mapping[str, Iterable[str]]] = {}

    lengths: tuple[int, ...] | None = powers(13, 17)
    dtype: str | None = by_device("bfloat16", "float32", f"one of {', '.join(DTYPES)}")
    cab: tuple[str, ...] = option(
        (), "field=value of CabConfig, e.g. mass_threshold=0.004; repeatable", repeatable=True
    )
    out: str = option("speed_results", "folder for the results; a run in this folder is continued")
    seed: int = option(0, "random seed of the inputs", int)
    device: str | None = option(None, "torch device; the default is the GPU, cpu is for tests")

    def __post_init__(self) -> None:
        device = "cuda" if self.device is None else self.device
        on_gpu = device == "cuda" or device.removeprefix("cuda:").isdigit()
        if on_gpu and not torch.cuda.is_available():
            raise ValueError(
                f"device must be a CUDA device, got {device!r}, and torch finds none. Run it on a "
                "machine with a GPU, or try tiny lengths with --device cpu."
            )
        # `Speed.check` requires a GPU, not the parser of settings
        if not on_gpu:
            computing_device(device)
        self._set("device", device)
        fill_by_device(self, torch.device(device).type == "cpu")
        self._set("lengths", tuple(sorted(self.lengths)))
        self.check("lengths", self.lengths and self.lengths[0] > 0, "numbers of tokens")
        self.check("seed", 0 <= self.seed < 1 << 63, "0 to 2^63 - 1")
        for name in self.POSITIVE:
            value = getattr(self, name)
            least = min(value, default=0) if isinstance(value, tuple) else value
            self.check(name, least > 0, "at least 1")
        for name in self.FROM_0:
            self.check(name, (getattr(self, name) or 0) >= 0, "0 or more")
        for name, choices in {"dtype": DTYPES, **self.CHOICES}.items():
            self.check_choice(name, choices)
        if hasattr(self, "kv_heads"):
            divides = self.heads > 0 and self.heads % self.kv_heads == 0
            self.check("heads", divides, f"a multiple of kv_heads={self.kv_heads}")
        # raises an error before the run instead of during it
        _ = self.cab_config, self.configs()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def check(self, name: str, holds: object, accepted: str) -> None:
        """Raise an error for the field ``name`` unless ``holds``."""
        require(self, name, holds, accepted)

    def check_choice(self, name: str, choices: Iterable[str]) -> None:
        """Raise an error unless the field ``name``, or each of its values, is in ``choices``."""
        given = getattr(self, name)
        several = isinstance(given, tuple)
        values = set(given if several else (given,))
        accepted = f"{'out' if several else 'one'} of {', '.join(choices)}"
        self.check(name, values and values <= set(choices), accepted)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @cached_property
    def cab_config(self) -> CabConfig:
        """CAB's config: ``--cab`` over the defaults."""
        return self.configured()

    def configured(self, **fixed: Any) -> CabConfig:
        """Return ``--cab`` over `DEFAULTS`.

        Raises:
            ValueError: ``--cab`` sets a field that is ``fixed`` elsewhere.
        """
        given = dict(map(parse_assignment, self.cab))
        twice = sorted(fixed.keys() & given.keys())
        if twice:
            raise ValueError(
                f"cab must not set {twice[0]}, which is another option or measured here. Use that "
                "option."
            )
        return known(CabConfig(**self.DEFAULTS).changed(**given, **fixed))

    def option_by_length(self, name: str, parse: Callable[[str], Any]) -> dict[int | None, Any]:
        """Parse the option ``name``, written as in `densities`: length -> value, None for others.

        Returns {} if it cannot be parsed.
        """
        written = [part.rpartition(":") for part in getattr(self, name)]
        try:
            return {parse_length(at) if colon else None: parse(x) for at, colon, x in written}
        except ValueError:
            return {}

    def value_at(self, name: str, length: int, parse: Callable[[str], Any], what: str) -> Any:
        """Return the value of such an option at a length; raises an error if it is missing or 0."""
        values = self.option_by_length(name, parse)
        value = values.get(length, values.get(None))
        accepted = f"a {what}, or LENGTH:{what.upper()} pairs that include {length:,} tokens"
        self.check(name, value, accepted)
        return value

    def density_at(self, length: int) -> float:
        """Return ``max_density`` at a length, for subclasses that have it."""
        return self.value_at("max_density", length, float, "share")

    def random_heads(
        self, length: int, head_dim: int, device: torch.device, names: str, batch: int = 0
    ) -> tuple[Tensor, ...]:
        """Return random q, k or v by letter, [B, H, N, D] views of [B, N, H * D] as at prefill.

        They have the block structure of text: in q and k, runs of `TOPIC_TOKENS` tokens share one
        of `TOPICS` directions. On white noise almost no block could be left out. Settings need
        ``heads`` and ``kv_heads``. B is ``batch``, or the batch of the settings.
        """
        generator = torch.Generator(device).manual_seed(self.seed)
        like = {"device": device, "dtype": self.torch_dtype, "generator": generator}
        topics = torch.randn(TOPICS, head_dim, **like)
        topics *= TOPIC_STRENGTH * head_dim**0.5 / topics.norm(dim=-1, keepdim=True)
        runs = torch.randint(
            TOPICS, (-(-length // TOPIC_TOKENS),), device=device, generator=generator
        )
        shared = topics[runs.repeat_interleave(TOPIC_TOKENS)[:length]]
        made = []
        for name in names:
            heads = self.heads if name == "q" else self.kv_heads
            x = torch.randn(batch or self.batch, length, heads, head_dim, **like)
            if name != "v":
                x += shared[:, None]
            made.append(x.transpose(1, 2))
        return tuple(made)

    def configs(self) -> list[CabConfig]:
        """Return the configs of all cases if they differ."""
        return []

    def asked(self) -> list[dict[str, Any]]:
        """Return the cases that the settings ask for."""
        lists = (getattr(self, name) for name in self.KEYS.values())
        return [dict(zip(self.KEYS, values, strict=True)) for values in itertools.product(*lists)]


class Speed(Reported, Experiment):
    """The base class of speed ops.

    Samples are comparable only with equal code, GPU, versions and baselines.
    """

    CASE = ("length",)
    GROWS = ("lengths", "cab")  # cab_config is recorded next to the words that define it
    # settings that a sample repeats
    SHAPE: ClassVar[tuple[str, ...]]
    # fields of a sample that `find` fills, and fields with values by name
    FOUND: ClassVar[tuple[str, ...]]
    BY_NAME: ClassVar[tuple[str, ...]] = ()

    @cached_property
    def bench(self) -> Bench:
        settings = self.settings
        limits = getattr(settings, "seconds", None), getattr(settings, "gpu_gib", 0.0)
        return bench_on(settings.device, *limits)

    def check(self) -> None:
        computing_device(self.settings.device)

    def recorded(self) -> dict[str, Any]:
        settings = self.settings
        fields = {"cab_config": settings.cab_config.to_dict(), "method": settings.method}
        return {**super().recorded(), **fields}

    def provenance(self, started: str) -> dict[str, Any]:
        versions = {n: each.version() for n, each in dense.on(self.settings.device).items()}
        baselines = {name: version for name, version in versions.items() if version}
        return {**super().provenance(started), "baselines": baselines}

    def identity(self) -> dict[str, Any]:
        made = self.provenance("")
        return {**super().identity(), **{name: made[name] for name in MADE_BY}}

    def cases(self, samples: Sequence[Row]) -> list[dict[str, Any]]:
        return self.settings.asked()

    def expected(self) -> int | None:
        sought = getattr(self.settings, "longest", False)
        return None if sought else sum(1 for _ in self.cases(()))

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results of `find`, or those before an error, and the error."""
        sample = {"op": self.name.removeprefix("speed "), **case}
        sample |= {name: getattr(self.settings, name) for name in self.SHAPE}
        sample |= dict.fromkeys((*self.FOUND, "error"))
        sample |= {name: {} for name in self.BY_NAME}
        try:
            self.find(sample)
        except Exception as error:
            sample |= self.reported(error)
        self.bench.settle()
        return sample

    @abstractmethod
    def find(self, sample: dict[str, Any]) -> None:
        """Add the results to ``sample``, which contains the fields of its case."""

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return rows by length; an op may derive more."""
        return by_length(samples)

    def time(self, sample: dict[str, Any], what: str, call: Callable[[], Any]) -> Timing:
        """Call `Bench.time`, and record in ``sample`` why ``what`` has no CUDA graph, if so."""
        timing = self.bench.time(call)
        if timing.why_not:
            sample["without_graph"][what] = timing.why_not
        return timing

    def reported(self, error: Exception) -> dict[str, Any]:
        """Return the fields for ``error``; ``fits`` is False if memory ran out, else None."""
        fits = {"fits": False if ran_out(error) else None} if "fits" in self.FOUND else {}
        return {"error": in_a_sentence(error), **fits}

    def search(
        self, place: Mapping[str, Any], samples: Sequence[Row], step: int, estimate: int = 0
    ) -> Iterator[dict[str, Any]]:
        """Yield cases at ``place`` until the longest multiple of ``step`` that fits is known.

        Yields none if the memory is unknown, and stops after an error for another reason. The first
        cases are a little below and above the ``estimate``.
        """
        while True:
            same = [row for row in samples if place.items() <= row.items()]
            tried = {row["length"]: row["fits"] for row in same}
            length = next_length(tried, step, [int(share * estimate) for share in AROUND])
            if None in tried.values() or length is None or self.bench.room() is None:
                return
            yield {**place, "length": length, "sought": True}


def next_length(
    tried: Mapping[int, bool | None], step: int, likely: Iterable[int] = ()
) -> int | None:
    """Return the next length to try for the longest multiple of ``step`` that fits, or None.

    ``tried`` maps lengths to True if they fit. Until one does not fit, the next length is the
    shortest of the ``likely`` ones above all that fit, or twice the longest. Then the interval is
    halved.
    """
    least = max((length // step for length, fits in tried.items() if fits), default=0)
    fails = min((length for length, fits in tried.items() if not fits), default=None)
    if fails is None:
        above = [length // step for length in likely if length // step > least]
        return min(above, default=max(1, 2 * least)) * step
    # the longest multiple that may fit
    most = (fails - 1) // step
    return (least + most + 1) // 2 * step if most > least else None


def longest(rows: Sequence[Row], by: Mapping[str, str]) -> list[str]:
    """Describe the longest length that fits for rows equal in ``by``, heading -> field."""
    parts = []
    for alike in grouped(rows, *by.values()):
        fits = [row for row in alike if row["fits"]]
        fails = [row["length"] for row in alike if row["fits"] is False]
        if fits and fails and any(row["sought"] for row in alike):
            last = max(fits, key=itemgetter("length"))
            which = "".join(f" for {each}" for each in named(last, varying(rows, by)))
            estimate = f"; estimated: {last['estimate']:,}" if last.get("estimate") else ""
            parts.append(
                f"{last['length']:,} tokens are the longest that fit{which}: "
                f"{seconds(last['ms'])} s, {digits(last['peak_gib'])} of "
                f"{digits(last['room_gib'])} GiB at the peak; {min(fails):,} tokens do not "
                f"fit{estimate}."
            )
    return parts


def by_length(samples: Sequence[Row], derived: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the samples by length, with columns for ``derived`` values."""
    ordered = sorted(samples, key=lambda sample: sample["length"])
    return [{**sample, **dict.fromkeys(derived)} for sample in ordered]


def made_of(shape: str, settings: Mapping[str, Any]) -> str:
    """Describe inputs, config and clock for a report; ``settings`` are recorded ones."""
    recorded = settings["cab_config"]
    config, default = unlike_default(recorded), default_of(recorded)
    chosen = f"CabConfig with {config}" if config else "default CabConfig"
    if is_earlier(recorded):
        chosen += " (the earlier default: 8 typical queries on every key)"
    if recorded.keys() - default.keys():
        chosen = "block selection of cab_hf 0.2, with the settings in the command"
    return f"{shape}; {chosen}.\n\nMethod: {settings['method']}."
