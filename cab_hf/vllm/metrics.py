"""Counters of sparse prompts and of (query, key) pairs, for ``/metrics`` and for the log.

vLLM does not forward the metrics of a backend. A worker therefore writes its totals to a file in
the format of Prometheus' multiprocess mode. With several API servers, vLLM itself reads all files
of that mode, in the folder PROMETHEUS_MULTIPROC_DIR. A single API server reads the files of its
engines by the collector `Totals`.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from prometheus_client import REGISTRY
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.multiprocess import MultiProcessCollector
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
    """Return the folder for the totals of an engine, by the ``instance_id`` of its config.

    Processes of an engine inherit PROMETHEUS_MULTIPROC_DIR. vLLM sets the variable for several API
    servers, and then serves the sums over all files in that folder.
    """
    shared = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if shared is not None:
        return Path(shared)
    return Path(tempfile.gettempdir()) / f"cab_hf-{os.getuid()}-{instance}"


class Meter:
    """The counters of one engine in one worker process.

    Attributes:
        layers: the sparse layers of this process, by which `attended` counts pairs.
        counts_prompts: whether this process counts prompts; one rank of an engine does.
        is_logged: whether this process logs the density.
        sparse_prompts: prompts whose last chunk was attended sparsely.
        file: file with the totals. Prometheus reads the type of the metrics from the file name.
        logged: totals at the time of the last log line.
    """

    def __init__(
        self, instance: str, layers: list[nn.Module], counts_prompts: bool, is_logged: bool
    ) -> None:
        self.layers = layers
        self.counts_prompts = counts_prompts
        self.is_logged = is_logged
        self.sparse_prompts = 0
        self.file = folder_of(instance) / f"counter_cab-{os.getpid()}-{id(self)}.db"
        self.logged = dict.fromkeys(COUNTERS, 0)
        self.measured = 0, 0
        self.thread: threading.Thread | None = None

    def count_prompt(self) -> None:
        """Count a prompt; the first one starts the thread that publishes the totals."""
        if not self.layers:
            return
        self.sparse_prompts += self.counts_prompts
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
        self.write(totals)
        if self.is_logged and new["possible_pairs"] > 0:
            logger.info(
                "cab_hf: %d sparse prompts, density %.3f (%.3g of %.3g pairs attended).",
                new["sparse_prompts"],
                new["attended_pairs"] / new["possible_pairs"],
                new["attended_pairs"],
                new["possible_pairs"],
            )

    def write(self, totals: dict[str, int]) -> None:
        """Replace the file by one with these totals. A reader never finds a part of a file."""
        self.file.parent.mkdir(mode=0o700, exist_ok=True)
        draft = self.file.with_suffix(".tmp")
        draft.unlink(missing_ok=True)
        values = MmapedDict(str(draft))
        for name, total in totals.items():
            metric = PREFIX + name
            key = mmap_key(metric, f"{metric}_total", [], [], COUNTERS[name])
            values.write_value(key, total, 0.0)
        values.close()
        draft.replace(self.file)

    def _publish_for_ever(self) -> None:
        from vllm import envs

        pause = threading.Event()
        while not pause.wait(envs.VLLM_LOG_STATS_INTERVAL):
            self.publish()


# meters of this worker process by the ``instance_id`` of their engine
METERS: dict[str, Meter] = {}


class Totals:
    """A ``prometheus_client`` collector for the engines that this process started."""

    def __init__(self) -> None:
        self.instances: set[str] = set()

    def collect(self) -> Iterator[Any]:
        """Yield the sums over the files of all workers of these engines."""
        folders = [folder_of(instance) for instance in self.instances]
        files = [str(file) for folder in folders for file in folder.glob("counter_cab-*.db")]
        yield from MultiProcessCollector.merge(files)

    def describe(self) -> list[Any]:
        # read no file when the collector is registered
        return []


_totals: Totals | None = None


def export(vllm_config: Any) -> None:
    """Add the counters of an engine to the ``/metrics`` of this process.

    Does nothing in Prometheus' multiprocess mode, where ``/metrics`` reads the files of all
    processes, and whoever has set PROMETHEUS_MULTIPROC_DIR deletes them.
    """
    global _totals
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return
    folder = folder_of(vllm_config.instance_id)
    shutil.rmtree(folder, ignore_errors=True)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if _totals is None:
        _totals = Totals()
        REGISTRY.register(_totals)
    _totals.instances.add(vllm_config.instance_id)
