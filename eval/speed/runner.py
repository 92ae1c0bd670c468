"""The runner of all speed ops: settings, cases, errors, tables and lines over tokens."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from cab_hf.config import CabConfig
from cab_hf.eval import charts
from cab_hf.eval.experiment import Experiment, Row, default_of, is_earlier, unlike_default
from cab_hf.eval.methods import known
from cab_hf.eval.report import digits, grouped, markdown_table, percent, seconds
from cab_hf.eval.speed import dense
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
CAB_DENSE = "cab_dense"  # exact attention, over ranks as well
HEADINGS = {
    **{"length": "tokens", "implementation": "attention", "way": "attention", "world": "ranks"},
    **{"ceiling": "upper bound", "over_best": "speed-up", "over_same": "speed-up over sdpa"},
    **{"ratio": "time / baseline", "predict_ms": "select ms", "choose_ms": "select ms"},
    **{"tokens": "tokens in all", "tokens_s": "tokens/s", "gb_s": "GB/s"},
    **{"tflops": "TFLOP/s", "labels": "computed by", "break_even": "faster than dense"},
    **{"prompt_tokens_s": "prompt tokens/s", "output_tokens_s": "output tokens/s"},
    **{"cab_dense": "cab_dense", "peak_mib": "peak MiB", "iterations_s": "turns/s"},
}
SHARES = ("efficiency", "of_bandwidth", "gap", "density", "mass")
TIMES = "{:.2f}×".format
# field of a sample -> its meaning; the field contains a text, or texts by name
REMARKS = {
    "ran_as": "ran as",
    "error": "not measured",
    "why_no_split": "not split into parts",
    "without_graph": "no CUDA graph, so its time is eager",
    "not_measured": "not measured",
}
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
        fields = dict(map(parse_assignment, self.cab))
        twice = sorted(fixed.keys() & fields.keys())
        if twice:
            raise ValueError(
                f"cab must not set {twice[0]}, which is another option or measured here. Use that "
                "option."
            )
        return known(CabConfig(**self.DEFAULTS).changed(**fields, **fixed))

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


class Panel(NamedTuple):
    """A panel of a figure over tokens, left out if no row has a value of its ``fields``."""

    title: str
    unit: str
    fields: tuple[str, ...]
    log: bool = True

    def shows(self, rows: Sequence[Row]) -> bool:
        return any(row.get(field) is not None for row in rows for field in self.fields)


class Speed(Experiment):
    """The base class of speed ops.

    Samples are comparable only with equal code, GPU, versions and baselines.
    """

    CASE = ("length",)
    GROWS = ("lengths", "cab")  # cab_config is recorded next to the words that define it
    # settings that a sample repeats
    SHAPE: ClassVar[tuple[str, ...]]
    # fields that distinguish rows of one length, heading -> field; "way" is the attention
    BY: ClassVar[Mapping[str, str]] = {}
    # headings of fields whose values have separate panels
    APART: ClassVar[Sequence[str]] = ()
    # fields in addition to the length on which the ``baselines`` of a row depend
    DENSE: ClassVar[Sequence[str]] = ()
    # drawn field -> field that contains it by name of a kernel
    OF_DENSE: ClassVar[Mapping[str, str]] = {"ms": "baselines"}
    # fields without a column
    HIDDEN: ClassVar[Sequence[str]] = ()
    # True if the first table contains the longest length alone
    LONGEST_FIRST: ClassVar[bool] = False
    PANELS: ClassVar[Sequence[Panel]]
    # notes on all runs under "", and notes on runs with a setting
    NOTES: ClassVar[Mapping[str, str]]
    # function that describes inputs and clock from recorded settings
    described: ClassVar[Callable[[Mapping[str, Any]], str]]
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

    @classmethod
    def shown(cls, rows: Sequence[Row]) -> Sequence[Row]:
        """Return the rows of tables and figures: one row per attention."""
        return rows

    @classmethod
    def tables(cls, rows: Sequence[Row]) -> dict[str, str]:
        shown, tables = cls.shown(rows), {}
        if cls.LONGEST_FIRST:
            most = max((row["length"] for row in shown), default=0)
            longest = [row for row in shown if row["length"] == most]
            if len(longest) < len(shown):
                tables["At the longest length"] = cls.table(longest)
        tables["All cases"] = cls.table(shown)
        if any(row.get("baselines") for row in rows):
            names = (*cls.DENSE, "length")
            once = [alike[0] for alike in grouped(rows, *names)]
            ways = [{name: row[name] for name in names} | row["baselines"] for row in once]
            same = [n for n in cls.ADDED if len({row.get(n) for row in rows}) == 1]
            tables["Dense attention, ms"] = table(ways, same)
        return tables | cls.remarks(rows)

    @classmethod
    def table(cls, rows: Sequence[Row]) -> str:
        """Return the `table` without settings that all rows share, and without remarks."""
        settings = ("op", *cls.SHAPE, *cls.ADDED)
        same = [n for n in settings if all(row.get(n) == rows[0].get(n) for row in rows)]
        # fields that distinguish rows come first
        names = dict.fromkeys(("length", *cls.BY.values(), *rows[0])) if rows else ()
        ordered = [{name: row[name] for name in names if name in row} for row in rows]
        return table(ordered, (*same, *REMARKS, *cls.HIDDEN))

    @classmethod
    def remarks(cls, rows: Sequence[Row]) -> dict[str, str]:
        """Return `remarks` by the fields that differ among rows; missing values are dashes."""
        told = {h: name for h, name in cls.BY.items() if not cls.DENSE or name in cls.DENSE}
        by = varying(rows, told)
        dashes = [{name: "–" for name in by.values() if row[name] is None} for row in rows]
        return remarks([{**row, **x} for row, x in zip(rows, dashes, strict=True)], by)

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """Return sentences that the first table does not show; none by default."""
        return []

    @classmethod
    def notes(cls, settings: Mapping[str, Any]) -> str:
        texts = [text for name, text in cls.NOTES.items() if not name or settings.get(name)]
        return "\n\n".join([cls.described(settings), *texts])

    @classmethod
    def lines(cls, rows: Sequence[Row]) -> list[Row]:
        """Return rows to draw: the shown ones, and one for each dense kernel."""
        names, lines = (*cls.DENSE, "length"), list(cls.shown(rows))
        for first, *_ in grouped(rows, *names) if cls.OF_DENSE else ():
            place = dict.fromkeys(cls.BY.values()) | {field: first[field] for field in names}
            for way in first.get("baselines") or ():
                values = {field: first[named].get(way) for field, named in cls.OF_DENSE.items()}
                lines.append({**place, "way": way, **values})
        return lines

    @classmethod
    def draw(cls, path: Path, rows: Sequence[Row]) -> None:
        """Draw the panels side by side, one row for each value of `APART`; dense lines are grey."""
        lines = cls.lines(rows)
        panels = [panel for panel in cls.PANELS if panel.shows(lines)]
        # dense kernels have no blocks and no budget: missing fields do not separate panels
        panel_fields = varying(rows, {heading: cls.BY[heading] for heading in cls.APART})
        by = {h: name for h, name in varying(lines, cls.BY).items() if h not in cls.APART}
        groups, across = grouped(rows, *panel_fields.values()), max(1, len(panels))
        with charts.figure(
            path, len(groups), across, figsize=(5.5 * across, 4.6 * len(groups))
        ) as (axes):
            for beside, some in zip(axes, groups, strict=True):
                lengths, drawn = [row["length"] for row in some], cls.lines(some)
                for axis, panel in zip(beside, panels, strict=False):
                    axis.set_visible(panel.shows(drawn))
                    cls.draw_lines(axis, panel, drawn, by)
                    title = ", ".join([*named(some[0], panel_fields), panel.title])
                    charts.over_tokens(axis, lengths, title, panel.unit, log=panel.log)

    @classmethod
    def draw_lines(
        cls, axis: Any, panel: Panel, rows: Sequence[Row], by: Mapping[str, str]
    ) -> None:
        """Draw the lines of a panel by ``by``; several fields are drawn for cab alone."""
        greys, several = itertools.cycle(charts.GREYS), len(panel.fields) > 1
        for alike, field in itertools.product(grouped(rows, *by.values()), panel.fields):
            dense = "way" in cls.BY and not is_ours(alike[0][cls.BY["way"]])
            if dense and several:
                continue
            look = {"color": next(greys), "marker": "s"} if dense else {}
            label = ", ".join([*named(alike[0], by), *[heading_of(field)] * several])
            charts.line(
                axis, alike, lambda row, field=field: row.get(field), label=label or None, **look
            )

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


def varying(rows: Sequence[Row], columns: Mapping[str, str]) -> dict[str, str]:
    """Return the ``columns``, heading -> field, that differ among rows."""
    return {h: name for h, name in columns.items() if len({row.get(name) for row in rows}) > 1}


def remarks(rows: Sequence[Row], by: Mapping[str, str]) -> dict[str, str]:
    """Return a table of `REMARKS` by the fields that distinguish rows besides length, or {}."""
    lengths: dict[tuple, dict[str, None]] = {}
    for (field, kind), row in itertools.product(REMARKS.items(), rows):
        said = row.get(field) or {}
        for name, text in (said if isinstance(said, Mapping) else {"": said}).items():
            what = (*(row[each] for each in by.values()), kind, text)
            lengths.setdefault((what, name), {})[f"{row['length']:,}"] = None
    # equal remarks of several names are joined
    names: dict[tuple, list[str]] = {}
    for (what, name), where in lengths.items():
        names.setdefault((*what, ", ".join(where)), []).append(name)
    headings = (*(HEADINGS.get(x, x) for x in by), "what", "reason", "tokens", "for")
    lines = [dict(zip(headings, (*k, ", ".join(of)), strict=True)) for k, of in names.items()]
    shown = headings if any(line["for"] for line in lines) else headings[:-1]
    return {"Remarks": markdown_table(lines, shown)} if lines else {}


def named(row: Row, by: Mapping[str, str]) -> list[str]:
    """Return the values that distinguish a row from others; numbers follow their headings."""
    values = {heading: row[name] for heading, name in by.items() if row[name] is not None}
    return [x if isinstance(x, str) else f"{heading} {x:g}" for heading, x in values.items()]


def heading_of(name: str) -> str:
    """Return the heading of a field."""
    return HEADINGS.get(name, name.replace("_", " ").replace("gib", "GiB"))


def is_ours(name: Any) -> bool:
    """Return True if ``name`` is a sparse attention."""
    return str(name).startswith("cab") and name != CAB_DENSE


def table(rows: Sequence[Row], hidden: Sequence[str] = ()) -> str:
    """Return numbers and names in ``rows`` without flags, one column per field with a value."""
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {}
    for name in names:
        kinds = {type(row.get(name)) for row in rows} - {type(None)}
        if name not in hidden and kinds and kinds <= {int, float, str}:
            columns[heading_of(name)] = partial(written, name)
    return markdown_table(rows, columns)


def written(name: str, row: Row) -> str | None:
    """Format the field ``name`` of a row for a table."""
    value = row.get(name)
    if value is None or isinstance(value, str):
        return value
    if name in SHARES:
        return percent(value)
    if "over_" in name or name == "ceiling":
        return TIMES(value)
    shown = f"{value:,}" if isinstance(value, int) else digits(value)
    return f"≈ {shown}" if name == "baseline_ms" and row.get("extrapolated") else shown
