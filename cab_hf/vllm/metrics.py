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
COUNTER_HELP_TEXTS = {
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
        sparse_layers: the sparse layers of this process. `cab_hf.dispatch.attended_pairs` contains
            the number of (query, key) pairs of each layer.
        should_count_prompts: True if this process counts prompts; one rank of an engine does.
        is_logged: True if this process logs the density.
        num_sparse_prompts: number of prompts whose last chunk was attended sparsely.
        totals_file: file with the totals. Prometheus reads the type of the metrics from the file
            name.
        logged_totals: totals at the time of the last log line.
        dummy_pair_counts: (attended, possible) pairs of the dummy prompt with which vLLM measured
            memory.
        publishing_thread: thread that publishes the totals; None before the first prompt.
    """

    def __init__(
        self,
        instance_id: str,
        sparse_layers: list[nn.Module],
        should_count_prompts: bool,
        is_logged: bool,
    ) -> None:
        self.sparse_layers = sparse_layers
        self.should_count_prompts = should_count_prompts
        self.is_logged = is_logged
        self.num_sparse_prompts = 0
        self.totals_file = metrics_folder(instance_id) / f"counter_cab-{os.getpid()}-{id(self)}.db"
        self.logged_totals = dict.fromkeys(COUNTER_HELP_TEXTS, 0)
        self.dummy_pair_counts = 0, 0
        self.publishing_thread: threading.Thread | None = None

    def count_prompt(self) -> None:
        """Count a sparse prompt. The first call starts the thread that publishes the totals."""
        if not self.sparse_layers:
            return
        self.num_sparse_prompts += self.should_count_prompts
        if self.publishing_thread is None:
            self.dummy_pair_counts = self._count_pairs()
            self.publishing_thread = threading.Thread(
                target=self._publish_periodically, daemon=True
            )
            self.publishing_thread.start()
            atexit.register(self.publish_totals)

    def read_totals(self) -> dict[str, int]:
        """Return the values of all `COUNTER_HELP_TEXTS` since the start of the engine."""
        attended_pairs, possible_pairs = self._count_pairs()
        dummy_attended_pairs, dummy_possible_pairs = self.dummy_pair_counts
        return {
            "sparse_prompts": self.num_sparse_prompts,
            "attended_pairs": attended_pairs - dummy_attended_pairs,
            "possible_pairs": possible_pairs - dummy_possible_pairs,
        }

    def _count_pairs(self) -> tuple[int, int]:
        """Return the numbers of attended and of possible pairs, summed over the layers.

        Reading the counters synchronises with the device.
        """
        pair_counters = [
            attended_pairs[layer] for layer in self.sparse_layers if layer in attended_pairs
        ]
        if any(pair_counter.is_cuda for pair_counter in pair_counters):
            # kernels on another stream may still write the counters
            torch.cuda.synchronize()
        pair_counts = [pair_counter.tolist() for pair_counter in pair_counters]
        return sum(counts_of_layer[0] for counts_of_layer in pair_counts), sum(
            counts_of_layer[1] for counts_of_layer in pair_counts
        )

    def publish_totals(self) -> None:
        """Write the totals, and log the prompts and pairs since the last log line."""
        totals = self.read_totals()
        if totals == self.logged_totals:
            return
        unlogged_counts = {
            counter_name: total - self.logged_totals[counter_name]
            for counter_name, total in totals.items()
        }
        self.logged_totals = totals
        self.write_totals(totals)
        if self.is_logged and unlogged_counts["possible_pairs"] > 0:
            density = unlogged_counts["attended_pairs"] / unlogged_counts["possible_pairs"]
            logger.info(
                f"cab_hf: {unlogged_counts['sparse_prompts']} sparse prompts, "
                f"density {density:.3f} ({unlogged_counts['attended_pairs']:.3g} of "
                f"{unlogged_counts['possible_pairs']:.3g} pairs attended)."
            )

    def write_totals(self, totals: dict[str, int]) -> None:
        """Replace the file of this process by a file with ``totals``.

        The new file is written under another name and renamed, so that readers never read an
        incomplete file.
        """
        self.totals_file.parent.mkdir(mode=0o700, exist_ok=True)
        temporary_file = self.totals_file.with_suffix(".tmp")
        temporary_file.unlink(missing_ok=True)
        metric_file = MmapedDict(str(temporary_file))
        for counter_name, total in totals.items():
            metric_name = COUNTER_PREFIX + counter_name
            metric_key = mmap_key(
                metric_name=metric_name,
                name=f"{metric_name}_total",
                labelnames=[],
                labelvalues=[],
                help_text=COUNTER_HELP_TEXTS[counter_name],
            )
            metric_file.write_value(metric_key, total, 0.0)
        metric_file.close()
        temporary_file.replace(self.totals_file)

    def _publish_periodically(self) -> None:
        """Publish the totals at the interval of vLLM's own log lines, until the process ends."""
        from vllm import envs

        stop_event = threading.Event()
        while not stop_event.wait(envs.VLLM_LOG_STATS_INTERVAL):
            self.publish_totals()


# meters of this worker process by the ``instance_id`` of their engine
METER_BY_INSTANCE_ID: dict[str, Meter] = {}


class TotalsCollector:
    """A ``prometheus_client`` collector with the counters of engines that this process started.

    Attributes:
        instance_ids: ``instance_id`` of the engines.
    """

    def __init__(self) -> None:
        self.instance_ids: set[str] = set()

    def collect(self) -> Iterator[Any]:
        """Yield each counter, summed over the files of all workers of the engines."""
        totals_folders = [metrics_folder(instance_id) for instance_id in self.instance_ids]
        totals_files = [
            str(totals_file)
            for totals_folder in totals_folders
            for totals_file in totals_folder.glob("counter_cab-*.db")
        ]
        yield from MultiProcessCollector.merge(totals_files)

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
    totals_folder = metrics_folder(vllm_config.instance_id)
    shutil.rmtree(totals_folder, ignore_errors=True)
    atexit.register(shutil.rmtree, totals_folder, ignore_errors=True)
    if _totals_collector is None:
        _totals_collector = TotalsCollector()
        REGISTRY.register(_totals_collector)
    _totals_collector.instance_ids.add(vllm_config.instance_id)
