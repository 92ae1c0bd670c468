"""Error budget of a kernel: twice the error of plain PyTorch at the same precision."""

import torch

# machine epsilon of each dtype
EPS = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def assert_within_budget(actual, compute, *inputs):
    """Assert err(actual, exact) <= 2 (err(plain, exact) + eps max|exact|).

    ``plain`` is ``compute(*inputs)`` at the dtype of the inputs, and ``exact`` the same in float64.
    """
    exact = compute(*(x.double() for x in inputs))
    plain = compute(*inputs)
    assert actual.dtype == plain.dtype and actual.shape == plain.shape
    error = (actual.double() - exact).abs().max()
    allowed = 2 * ((plain.double() - exact).abs().max() + EPS[actual.dtype] * exact.abs().max())
    assert error <= allowed, f"error {error:.3g}, allowed {allowed:.3g}"
