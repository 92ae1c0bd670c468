"""Perplexity behind a long context of books: what sparse prefill loses of what context brings.

A method reads a context, and the tokens behind it are read through the KV cache, teacher forced.
Contexts of all lengths end at the same token of a book, so that the same tokens are predicted
behind each of them. Cells are (method, books, length, budget); a case is one place in one book.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from cab_hf.eval import charts
from cab_hf.eval.comparison import (
    RATIO,
    TIME,
    TIME_COLUMNS,
    Comparison,
    ComparisonSettings,
    cell_fields,
    cells_of,
    draw_legend,
    draw_lines,
    fewer_readings,
    finish_panel,
    kind_of,
    looks_of,
    mark_fewer,
    notes_how,
    notes_time,
    off_readings,
    parse_budget,
    perplexity,
    ratio_to_dense,
    time_said,
)
from cab_hf.eval.experiment import Row
from cab_hf.eval.haystack import read_text
from cab_hf.eval.long_run import ASSUMED_DENSITY, Load, is_sparse
from cab_hf.eval.methods import Cab, CabAtBudget, Dense, Full, Method, Streaming, exact_readings
from cab_hf.eval.passkey import MATCH
from cab_hf.eval.report import column, grouped, markdown_table
from cab_hf.eval.teacher_forcing import TeacherForced, nll
from cab_hf.runs.markdown import plain
from cab_hf.runs.settings import (
    UsageError,
    by_device,
    comma_separated,
    first_line,
    option,
    parse_length,
    refused_as,
    require,
)
from cab_hf.texts.needles import Tokens, leading_tokens

# the 100 test books of PG-19 (Rae et al. 2020, arXiv 1911.05507), and where the hub has them as a
# table: what DeepMind has there is a script, which `datasets` does not run
PG19, PG19_TEST = "pg19", "emozilla/pg19-test"
CONTINUATION = "continuation"
question_of = itemgetter("text", "length", "probe", "index")
NAMED = 5  # books that are left out, in a sentence
# what is drawn around CAB's own density
RING = {"fillstyle": "none", "markersize": 11, "color": "black"}


@dataclass(frozen=True)
class Settings(ComparisonSettings):
    """What a run is told. None stands for a default that depends on the device."""

    methods: tuple[str, ...] | None = by_device(
        ("dense", "full", "cab", "streaming", "mean_pooled", "xattention_fitted"),
        ("dense", "full", "cab", "streaming"),
        "comma-separated, as of fidelity; cab runs with its default and at each budget",
        comma_separated(str),
    )
    books: str = option(
        PG19, f"a folder with a .txt file a book; {PG19}: its 100 test books, from the hub"
    )
    lengths: tuple[int, ...] | None = by_device(
        (2048, 4096, 8192),
        (512, 1024),
        "comma-separated tokens of context, which all end at the same place of a book",
        comma_separated(parse_length),
    )
    places: int = option(1, "places in each book after which tokens are predicted", int)
    continuation: int | None = by_device(512, 64, "tokens to predict after a context", int)
    budgets: tuple[str | float, ...] = option(
        (0.05, 0.1, 0.2, 0.4),
        f"comma-separated densities; {MATCH}: that of --{MATCH}, for all methods but cab",
        comma_separated(parse_budget),
    )
    out: str = option("books_results", "folder for the results; a run found there goes on")

    def __post_init__(self) -> None:
        super().__post_init__()
        for method in self.methods:
            hidden = kind_of(method).hides_needle
            require(self, "methods", not hidden, f"without {method}: no key is asked for", method)
        compared = Dense.name in self.methods
        require(self, "methods", compared, f"with {Dense.name}, which all is held against")
        for name in ("places", "continuation"):
            require(self, name, getattr(self, name) > 0, "at least 1")
        there = self.books == PG19 or any(Path(self.books).glob("*.txt"))
        require(self, "books", there, f"a folder with .txt files, or {PG19}")


class Excerpt(NamedTuple):
    """What is read of a book.

    Attributes:
        end: tokens of the book before what is predicted.
        tokens: those of the longest context, and behind them those that are predicted.
    """

    book: str
    end: int
    tokens: array


class Books(Comparison):
    """A case is one place of a book under one method; a sample is how well it was predicted."""

    name = "books"
    purpose = "perplexity behind contexts of books, by density and by time"
    title = "Perplexity behind the context"
    caption = "perplexity over that of dense attention, by density and by attention time"
    Settings = Settings
    CASE = (*Comparison.CELL, "probe", "index")
    GROWS = (*Comparison.GROWS, "places")

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        # tokens that are read, as those that others write
        self.WRITTEN = settings.continuation

    def check(self) -> None:
        super().check()
        # refuses what are no books
        _ = self.books

    @cached_property
    def contents(self) -> dict[str, str]:
        """Name -> text of each book.

        Raises:
            UsageError: a file is no UTF-8 text, or the hub has not given them.
        """
        given = self.settings.books
        if given != PG19:
            files = sorted(Path(given).glob("[!.]*.txt"))
            return {file.name: read_text("books", file) for file in files}
        from datasets import load_dataset

        with refused_as(
            lambda error: (
                f"books is {PG19!r}, which the hub has not given ({first_line(error)}); give a "
                "folder with .txt files."
            )
        ):
            texts = load_dataset(PG19_TEST, split="test")["text"]
        return {f"{at:03}": text for at, text in enumerate(texts)}

    @cached_property
    def books(self) -> dict[str, array]:
        """Name -> tokens of each book that is long enough.

        Raises:
            UsageError: none is.
        """
        settings, result = self.settings, {}
        least = max(settings.lengths) + settings.continuation
        for name, text in self.contents.items():
            ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if len(ids) >= least:
                result[name] = array("i", ids)
        if not result:
            raise UsageError(
                f"books must have one of {least:,} tokens or more, for the longest of lengths and "
                f"what is predicted behind it; none of the {len(self.contents)} in "
                f"{settings.books!r} has as many."
            )
        return result

    @property
    def too_short(self) -> list[str]:
        """Books that are left out."""
        return [name for name in self.contents if name not in self.books]

    @cached_property
    def excerpts(self) -> list[Excerpt]:
        """One a place and book: the first place of all books, then the second."""
        settings, result = self.settings, []
        longest, read = max(settings.lengths), settings.continuation
        for place in range(settings.places):
            for name, tokens in self.books.items():
                rng = random.Random(f"{settings.seed}/{name}/{place}")
                end = rng.randint(longest, len(tokens) - read)
                result.append(Excerpt(name, end, tokens[end - longest : end + read]))
        return result

    def reading(self, index: int, length: int) -> TeacherForced:
        """The context of ``length`` tokens at a place, and what stands behind it."""
        tokens, end = self.excerpts[index].tokens, max(self.settings.lengths)
        begun = leading_tokens(self.tokenizer)
        read = (*begun, *tokens[end - length + len(begun) :])
        return TeacherForced(read, ((length, len(read)),), length)

    def ahead(self, ranks: int = 1) -> str:
        return "; ".join([super().ahead(ranks), *_left_out(self.too_short)])

    @property
    def texts(self) -> Sequence[str]:
        given = self.settings.books
        return [given if given == PG19 else Path(given).resolve().name]

    def typical(self, text: str, length: int) -> Tokens:
        return self.reading(0, length).tokens[:length]

    def recorded(self) -> dict[str, Any]:
        digest = sha256("\0".join(self.contents.values()).encode()).hexdigest()
        books = {"name": self.texts[0], "sha256": digest, "read": len(self.books)}
        return {**super().recorded(), "books": {**books, "too_short": self.too_short}}

    @cached_property
    def arms(self) -> list[tuple[str, str | float | None]]:
        """Those of others, and CAB at each budget that is a density."""
        settings = self.settings
        own = [name for name in settings.configs if name in settings.compared]
        return super().arms + [
            (name, budget)
            for budget in settings.budgets
            for name in own
            if budget != MATCH and CabAtBudget.takes(settings.configs[name])
        ]

    def kind(self, case: Mapping[str, Any]) -> type[Method]:
        kind = super().kind(case)
        return CabAtBudget if kind is Cab and case["budget"] is not None else kind

    def questions(self, method: str) -> list[dict[str, Any]]:
        read = [{"probe": CONTINUATION, "index": index} for index in range(len(self.excerpts))]
        return read + [{"probe": TIME, "index": 0}] * (self.clock is not None)

    def question(self, case: Mapping[str, Any]) -> tuple[Any, ...]:
        return question_of(case)

    def load(self, case: Mapping[str, Any]) -> Load:
        budget = None if self.waits(case) else case["budget"]
        density = (budget or ASSUMED_DENSITY) if is_sparse(kind_of(case["method"])) else 1.0
        behind = 0 if case["probe"] == TIME else self.settings.continuation
        return Load(case["length"] + behind, density, logits=behind or 1)

    def probed(self, case: Mapping[str, Any], method: Method) -> dict[str, Any]:
        excerpt, reading = self.excerpts[case["index"]], self.reading(case["index"], case["length"])
        # others keep all keys
        cache = method.cache(self.model) if isinstance(method, Streaming) else None
        how = self.settings.chunk, cache, self.settings.prefill_chunk
        result = self.under(method, lambda: nll(self.model, reading, *how))
        return {"book": excerpt.book, "end": excerpt.end, "tokens": len(reading.tokens), **result}

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """One row a cell: perplexity, and its ratio to that of dense attention.

        The ratio is the geometric mean over books with Student's interval, paired by place; those
        of one book are put together first. ``to_shortest`` has the same against dense attention
        behind the shortest context.
        """
        dense = {
            (s["length"], s["index"]): s
            for s in samples
            if s["method"] == Dense.name and s["probe"] == CONTINUATION
        }
        shortest, rows = min(settings["lengths"]), []
        # processes that share a run measure in no order
        cells = cells_of(sorted(samples, key=_place))
        for cell in cells:
            own = [s for s in cell if s["probe"] == CONTINUATION]
            row = cell_fields(cell, own)
            for name, length in (("perplexity", row["length"]), ("to_shortest", shortest)):
                pairs = [
                    (s, dense[length, s["index"]]) for s in own if (length, s["index"]) in dense
                ]
                if own:
                    row[name] = perplexity(own, _by_book(pairs))
            rows.append(row)
        mark_fewer(rows, cells)
        return rows

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        shown = COLUMNS | {
            heading: write
            for heading, (needs, write) in TIME_COLUMNS.items()
            if any(row.get(needs) for row in rows)
        }
        return {
            f"On {plain(own[0]['text'])}": markdown_table(own, shown)
            for own in grouped(rows, "text")
        }

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """What context brings dense attention, and what CAB's default keeps behind the longest."""
        values = [
            f"{row['perplexity']['value']:.2f} behind {row['length']:,} tokens"
            for row in rows
            if row["method"] == Dense.name and row.get("perplexity")
        ]
        said = [f"Dense attention has perplexity {', '.join(values)}."] * bool(values)
        cab = [row for row in rows if (row["method"], row["budget"]) == (Cab.name, None)]
        for row in cab[-1:]:
            if ratio := ratio_to_dense(row.get("perplexity", {})):
                said.append(
                    f"Behind {row['length']:,} tokens cab attends {row['density']:.0%} of the pairs"
                    f"{time_said(row)}, and has {ratio} × the perplexity of dense attention."
                )
        return [*said, *off_readings(rows), *fewer_readings(rows), *exact_readings(rows)]

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        books = settings["books"]
        left_out = "".join(f" {said}." for said in _left_out(books["too_short"]))
        return notes_how(settings) + (
            f"The same {settings['continuation']} tokens of a book are predicted behind contexts "
            "of all lengths, which end where these tokens begin, at a place drawn by the seed "
            f"({settings['places']} in each of {books['read']} books). The method reads the "
            "context; those tokens are read through the KV cache, teacher forced, by exact "
            "attention over all keys, but for streaming, which keeps sinks and window alone. "
            "Ratios of perplexity are the geometric mean over books, paired, with Student's 95 % "
            "interval; the places of a book count as one. × dense behind the shortest: over dense "
            "attention behind the shortest context; below 1, context has helped. Full, the sparse "
            "path with all blocks, shows what of it kernels and rounding leave. Cab without a "
            "budget is its default; at a budget it has the threshold of mass with this density, in "
            "the layers that are sparse, on the first book. Density: attended "
            f"over causal (query, key) pairs of the context. {notes_time().rstrip()}{left_out}"
        )

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """The ratio to dense over density, and over time where it was measured; a row a length."""
        drawn = [
            row
            for row in rows
            if row["method"] not in (Dense.name, Full.name)
            and row.get("perplexity", {}).get("ratio") is not None
        ]
        panels, looks = grouped(drawn, "text", "length") or [[]], looks_of(drawn)
        timed = any(row.get("over_dense") is not None for row in drawn)
        shares = ("density", "over_dense") if timed else ("density",)
        size = (max(7.2, 4.6 * len(shares)), 0.9 + 2.6 * len(panels))
        with charts.figure(path, len(panels), len(shares), figsize=size, sharey="row") as axes:
            for beside, own in zip(axes, panels, strict=True):
                for axis, share in zip(beside, shares, strict=True):
                    there = [row for row in own if row.get(share) is not None]
                    axis.axhline(1, color="black", linestyle="--", label=Dense.name)
                    draw_lines(axis, there, share, itemgetter("perplexity"), RATIO, looks)
                    for row in there:
                        if row["budget"] is None and kind_of(row["method"]) is Cab:
                            place = row[share], row["perplexity"]["ratio"]
                            axis.plot(*place, "o", label="cab, no budget given", **RING)
                    finish_panel(axis, share)
                    if own:
                        where = f"{own[0]['text']}, {own[0]['length']:,} tokens of context"
                        axis.set_title(where, fontsize=9, parse_math=False)
                beside[0].set_ylabel("perplexity × dense", fontsize=8)
            draw_legend(axes)


