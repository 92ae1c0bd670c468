"""``speed ttft``: the time to the first token of a whole model, by what it attends with.

Of a prompt, or of a question behind tokens that are in the cache already.
Started by torchrun, it deals the prompt out over the ranks, which read it together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cab_hf.eval import charts
from cab_hf.eval.experiment import Row
from cab_hf.eval.kv_cache import cache_arguments
from cab_hf.eval.report import column, digits, grouped, markdown_table, percent, seconds
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.base import (
    DENSITY,
    TOKENS,
    SpeedSettings,
    by_length,
    listed,
    powers,
    remarks,
)
from cab_hf.eval.speed.model import (
    CAB,
    CAB_DENSE,
    SDPA,
    ModelSettings,
    attended_by,
    attending,
    described,
    prefilling,
    prompt_of,
    random_model,
)
from cab_hf.eval.speed.team import Ranked, Team, by_torchrun
from cab_hf.runs.settings import option, parse_length

TIMES = "{:.2f}×".format
# of a rank that an MLP reads at a time: what it makes of half a million is 14 GiB a tensor
MLP_TOKENS = 2**16
# over ranks: of the prompt that compiles all kernels, behind which a first call counts as one that
# is timed if it takes more seconds than that
WARM_UP_TOKENS, WARM_UP_SECONDS = 2**17, 60.0
WIDTHS = dict(zip(CAB, (4.0, 1.5), strict=True))


@dataclass(frozen=True)
class Settings(ModelSettings):
    """What a run of whole prefills is told."""

    KEYS: ClassVar[Mapping[str, str]] = {"length": "lengths", "implementation": "implementations"}

    POSITIVE = (*ModelSettings.POSITIVE, "runs")

    lengths: tuple[int, ...] | None = powers(12, 17)
    implementations: tuple[str, ...] | None = listed(
        (SDPA, "cuDNN", "FA3", "FA4", *CAB), (SDPA, "SDPA", *CAB), "ways to attend"
    )
    runs: int = option(3, "timed runs of every row", int)
    behind: int = option(
        0,
        "tokens in the cache before the prompt, which then is a question about them",
        parse_length,
    )

    def __post_init__(self) -> None:
        asked = self.implementations
        super().__post_init__()
        if by_torchrun() and not asked:
            self._set("implementations", (CAB_DENSE, *CAB))
        # what knows of other ranks
        known = (CAB_DENSE, *CAB)
        if not by_torchrun():
            known = (SDPA, *known, *dense.on(self.device))
        named = set(self.implementations) <= set(known)
        self.check("implementations", named, f"out of {', '.join(known)}")
        self.check("behind", self.behind >= 0, "0 or more")
        if self.behind:
            self.check("behind", not by_torchrun(), "0 where ranks share a prompt")
            block = self.cab_config.query_block
            enough = f"at least query_block={block} each behind a cache, for fewer are read densely"
            self.check("lengths", self.lengths[0] >= block, enough)

    @property
    def positions(self) -> int:
        return super().positions + self.behind

    @property
    def method(self) -> str:
        what, where = "prompt", ""
        if self.behind:
            what = "question"
            where = (
                f" behind a DynamicCache of {self.behind:,} tokens, random keys and values, to "
                "which it is cropped before every run, outside of the time,"
            )
        text = (
            f"median of {self.runs} runs by time.perf_counter after one that warms up, from the "
            f"call of the model on a {what} of random tokens{where} until the device is done: the "
            f"whole {what} is in the cache and the logits of its last token are there; the peak is "
            "all that was allocated, weights and cache included"
        )
        if by_torchrun():
            text += (
                "; all ranks begin together, the slowest of each run and the highest peak of any "
                f"count; a run of more than {WARM_UP_SECONDS:g} s is warmed up by a prompt of "
                f"{WARM_UP_TOKENS:,} tokens"
            )
        return text


class TimeToFirstToken(Ranked):
    """A case is one length, one way to attend, and on how many ranks."""

    name = "speed ttft"
    purpose = "time to the first token of a LLaMA, by what it attends with"
    title = "Time to the first token"
    caption = "time to the first token by length, and what CAB gains"
    Settings = Settings
    CASE = (*Settings.KEYS, "world")
    ADDED: ClassVar[Mapping[str, Any]] = {"world": 1, "behind": 0}
    GROWS = (*Settings.KEYS.values(), "cab", "worlds")

    SHAPE = ("dtype", "behind")
    FOUND = ("ms", "peak_gib", "density", "ceiling", "tflops", "ran_as")
    REPORTED_ERRORS = Exception  # a kernel that is missing, refuses, is wrong or does not fit

    @staticmethod
    def needs_ranks(settings: SpeedSettings) -> bool:
        return by_torchrun()

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        for case in self.settings.asked():
            yield {**case, "world": self.team.size}

    def find(self, sample: dict[str, Any]) -> None:
        settings, length, name = self.settings, sample["length"], sample["implementation"]
        behind = settings.behind
        if self.team.size > 1:
            ms, peak = self.find_across(sample)
        elif behind:
            with asking(settings, length, behind, name) as (call, crop, known):
                ms, peak = self.bench.wall(call, settings.runs, before=crop)
                sample |= known()
        else:
            with prefilling(settings, length, name) as (call, known):
                ms, peak = self.bench.wall(call, settings.runs)
                sample |= known()
        done = settings.attended_flops(length, sample["density"], behind)
        sample |= {
            "ms": ms,
            "peak_gib": peak,
            "ceiling": settings.attended_flops(length, 1.0, behind) / done,
            "tflops": done / ms / 1e9 / self.team.size,
        }

    def find_across(self, sample: dict[str, Any]) -> tuple[float, float | None]:
        """(ms, peak GiB) of a prompt that all ranks read, the rest being written."""
        team, bench, settings = self.team, self.bench, self.settings
        length, name = sample["length"], sample["implementation"]
        team.together(bench.settle)
        parts = settings, length, name, team, MLP_TOKENS, WARM_UP_TOKENS
        with prefilling_across(*parts) as (call, known):
            result = team.slowest(bench, call, settings.runs, warm_up=WARM_UP_SECONDS)
            sample |= known()
        return result.ms, result.peak_gib

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """By length, each beside sdpa and the fastest dense way at its length.

        ``over_sdpa`` and ``over_best`` say how many times faster a row is, ``ratio`` is one over
        the latter.
        """
        derived = ("baseline", "baseline_ms", "ratio", "over_sdpa", "over_best")
        # ways to attend stay in the order they came in
        rows = by_length(samples, derived)
        for alike in grouped(rows, "length", "world"):
            others = {row["implementation"]: row["ms"] for row in alike}
            others = {name: ms for name, ms in others.items() if ms and name not in CAB}
            best = dense.against(others, preferred=())
            for row in alike:
                if best is None or row["ms"] is None:
                    continue
                row |= {"baseline": best, "baseline_ms": others[best]}
                row["ratio"] = row["ms"] / others[best]
                row["over_best"] = 1 / row["ratio"]
                if SDPA in others:
                    row["over_sdpa"] = others[SDPA] / row["ms"]
        return rows

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        """Seconds of every way to attend and what CAB gains, by length; then all there is."""
        columns = {f"{n} s": column(seconds, n, "ms") for n in _implementations(rows)}
        for name in _implementations(rows):
            if name in CAB:
                columns[f"{name} over best dense"] = column(TIMES, name, "over_best")
                columns[f"{name} at most"] = column(TIMES, name, "ceiling")
        lengths = [
            {**alike[0], **{row["implementation"]: row for row in alike}}
            for alike in grouped(rows, "length", "world")
        ]
        ranks = {"ranks": "world"} if is_over_ranks(rows) else {}
        tokens = BEHIND if any(row.get("behind") for row in rows) else TOKENS
        return {
            "Seconds": markdown_table(lengths, tokens | ranks | columns),
            "Every way to attend": markdown_table(rows, tokens | ranks | COLUMNS),
            **remarks(rows, {"way": "implementation"} | ranks),
        }

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """What each of `CAB` gains at the longest prompt, of how much there is to gain."""
        parts = []
        compared = [row for row in rows if row["ratio"] is not None]
        for alike in grouped(compared, "world"):
            on = f" on {alike[0]['world']} ranks" if is_over_ranks(alike) else ""
            for name in CAB:
                ours = [row for row in alike if row["implementation"] == name]
                if not ours:
                    continue
                last = ours[-1]
                where = f"{_behind(ours)}{on}"
                parts.append(
                    f"At {last['length']:,} tokens{where} {name} is {TIMES(last['over_best'])} as "
                    f"fast as {last['baseline']}, the fastest dense way, where attending "
                    f"{percent(last['density'])} of the pairs can bring "
                    f"{TIMES(last['ceiling'])} at most; it is faster "
                    f"{dense.break_even_shown(ours)}."
                )
        return parts

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        text = (
            f"{described(settings)}\n\nsdpa is transformers' own; other dense ways take its place. "
            "cab computes prompts shorter than min_length dense, cab-always none. "
            "At most: operations of the dense model over those at the realised density, attended "
            f"over causal pairs in all layers. TFLOP/s count what is attended. {dense.BREAK_EVEN}"
        )
        if settings.get("behind"):
            text += f"\n\n{CONTINUED}"
        return f"{text}\n\n{ACROSS}" if settings.get("worlds") else text

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """Of the most ranks there are."""
        world = max(row["world"] for row in rows)
        some = [row for row in rows if row["world"] == world]
        on = f" on {world} ranks" if is_over_ranks(some) else ""
        drawn(path, some, f"time to the first token{on}{_behind(some)}")


EXPERIMENT = TimeToFirstToken


@contextmanager
def asking(
    settings: ModelSettings, length: int, behind: int, way: str
) -> Iterator[tuple[Callable[[], Any], Callable[[], Any], Callable[[], dict[str, Any]]]]:
    """(what reads a question, what takes it off the cache again, what then is known of it).

    The question has ``length`` random tokens, behind ``behind`` tokens of random keys and values in
    a `DynamicCache`; reading it gives the logits of its last token. Known is what `prefilling`
    knows, of pairs with the cached tokens too.
    """
    from cab_hf.eval.speed.steps import filled

    model, question = random_model(settings), prompt_of(settings, length)
    cache = filled(model, behind, 1, 0, static=False, config=None)
    cached = cache_arguments(model, cache)

    @torch.inference_mode()
    def call() -> Any:
        return model(question, **cached, logits_to_keep=1)

    def crop() -> None:
        asked = cache.get_seq_length() - behind
        # a crop by nothing is not the same in all versions of transformers
        if asked:
            cache.crop(-asked)

    config = settings.budgeted(length, **CAB.get(way, {}))
    with attending(model, way, config, continues=True):
        yield call, crop, partial(attended_by, model, behind + length, way)


@contextmanager
def prefilling_across(
    settings: ModelSettings, length: int, way: str, team: Team, mlp_tokens: int, warm_up: int
) -> Iterator[tuple[Callable[[], Any], Callable[[], dict[str, Any]]]]:
    """As `prefilling`, where each rank of ``team`` reads its tokens of the prompt.

    What is known is of all ranks, and asked for by all of them. MLPs read at most ``mlp_tokens``
    at a time. Of a prompt longer than ``warm_up``, so many tokens have been read before.
    """
    from cab_hf import context_parallel
    from cab_hf.eval.speed.spread import CP, block_of, causal_pairs, density_of_all
    from cab_hf.patches import stats

    model = random_model(settings)
    with prefilling(settings, length, way) as (_, known_here):
        block = block_of(model)
        pairs = causal_pairs(CP, length, team, block)

        def known() -> dict[str, Any]:
            return {"density": density_of_all(team, known_here()["density"], pairs)}

        prompt = prompt_of(settings, length)
        with context_parallel(model, team.group, block=block), mlp_in_chunks(model, mlp_tokens):
            if length > warm_up:
                team.together(reading(model, prompt[:, :warm_up], team, block))
                # what that one attended is not of the prompt that is asked for
                stats(model, reset=True)
            yield reading(model, prompt, team, block), known


def reading(model: nn.Module, prompt: Tensor, team: Team, block: int) -> Callable[[], Any]:
    """What reads this rank's tokens of a prompt [1, N] into a cache, with the logits of one of
    them: on the rank that holds it, of the prompt's last."""
    from cab_hf.distributed import shard
    from cab_hf.distributed.layout import layout_of

    mine = shard({"input_ids": prompt}, team.group, block)
    layout = layout_of((prompt.shape[1],), team.size, block)
    holder, place = divmod(int(layout.holders[-1]), layout.tokens)
    kept = torch.tensor([place if holder == team.rank else 0], device=prompt.device)

    @torch.inference_mode()
    def call() -> Any:
        return model(**mine, use_cache=True, logits_to_keep=kept)

    return call


