"""Rows of context parallelism: what was measured, beside what `links` says of it and of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from typing import Any

import torch

from cab_hf.distributed.layout import layout_of
from cab_hf.eval.experiment import Row
from cab_hf.eval.intervals import ratio_interval
from cab_hf.eval.speed import dense
from cab_hf.eval.speed.links import BOTH, FORWARD, Alone, Link, Text, fitted, turn
from cab_hf.eval.speed.sharded_layer import ALONE, OVER_RANKS, SCHEMES
from cab_hf.plan import EXACT_BLOCK

# the scheme of a sample that tells of links
LINKS = "links"
COLLECTIVES = ("all-gather", "reduce-scatter")
# a rank's early and late chunk in one kernel, or in one each
ONE_LAUNCH, TWO_LAUNCHES = "grouped", "two-launches"
place_of = itemgetter("direction", "length", "world")
# numbers of ranks and of hosts that are foreseen
WORLDS, HOSTS = (2, 4, 8, 16), (1, 2, 4)
DERIVED = (
    *("iterations_s", "alone_ms", "efficiency", "of_two_launches", "collectives_share"),
    *("predicted_ms", "predicted_efficiency", "fits"),
)


@dataclass(frozen=True)
class Model:
    """What the samples of a run say of one rank and of links.

    Attributes:
        alone: ms by scheme, direction and length.
        choosing: ms of CAB's choice by length.
        links: of all-gathers and reduce-scatters, by ranks.
    """

    settings: Mapping[str, Any]
    shape: tuple[int, int, int]
    alone: Mapping[tuple[str, str, int], float]
    choosing: Mapping[int, float]
    links: Mapping[int, tuple[Link, Link]]

    @classmethod
    def of(
        cls, samples: Sequence[Row], settings: Mapping[str, Any], shape: tuple[int, int, int]
    ) -> Model:
        alone = [s for s in samples if s["scheme"] in ALONE and s["ms"] is not None]
        times = {(s["scheme"], s["direction"], s["length"]): s["ms"] for s in alone}
        choosing = {s["length"]: s["choose_ms"] for s in alone if s["choose_ms"] is not None}
        links = {}
        for sample in samples:
            result = fits(sample)
            if result and all(result.get(name) for name in COLLECTIVES):
                links[sample["world"]] = tuple(result[name] for name in COLLECTIVES)
        return cls(settings, shape, times, choosing, links)

    def ms_alone(self, scheme: str, direction: str, length: int) -> float | None:
        """Of one rank, measured; of dense attention else extrapolated from the longest shorter."""
        if (scheme, direction, length) in self.alone:
            return self.alone[scheme, direction, length]
        shorter = [at for s, d, at in self.alone if (s, d) == (scheme, direction) and at < length]
        if SCHEMES[scheme].sparse or not shorter:
            return None
        at = max(shorter)
        return dense.extrapolate(self.alone[scheme, direction, at], at, length)

    def predicted(
        self, scheme: str, direction: str, length: int, world: int, hosts: int = 1
    ) -> dict[str, float | None]:
        """``predicted_ms`` of a turn and ``predicted_efficiency``; None of what is not known."""
        against = SCHEMES[scheme].against
        forward, both = (self.ms_alone(against, each, length) for each in (FORWARD, BOTH))
        seconds = None
        if forward is not None and self.links:
            gather, scatter = self.links.get(world, self.links[max(self.links)])
            if hosts > 1:
                between = self.settings["between_gb"] * 1e9
                gather, scatter = (link.at_most(between) for link in (gather, scatter))
            undivided = self.choosing.get(length, 0.0) if SCHEMES[scheme].sparse else 0.0
            backward = None if both is None else max(0.0, both - forward) / 1e3
            one = Alone(forward / 1e3, backward, min(undivided, forward) / 1e3)
            text = self.text(length, world)
            seconds = turn(scheme, direction, text, one, gather, scatter)
        if seconds is None:
            return {"predicted_ms": None, "predicted_efficiency": None}
        complete = forward if direction == FORWARD else both
        return {
            "predicted_ms": 1e3 * seconds,
            "predicted_efficiency": complete / 1e3 / seconds / world,
        }

    def text(self, length: int, world: int) -> Text:
        """What travels."""
        _, kv_heads, head_dim = self.shape
        settings, stride = self.settings, self.settings["heads_k_stride"]
        item = getattr(torch, settings["dtype"]).itemsize
        slices = [min(stride, kv_heads - start) for start in range(0, kv_heads, stride)]
        held = layout_of((length,), world, EXACT_BLOCK).tokens
        return Text(length, world, held, 2 * head_dim * item * settings["batch"], tuple(slices))


def rows(
    samples: Sequence[Row], settings: Mapping[str, Any], shape: tuple[int, int, int]
) -> list[dict[str, Any]]:
    """Measured turns by direction, length, ranks and scheme, links, then places not measured."""
    model = Model.of(samples, settings, shape)
    places = {name: place for place, name in enumerate(SCHEMES)}
    turns = [s for s in samples if s["scheme"] != LINKS]
    turns.sort(
        key=lambda s: (s["direction"] != FORWARD, s["length"], s["world"], places[s["scheme"]])
    )
    blank = {"hosts": 1, "measured": True, **dict.fromkeys(DERIVED)}
    two = {place_of(s): s for s in turns if s["scheme"] == TWO_LAUNCHES}
    made = [
        {**sample, **blank, **derived(sample, model), **compared(sample, two.get(place_of(sample)))}
        for sample in turns
    ]
    for sample in samples:
        if sample["scheme"] == LINKS:
            made.append({**sample, **blank, "fits": shown(fits(sample))})
    return made + foreseen(turns, model, {**dict.fromkeys(samples[0]), **blank, "measured": False})


def derived(sample: Row, model: Model) -> dict[str, Any]:
    """What follows for a measured turn."""
    scheme, direction, length = (sample[name] for name in ("scheme", "direction", "length"))
    ms, result = sample["ms"], {}
    if ms is not None:
        result["iterations_s"] = 1e3 / ms
    if scheme in ALONE:
        return result
    result |= model.predicted(scheme, direction, length, sample["world"])
    # what was not measured on one rank is held against nothing
    one = result["alone_ms"] = model.alone.get((SCHEMES[scheme].against, direction, length))
    if None not in (ms, one):
        result["efficiency"] = one / ms / sample["world"]
    if None not in (ms, sample["collectives_ms"]):
        result["collectives_share"] = sample["collectives_ms"] / ms
    return result


def compared(sample: Row, two: Row | None) -> dict[str, Any]:
    """What one launch takes of the time of two, with an interval where both ran several times."""
    if sample["scheme"] != ONE_LAUNCH or two is None or None in (sample["ms"], two["ms"]):
        return {}
    runs = [each["each_ms"] or () for each in (sample, two)]
    if min(map(len, runs)) < 2:
        return {"of_two_launches": {"ratio": sample["ms"] / two["ms"]}}
    ratio, low, high = ratio_interval(*runs)
    return {"of_two_launches": {"ratio": ratio, "low": low, "high": high}}


def foreseen(turns: Sequence[Row], model: Model, blank: Row) -> list[dict[str, Any]]:
    """A row for each scheme at each place where it was not measured and is predicted."""
    over = [sample for sample in turns if sample["scheme"] in OVER_RANKS]
    measured = {sample["world"] for sample in over}
    asked = dict.fromkeys((s["direction"], s["length"], s["scheme"]) for s in over)
    most = model.settings["ranks_a_host"]
    made = []
    for (direction, length, scheme), hosts, world in product(asked, HOSTS, WORLDS):
        apart = hosts == 1 or hosts <= world // 2
        if not apart or world // hosts > most or (hosts == 1 and world in measured):
            continue
        result = model.predicted(scheme, direction, length, world, hosts)
        if result["predicted_ms"] is not None:
            where = {"direction": direction, "length": length, "scheme": scheme, "world": world}
            made.append({**blank, **where, "hosts": hosts, **result})
    return made


def fits(sample: Row) -> dict[str, Link | None]:
    """The link of each collective that a sample tells of."""
    return {
        name: fitted([(received, ms / 1e3) for received, ms in points])
        for name, points in (sample["points"] or {}).items()
    }


def shown(result: Mapping[str, Link | None]) -> dict[str, dict[str, float] | None]:
    """Links in the units of a table."""
    return {
        name: link and {"latency_us": link.latency * 1e6, "gb_s": link.rate / 1e9}
        for name, link in result.items()
    }


def described(settings: Mapping[str, Any]) -> str:
    """What predictions take for granted, for a report."""
    return (
        "Predicted: the time of one rank, times the share of causal pairs of the rank that has the "
        "most, and links by a latency and a rate fitted to all-gathers and reduce-"
        "scatters. A slice of KV heads is attended while the next one travels; the first slice "
        "waits, and backward slices are gathered again while gradients of those before go home. A "
        "ring passes all heads on beside each step, and waits for each hop backward. Every rank "
        "chooses CAB's blocks for the whole text. Left out are what kernels lose on smaller texts, "
        "what collectives take from them, and the summaries of keys that travel for CAB. Dense "
        "attention that did not fit on one rank is extrapolated by N². Links of numbers of ranks "
        "that were not measured are those of the most that were; between hosts a GPU receives at "
        "most "
        f"{settings['between_gb']:g} GB/s."
    )
