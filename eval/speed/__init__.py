"""How long an op takes, beside the best dense attention in the same run."""

COMMANDS = {
    op: f"cab_hf.eval.speed.{op}"
    for op in ("predictor", "attention", "budgets", "ttft", "breakdown", "prefill", "lora")
}