@contextmanager
def mlp_in_chunks(model: nn.Module, tokens: int) -> Iterator[None]:
    """Inside, the MLPs of ``model`` read at most so many tokens at a time; the same comes out."""
    mlps = [layer.mlp for layer in model.model.layers]

    def chunked(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            if x.shape[1] <= tokens:
                return function(x)
            out = torch.empty_like(x)
            for start in range(0, x.shape[1], tokens):
                out[:, start : start + tokens] = function(x[:, start : start + tokens])
            return out

        return forward

    for mlp in mlps:
        mlp.forward = chunked(mlp.forward)
    try:
        yield
    finally:
        for mlp in mlps:
            del mlp.forward


def is_over_ranks(rows: Sequence[Row]) -> bool:
    """Whether any of ``rows`` is of several ranks."""
    return any(row["world"] > 1 for row in rows)


def drawn(path: Path, rows: Sequence[Row], what: str) -> None:
    """Seconds by length of every way to attend, and beside it what each of `CAB` gains."""
    lengths = [row["length"] for row in rows]
    with charts.figure(path, 1, 2, figsize=(11, 4.6)) as axes:
        left, right = axes[0]
        greys = iter(charts.GREYS)
        for place, name in enumerate(_implementations(rows)):
            some = [row for row in rows if row["implementation"] == name]
            if name in CAB:
                # wide below narrow: where both run alike, both are seen
                look = {"color": f"C{place}", "linewidth": WIDTHS[name]}
                gained = f"{name} over the fastest dense way"
                charts.line(right, some, itemgetter("over_best"), label=gained, **look)
                dashed = {**look, "linestyle": "--", "marker": "s", "fillstyle": "none"}
                bound = f"    at most, at {name}'s density"
                charts.line(right, some, itemgetter("ceiling"), label=bound, **dashed)
            else:
                look = {"color": next(greys), "marker": "s"}
            charts.line(left, some, lambda row: row["ms"] and row["ms"] / 1e3, label=name, **look)
        right.axhline(1, color="grey", linewidth=1)
        charts.over_tokens(left, lengths, what, "s")
        title = "what a faster attention brings to the whole model"
        charts.over_tokens(right, lengths, title, "times as fast", log=False)


def _behind(rows: Sequence[Row]) -> str:
    """What stands before the prompts of ``rows``, as the end of half a sentence."""
    # training steps have nothing behind them
    behind = rows[0].get("behind")
    return f" behind {behind:,} in the cache" if behind else ""


def _implementations(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["implementation"] for row in rows))


