"""Ablation: what each part of the default is worth, one change at a time, on texts of your own.

Fidelity with a method a change: the same probes, samples and resumption, every change paired with
dense attention and with the default itself. Cells are those of fidelity.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from cab_hf.checks import short
from cab_hf.config import CabConfig
from cab_hf.eval import charts, fidelity
from cab_hf.eval.comparison import cell_of
from cab_hf.eval.experiment import Row
from cab_hf.eval.fidelity import (
    ASKED,
    CONTINUATION,
    RECALL,
    Fidelity,
    question_of,
    table_a_text,
)
from cab_hf.eval.intervals import LEVEL, mean_interval, paired_difference
from cab_hf.eval.methods import Cab, Dense, Full
from cab_hf.eval.report import column, difference, digits, grouped
from cab_hf.runs.markdown import plain
from cab_hf.runs.settings import by_device, comma_separated, option, require

ALONE = (Dense.name, Full.name, Cab.name)
GIVEN = "Settings that were given as {}."
LEAST_BLOCK = 16  # tokens
place_of = itemgetter("text", "length")


class Change(NamedTuple):
    """Fields of the default that are set otherwise, and what that says in a sentence."""

    fields: Mapping[str, Any]
    says: str


def changes(config: CabConfig) -> dict[str, Change]:
    """Name -> a change of ``config``; without those that would change nothing."""
    query_block, key_block = config.query_block, config.key_block
    exact, table = config.exact_queries, isinstance(config.exact_queries, tuple)
    rows = {
        "rows_none": Change(
            {"exact_queries": 0},
            "No query is scored exactly; block summaries choose, and curvature what is added.",
        ),
        "rows_half": Change(
            {"exact_queries": exact if table else exact // 2 or exact},
            "Half as many outlier queries are scored exactly.",
        ),
        "rows_twice": Change(
            {"exact_queries": exact if table else min(2 * exact, query_block)},
            "Twice as many outlier queries are scored exactly.",
        ),
        "rows_all": Change(
            {"exact_queries": query_block},
            "All queries are scored exactly, not only those least like their block's mean.",
        ),
        "curvature_none": Change(
            {"exact_queries": 0, "curvature": "none"},
            "Block summaries choose, and what is added goes by them too, without curvature.",
        ),
        "curvature_forman": Change(
            {"exact_queries": 0, "curvature": "forman"},
            "Block summaries choose, and Forman-Ricci curvature what is added.",
        ),
        "bounds_none": Change(
            {"coarsen": "mean"}, "A key block is summarised by its mean, without bounds."
        ),
        "bounds_loudest": Change(
            {"coarsen": "max_l2"}, "A key block is summarised by its key of largest norm."
        ),
        "mass_none": Change(
            {"top_p": 0.001}, "No block is kept for the mass that it is estimated to hold."
        ),
        "mass_half": Change({"top_p": 0.5}, "Blocks are kept for half of the estimated mass."),
        "mass_most": Change({"top_p": 0.99}, "Blocks are kept for 0.99 of the estimated mass."),
        "top_none": Change(
            {"top_k_share": 0.0}, "No block is added for what a single query needs of it."
        ),
        "top_more": Change(
            {"top_k_share": 0.05}, "A twentieth of a row's blocks is added for single queries."
        ),
        "tail_none": Change(
            {"dense_tail_blocks": 0}, "The last queries of a text choose like all others."
        ),
        "sinks_none": Change({"sink_blocks": 0}, "The beginning of a text is not always kept."),
        "local_none": Change(
            {"local_blocks": 0}, "Of what stands before a row only its own positions are kept."
        ),
        "local_more": Change(
            {"local_blocks": 4 * config.local_blocks}, "Four times as many blocks before a row."
        ),
        "query_block_half": Change(
            {
                "query_block": query_block // 2,
                "exact_queries": exact if table else min(exact, query_block // 2),
            },
            "Half as many queries share a choice, and as many of them are scored exactly.",
        ),
        "query_block_twice": Change(
            {"query_block": 2 * query_block},
            "Twice as many queries share a choice, and as many of them are scored exactly.",
        ),
        "key_block_half": Change(
            {"key_block": key_block // 2}, "Half as many keys are attended or skipped together."
        ),
        "key_block_twice": Change(
            {"key_block": 2 * key_block}, "Twice as many keys are attended or skipped together."
        ),
    }
    return {name: change for name, change in rows.items() if _changes(config, change)}


def _changes(config: CabConfig, change: Change) -> bool:
    """Whether it is another config; not one of blocks that are too small."""
    sizes = [change.fields.get(name, LEAST_BLOCK) for name in ("query_block", "key_block")]
    return min(sizes) >= LEAST_BLOCK and config.changed(**change.fields) != config


@dataclass(frozen=True)
class Settings(fidelity.Settings):
    """What a run is told. None stands for a default that depends on the device."""

    methods: tuple[str, ...] | None = by_device(
        ALONE,
        ALONE,
        "comma-separated, as of fidelity; the changes come on top",
        comma_separated(str),
    )
    changes: tuple[str, ...] = option(
        (), "comma-separated names of changes of cab; default: all", comma_separated(str)
    )
    probes: tuple[str, ...] = option(
        (CONTINUATION, ASKED, RECALL), "comma-separated, as of fidelity", comma_separated(str)
    )
    out: str = option("ablation_results", "folder for the results; a run found there goes on")

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in (Dense.name, Cab.name):
            require(
                self, "methods", name in self.methods, f"with {name}, which all is held against"
            )

    @cached_property
    def configs(self) -> dict[str, CabConfig]:
        """The default, ``--cab`` over it, one config a change, and those of ``--variant``."""
        given = super().configs
        default = given[Cab.name]
        chosen = (default.predictor, default.select) == ("curvature", "clusters")
        require(self, "cab", chosen, "settings that leave predictor and select at their default")
        known = changes(default)
        for name in self.changes:
            require(self, "changes", name in known, f"of {', '.join(known)}", name)
        changed = {
            f"{Cab.name}:{name}": default.changed(**change.fields)
            for name, change in known.items()
            if name in self.changes or not self.changes
        }
        for name in changed:
            taken = f"NAME=... of other names than the changes, such as {name}"
            require(self, "variant", name not in given, taken)
        return {Cab.name: default, **changed, **given}


class Ablation(Fidelity):
    """A case is one text read under one change of the default; the rest is fidelity's."""

    name = "ablation"
    purpose = "what each part of the default is worth, one change at a time"
    title = "Ablation of the default"
    caption = "what each change adds to the KL behind the prompt"
    Settings = Settings

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Those of fidelity; changes also say what they change, and what that does to the default.

        Differences to the default are paired by text, probe and index: of KL a token the mean over
        documents with Student's interval, of recall with Newcombe's over keys. Of KL ``among_low``
        and ``among_high`` are the edges of Bonferroni's, for all changes of a text and a length.
        """
        configs = settings.get("cab_configs", {})
        default = {question_of(s): s for s in samples if s["method"] == Cab.name}
        rows = Fidelity.rows(samples, settings)
        changed = [row for row in rows if row["method"].startswith(f"{Cab.name}:")]
        number = Counter(place_of(row) for row in changed if row.get(CONTINUATION))
        for row in changed:
            name = row["method"]
            own = [s for s in samples if cell_of(s) == cell_of(row)]
            pairs = [(s, default[question_of(s)]) for s in own if question_of(s) in default]
            row["to_default"] = dict(_to_default(pairs, number[place_of(row)]))
            if name in configs:
                row |= _described(name, configs)
        return rows

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        shown = {
            heading: write
            for heading, (needs, write) in COLUMNS.items()
            if needs is None or any(needs(row) for row in rows)
        }
        return table_a_text(rows, shown)

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """Those of fidelity, and which changes move the KL by more than chance.

        Of many changes some would seem to by their own intervals.
        """
        said = Fidelity.readings(rows)
        for own in grouped([row for row in rows if _kl(row)], "text", "length"):
            worse = [row["method"] for row in own if _kl(row).get("among_low", 0) > 0]
            better = [row["method"] for row in own if _kl(row).get("among_high", 0) < 0]
            said.append(
                f"On {plain(own[0]['text'])}, {own[0]['length']} tokens, of {len(own)} changes "
                f"these raise the KL behind the prompt: {_names(worse)}; these lower it: "
                f"{_names(better)} (95 % for all of them together)."
            )
        return said

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        return (
            "Each row changes one thing of cab, the default, and nothing makes up for what that "
            "does to its density and its time, which stand beside. Sinks, local blocks and tails "
            "are counted in blocks, and so change with their sizes. To default: the difference to "
            "cab on the same texts; of KL the mean over documents with Student's interval, of "
            "recall over keys with Newcombe's, 95 % each. The sentence on which changes move the "
            "KL goes by wider intervals, Bonferroni's, which hold with 95 % for all changes of a "
            f"text and a length together. {Fidelity.notes(settings)}"
        )

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """The KL that each change adds to the default, with its interval; a panel a cell."""
        panels = grouped([row for row in rows if _kl(row)], "text", "length") or [[]]
        most = max(map(len, panels))
        with charts.figure(
            path, 1, len(panels), figsize=(4.6 * len(panels), 1.6 + 0.24 * most)
        ) as axes:
            for axis, own in zip(axes.flat, panels, strict=True):
                for at, row in enumerate(own):
                    kl = _kl(row)
                    low, high = (kl.get(edge, kl["delta"]) for edge in ("delta_low", "delta_high"))
                    reach = [[kl["delta"] - low], [high - kl["delta"]]]
                    axis.errorbar(
                        [kl["delta"]], [at], xerr=reach, fmt="o", color="C0", markersize=4
                    )
                axis.axvline(0, color="black", linewidth=0.8)
                names = [row["method"].partition(":")[2] for row in own]
                axis.set_yticks(range(len(own)), names, fontsize=8, parse_math=False)
                axis.invert_yaxis()
                axis.set_xlabel("KL behind the prompt, nats a token more than cab", fontsize=8)
                if own:
                    where = f"{own[0]['text']}, {own[0]['length']:,} tokens"
                    axis.set_title(where, fontsize=9, parse_math=False)
                axis.grid(alpha=0.25)


def _to_default(
    pairs: Sequence[tuple[Row, Row]], number: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(probe, difference to the default) for each probe that both were asked.

    ``number`` changes stand side by side.
    """
    for own in grouped(
        [{"probe": ours["probe"], "pair": (ours, base)} for ours, base in pairs], "probe"
    ):
        probe, both = own[0]["probe"], [each["pair"] for each in own]
        if all("kl" in s for s in both[0]):
            ours, base = ([s["kl"] / s["count"] for s in side] for side in zip(*both, strict=True))
            fields = {"delta": fmean(ours) - fmean(base), "pairs": len(both)}
            if len(both) > 1:
                _, fields["delta_low"], fields["delta_high"] = mean_interval(ours, base)
                among = mean_interval(ours, base, 1 - (1 - LEVEL) / number)
                _, fields["among_low"], fields["among_high"] = among
            yield probe, fields
        elif all("right" in s for s in both[0]):
            keys = [each for s, t in both for each in zip(s["right"], t["right"], strict=True)]
            interval = paired_difference(*zip(*keys, strict=True))
            names = ("delta", "delta_low", "delta_high")
            yield probe, {**dict(zip(names, interval, strict=True)), "pairs": len(keys)}