EXPERIMENT = Books


def _place(sample: Row) -> tuple[float, int]:
    """Of a sample in its method: the default, densities in order, what is matched."""
    budget = sample["budget"]
    return math.inf if budget == MATCH else budget or 0.0, sample["index"]


def _by_book(pairs: Sequence[tuple[Row, Row]]) -> list[tuple[Row, Row]]:
    """The places of each book put together."""
    books: dict[str, list[tuple[Row, Row]]] = {}
    for ours, base in pairs:
        books.setdefault(ours["book"], []).append((ours, base))
    return [tuple(map(_together, zip(*both, strict=True))) for both in books.values()]


def _together(samples: Sequence[Row]) -> Row:
    return {name: sum(s[name] for s in samples) for name in ("nll", "count")}


def _left_out(books: Sequence[str]) -> list[str]:
    """A sentence on books that are too short, without its full stop."""
    named = ", ".join(books[:NAMED]) + (", ..." if len(books) > NAMED else "")
    count = "1 book is" if len(books) == 1 else f"{len(books)} books are"
    return [f"{count} too short and left out: {named}"] * bool(books)


def _budget(row: Row) -> Any:
    """A budget, with a word where the density is another one, as forced blocks may have it."""
    budget = row["budget"]
    return f"{budget} (missed)" if "density_over_match" in row else budget


# heading -> what is shown of a row
COLUMNS = {
    **{"method": "method", "length": "length", "budget": _budget, "density": "density"},
    "perplexity": column(lambda result: f"{result['value']:.3f}", "perplexity"),
    "perplexity × dense [95 %]": column(ratio_to_dense, "perplexity"),
    "× dense behind the shortest [95 %]": column(ratio_to_dense, "to_shortest"),
}
