"""Processes with a gloo group, started once for many cases."""

import contextlib
import multiprocessing
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

# imported once, by the process that all others are forked from
PRELOADED = [
    "torch.distributed",
    "cab_hf.attention",
    "cab_hf.distributed",
    "transformers.generation.utils",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("llama", "mistral", "mixtral", "qwen3")
    ),
    "transformers.models.smollm3.modeling_smollm3",
]
# seconds after which a call counts as hanging
PATIENCE = 120


class Ranks:
    """Pool of ``count`` processes; the first W form a group of W ranks."""

    def __init__(self, count, folder, timeout=60):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.pipes, self.processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe()
            settings = rank, count, f"file://{folder}/store", timeout, theirs
            process = context.Process(target=_serve, args=settings, daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, world, function, *arguments):
        """Return ``function(group, *arguments)`` of each rank of a group of ``world``.

        The first exception of a rank is raised here, with its traceback.
        """
        results = self.outcomes(world, function, *arguments)
        failed = [result for result in results if isinstance(result, Failure)]
        if failed:
            raise AssertionError(failed[0].text)
        return results

    def outcomes(self, world, function, *arguments):
        """Return the same as `run`, with `Failure` for a rank that raised and None if it died."""
        pipes = self.pipes[:world]
        for pipe in pipes:
            pipe.send((world, function, arguments))
        return [self._answer(pipe) for pipe in pipes]

    def _answer(self, pipe):
        try:
            assert pipe.poll(PATIENCE), "a rank hangs"
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            return None

    def close(self):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            process.kill()


class Failure:
    """Exception of a rank."""

    def __init__(self, error):
        self.kind, self.sentence = type(error).__name__, str(error)
        self.text = "".join(traceback.format_exception(error))


def _serve(rank, count, store, timeout, pipe):
    torch.set_num_threads(1)
    wait = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=count, timeout=wait)
    worlds = [world for world in (1, 2, 4, 8) if world <= count] + [count]
    groups = {world: dist.new_group(range(world), timeout=wait) for world in worlds}
    while (job := pipe.recv()) is not None:
        world, function, arguments = job
        torch.manual_seed(0)
        try:
            result = function(groups[world], *arguments)
        except BaseException as error:
            result = Failure(error)
        pipe.send(result)
