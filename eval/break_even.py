"""Measure the smallest number of queries after cached keys for which sparse attention pays.

    python -m cab_hf.eval.break_even                    # print the points of this device
    python -m cab_hf.eval.break_even --write            # write them to cab_hf/break_even.json

Each point is [number of keys, smallest number of queries for which sparse attention pays]. Sparse
attention pays for n queries if selection plus attention take at most as long as dense attention,
for n queries and for all larger measured numbers. Queries and keys are random vectors in which, as
in natural text, runs of consecutive tokens have a common subject (`draw_qkv`).
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from cab_hf import break_even
from cab_hf.call.call import Call
from cab_hf.call.mask import MaskInfo
from cab_hf.config import CabConfig, block_sizes
from cab_hf.dispatch import dispatch
from cab_hf.ops import Workload

SUBJECT_RUN_TOKENS = 300  # consecutive tokens with the same subject
NUM_SUBJECTS = 32  # number of subjects: random directions in the space of queries and keys
# device -> numbers of keys to measure
KEY_COUNTS = {"cuda": (16384, 32768, 65536, 131072), "cpu": (16384,)}
QUERY_COUNTS = (256, 512, 1024, 2048, 4096, 8192)
# device -> query heads, KV heads, head dim, dtype
HEAD_SHAPES = {"cuda": (32, 8, 128, torch.bfloat16), "cpu": (9, 3, 64, torch.float32)}


def draw_qkv(device: str, length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return random q, k and v [1, H or H_kv, length, D] of one sequence.

    Tokens attend mostly to tokens with the same subject, because the direction of the subject is
    added to the q and k of both.
    """
    heads, kv_heads, head_dim, dtype = HEAD_SHAPES[device]
    generator = torch.Generator(device).manual_seed(seed)
    tensor_options = {"device": device, "generator": generator}
    subjects = torch.randn(NUM_SUBJECTS, head_dim, **tensor_options)
    subjects *= head_dim**0.5 / subjects.norm(dim=-1, keepdim=True)
    run_subjects = torch.randint(
        NUM_SUBJECTS, (length // SUBJECT_RUN_TOKENS + 1,), **tensor_options
    )
    token_directions = subjects[run_subjects.repeat_interleave(SUBJECT_RUN_TOKENS)[:length]][
        :, None
    ]
    q, k, v = (
        torch.randn(1, length, x, head_dim, **tensor_options) for x in (heads, kv_heads, kv_heads)
    )
    return tuple(
        x.to(dtype).transpose(1, 2) for x in (q + token_directions, k + token_directions, v)
    )


def time_calls(device: str, calls: list[Callable[[], object]], num_runs: int) -> list[float]:
    """Return the median seconds of each call over alternating runs, after one warm-up run.

    Args:
        device: "cuda" or "cpu".
        calls: the functions to time.
        num_runs: timed runs of each function.
    """
    seconds_by_call: list[list[float]] = [[] for _ in calls]
    for run_index in range(num_runs + 1):
        for call, call_seconds in zip(calls, seconds_by_call, strict=True):
            if device == "cuda":
                torch.cuda.synchronize()
            start_time = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            if run_index:
                call_seconds.append(time.perf_counter() - start_time)
    return [median(call_seconds) for call_seconds in seconds_by_call]


def measure_speedup(q: Tensor, k: Tensor, v: Tensor, q_length: int, num_runs: int) -> float:
    """Return the speed-up: the time of dense attention divided by the time of sparse attention.

    Args:
        q, k, v: tensors of one sequence, from `draw_qkv`.
        q_length: number of queries. The last q_length queries of q attend to all keys; the keys of
            earlier tokens count as cached.
        num_runs: timed runs of each kind of attention.
    """
    config, kv_length = CabConfig(min_length=0), k.shape[2]
    q = q[:, :, kv_length - q_length :]
    workload = Workload.from_tensors(q, k, v, block_sizes(config))

    def make_call(is_sparse: bool) -> Callable[[], Tensor]:
        def attend() -> Tensor:
            mask = MaskInfo(1, q_length, kv_length, kv_length - q_length)
            layer = nn.Module()
            attention_call = Call(
                q=q,
                k=k,
                v=v,
                scale=q.shape[-1] ** -0.5,
                layer=layer,
                config=config,
                is_sparse=is_sparse,
                workload=workload,
                mask=mask,
            )
            return dispatch(attention_call)

        return attend

    sparse_seconds, dense_seconds = time_calls(
        k.device.type, [make_call(True), make_call(False)], num_runs
    )
    return dense_seconds / sparse_seconds


def measure_break_even_points(
    device: str, lengths: tuple[int, ...], num_runs: int
) -> list[list[int]]:
    """Return [keys, smallest number of queries for which sparse attention pays] for each length.

    If sparse attention pays for no measured number of queries, the number of keys replaces the
    number of queries. Every measured speed-up is printed.

    Args:
        device: "cuda" or "cpu".
        lengths: numbers of keys.
        num_runs: timed runs of each kind of attention.
    """
    points = []
    for length in lengths:
        q, k, v = draw_qkv(device, length)
        min_queries = length
        for q_length in sorted(
            (num_queries for num_queries in QUERY_COUNTS if num_queries <= length), reverse=True
        ):
            speedup = measure_speedup(q, k, v, q_length, num_runs)
            print(f"{q_length:>6} queries after {length - q_length:>7} keys: {speedup:.2f} x dense")
            if speedup < 1:
                break
            min_queries = q_length
        points.append([length, min_queries])
    return points


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--lengths", help="comma-separated numbers of keys")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--write", action="store_true", help=f"write {break_even.POINTS_FILE.name}")
    args = parser.parse_args()
    lengths = KEY_COUNTS[args.device]
    if args.lengths:
        lengths = tuple(sorted(map(int, args.lengths.split(","))))
    points = measure_break_even_points(args.device, lengths, args.runs)
    device_name = torch.cuda.get_device_name() if args.device == "cuda" else platform.machine()
    device_record = {
        args.device: {"device": device_name, "torch": torch.__version__, "points": points}
    }
    print(json.dumps(device_record))
    if args.write:
        device_records = json.loads(break_even.POINTS_FILE.read_text("utf-8"))
        # keep the device's fields that other commands have written
        device_records[args.device] = (
            device_records.get(args.device, {}) | device_record[args.device]
        )
        break_even.POINTS_FILE.write_text(json.dumps(device_records, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
