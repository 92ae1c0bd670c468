"""``speed ttft``: the time to the first token of a whole model, by what it attends with.

Of a prompt, or of a question behind tokens that are in the cache already.
Started by torchrun, it deals the prompt out over the ranks, which read it together.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from cab_hf.eval.experiment import Row
from cab_hf.eval.kv_cache import cache_arguments
from cab_hf.eval.report import column, digits, grouped, markdown_table, percent, seconds
from cab_hf.eval.speed import base, dense
from cab_hf.eval.speed import model as models
from cab_hf.eval.speed.model import CAB, CAB_DENSE, SDPA, TIMES, Panel, by_way
from cab_hf.eval.speed.team import Ranked, Team, by_torchrun
from cab_hf.runs.settings import option, parse_length

# of a rank that an MLP reads at a time: what it makes of half a million is 14 GiB a tensor
MLP_TOKENS = 2**16
# of the prompt that compiles all kernels where ranks share one
WARM_UP_TOKENS = 2**17


@dataclass(frozen=True)
class Settings(models.ModelSettings):
    """What a run of whole prefills is told."""

    KEYS: ClassVar[Mapping[str, str]] = {"length": "lengths", "implementation": "implementations"}
    POSITIVE = (*models.ModelSettings.POSITIVE, "runs")

    lengths: tuple[int, ...] | None = base.powers(12, 17)
    implementations: tuple[str, ...] | None = base.listed(
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
        # what knows of other ranks
        known = (CAB_DENSE, *CAB)
        if not by_torchrun():
            known = (SDPA, *known, *dense.on(self.device))
        elif not asked:
            self._set("implementations", known)
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
        where = (
            f" behind a DynamicCache of {self.behind:,} tokens, random keys and values, to which "
            "it is cropped before every run, outside of the time"
        )
        text = (
            f"median of {self.runs} runs by time.perf_counter after one that warms up, from the "
            f"call of the model on random tokens{where if self.behind else ''} until the device is "
            "done: all of them are in the cache and the logits of the last one are there; the peak "
            "is all that was allocated, weights and cache included"
        )
        if by_torchrun():
            text += (
                "; all ranks begin together, the slowest of each run and the highest peak of any "
                f"count; what warms up has at most {WARM_UP_TOKENS:,} tokens"
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
    def needs_ranks(settings: base.SpeedSettings) -> bool:
        return by_torchrun()

    def cases(self, samples: Sequence[Row]) -> Iterator[dict[str, Any]]:
        for case in self.settings.asked():
            yield {**case, "world": self.team.size}

    def find(self, sample: dict[str, Any]) -> None:
        settings, bench, team = self.settings, self.bench, self.team
        length, way, behind = sample["length"], sample["implementation"], settings.behind
        if team.size > 1:
            team.together(bench.settle)
            with prefilling_across(settings, length, way, team) as (call, known):
                ms, peak, *_ = team.slowest(bench, call, settings.runs, warm_up=0)
                sample |= known()
        elif behind:
            with asking(settings, length, way) as (call, crop, known):
                ms, peak = bench.wall(call, settings.runs, before=crop)
                sample |= known()
        else:
            with models.prefilling(settings, length, way) as (call, known):
                ms, peak = bench.wall(call, settings.runs)
                sample |= known()
        done = settings.flops(length, sample["density"], behind)
        sample |= {
            "ms": ms,
            "peak_gib": peak,
            "ceiling": settings.flops(length, 1.0, behind) / done,
            "tflops": done / ms / 1e9 / team.size,
        }

    @staticmethod
    def rows(samples: Sequence[Row], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
        """By length, each beside sdpa and the fastest dense way at its length.

        ``over_sdpa`` and ``over_best`` say how many times faster a row is, ``ratio`` is one over
        the latter.
        """
        derived = ("baseline", "baseline_ms", "ratio", "over_sdpa", "over_best")
        # ways to attend stay in the order they came in
        rows = base.by_length(samples, derived)
        for alike in grouped(rows, "length", "world"):
            timed = {row["implementation"]: row["ms"] for row in alike if row["ms"]}
            others = {name: ms for name, ms in timed.items() if name not in CAB}
            best = dense.against(others, preferred=())
            for row in alike if best else ():
                if row["ms"] is not None:
                    row |= {"baseline": best, "baseline_ms": others[best]}
                    row |= {
                        "ratio": row["ms"] / others[best],
                        "over_best": others[best] / row["ms"],
                    }
                    row["over_sdpa"] = others[SDPA] / row["ms"] if SDPA in others else None
        return rows

    @staticmethod
    def tables(rows: Sequence[Row]) -> dict[str, str]:
        ranks = {"ranks": "world"} if any(row["world"] > 1 for row in rows) else {}
        place = (BEHIND if any(row["behind"] for row in rows) else base.TOKENS) | ranks
        return {
            "Every way to attend": markdown_table(rows, place | COLUMNS),
            **base.remarks(rows, {"way": "implementation"} | ranks),
        }

    @staticmethod
    def readings(rows: Sequence[Row]) -> list[str]:
        """What each of `CAB` gains at the longest prompt, of how much there is to gain."""
        parts = []
        ours = [row for row in rows if row["ratio"] is not None and row["implementation"] in CAB]
        for some in grouped(
            [{**row, "where": where(row)} for row in ours], "where", "implementation"
        ):
            last = some[-1]
            parts.append(
                f"At {last['length']:,} tokens{last['where']} {last['implementation']} is "
                f"{TIMES(last['over_best'])} as fast as {last['baseline']}, the fastest dense way, "
                f"where attending {percent(last['density'])} of the pairs can bring "
                f"{TIMES(last['ceiling'])} at most; it is faster {dense.break_even_shown(some)}."
            )
        return parts

    @staticmethod
    def notes(settings: Mapping[str, Any]) -> str:
        text = (
            f"{models.described(settings)}\n\nsdpa is transformers' own; other dense ways take its "
            "place. cab computes prompts shorter than min_length dense, cab-always none. "
            "At most: operations of the dense model over those at the realised density, attended "
            f"over causal pairs in all layers. TFLOP/s count what is attended. {dense.BREAK_EVEN}"
        )
        text += f"\n\n{CONTINUED}" if settings.get("behind") else ""
        return f"{text}\n\n{ACROSS}" if settings.get("worlds") else text

    @staticmethod
    def draw(path: Path, rows: Sequence[Row]) -> None:
        """Of the most ranks there are."""
        world = max(row["world"] for row in rows)
        draw_gains(path, [row for row in rows if row["world"] == world], "time to the first token")


EXPERIMENT = TimeToFirstToken


@contextmanager
def asking(
    settings: Settings, length: int, way: str
) -> Iterator[tuple[Callable[[], Any], Callable[[], Any], Callable[[], dict[str, Any]]]]:
    """(what reads a question, what takes it off the cache again, what then is known of it).

    The question has ``length`` random tokens, behind those of random keys and values in a
    `DynamicCache`; reading it gives the logits of its last token. Known is what `attended_by`
    says, of pairs with the cached tokens too.
    """
    model, question = models.random_model(settings), models.random_tokens(settings, length)
    cache = models.random_cache(model, settings.behind)
    cached = cache_arguments(model, cache)

    @torch.inference_mode()
    def call() -> Any:
        return model(question, **cached, logits_to_keep=1)

    def crop() -> None:
        asked = cache.get_seq_length() - settings.behind
        # a crop by nothing is not the same in all versions of transformers
        if asked:
            cache.crop(-asked)

    with models.attending(model, way, settings.budgeted(length, way), continues=True):
        yield call, crop, partial(models.attended_by, model, settings.behind + length, way)


@contextmanager
def prefilling_across(
    settings: models.ModelSettings, length: int, way: str, team: Team
) -> Iterator[tuple[Callable[[], Any], Callable[[], dict[str, Any]]]]:
    """As `prefilling`, where each rank of ``team`` reads its tokens of the prompt.

    What is known is of all ranks, and asked for by all of them. Kernels are compiled by then.
    """
    from cab_hf import context_parallel
    from cab_hf.eval.speed.spread import CP, block_of, density_of_all
    from cab_hf.finetune.tiles import compute_in_tiles

    model, prompt = models.random_model(settings), models.random_tokens(settings, length)
    with models.attending(model, way, settings.budgeted(length, way)):
        block = block_of(model)

        def known() -> dict[str, Any]:
            density = models.attended_by(model, length, way)["density"]
            return {"density": density_of_all(team, density, CP, length, block)}

        compute_in_tiles(model, MLP_TOKENS)
        try:
            with context_parallel(model, team.group, block=block):
                team.together(reading(model, prompt[:, :WARM_UP_TOKENS], team, block))
                # what that one attended is not of the prompt that is asked for
                models.attended_by(model, length, way, reset=True)
                yield reading(model, prompt, team, block), known
        finally:
            # one tile of all tokens is none
            compute_in_tiles(model, sys.maxsize)


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


def where(row: Row) -> str:
    """On how many ranks a row is and what stands before its prompt, as the end of a clause."""
    # training steps have nothing behind them
    behind = f" behind {row['behind']:,} in the cache" if row.get("behind") else ""
    by = "" if row.get("spread", "alone") == "alone" else f" by {row['spread']}"
    return behind + (f" on {row['world']} ranks{by}" if row["world"] > 1 else "")


def draw_gains(path: Path, rows: Sequence[Row], what: str) -> None:
    """Seconds by length of every way to attend, and beside it what each of `CAB` gains."""
    shown = [{**row, "s": row["ms"] and row["ms"] / 1e3} for row in rows]
    ours = [row for row in rows if row["implementation"] in CAB]
    ceilings = by_way(ours, "ceiling", "implementation")
    gains = by_way(ours, "over_best", "implementation")
    gains |= {f"{way}, at most at its density": line for way, line in ceilings.items()}
    panels = [
        Panel(f"{what}{where(rows[0])}", "s", by_way(shown, "s", "implementation")),
        Panel("gain over the fastest dense way", "times as fast", gains, log=False),
    ]
    models.draw_panels(path, panels)


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
    "the prompt's last makes its logits. The cache stays sharded as the prompt is. MLPs compute "
    f"tiles of {MLP_TOKENS:,} tokens, as in fine-tuning. TFLOP/s are those of a rank."
)
BEHIND = {
    "cached tokens": column("{:,}".format, "behind"),
    "tokens of the question": base.TOKENS["tokens"],
}
COLUMNS = {
    "way": "implementation",
    "s": column(seconds, "ms"),
    **base.DENSITY,
    "over sdpa": column(TIMES, "over_sdpa"),
    "over best dense": column(TIMES, "over_best"),
    "at most": column(TIMES, "ceiling"),
    "peak GiB": column(digits, "peak_gib"),
    "TFLOP/s": column(digits, "tflops"),
}
