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
from cab_hf.eval.experiment import (
    Experiment,
    Row,
    find_changed_fields,
    get_default_fields,
    is_from_earlier_version,
)
from cab_hf.eval.methods import with_known_predictor
from cab_hf.eval.report import (
    format_digits,
    format_percent,
    format_seconds,
    group_rows,
    markdown_table,
)
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.timing import Bench, Timing, is_out_of_memory, make_bench, summarise_error
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
ALL_BLOCKS_FIELDS = {"mass_threshold": 0.0}
# random inputs have the block structure of text: runs of tokens about one topic
NUM_TOPICS = 64  # number of topics, each a direction in the space of q and k
TOPIC_TOKENS = 512  # tokens of a run
TOPIC_STRENGTH = 0.8  # norm of the direction relative to the norm of the noise
INPUTS_DESCRIPTION = (
    "random with the block structure of text (runs of tokens that share a direction)"
)
SEARCH_FACTORS = (0.9, 1.1)  # a search tries these multiples of the estimated longest length first
CAB_DENSE = "cab_dense"  # the dense attention of cab_hf, which supports sequences over ranks
FIELD_HEADINGS = {
    **{"length": "tokens", "implementation": "attention", "way": "attention", "world": "ranks"},
    **{"ceiling": "upper bound", "over_best": "speed-up", "over_same": "speed-up over sdpa"},
    **{"ratio": "time / baseline", "predict_ms": "select ms", "choose_ms": "select ms"},
    **{"tokens": "tokens in all", "tokens_s": "tokens/s", "gb_s": "GB/s"},
    **{"tflops": "TFLOP/s", "labels": "computed by", "break_even": "faster than dense"},
    **{"prompt_tokens_s": "prompt tokens/s", "output_tokens_s": "output tokens/s"},
    **{"cab_dense": "cab_dense", "peak_mib": "peak MiB", "iterations_s": "turns/s"},
}
PERCENT_FIELDS = ("efficiency", "of_bandwidth", "gap", "density", "mass")
format_speed_up = "{:.2f}×".format
# field of a result record -> column "what" of the table of remarks. The field contains the text of
# the column "reason", or maps names of kernels to such texts
REMARK_FIELDS = {
    "ran_as": "ran as",
    "error": "not measured",
    "why_no_split": "not split into parts",
    "without_graph": "no CUDA graph, so its time is eager",
    "not_measured": "not measured",
}
# fields of the provenance in which all samples of a folder must agree
IDENTITY_FIELDS = ("device", "versions", "baselines", "commit")


def make_lengths_option(min_exponent: int, max_exponent: int) -> Any:
    """Return a dataclass field for a command-line option that lists sequence lengths.

    On a GPU, the default is all powers of 2 from 2^min_exponent to 2^max_exponent tokens. On a CPU,
    the default is 256 and 512 tokens.
    """
    lengths = tuple(2**exponent for exponent in range(min_exponent, max_exponent + 1))
    return make_list_option(lengths, (256, 512), "tokens", parse_length)


def make_list_option(
    gpu_default: tuple,
    cpu_default: tuple | None,
    help: str,
    parse_value: Callable[[str], Any] = str,
) -> Any:
    """Return a dataclass field for a command-line option of comma-separated values.

    Args:
        gpu_default: default on a GPU.
        cpu_default: default on a CPU; None: the default of a GPU.
        help: help text.
        parse_value: parses one value.
    """
    parse_list = comma_separated(parse_value)
    return (
        option(gpu_default, help, parse_list)
        if cpu_default is None
        else by_device(gpu_default, cpu_default, help, parse_list)
    )


def make_densities_option(*default: str) -> Any:
    """Return a dataclass field for the option ``max_density``, which may have a value per length.

    Args:
        default: the default, a tuple of parts as in `SpeedSettings.parse_option_by_length`.
    """
    return make_list_option(default, None, "max_density of CAB, or LENGTH:DENSITY for one length")


