"""Counters of sparse prompts and of (query, key) pairs, for ``/metrics`` and for the log.

vLLM does not forward the metrics of a backend. A worker therefore writes its totals to a file in
the format of Prometheus' multiprocess mode. With several API servers, vLLM itself reads all files
of that mode, in the folder PROMETHEUS_MULTIPROC_DIR. A single API server reads the files of its
engines by the collector `TotalsCollector`.
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

from cab_hf.dispatch import attended_pairs

logger = logging.getLogger("vllm.cab_hf")

# key: name of a counter. Value: help text of the counter on ``/metrics``
COUNTERS = {
    "sparse_prompts": "Prompts whose last chunk was attended sparsely.",
    "attended_pairs": "(query, key) pairs that sparse layers attended, over heads and layers.",
    "possible_pairs": "(query, key) pairs that dense attention would have attended there.",
}
# prefix of the names of all counters; vLLM has the prefix "vllm:"
COUNTER_PREFIX = "cab_hf:"


def metrics_folder(instance_id: str) -> Path:
    """Return the folder in which the workers of an engine write their totals.

    vLLM sets PROMETHEUS_MULTIPROC_DIR for several API servers, and ``/metrics`` then has the sums
    over all files in that folder. All processes of an engine inherit the variable.

    Args:
        instance_id: ``instance_id`` of the engine's config.
    """
    shared_folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if shared_folder is not None:
        return Path(shared_folder)
    return Path(tempfile.gettempdir()) / f"cab_hf-{os.getuid()}-{instance_id}"


class Meter:
    """The counters of one engine in one worker process.

    Attributes:
        layers: the sparse layers of this process. `cab_hf.dispatch.attended_pairs` contains the
            number of (query, key) pairs of each layer.
        counts_prompts: True if this process counts prompts; one rank of an engine does.
        is_logged: True if this process logs the density.
        sparse_prompts: number of prompts whose last chunk was attended sparsely.
        file: file with the totals. Prometheus reads the type of the metrics from the file name.
        logged_totals: totals at the time of the last log line.
        dummy_pairs: (attended, possible) pairs of the dummy prompt with which vLLM measured memory.
        thread: thread that publishes the totals; None before the first prompt.
    """

    def __init__(
        self,
        instance_id: str,
        sparse_layers: list[nn.Module],
        counts_prompts: bool,
        is_logged: bool,
    ) -> None:
        self.layers = sparse_layers
        self.counts_prompts = counts_prompts
        self.is_logged = is_logged
        self.sparse_prompts = 0
        self.file = metrics_folder(instance_id) / f"counter_cab-{os.getpid()}-{id(self)}.db"
        self.logged_totals = dict.fromkeys(COUNTERS, 0)
        self.dummy_pairs = 0, 0
        self.thread: threading.Thread | None = None

    def count_prompt(self) -> None:
        """Count a sparse prompt. The first call starts the thread that publishes the totals."""
        if not self.layers:
            return
        self.sparse_prompts += self.counts_prompts
        if self.thread is None:
            self.dummy_pairs = self._count_pairs()
            self.thread = threading.Thread(target=self._publish_periodically, daemon=True)
            self.thread.start()
            atexit.register(self.publish)

    def totals(self) -> dict[str, int]:
        """Return the values of all `COUNTERS` since the start of the engine."""
        attended_pairs, possible_pairs = self._count_pairs()
        dummy_attended, dummy_possible = self.dummy_pairs
        return {
            "sparse_prompts": self.sparse_prompts,
            "attended_pairs": attended_pairs - dummy_attended,
            "possible_pairs": possible_pairs - dummy_possible,
        }

    def _count_pairs(self) -> tuple[int, int]:
        """Return the numbers of attended and of possible pairs, summed over the layers.

        Reading the counters synchronises with the device.
        """
        counters = [attended_pairs[layer] for layer in self.layers if layer in attended_pairs]
        if any(counter.is_cuda for counter in counters):
            # kernels on another stream may still write the counters
            torch.cuda.synchronize()
        pairs = [counter.tolist() for counter in counters]
        return sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)

    def publish(self) -> None:
        """Write the totals, and log the prompts and pairs since the last log line."""
        totals = self.totals()
        if totals == self.logged_totals:
            return
        new_counts = {name: total - self.logged_totals[name] for name, total in totals.items()}
        self.logged_totals = totals
        self.write(totals)
        if self.is_logged and new_counts["possible_pairs"] > 0:
            density = new_counts["attended_pairs"] / new_counts["possible_pairs"]
            logger.info(
                f"cab_hf: {new_counts['sparse_prompts']} sparse prompts, density {density:.3f} "
                f"({new_counts['attended_pairs']:.3g} of {new_counts['possible_pairs']:.3g} pairs "
                "attended)."
            )

    def write(self, totals: dict[str, int]) -> None:
        """Replace the file of this process by a file with ``totals``.

        The new file is written under another name and renamed, so that readers never read an
        incomplete file.
        """
        self.file.parent.mkdir(mode=0o700, exist_ok=True)
        draft_file = self.file.with_suffix(".tmp")
        draft_file.unlink(missing_ok=True)
        metric_file = MmapedDict(str(draft_file))
        for name, total in totals.items():
            metric_name = COUNTER_PREFIX + name
            key = mmap_key(
                metric_name=metric_name,
                name=f"{metric_name}_total",
                labelnames=[],
                labelvalues=[],
                help_text=COUNTERS[name],
            )
            metric_file.write_value(key, total, 0.0)
        metric_file.close()
        draft_file.replace(self.file)

    def _publish_periodically(self) -> None:
        """Publish the totals at the interval of vLLM's own log lines, until the process ends."""
        from vllm import envs

        stop_event = threading.Event()
        while not stop_event.wait(envs.VLLM_LOG_STATS_INTERVAL):
            self.publish()


# meters of this worker process by the ``instance_id`` of their engine
METERS: dict[str, Meter] = {}


class TotalsCollector:
    """A ``prometheus_client`` collector with the counters of engines that this process started.

    Attributes:
        instances: ``instance_id`` of the engines.
    """

    def __init__(self) -> None:
        self.instances: set[str] = set()

    def collect(self) -> Iterator[Any]:
        """Yield each counter, summed over the files of all workers of the engines."""
        folders = [metrics_folder(instance_id) for instance_id in self.instances]
        files = [str(file) for folder in folders for file in folder.glob("counter_cab-*.db")]
        yield from MultiProcessCollector.merge(files)

    def describe(self) -> list[Any]:
        """Return an empty list of metrics.

        Without this method, the registry of ``prometheus_client`` would call `collect` when the
        collector is registered.
        """
        return []


# the collector of this process; None before the first call of `export_counters`
_totals_collector: TotalsCollector | None = None


def export_counters(vllm_config: Any) -> None:
    """Add the counters of an engine to the ``/metrics`` of this process.

    In Prometheus' multiprocess mode this is not needed, and the function returns at once:
    ``/metrics`` reads the files of all processes, and the program that has set
    PROMETHEUS_MULTIPROC_DIR deletes the files.
    """
    global _totals_collector
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        return
    folder = metrics_folder(vllm_config.instance_id)
    shutil.rmtree(folder, ignore_errors=True)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if _totals_collector is None:
        _totals_collector = TotalsCollector()
        REGISTRY.register(_totals_collector)
    _totals_collector.instances.add(vllm_config.instance_id)
