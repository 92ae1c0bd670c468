"""A pool of processes with gloo groups, which calls functions on several ranks."""

import contextlib
import multiprocessing
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

# modules that the fork server imports once for all processes
PRELOADED_MODULES = [
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
# seconds until a call fails the test
CALL_TIMEOUT = 120


class Ranks:
    """Pool of ``num_ranks`` processes. A group of W ranks consists of the first W processes.

    ``folder`` is the folder of the group's file store, and ``timeout`` the timeout of collectives
    in seconds.
    """

    def __init__(self, num_ranks, folder, timeout=60):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED_MODULES)
        self.pipes, self.processes = [], []
        for rank in range(num_ranks):
            parent_end, child_end = context.Pipe()
            arguments = rank, num_ranks, f"file://{folder}/store", timeout, child_end
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            child_end.close()
            self.pipes.append(parent_end)
            self.processes.append(process)

    def run(self, world_size, function, *arguments):
        """Call ``function(group, *arguments)`` on ``world_size`` ranks; return their results.

        Raises:
            AssertionError: a rank raised an error. The message is the traceback of the rank.
        """
        results = self.outcomes(world_size, function, *arguments)
        failures = [result for result in results if isinstance(result, Failure)]
        if failures:
            raise AssertionError(failures[0].text)
        return results

    def outcomes(self, world_size, function, *arguments):
        """Call a function as `run` does, and return a list with an element for each rank.

        The element is the result, a `Failure` if the rank raised an error, or None if it died.
        """
        pipes = self.pipes[:world_size]
        for pipe in pipes:
            pipe.send((world_size, function, arguments))
        return [self._receive_result(pipe) for pipe in pipes]

    def _receive_result(self, pipe):
        """Return the next result of a process, or None if the process died."""
        try:
            assert pipe.poll(CALL_TIMEOUT), "a rank hangs"
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            return None

    def close(self):
        """End all processes."""
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(5)
            process.kill()


class Failure:
    """The error of a rank: name of its type, message, and traceback."""

    def __init__(self, error):
        self.kind, self.sentence = type(error).__name__, str(error)
        self.text = "".join(traceback.format_exception(error))


def _serve(rank, num_ranks, store, timeout, pipe):
    """Join all groups as ``rank``, and call the functions that ``pipe`` receives until None."""
    torch.set_num_threads(1)
    timeout_delta = timedelta(seconds=timeout)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=num_ranks, timeout=timeout_delta
    )
    world_sizes = [world for world in (1, 2, 4, 8) if world <= num_ranks] + [num_ranks]
    groups = {world: dist.new_group(range(world), timeout=timeout_delta) for world in world_sizes}
    while (call_message := pipe.recv()) is not None:
        world_size, function, arguments = call_message
        torch.manual_seed(0)
        try:
            result = function(groups[world_size], *arguments)
        except BaseException as error:
            result = Failure(error)
        pipe.send(result)
