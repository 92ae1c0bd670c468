"""Measure the time of an op, next to the best dense attention in the same run."""

OPS = ("attention", "ttft", "decode", "serve", "lora", "context-parallel")
COMMANDS = {op: f"cab_hf.eval.speed.{op.replace('-', '_')}" for op in OPS}