def _described(name: str, configs: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What a change sets, and its sentence; of configs as they are recorded."""
    default, own = configs[Cab.name], configs[name]
    fields = {field: value for field, value in own.items() if value != default.get(field)}
    name = name.partition(":")[2]
    known = changes(CabConfig.from_dict(default)).get(name)
    return {
        "change": ", ".join(f"{field}={short(value)}" for field, value in fields.items()),
        "says": GIVEN.format(name) if known is None else known.says,
    }


def _kl(row: Row) -> Row | None:
    return row.get("to_default", {}).get(CONTINUATION)


def _kl_difference(result: Row) -> str:
    """``+0.0123 [+0.0100, +0.0146]``, without the interval where there is one document."""
    names = ("delta", "delta_low", "delta_high")
    values = (result[name] for name in names if name in result)
    mean, *edges = (f"{'-' if value < 0 else '+'}{digits(abs(value))}" for value in values)
    return f"{mean}{' [{}, {}]'.format(*edges) if edges else ''}"


def _names(methods: Sequence[str]) -> str:
    return ", ".join(method.partition(":")[2] for method in methods) or "none"


def _milliseconds(row: Row) -> str | None:
    return None if row.get("attend_ms") is None else digits(row["predict_ms"] + row["attend_ms"])


# heading -> what tells whether a row has it, None for always; and what is shown of a row
COLUMNS = {
    "method": (None, "method"),
    "what was changed": (None, "change"),
    "length": (None, "length"),
    "density": (None, "density"),
    "KL behind the prompt": (
        lambda row: row.get(CONTINUATION),
        column(lambda result: digits(result["kl"]), CONTINUATION),
    ),
    "KL to default": (_kl, column(_kl_difference, "to_default", CONTINUATION)),
    **{
        f"{title} to default": (
            lambda row, probe=probe: row.get("to_default", {}).get(probe),
            column(difference, "to_default", probe),
        )
        for probe, title in ((ASKED, "end-of-prompt recall"), (RECALL, "in-text recall"))
    },
    "attention ms": (lambda row: row.get("attend_ms"), _milliseconds),
    "what that is": (None, "says"),
}

EXPERIMENT = Ablation
