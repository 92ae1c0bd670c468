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
        f"transformers.models.{model_type}.modeling_{model_type}"
        for model_type in ("llama", "mistral", "mixtral", "qwen3")
    ),
    "transformers.models.smollm3.modeling_smollm3",
]
# seconds until a call fails the test
CALL_TIMEOUT_SECONDS = 120


class Ranks:
    """Pool of ``num_ranks`` processes. A group of W ranks consists of the first W processes.

    ``store_folder`` is the folder of the group's file store, and ``timeout`` the timeout of
    collectives in seconds.
    """

    def __init__(self, num_ranks, store_folder, timeout=60):
        fork_context = multiprocessing.get_context("forkserver")
        fork_context.set_forkserver_preload(PRELOADED_MODULES)
        self.pipes, self.processes = [], []
        for rank in range(num_ranks):
            parent_end, child_end = fork_context.Pipe()
            process_arguments = rank, num_ranks, f"file://{store_folder}/store", timeout, child_end
            process = fork_context.Process(target=_serve_calls, args=process_arguments, daemon=True)
            process.start()
            child_end.close()
            self.pipes.append(parent_end)
            self.processes.append(process)

    def run(self, world_size, function, *arguments):
        """Call ``function(group, *arguments)`` on ``world_size`` ranks; return their results.

        Raises:
            AssertionError: a rank raised an error. The message is the traceback of the rank.
        """
        results = self.collect_outcomes(world_size, function, *arguments)
        failures = [result for result in results if isinstance(result, Failure)]
        if failures:
            raise AssertionError(failures[0].traceback)
        return results

    def collect_outcomes(self, world_size, function, *arguments):
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
            assert pipe.poll(CALL_TIMEOUT_SECONDS), "a rank hangs"
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
    """The error of a rank: name of the error type, message, and traceback."""

    def __init__(self, error):
        self.error_type, self.message = type(error).__name__, str(error)
        self.traceback = "".join(traceback.format_exception(error))


def _serve_calls(rank, num_ranks, store_url, timeout, pipe):
    """Join all groups as ``rank``, and call the functions that ``pipe`` receives until None."""
    torch.set_num_threads(1)
    timeout_delta = timedelta(seconds=timeout)
    dist.init_process_group(
        "gloo", init_method=store_url, rank=rank, world_size=num_ranks, timeout=timeout_delta
    )
    group_sizes = [group_size for group_size in (1, 2, 4, 8) if group_size <= num_ranks] + [
        num_ranks
    ]
    groups = {
        group_size: dist.new_group(range(group_size), timeout=timeout_delta)
        for group_size in group_sizes
    }
    while (call_message := pipe.recv()) is not None:
        world_size, function, arguments = call_message
        torch.manual_seed(0)
        try:
            result = function(groups[world_size], *arguments)
        except BaseException as error:
            result = Failure(error)
        pipe.send(result)
