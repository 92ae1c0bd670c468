"""Counters of sparse prompts and of (query, key) pairs, for ``/metrics`` and for the log.

vLLM does not forward the metrics of a backend. A worker therefore writes its totals to a file, and
the process that serves ``/metrics`` reads the files of its engines.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cab_hf.dispatch import attended

logger = logging.getLogger("vllm.cab_hf")

# counters that `Totals` adds up -> help texts of ``/metrics``
COUNTERS = {
    "sparse_prompts": "Prompts whose last chunk was attended sparsely.",
    "attended_pairs": "(query, key) pairs that sparse layers attended, over heads and layers.",
    "possible_pairs": "(query, key) pairs that dense attention would have attended there.",
}
# vLLM separates its name from the name of a metric with a colon
PREFIX = "cab_hf:"


def folder_of(instance: str) -> Path:
    """Return the folder with the totals of an engine, by the ``instance_id`` of its config."""
    return Path(tempfile.gettempdir()) / f"cab_hf-{os.getuid()}-{instance}"


class Meter:
    """The counters of one engine in one worker process.

    Attributes:
        layers: the sparse layers of this process, by which `attended` counts pairs.
        sparse_prompts: prompts whose last chunk was attended sparsely, on the first rank.
    """

    def __init__(self, instance: str, layers: list[nn.Module], is_first_rank: bool) -> None:
        self.layers, self.is_first_rank, self.sparse_prompts = layers, is_first_rank, 0
        self.file = folder_of(instance) / f"{os.getpid()}-{id(self)}.json"
        self.logged = dict.fromkeys(COUNTERS, 0)
        self.measured = 0, 0
        self.thread: threading.Thread | None = None

    def count_prompt(self) -> None:
        """Count a prompt; the first one starts the thread that publishes the totals."""
        if not self.layers:
            return
        self.sparse_prompts += self.is_first_rank
        if self.thread is None:
            # pairs of the dummy prompt with which vLLM measured memory
            self.measured = self._pairs()
            self.thread = threading.Thread(target=self._publish_for_ever, daemon=True)
            self.thread.start()
            atexit.register(self.publish)

    def totals(self) -> dict[str, int]:
        """Return the counters."""
        done, possible = (x - y for x, y in zip(self._pairs(), self.measured, strict=True))
        return dict(zip(COUNTERS, (self.sparse_prompts, done, possible), strict=True))

    def _pairs(self) -> tuple[int, int]:
        """Return the attended and the possible pairs of all layers; waits for the device."""
        pairs = [attended[layer] for layer in self.layers if layer in attended]
        if any(each.is_cuda for each in pairs):
            # kernels on another stream may still write the counters
            torch.cuda.synchronize()
        sums = [each.tolist() for each in pairs]
        return sum(each[0] for each in sums), sum(each[1] for each in sums)

    def publish(self) -> None:
        """Write the totals, and log the pairs that were attended since the last call."""
        totals = self.totals()
        if totals == self.logged:
            return
        new = {name: total - self.logged[name] for name, total in totals.items()}
        self.logged = totals
        self.file.parent.mkdir(mode=0o700, exist_ok=True)
        draft = self.file.with_suffix(".tmp")
        draft.write_text(json.dumps(totals), "utf-8")
        draft.replace(self.file)
        if self.is_first_rank and new["possible_pairs"] > 0:
            logger.info(
                "cab_hf: %d sparse prompts, density %.3f (%.3g of %.3g pairs attended).",
                new["sparse_prompts"],
                new["attended_pairs"] / new["possible_pairs"],
                new["attended_pairs"],
                new["possible_pairs"],
            )

    def _publish_for_ever(self) -> None:
        from vllm import envs

        pause = threading.Event()
        while not pause.wait(envs.VLLM_LOG_STATS_INTERVAL):
            self.publish()


# meters of this worker process by the ``instance_id`` of their engine
METERS: dict[str, Meter] = {}


def totals_of(instances: set[str]) -> dict[str, int]:
    """Return the sums of the totals that the workers of these engines have written."""
    sums = dict.fromkeys(COUNTERS, 0)
    for instance in instances:
        for file in folder_of(instance).glob("*.json"):
            for name, total in json.loads(file.read_text("utf-8")).items():
                sums[name] += total
    return sums


class Totals:
    """A ``prometheus_client`` collector for the engines that this process started."""

    def __init__(self) -> None:
        self.instances: set[str] = set()

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily

        for name, total in totals_of(self.instances).items():
            yield CounterMetricFamily(PREFIX + name, COUNTERS[name], value=total)

    def describe(self) -> list[Any]:
        # read no file when the collector is registered
        return []


_totals: Totals | None = None


def export(vllm_config: Any) -> None:
    """Add the counters of an engine to the ``/metrics`` of this process."""
    global _totals
    from prometheus_client import REGISTRY

    folder = folder_of(vllm_config.instance_id)
    shutil.rmtree(folder, ignore_errors=True)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if _totals is None:
        _totals = Totals()
        REGISTRY.register(_totals)
    _totals.instances.add(vllm_config.instance_id)