@dataclass(frozen=True)
class SpeedSettings:
    """Settings of every speed run. A setting of None gets a default that depends on the device.

    Subclasses define ``method``, a description of the measurement.

    Attributes:
        CASE_OPTIONS: field of a case -> option that lists the field's values; the last field varies
            fastest.
        CONFIG_DEFAULTS: fields of CabConfig whose default differs here.
        POSITIVE: options with a number, or numbers, of at least 1.
        NON_NEGATIVE: options with a number of at least 0.
        CHOICES: option -> accepted values.

    Raises:
        ValueError: an option is out of range. The message contains the option and its value.
    """

    CASE_OPTIONS: ClassVar[Mapping[str, str]] = {"length": "lengths"}
    CONFIG_DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    POSITIVE: ClassVar[tuple[str, ...]] = ()
    NON_NEGATIVE: ClassVar[tuple[str, ...]] = ()
    CHOICES: ClassVar[Mapping[str, Iterable[str]]] = {}

    lengths: tuple[int, ...] | None = make_lengths_option(13, 17)
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
        # `Speed.check_settings` checks that the GPU with the given number exists
        if not is_cuda:
            computing_device(device)
        self._set_option("device", device)
        fill_by_device(self, torch.device(device).type == "cpu")
        self._set_option("lengths", tuple(sorted(self.lengths)))
        self.require_option("lengths", self.lengths and self.lengths[0] > 0, "numbers of tokens")
        self.require_option("seed", 0 <= self.seed < 1 << 63, "0 to 2^63 - 1")
        for option_name in self.POSITIVE:
            option_value = getattr(self, option_name)
            min_value = (
                min(option_value, default=0) if isinstance(option_value, tuple) else option_value
            )
            self.require_option(option_name, min_value > 0, "at least 1")
        for option_name in self.NON_NEGATIVE:
            self.require_option(option_name, (getattr(self, option_name) or 0) >= 0, "0 or more")
        for option_name, choices in {"dtype": DTYPES, **self.CHOICES}.items():
            self.check_choice(option_name, choices)
        if hasattr(self, "kv_heads"):
            is_multiple = self.heads > 0 and self.heads % self.kv_heads == 0
            self.require_option("heads", is_multiple, f"a multiple of kv_heads={self.kv_heads}")
        # raise an error for invalid configs before the run instead of during it
        _ = self.cab_config, self.configs()

    def _set_option(self, option_name: str, new_value: Any) -> None:
        object.__setattr__(self, option_name, new_value)

    def require_option(self, option_name: str, is_accepted: object, accepted_values: str) -> None:
        """Raise an error about the option ``option_name`` unless ``is_accepted`` is true."""
        require(self, option_name, is_accepted, accepted_values)

    def check_choice(self, option_name: str, choices: Iterable[str]) -> None:
        """Raise an error unless the option, or each of its values, is in ``choices``."""
        option_value = getattr(self, option_name)
        is_list = isinstance(option_value, tuple)
        option_values = set(option_value if is_list else (option_value,))
        accepted_values = f"{'out' if is_list else 'one'} of {', '.join(choices)}"
        self.require_option(
            option_name, option_values and option_values <= set(choices), accepted_values
        )

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @cached_property
    def cab_config(self) -> CabConfig:
        """CAB's config: `CONFIG_DEFAULTS`, replaced by the fields of ``--cab``."""
        return self.make_measured_config()

    def make_measured_config(self, **measured_fields: Any) -> CabConfig:
        """Return a config of `CONFIG_DEFAULTS`, updated by ``--cab`` and ``measured_fields``.

        Raises:
            ValueError: ``--cab`` sets a field of ``measured_fields``.
        """
        cab_fields = dict(map(parse_assignment, self.cab))
        conflicts = sorted(measured_fields.keys() & cab_fields.keys())
        if conflicts:
            raise ValueError(
                f"cab must not set {conflicts[0]}, which is another option or measured here. Use "
                "that option."
            )
        return with_known_predictor(
            CabConfig(**self.CONFIG_DEFAULTS).changed(**cab_fields, **measured_fields)
        )

    def parse_option_by_length(
        self, option_name: str, parse_value: Callable[[str], Any]
    ) -> dict[int | None, Any]:
        """Return a mapping from lengths to the values of an option.

        The option has parts ``VALUE`` and ``LENGTH:VALUE``. A part ``VALUE`` has the key None, and
        applies to all other lengths. Returns {} if a part cannot be parsed.
        """
        option_parts = [option_part.rpartition(":") for option_part in getattr(self, option_name)]
        try:
            return {
                parse_length(length) if separator else None: parse_value(value)
                for length, separator, value in option_parts
            }
        except ValueError:
            return {}

    def get_value_at_length(
        self, option_name: str, length: int, parse_value: Callable[[str], Any], value_noun: str
    ) -> Any:
        """Return the value of an option for a length, from the mapping of `parse_option_by_length`.

        Args:
            option_name: the option.
            length: tokens.
            parse_value: parses one value.
            value_noun: noun for the value in the error message, such as "count".

        Raises:
            ValueError: the option has no value for the length, or the value is 0.
        """
        values_by_length = self.parse_option_by_length(option_name, parse_value)
        value = values_by_length.get(length, values_by_length.get(None))
        accepted_values = (
            f"a {value_noun}, or LENGTH:{value_noun.upper()} pairs that include {length:,} tokens"
        )
        self.require_option(option_name, value, accepted_values)
        return value

    def get_density_at_length(self, length: int) -> float:
        """Return the ``max_density`` for a length; only for subclasses with this option."""
        return self.get_value_at_length("max_density", length, float, "share")

    def draw_random_heads(
        self, length: int, head_dim: int, device: torch.device, tensor_names: str, batch: int = 0
    ) -> tuple[Tensor, ...]:
        """Return random q, k or v, each a [B, H, N, D] view of [B, N, H, D] as in a prefill.

        The tensors have the block structure of text: in q and k, runs of `TOPIC_TOKENS` tokens
        share one of `NUM_TOPICS` directions. With white noise, almost no block could be dropped.

        Args:
            length: tokens N.
            head_dim: channels per head.
            device: device of the tensors.
            tensor_names: letters of the tensors to return, such as "qkv".
            batch: rows B; 0: the batch of the settings.
        """
        generator = torch.Generator(device).manual_seed(self.seed)
        tensor_options = {"device": device, "dtype": self.torch_dtype, "generator": generator}
        topics = torch.randn(NUM_TOPICS, head_dim, **tensor_options)
        topics *= TOPIC_STRENGTH * head_dim**0.5 / topics.norm(dim=-1, keepdim=True)
        run_topics = torch.randint(
            NUM_TOPICS, (-(-length // TOPIC_TOKENS),), device=device, generator=generator
        )
        directions = topics[run_topics.repeat_interleave(TOPIC_TOKENS)[:length]]
        tensors = []
        for tensor_name in tensor_names:
            num_heads = self.heads if tensor_name == "q" else self.kv_heads
            head_tensor = torch.randn(
                batch or self.batch, length, num_heads, head_dim, **tensor_options
            )
            if tensor_name != "v":
                head_tensor += directions[:, None]
            tensors.append(head_tensor.transpose(1, 2))
        return tuple(tensors)

    def configs(self) -> list[CabConfig]:
        """Return CAB's config of each case; [] if all cases use `cab_config`."""
        return []

    def list_requested_cases(self) -> list[dict[str, Any]]:
        """Return the cases of the settings: all combinations of the values in `CASE_OPTIONS`."""
        value_combinations = itertools.product(
            *(getattr(self, option_name) for option_name in self.CASE_OPTIONS.values())
        )
        return [dict(zip(self.CASE_OPTIONS, values, strict=True)) for values in value_combinations]


class Panel(NamedTuple):
    """A panel of a line chart over tokens.

    Attributes:
        title: title of the panel.
        unit: label of the vertical axis.
        fields: fields of a row that are drawn, one line each.
        is_logarithmic: True for a logarithmic vertical axis.
    """

    title: str
    unit: str
    fields: tuple[str, ...]
    is_logarithmic: bool = True

    def has_values(self, rows: Sequence[Row]) -> bool:
        """Return True if a row has a value to draw."""
        return any(row.get(field) is not None for row in rows for field in self.fields)


class Speed(Experiment):
    """The base class of speed ops.

    A folder contains only samples of equal code, GPU, versions and baselines, because other samples
    are not comparable.

    Attributes:
        COPIED_SETTINGS: settings that are copied into each sample.
        GROUP_FIELDS: heading -> field that distinguishes rows of one length. The heading "way"
            stands for the attention implementation.
        PANEL_HEADINGS: headings of `GROUP_FIELDS`; the figure has a row of panels for each value of
            their fields.
        DENSE_FIELDS: fields in addition to the length on which the times of dense kernels depend.
        DENSE_VALUE_FIELDS: drawn field -> field of a row that maps names of dense kernels to the
            values to draw.
        HIDDEN_FIELDS: fields without a column in tables.
        LONGEST_FIRST: True if the first table contains only the longest length.
        PANELS: panels of the figure.
        NOTES: setting -> note on runs with the setting; "" -> note on all runs.
        describe_run: function of the recorded settings that returns a description of the inputs and
            of the timing method.
        RESULT_FIELDS: fields of a sample that `fill_sample` fills.
        RESULT_FIELDS_BY_NAME: fields of a sample that `fill_sample` fills with values by name.
    """

    CASE_FIELDS = ("length",)
    EXTENSIBLE_SETTINGS = (
        "lengths",
        "cab",
    )  # ``cab`` may grow, because identity contains cab_config
    COPIED_SETTINGS: ClassVar[tuple[str, ...]]
    GROUP_FIELDS: ClassVar[Mapping[str, str]] = {}
    PANEL_HEADINGS: ClassVar[Sequence[str]] = ()
    DENSE_FIELDS: ClassVar[Sequence[str]] = ()
    DENSE_VALUE_FIELDS: ClassVar[Mapping[str, str]] = {"ms": "baselines"}
    HIDDEN_FIELDS: ClassVar[Sequence[str]] = ()
    LONGEST_FIRST: ClassVar[bool] = False
    PANELS: ClassVar[Sequence[Panel]]
    NOTES: ClassVar[Mapping[str, str]]
    describe_run: ClassVar[Callable[[Mapping[str, Any]], str]]
    RESULT_FIELDS: ClassVar[tuple[str, ...]]
    RESULT_FIELDS_BY_NAME: ClassVar[tuple[str, ...]] = ()

    @cached_property
    def bench(self) -> Bench:
        """The timer for calls on the device of the settings."""
        settings = self.settings
        return make_bench(
            settings.device,
            seconds=getattr(settings, "seconds", None),
            limit_gib=getattr(settings, "gpu_gib", 0.0),
        )

    def check_settings(self) -> None:
        computing_device(self.settings.device)

    def recorded_settings(self) -> dict[str, Any]:
        settings = self.settings
        speed_fields = {
            "cab_config": settings.cab_config.to_dict(),
            "method": settings.method_description,
        }
        return {**super().recorded_settings(), **speed_fields}

    def provenance(self, started: str) -> dict[str, Any]:
        baseline_by_name = dense.get_baselines(self.settings.device)
        version_by_kernel = {
            baseline_name: baseline.get_version()
            for baseline_name, baseline in baseline_by_name.items()
        }
        known_version_by_kernel = {
            baseline_name: version
            for baseline_name, version in version_by_kernel.items()
            if version
        }
        return {**super().provenance(started), "baselines": known_version_by_kernel}

    def identity(self) -> dict[str, Any]:
        record = self.provenance("")
        return {**super().identity(), **{name: record[name] for name in IDENTITY_FIELDS}}

    def cases(self, samples: Sequence[Row]) -> list[dict[str, Any]]:
        return self.settings.list_requested_cases()

    def num_expected_cases(self) -> int | None:
        is_search = getattr(self.settings, "longest", False)
        return None if is_search else sum(1 for _ in self.cases(()))

    def measure(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """Measure a case by `fill_sample`, and return its sample.

        After an error, the sample contains the results up to the error, and the field ``error``.
        """
        sample = {"op": self.name.removeprefix("speed "), **case}
        sample |= {name: getattr(self.settings, name) for name in self.COPIED_SETTINGS}
        sample |= dict.fromkeys((*self.RESULT_FIELDS, "error"))
        sample |= {name: {} for name in self.RESULT_FIELDS_BY_NAME}
        try:
            self.fill_sample(sample)
        except Exception as error:
            sample |= self.make_error_fields(error)
        self.bench.free_memory()
        return sample

    @abstractmethod
    def fill_sample(self, sample: dict[str, Any]) -> None:
        """Measure a case, and add the results to ``sample``, which contains the case's fields."""

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return one row per sample, sorted by length; subclasses may derive other rows."""
        return sort_by_length(samples)

    @classmethod
    def display_rows(cls, rows: Sequence[Row]) -> Sequence[Row]:
        """Return the rows for tables and figures, which have one row per attention implementation.

        A subclass may split a row into several rows.
        """
        return rows

    @classmethod
    def tables(cls, rows: Sequence[Row]) -> dict[str, str]:
        table_rows, tables = cls.display_rows(rows), {}
        if cls.LONGEST_FIRST:
            max_length = max((row["length"] for row in table_rows), default=0)
            longest_rows = [row for row in table_rows if row["length"] == max_length]
            if len(longest_rows) < len(table_rows):
                tables["At the longest length"] = cls.make_table(longest_rows)
        tables["All cases"] = cls.make_table(table_rows)
        if any(row.get("baselines") for row in rows):
            dense_fields = (*cls.DENSE_FIELDS, "length")
            # rows of a group have the same baselines
            first_rows = [group[0] for group in group_rows(rows, dense_fields)]
            dense_rows = [
                {name: row[name] for name in dense_fields} | row["baselines"] for row in first_rows
            ]
            constant_fields = [
                name for name in cls.ADDED_DEFAULTS if len({row.get(name) for row in rows}) == 1
            ]
            tables["Dense attention, ms"] = format_table(dense_rows, constant_fields)
        return tables | cls.make_remarks_table(rows)

    @classmethod
    def make_table(cls, rows: Sequence[Row]) -> str:
        """Return a Markdown table of rows.

        The fields `REMARK_FIELDS` and settings with equal values in all rows have no columns.
        """
        setting_names = ("op", *cls.COPIED_SETTINGS, *cls.ADDED_DEFAULTS)
        constant_fields = [
            name
            for name in setting_names
            if all(row.get(name) == rows[0].get(name) for row in rows)
        ]
        # fields that distinguish rows come first
        field_names = (
            dict.fromkeys(("length", *cls.GROUP_FIELDS.values(), *rows[0])) if rows else ()
        )
        ordered_rows = [{name: row[name] for name in field_names if name in row} for row in rows]
        return format_table(ordered_rows, (*constant_fields, *REMARK_FIELDS, *cls.HIDDEN_FIELDS))

    @classmethod
    def make_remarks_table(cls, rows: Sequence[Row]) -> dict[str, str]:
        """Return the tables of the function `format_remarks`.

        The fields of `GROUP_FIELDS` have a column if their values differ among the rows.
        """
        columns = {
            heading: name
            for heading, name in cls.GROUP_FIELDS.items()
            if not cls.DENSE_FIELDS or name in cls.DENSE_FIELDS
        }
        columns = select_varying_columns(rows, columns)
        rows_with_dashes = [
            {**row, **{name: "–" for name in columns.values() if row[name] is None}} for row in rows
        ]
        return format_remarks(rows_with_dashes, columns)

    @staticmethod
    def summary_sentences(rows: Sequence[Row]) -> list[str]:
        """Return sentences about the rows; none by default."""
        return []

    @classmethod
    def notes(cls, settings: Mapping[str, Any]) -> str:
        notes = [note for name, note in cls.NOTES.items() if not name or settings.get(name)]
        return "\n\n".join([cls.describe_run(settings), *notes])

    @classmethod
    def list_rows_to_draw(cls, rows: Sequence[Row]) -> list[Row]:
        """Return the rows of `display_rows`, and a row per dense kernel and length."""
        dense_fields, drawn_rows = (*cls.DENSE_FIELDS, "length"), list(cls.display_rows(rows))
        for first_row, *_ in group_rows(rows, dense_fields) if cls.DENSE_VALUE_FIELDS else ():
            group_values = dict.fromkeys(cls.GROUP_FIELDS.values()) | {
                field: first_row[field] for field in dense_fields
            }
            for kernel_name in first_row.get("baselines") or ():
                kernel_values = {
                    field: first_row[value_field].get(kernel_name)
                    for field, value_field in cls.DENSE_VALUE_FIELDS.items()
                }
                drawn_rows.append({**group_values, "way": kernel_name, **kernel_values})
        return drawn_rows

    @classmethod
    def draw(cls, path: Path, rows: Sequence[Row]) -> None:
        """Draw `PANELS` side by side, with a row of panels for each value of `PANEL_HEADINGS`.

        Lines of dense kernels are grey. The figure is empty without rows.
        """
        if not rows:
            with charts.figure(path, 1, 1, figsize=(5.5, 4.6)) as axes:
                axes[0, 0].set_title("no case was measured")
            return
        drawn_rows = cls.list_rows_to_draw(rows)
        panels = [panel for panel in cls.PANELS if panel.has_values(drawn_rows)]
        # compare rows, not lines: lines of dense kernels have None in fields such as blocks, which
        # must not count as another value
        panel_fields = select_varying_columns(
            rows, {heading: cls.GROUP_FIELDS[heading] for heading in cls.PANEL_HEADINGS}
        )
        line_fields = {
            heading: field_name
            for heading, field_name in select_varying_columns(drawn_rows, cls.GROUP_FIELDS).items()
            if heading not in cls.PANEL_HEADINGS
        }
        row_groups, num_panels = group_rows(rows, panel_fields.values()), max(1, len(panels))
        figure_size = (5.5 * num_panels, 4.6 * len(row_groups))
        with charts.figure(path, len(row_groups), num_panels, figsize=figure_size) as axes:
            for row_of_axes, group in zip(axes, row_groups, strict=True):
                lengths = [row["length"] for row in group]
                drawn_group_rows = cls.list_rows_to_draw(group)
                for axis, panel in zip(row_of_axes, panels, strict=False):
                    axis.set_visible(panel.has_values(drawn_group_rows))
                    cls.draw_lines(axis, panel, drawn_group_rows, line_fields)
                    title = ", ".join([*list_distinct_values(group[0], panel_fields), panel.title])
                    charts.format_token_axes(
                        axis, lengths, title, panel.unit, is_logarithmic=panel.is_logarithmic
                    )

    @classmethod
    def draw_lines(
        cls, axis: Any, panel: Panel, rows: Sequence[Row], line_fields: Mapping[str, str]
    ) -> None:
        """Draw the lines of a panel.

        A panel with several fields has no lines of dense kernels.

        Args:
            axis: the axes of the panel.
            panel: the panel.
            rows: the rows to draw.
            line_fields: heading -> field that distinguishes lines.
        """
        grey_colours, has_several_fields = itertools.cycle(charts.GREYS), len(panel.fields) > 1
        for group, field in itertools.product(group_rows(rows, line_fields.values()), panel.fields):
            is_dense = "way" in cls.GROUP_FIELDS and not is_sparse_cab(
                group[0][cls.GROUP_FIELDS["way"]]
            )
            if is_dense and has_several_fields:
                continue
            style = {"color": next(grey_colours), "marker": "s"} if is_dense else {}
            label = ", ".join(
                [
                    *list_distinct_values(group[0], line_fields),
                    *[format_heading(field)] * has_several_fields,
                ]
            )
            charts.draw_line(
                axis, group, lambda row, field=field: row.get(field), label=label or None, **style
            )

    def time_call(self, sample: dict[str, Any], call_name: str, call: Callable[[], Any]) -> Timing:
        """Return the time of ``call``. If no CUDA graph was timed, note the reason in ``sample``.

        Args:
            sample: the sample, with the field ``without_graph``.
            call_name: name of the timed call in this field.
            call: the function to time.
        """
        timing = self.bench.time(call)
        if timing.no_graph_reason:
            sample["without_graph"][call_name] = timing.no_graph_reason
        return timing

    def make_error_fields(self, error: Exception) -> dict[str, Any]:
        """Return the fields of a sample after an error.

        If the op has the field ``fits``, it is False after a lack of memory, or else None.
        """
        fits_field = (
            {"fits": False if is_out_of_memory(error) else None}
            if "fits" in self.RESULT_FIELDS
            else {}
        )
        return {"error": summarise_error(error), **fits_field}

    def search_longest(
        self,
        searched_fields: Mapping[str, Any],
        samples: Sequence[Row],
        step_tokens: int,
        estimated_length: int = 0,
    ) -> Iterator[dict[str, Any]]:
        """Yield cases until the longest length that fits into memory is known.

        Yields no case if the memory of the device is unknown. The search ends if a case fails for
        another reason than a lack of memory.

        Args:
            searched_fields: the fields of the cases, without the length.
            samples: the samples of all cases. The caller must append the sample of each yielded
                case before it asks for the next case.
            step_tokens: number of tokens of which lengths are multiples.
            estimated_length: estimated length; the first cases are a little shorter and longer. 0:
                none.
        """
        while True:
            searched_samples = [row for row in samples if searched_fields.items() <= row.items()]
            fits_by_length = {row["length"]: row["fits"] for row in searched_samples}
            length = choose_next_length(
                fits_by_length,
                step_tokens,
                [int(factor * estimated_length) for factor in SEARCH_FACTORS],
            )
            if (
                None in fits_by_length.values()
                or length is None
                or self.bench.available_gib() is None
            ):
                return
            yield {**searched_fields, "length": length, "sought": True}


def choose_next_length(
    fits_by_length: Mapping[int, bool | None], step_tokens: int, likely_lengths: Iterable[int] = ()
) -> int | None:
    """Return the next length to try in the search for the longest length that fits.

    Until a length does not fit, the next length is the shortest of ``likely_lengths`` above all
    lengths that fit, or else twice the longest length that fits. Then the search halves the
    interval.

    Args:
        fits_by_length: length -> True if the length fits, and False if it does not fit.
        step_tokens: number of tokens of which lengths are multiples.
        likely_lengths: lengths to try first.

    Returns:
        The length; None if the longest length is known.
    """
    longest_fitting_steps = max(
        (length // step_tokens for length, fits in fits_by_length.items() if fits), default=0
    )
    shortest_failing_length = min(
        (length for length, fits in fits_by_length.items() if not fits), default=None
    )
    if shortest_failing_length is None:
        likely_steps_above = [
            length // step_tokens
            for length in likely_lengths
            if length // step_tokens > longest_fitting_steps
        ]
        return min(likely_steps_above, default=max(1, 2 * longest_fitting_steps)) * step_tokens
    # the longest multiple of ``step_tokens`` below the shortest length that does not fit
    longest_untried_steps = (shortest_failing_length - 1) // step_tokens
    return (
        (longest_fitting_steps + longest_untried_steps + 1) // 2 * step_tokens
        if longest_untried_steps > longest_fitting_steps
        else None
    )


def describe_longest(rows: Sequence[Row], group_fields: Mapping[str, str]) -> list[str]:
    """Return a sentence on the longest length that fits, for each group of searched rows.

    Args:
        rows: the rows.
        group_fields: heading -> field that distinguishes groups.
    """
    sentences = []
    for group in group_rows(rows, group_fields.values()):
        fitting_rows = [row for row in group if row["fits"]]
        failing_lengths = [row["length"] for row in group if row["fits"] is False]
        if fitting_rows and failing_lengths and any(row["sought"] for row in group):
            longest_row = max(fitting_rows, key=itemgetter("length"))
            value_phrases = "".join(
                f" for {value}"
                for value in list_distinct_values(
                    longest_row, select_varying_columns(rows, group_fields)
                )
            )
            estimate_phrase = (
                f"; estimated: {longest_row['estimate']:,}" if longest_row.get("estimate") else ""
            )
            sentences.append(
                f"{longest_row['length']:,} tokens are the longest that fit{value_phrases}: "
                f"{format_seconds(longest_row['ms'])} s, "
                f"{format_digits(longest_row['peak_gib'])} of "
                f"{format_digits(longest_row['room_gib'])} GiB at the peak; "
                f"{min(failing_lengths):,} tokens do not fit{estimate_phrase}."
            )
    return sentences


def sort_by_length(
    samples: Sequence[Row], derived_fields: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return a row per sample, sorted by length, with None in the fields ``derived_fields``."""
    ordered_samples = sorted(samples, key=lambda sample: sample["length"])
    return [{**sample, **dict.fromkeys(derived_fields)} for sample in ordered_samples]


def format_run_description(inputs_phrase: str, settings: Mapping[str, Any]) -> str:
    """Return a description of inputs, config and timing method for a report.

    Args:
        inputs_phrase: description of the inputs.
        settings: the recorded settings.
    """
    recorded_config = settings["cab_config"]
    changed_fields, default_config = (
        find_changed_fields(recorded_config),
        get_default_fields(recorded_config),
    )
    config_phrase = f"CabConfig with {changed_fields}" if changed_fields else "default CabConfig"
    if is_from_earlier_version(recorded_config):
        config_phrase += " (the earlier default: 8 typical queries on every key)"
    if recorded_config.keys() - default_config.keys():
        config_phrase = "block selection of cab_hf 0.2, with the settings in the command"
    return f"{inputs_phrase}; {config_phrase}.\n\nMethod: {settings['method']}."


def select_varying_columns(rows: Sequence[Row], columns: Mapping[str, str]) -> dict[str, str]:
    """Return the items of ``columns`` whose field has different values among the rows.

    Args:
        rows: the rows.
        columns: heading -> field.
    """
    return {
        heading: field_name
        for heading, field_name in columns.items()
        if len({row.get(field_name) for row in rows}) > 1
    }


def format_remarks(rows: Sequence[Row], group_fields: Mapping[str, str]) -> dict[str, str]:
    """Return {"Remarks": Markdown table of the texts in `REMARK_FIELDS`}; {} without texts.

    Equal texts for several lengths, or for several kernels, share a line.

    Args:
        rows: the rows.
        group_fields: heading -> field that distinguishes rows of one length.
    """
    # ((*values of ``group_fields``, kind, reason), name of a kernel or "") -> formatted lengths
    remark_lengths_by_key: dict[tuple, dict[str, None]] = {}
    for (field, remark_kind), row in itertools.product(REMARK_FIELDS.items(), rows):
        reasons = row.get(field) or {}
        for kernel_name, reason in (
            reasons if isinstance(reasons, Mapping) else {"": reasons}
        ).items():
            remark_key = (*(row[column] for column in group_fields.values()), remark_kind, reason)
            remark_lengths_by_key.setdefault((remark_key, kernel_name), {})[
                f"{row['length']:,}"
            ] = None
    # (*values of ``group_fields``, kind, reason, joined lengths) -> names of kernels
    kernel_names_by_remark: dict[tuple, list[str]] = {}
    for (remark_key, kernel_name), remark_lengths in remark_lengths_by_key.items():
        kernel_names_by_remark.setdefault((*remark_key, ", ".join(remark_lengths)), []).append(
            kernel_name
        )
    headings = (
        *(FIELD_HEADINGS.get(heading, heading) for heading in group_fields),
        "what",
        "reason",
        "tokens",
        "for",
    )
    table_rows = [
        dict(zip(headings, (*remark_key, ", ".join(remark_kernels)), strict=True))
        for remark_key, remark_kernels in kernel_names_by_remark.items()
    ]
    table_columns = headings if any(table_row["for"] for table_row in table_rows) else headings[:-1]
    return {"Remarks": markdown_table(table_rows, table_columns)} if table_rows else {}


def list_distinct_values(row: Row, value_fields: Mapping[str, str]) -> list[str]:
    """Return the values by which a row differs from others; numbers get a heading: "ranks 2".

    Args:
        row: the row.
        value_fields: heading -> field; fields with None are left out.
    """
    value_by_heading = {
        heading: row[field_name]
        for heading, field_name in value_fields.items()
        if row[field_name] is not None
    }
    return [
        value if isinstance(value, str) else f"{heading} {value:g}"
        for heading, value in value_by_heading.items()
    ]


def format_heading(field_name: str) -> str:
    """Return the table heading of a field."""
    return FIELD_HEADINGS.get(field_name, field_name.replace("_", " ").replace("gib", "GiB"))


def is_sparse_cab(implementation_name: Any) -> bool:
    """Return True if ``implementation_name`` names sparse attention by cab_hf."""
    return str(implementation_name).startswith("cab") and implementation_name != CAB_DENSE


def format_table(rows: Sequence[Row], hidden_fields: Sequence[str] = ()) -> str:
    """Return a Markdown table with a column for each field whose values are numbers or strings.

    Args:
        rows: the rows.
        hidden_fields: fields without a column.
    """
    field_names = dict.fromkeys(field_name for row in rows for field_name in row)
    formatter_by_heading = {}
    for field_name in field_names:
        value_types = {type(row.get(field_name)) for row in rows} - {type(None)}
        if field_name not in hidden_fields and value_types and value_types <= {int, float, str}:
            formatter_by_heading[format_heading(field_name)] = partial(format_field, field_name)
    return markdown_table(rows, formatter_by_heading)


def format_field(field_name: str, row: Row) -> str | None:
    """Format the field ``field_name`` of a row for a table."""
    field_value = row.get(field_name)
    if field_value is None or isinstance(field_value, str):
        return field_value
    if field_name in PERCENT_FIELDS:
        return format_percent(field_value)
    if "over_" in field_name or field_name == "ceiling":
        return format_speed_up(field_value)
    number_text = f"{field_value:,}" if isinstance(field_value, int) else format_digits(field_value)
    return (
        f"≈ {number_text}"
        if field_name == "baseline_ms" and row.get("extrapolated")
        else number_text
    )