CONTINUED = (
    "Pairs are those of the question's tokens with each other and with all that are cached. A "
    "DynamicCache copies keys and values of a layer to put new ones behind them, for every way "
    "alike. sdpa gets a mask of all pairs from transformers, which repeats keys and values for "
    "every query head then. The last dense_tail_blocks query blocks of a question attend "
    "everything, which of a short one is a large share."
)
ACROSS = (
    "Ranks share one prompt, sharded by cab_hf.distributed.shard and read inside "
    "cab_hf.context_parallel: every rank reads its tokens through all layers, and the one that has "
    "the prompt's last makes its logits. The cache stays sharded as the prompt is: each rank has "
    "keys and values of its own tokens in all layers. MLPs are given at most "
    f"{MLP_TOKENS:,} tokens at a time, by a hook of this benchmark alone; in models of "
    "transformers they read all tokens of a rank at once. TFLOP/s are those of a rank."
)
BEHIND = {
    "cached tokens": column("{:,}".format, "behind"),
    "tokens of the question": TOKENS["tokens"],
}
COLUMNS = {
    "way": "implementation",
    "s": column(seconds, "ms"),
    **DENSITY,
    "over sdpa": column(TIMES, "over_sdpa"),
    "over best dense": column(TIMES, "over_best"),
    "at most": column(TIMES, "ceiling"),
    "peak GiB": column(digits, "peak_gib"),
    "TFLOP/s": column(digits, "tflops"),
}
