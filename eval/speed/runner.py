"""The base class of all speed ops: settings, cases, errors, tables and line charts."""

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
from cab_hf.eval.methods import with_known_predictor
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
# a threshold that drops no block, so that the density is exactly max_density
KEEPS_ALL = {"mass_threshold": 0.0}
# random inputs have the block structure of text: runs of tokens about one topic
TOPICS = 64  # number of topics, each a direction in the space of q and k
TOPIC_TOKENS = 512  # tokens of a run
TOPIC_STRENGTH = 0.8  # norm of the direction relative to the norm of the noise
INPUTS = "random with the block structure of text (runs of tokens that share a direction)"
AROUND = (0.9, 1.1)  # a search tries these multiples of the estimated longest length first
CAB_DENSE = "cab_dense"  # the dense attention of cab_hf, which supports sequences over ranks
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
# field of a result record -> column "what" of the table of remarks. The field contains the text of
# the column "reason", or maps names of kernels to such texts
REMARKS = {
    "ran_as": "ran as",
    "error": "not measured",
    "why_no_split": "not split into parts",
    "without_graph": "no CUDA graph, so its time is eager",
    "not_measured": "not measured",
}
# fields of the provenance in which all samples of a folder must agree
MADE_BY = ("device", "versions", "baselines", "commit")


def powers(low: int, high: int) -> Any:
    """Return a dataclass field for a command-line option that lists sequence lengths.

    On a GPU, the default is all powers of 2 from 2^low to 2^high tokens. On a CPU, the default is
    256 and 512 tokens.
    """
    lengths = tuple(2**n for n in range(low, high + 1))
    return listed(lengths, (256, 512), "tokens", parse_length)


def listed(gpu: tuple, cpu: tuple | None, help: str, parse: Callable[[str], Any] = str) -> Any:
    """Return a dataclass field for a command-line option of comma-separated values.

    Args:
        gpu: default on a GPU.
        cpu: default on a CPU; None: the default of a GPU.
        help: help text.
        parse: parses one value.
    """
    parse_all = comma_separated(parse)
    return option(gpu, help, parse_all) if cpu is None else by_device(gpu, cpu, help, parse_all)


def densities(*default: str) -> Any:
    """Return a dataclass field for the option ``max_density``, which may have a value per length.

    Args:
        default: the default, a tuple of parts as in `SpeedSettings.option_by_length`.
    """
    return listed(default, None, "max_density of CAB, or LENGTH:DENSITY for one length")


@dataclass(frozen=True)
class SpeedSettings:
    """Settings of every speed run. A setting of None gets a default that depends on the device.

    Subclasses define ``method``, a description of the measurement.

    Attributes:
        KEYS: field of a case -> option that lists its values; the last field varies fastest.
        DEFAULTS: fields of CabConfig whose default differs here.
        POSITIVE: options with a number, or numbers, of at least 1.
        FROM_0: options with a number of at least 0.
        CHOICES: option -> accepted values.

    Raises:
        ValueError: an option is out of range. The message contains the option and its value.
    """

    KEYS: ClassVar[Mapping[str, str]] = {"length": "lengths"}
    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
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
        is_cuda = device == "cuda" or device.removeprefix("cuda:").isdigit()
        if is_cuda and not torch.cuda.is_available():
            raise ValueError(
                f"device must be a CUDA device, got {device!r}, and torch finds none. Run it on a "
                "machine with a GPU, or try tiny lengths with --device cpu."
            )
        # `Speed.check` checks that the GPU with the given number exists
        if not is_cuda:
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
            is_multiple = self.heads > 0 and self.heads % self.kv_heads == 0
            self.check("heads", is_multiple, f"a multiple of kv_heads={self.kv_heads}")
        # raise an error for invalid configs before the run instead of during it
        _ = self.cab_config, self.configs()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def check(self, name: str, holds: object, accepted: str) -> None:
        """Raise an error about the option ``name`` unless ``holds`` is true."""
        require(self, name, holds, accepted)

    def check_choice(self, name: str, choices: Iterable[str]) -> None:
        """Raise an error unless the option ``name``, or each of its values, is in ``choices``."""
        value = getattr(self, name)
        is_list = isinstance(value, tuple)
        values = set(value if is_list else (value,))
        accepted = f"{'out' if is_list else 'one'} of {', '.join(choices)}"
        self.check(name, values and values <= set(choices), accepted)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @cached_property
    def cab_config(self) -> CabConfig:
        """CAB's config: `DEFAULTS`, replaced by the fields of ``--cab``."""
        return self.configured()

    def configured(self, **fixed: Any) -> CabConfig:
        """Return a config of `DEFAULTS`, replaced by the fields of ``--cab`` and by ``fixed``.

        Raises:
            ValueError: ``--cab`` sets a field of ``fixed``.
        """
        fields = dict(map(parse_assignment, self.cab))
        conflicts = sorted(fixed.keys() & fields.keys())
        if conflicts:
            raise ValueError(
                f"cab must not set {conflicts[0]}, which is another option or measured here. Use "
                "that option."
            )
        return with_known_predictor(CabConfig(**self.DEFAULTS).changed(**fields, **fixed))

    def option_by_length(self, name: str, parse: Callable[[str], Any]) -> dict[int | None, Any]:
        """Return a mapping from lengths to the values of an option.

        The option has parts ``VALUE`` and ``LENGTH:VALUE``. A part ``VALUE`` has the key None, and
        applies to all other lengths. Returns {} if a part cannot be parsed.
        """
        parts = [part.rpartition(":") for part in getattr(self, name)]
        try:
            return {
                parse_length(length) if colon else None: parse(value)
                for length, colon, value in parts
            }
        except ValueError:
            return {}

    def value_at(self, name: str, length: int, parse: Callable[[str], Any], what: str) -> Any:
        """Return the value of an option for a length, from the mapping of `option_by_length`.

        Args:
            name: the option.
            length: tokens.
            parse: parses one value.
            what: noun for the value in the error message, such as "count".

        Raises:
            ValueError: the option has no value for the length, or the value is 0.
        """
        values = self.option_by_length(name, parse)
        value = values.get(length, values.get(None))
        accepted = f"a {what}, or LENGTH:{what.upper()} pairs that include {length:,} tokens"
        self.check(name, value, accepted)
        return value

    def density_at(self, length: int) -> float:
        """Return the ``max_density`` for a length; only for subclasses with this option."""
        return self.value_at("max_density", length, float, "share")

    def random_heads(
        self, length: int, head_dim: int, device: torch.device, names: str, batch: int = 0
    ) -> tuple[Tensor, ...]:
        """Return random q, k or v, each a [B, H, N, D] view of [B, N, H, D] as in a prefill.

        The tensors have the block structure of text: in q and k, runs of `TOPIC_TOKENS` tokens
        share one of `TOPICS` directions. With white noise, almost no block could be dropped.

        Args:
            length: tokens N.
            head_dim: channels per head.
            device: device of the tensors.
            names: letters of the tensors to return, such as "qkv".
            batch: rows B; 0: the batch of the settings.
        """
        generator = torch.Generator(device).manual_seed(self.seed)
        like = {"device": device, "dtype": self.torch_dtype, "generator": generator}
        topics = torch.randn(TOPICS, head_dim, **like)
        topics *= TOPIC_STRENGTH * head_dim**0.5 / topics.norm(dim=-1, keepdim=True)
        runs = torch.randint(
            TOPICS, (-(-length // TOPIC_TOKENS),), device=device, generator=generator
        )
        directions = topics[runs.repeat_interleave(TOPIC_TOKENS)[:length]]
        tensors = []
        for name in names:
            heads = self.heads if name == "q" else self.kv_heads
            x = torch.randn(batch or self.batch, length, heads, head_dim, **like)
            if name != "v":
                x += directions[:, None]
            tensors.append(x.transpose(1, 2))
        return tuple(tensors)

    def configs(self) -> list[CabConfig]:
        """Return CAB's config of each case; [] if all cases use `cab_config`."""
        return []

    def asked(self) -> list[dict[str, Any]]:
        """Return the cases of the settings: all combinations of the values in `KEYS`."""
        combinations = itertools.product(*(getattr(self, name) for name in self.KEYS.values()))
        return [dict(zip(self.KEYS, values, strict=True)) for values in combinations]


class Panel(NamedTuple):
    """A panel of a line chart over tokens.

    Attributes:
        title: title of the panel.
        unit: label of the vertical axis.
        fields: fields of a row that are drawn, one line each.
        log: True for a logarithmic vertical axis.
    """

    title: str
    unit: str
    fields: tuple[str, ...]
    log: bool = True

    def shows(self, rows: Sequence[Row]) -> bool:
        """Return True if a row has a value to draw."""
        return any(row.get(field) is not None for row in rows for field in self.fields)


class Speed(Experiment):
    """The base class of speed ops.

    A folder contains only samples of equal code, GPU, versions and baselines, because other samples
    are not comparable.

    Attributes:
        SHAPE: settings that are copied into each sample.
        BY: heading -> field that distinguishes rows of one length. The heading "way" stands for the
            attention implementation.
        APART: headings of `BY`; the figure has a row of panels for each value of their fields.
        DENSE: fields in addition to the length on which the times of dense kernels depend.
        OF_DENSE: drawn field -> field of a row that maps names of dense kernels to its values.
        HIDDEN: fields without a column in tables.
        LONGEST_FIRST: True if the first table contains only the longest length.
        PANELS: panels of the figure.
        NOTES: setting -> note on runs with the setting; "" -> note on all runs.
        described: function of the recorded settings that returns a description of the inputs and
            of the timing method.
        FOUND: fields of a sample that `find` fills.
        BY_NAME: fields of a sample that `find` fills with values by name.
    """

    CASE = ("length",)
    GROWS = ("lengths", "cab")  # ``cab`` may grow, because identity contains cab_config
    SHAPE: ClassVar[tuple[str, ...]]
    BY: ClassVar[Mapping[str, str]] = {}
    APART: ClassVar[Sequence[str]] = ()
    DENSE: ClassVar[Sequence[str]] = ()
    OF_DENSE: ClassVar[Mapping[str, str]] = {"ms": "baselines"}
    HIDDEN: ClassVar[Sequence[str]] = ()
    LONGEST_FIRST: ClassVar[bool] = False
    PANELS: ClassVar[Sequence[Panel]]
    NOTES: ClassVar[Mapping[str, str]]
    described: ClassVar[Callable[[Mapping[str, Any]], str]]
    FOUND: ClassVar[tuple[str, ...]]
    BY_NAME: ClassVar[tuple[str, ...]] = ()

    @cached_property
    def bench(self) -> Bench:
        """The timer for calls on the device of the settings."""
        settings = self.settings
        return bench_on(
            settings.device,
            seconds=getattr(settings, "seconds", None),
            gib=getattr(settings, "gpu_gib", 0.0),
        )

    def check(self) -> None:
        computing_device(self.settings.device)

    def recorded(self) -> dict[str, Any]:
        settings = self.settings
        fields = {"cab_config": settings.cab_config.to_dict(), "method": settings.method}
        return {**super().recorded(), **fields}

    def provenance(self, started: str) -> dict[str, Any]:
        kernels = dense.on(self.settings.device)
        versions = {name: kernel.version() for name, kernel in kernels.items()}
        baselines = {name: version for name, version in versions.items() if version}
        return {**super().provenance(started), "baselines": baselines}

    def identity(self) -> dict[str, Any]:
        record = self.provenance("")
        return {**super().identity(), **{name: record[name] for name in MADE_BY}}

    def cases(self, samples: Sequence[Row]) -> list[dict[str, Any]]:
        return self.settings.asked()

    def expected(self) -> int | None:
        is_search = getattr(self.settings, "longest", False)
        return None if is_search else sum(1 for _ in self.cases(()))

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Measure a case by `find`, and return its sample.

        After an error, the sample contains the results up to the error, and the field ``error``.
        """
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
        """Measure a case, and add the results to ``sample``, which contains the case's fields."""

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return one row per sample, sorted by length; subclasses may derive other rows."""
        return by_length(samples)

    @classmethod
    def shown(cls, rows: Sequence[Row]) -> Sequence[Row]:
        """Return the rows for tables and figures, which have one row per attention implementation.

        A subclass may split a row into several rows.
        """
        return rows

    @classmethod
    def tables(cls, rows: Sequence[Row]) -> dict[str, str]:
        table_rows, tables = cls.shown(rows), {}
        if cls.LONGEST_FIRST:
            most = max((row["length"] for row in table_rows), default=0)
            longest = [row for row in table_rows if row["length"] == most]
            if len(longest) < len(table_rows):
                tables["At the longest length"] = cls.table(longest)
        tables["All cases"] = cls.table(table_rows)
        if any(row.get("baselines") for row in rows):
            names = (*cls.DENSE, "length")
            # rows of a group have the same baselines
            firsts = [group[0] for group in grouped(rows, names)]
            lines = [{name: row[name] for name in names} | row["baselines"] for row in firsts]
            constant = [name for name in cls.ADDED if len({row.get(name) for row in rows}) == 1]
            tables["Dense attention, ms"] = table(lines, constant)
        return tables | cls.remarks(rows)

    @classmethod
    def table(cls, rows: Sequence[Row]) -> str:
        """Return a Markdown table of rows.

        The fields `REMARKS` and settings with equal values in all rows have no columns.
        """
        settings = ("op", *cls.SHAPE, *cls.ADDED)
        constant = [
            name for name in settings if all(row.get(name) == rows[0].get(name) for row in rows)
        ]
        # fields that distinguish rows come first
        names = dict.fromkeys(("length", *cls.BY.values(), *rows[0])) if rows else ()
        ordered = [{name: row[name] for name in names if name in row} for row in rows]
        return table(ordered, (*constant, *REMARKS, *cls.HIDDEN))

    @classmethod
    def remarks(cls, rows: Sequence[Row]) -> dict[str, str]:
        """Return the tables of the function `remarks`.

        The fields of `BY` have a column if their values differ among the rows.
        """
        columns = {
            heading: name for heading, name in cls.BY.items() if not cls.DENSE or name in cls.DENSE
        }
        columns = varying_columns(rows, columns)
        with_dashes = [
            {**row, **{name: "–" for name in columns.values() if row[name] is None}} for row in rows
        ]
        return remarks(with_dashes, columns)

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """Return sentences about the rows; none by default."""
        return []

    @classmethod
    def notes(cls, settings: Mapping[str, Any]) -> str:
        notes = [note for name, note in cls.NOTES.items() if not name or settings.get(name)]
        return "\n\n".join([cls.described(settings), *notes])

    @classmethod
    def lines(cls, rows: Sequence[Row]) -> list[Row]:
        """Return the rows to draw: the rows of `shown`, and a row per dense kernel and length."""
        names, lines = (*cls.DENSE, "length"), list(cls.shown(rows))
        for first, *_ in grouped(rows, names) if cls.OF_DENSE else ():
            fields = dict.fromkeys(cls.BY.values()) | {field: first[field] for field in names}
            for kernel in first.get("baselines") or ():
                values = {field: first[by].get(kernel) for field, by in cls.OF_DENSE.items()}
                lines.append({**fields, "way": kernel, **values})
        return lines

    @classmethod
    def draw(cls, path: Path, rows: Sequence[Row]) -> None:
        """Draw `PANELS` side by side, with a row of panels for each value of `APART`.

        Lines of dense kernels are grey.
        """
        lines = cls.lines(rows)
        panels = [panel for panel in cls.PANELS if panel.shows(lines)]
        # compare rows, not lines: lines of dense kernels have None in fields such as blocks, which
        # must not count as another value
        panel_fields = varying_columns(rows, {heading: cls.BY[heading] for heading in cls.APART})
        line_fields = {
            heading: name
            for heading, name in varying_columns(lines, cls.BY).items()
            if heading not in cls.APART
        }
        groups, num_panels = grouped(rows, panel_fields.values()), max(1, len(panels))
        size = (5.5 * num_panels, 4.6 * len(groups))
        with charts.figure(path, len(groups), num_panels, figsize=size) as axes:
            for row_of_axes, group in zip(axes, groups, strict=True):
                lengths, drawn = [row["length"] for row in group], cls.lines(group)
                for axis, panel in zip(row_of_axes, panels, strict=False):
                    axis.set_visible(panel.shows(drawn))
                    cls.draw_lines(axis, panel, drawn, line_fields)
                    title = ", ".join([*distinct_values(group[0], panel_fields), panel.title])
                    charts.over_tokens(axis, lengths, title, panel.unit, log=panel.log)

    @classmethod
    def draw_lines(
        cls, axis: Any, panel: Panel, rows: Sequence[Row], by: Mapping[str, str]
    ) -> None:
        """Draw the lines of a panel.

        A panel with several fields has no lines of dense kernels.

        Args:
            axis: the axes of the panel.
            panel: the panel.
            rows: the rows to draw.
            by: heading -> field that distinguishes lines.
        """
        greys, has_several = itertools.cycle(charts.GREYS), len(panel.fields) > 1
        for group, field in itertools.product(grouped(rows, by.values()), panel.fields):
            is_dense = "way" in cls.BY and not is_ours(group[0][cls.BY["way"]])
            if is_dense and has_several:
                continue
            style = {"color": next(greys), "marker": "s"} if is_dense else {}
            label = ", ".join([*distinct_values(group[0], by), *[heading_of(field)] * has_several])
            charts.line(
                axis, group, lambda row, field=field: row.get(field), label=label or None, **style
            )

    def time(self, sample: dict[str, Any], what: str, call: Callable[[], Any]) -> Timing:
        """Return the time of ``call``. If no CUDA graph was timed, note the reason in ``sample``.

        Args:
            sample: the sample, with the field ``without_graph``.
            what: name of the timed call in this field.
            call: the function to time.
        """
        timing = self.bench.time(call)
        if timing.why_not:
            sample["without_graph"][what] = timing.why_not
        return timing

    def reported(self, error: Exception) -> dict[str, Any]:
        """Return the fields of a sample after an error.

        If the op has the field ``fits``, it is False after a lack of memory, or else None.
        """
        fits = {"fits": False if ran_out(error) else None} if "fits" in self.FOUND else {}
        return {"error": in_a_sentence(error), **fits}

    def search(
        self, fields: Mapping[str, Any], samples: Sequence[Row], step: int, estimate: int = 0
    ) -> Iterator[dict[str, Any]]:
        """Yield cases until the longest length that fits into memory is known.

        Yields no case if the memory of the device is unknown. The search ends if a case fails for
        another reason than a lack of memory.

        Args:
            fields: the fields of the cases, without the length.
            samples: the samples of all cases. The caller must append the sample of each yielded
                case before it asks for the next case.
            step: number of tokens of which lengths are multiples.
            estimate: estimated length; the first cases are a little shorter and longer. 0: none.
        """
        while True:
            own_samples = [row for row in samples if fields.items() <= row.items()]
            tried = {row["length"]: row["fits"] for row in own_samples}
            length = next_length(tried, step, [int(share * estimate) for share in AROUND])
            if None in tried.values() or length is None or self.bench.room() is None:
                return
            yield {**fields, "length": length, "sought": True}


def next_length(
    tried: Mapping[int, bool | None], step: int, likely: Iterable[int] = ()
) -> int | None:
    """Return the next length to try in the search for the longest length that fits.

    Until a length does not fit, the next length is the shortest ``likely`` length above all lengths
    that fit, or else twice the longest length that fits. Then the search halves the interval.

    Args:
        tried: length -> True if the length fits, and False if it does not fit.
        step: number of tokens of which lengths are multiples.
        likely: lengths to try first.

    Returns:
        The length; None if the longest length is known.
    """
    least = max((length // step for length, fits in tried.items() if fits), default=0)
    fails = min((length for length, fits in tried.items() if not fits), default=None)
    if fails is None:
        above = [length // step for length in likely if length // step > least]
        return min(above, default=max(1, 2 * least)) * step
    # the longest multiple of step below the shortest length that does not fit
    most = (fails - 1) // step
    return (least + most + 1) // 2 * step if most > least else None


def longest(rows: Sequence[Row], by: Mapping[str, str]) -> list[str]:
    """Return a sentence on the longest length that fits, for each group of searched rows.

    Args:
        rows: the rows.
        by: heading -> field that distinguishes groups.
    """
    sentences = []
    for group in grouped(rows, by.values()):
        fits = [row for row in group if row["fits"]]
        fails = [row["length"] for row in group if row["fits"] is False]
        if fits and fails and any(row["sought"] for row in group):
            last = max(fits, key=itemgetter("length"))
            values = "".join(
                f" for {value}" for value in distinct_values(last, varying_columns(rows, by))
            )
            estimate = f"; estimated: {last['estimate']:,}" if last.get("estimate") else ""
            sentences.append(
                f"{last['length']:,} tokens are the longest that fit{values}: "
                f"{seconds(last['ms'])} s, {digits(last['peak_gib'])} of "
                f"{digits(last['room_gib'])} GiB at the peak; {min(fails):,} tokens do not "
                f"fit{estimate}."
            )
    return sentences


def by_length(samples: Sequence[Row], derived: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return a row per sample, sorted by length, with None in the fields ``derived``."""
    ordered = sorted(samples, key=lambda sample: sample["length"])
    return [{**sample, **dict.fromkeys(derived)} for sample in ordered]


def run_description(shape: str, settings: Mapping[str, Any]) -> str:
    """Return a description of inputs, config and timing method for a report.

    Args:
        shape: description of the inputs.
        settings: the recorded settings.
    """
    recorded = settings["cab_config"]
    changed, default = unlike_default(recorded), default_of(recorded)
    config = f"CabConfig with {changed}" if changed else "default CabConfig"
    if is_earlier(recorded):
        config += " (the earlier default: 8 typical queries on every key)"
    if recorded.keys() - default.keys():
        config = "block selection of cab_hf 0.2, with the settings in the command"
    return f"{shape}; {config}.\n\nMethod: {settings['method']}."


def varying_columns(rows: Sequence[Row], columns: Mapping[str, str]) -> dict[str, str]:
    """Return the items of ``columns`` whose field has different values among the rows.

    Args:
        rows: the rows.
        columns: heading -> field.
    """
    return {
        heading: name
        for heading, name in columns.items()
        if len({row.get(name) for row in rows}) > 1
    }


def remarks(rows: Sequence[Row], by: Mapping[str, str]) -> dict[str, str]:
    """Return {"Remarks": Markdown table of the texts in the fields `REMARKS`}; {} without texts.

    Equal texts for several lengths, or for several kernels, share a line.

    Args:
        rows: the rows.
        by: heading -> field that distinguishes rows of one length.
    """
    # ((*values of ``by``, kind, reason), name of a kernel or "") -> formatted lengths
    lengths: dict[tuple, dict[str, None]] = {}
    for (field, kind), row in itertools.product(REMARKS.items(), rows):
        reasons = row.get(field) or {}
        for name, reason in (reasons if isinstance(reasons, Mapping) else {"": reasons}).items():
            key = (*(row[column] for column in by.values()), kind, reason)
            lengths.setdefault((key, name), {})[f"{row['length']:,}"] = None
    # (*values of ``by``, kind, reason, joined lengths) -> names of kernels
    names: dict[tuple, list[str]] = {}
    for (key, name), key_lengths in lengths.items():
        names.setdefault((*key, ", ".join(key_lengths)), []).append(name)
    headings = (*(HEADINGS.get(x, x) for x in by), "what", "reason", "tokens", "for")
    lines = [
        dict(zip(headings, (*key, ", ".join(key_names)), strict=True))
        for key, key_names in names.items()
    ]
    columns = headings if any(line["for"] for line in lines) else headings[:-1]
    return {"Remarks": markdown_table(lines, columns)} if lines else {}


def distinct_values(row: Row, by: Mapping[str, str]) -> list[str]:
    """Return the values by which a row differs from others; numbers get a heading: "ranks 2".

    Args:
        row: the row.
        by: heading -> field; fields with None are left out.
    """
    values = {heading: row[name] for heading, name in by.items() if row[name] is not None}
    return [x if isinstance(x, str) else f"{heading} {x:g}" for heading, x in values.items()]


def heading_of(name: str) -> str:
    """Return the table heading of a field."""
    return HEADINGS.get(name, name.replace("_", " ").replace("gib", "GiB"))


def is_ours(name: Any) -> bool:
    """Return True if ``name`` names sparse attention by cab_hf."""
    return str(name).startswith("cab") and name != CAB_DENSE


def table(rows: Sequence[Row], hidden: Sequence[str] = ()) -> str:
    """Return a Markdown table with a column for each field whose values are numbers or strings.

    Args:
        rows: the rows.
        hidden: fields without a column.
    """
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
    number = f"{value:,}" if isinstance(value, int) else digits(value)
    return f"≈ {number}" if name == "baseline_ms" and row.get("extrapolated") else number
