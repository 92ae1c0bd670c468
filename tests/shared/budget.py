"""Error budget of a kernel: twice the error of plain PyTorch at the same precision."""

import torch

# machine epsilon of each dtype
DTYPE_EPS = {torch.float32: 2**-23, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def assert_within_budget(actual, compute, *inputs):
    """Assert err(actual, exact) <= 2 (err(plain, exact) + eps max|exact|).

    The plain output is ``compute(*inputs)`` at the dtype of the inputs. The exact output is
    ``compute`` of the inputs in float64.
    """
    exact_out = compute(*(x.double() for x in inputs))
    plain_out = compute(*inputs)
    assert actual.dtype == plain_out.dtype and actual.shape == plain_out.shape
    error = (actual.double() - exact_out).abs().max()
    allowed_error = 2 * (
        (plain_out.double() - exact_out).abs().max()
        + DTYPE_EPS[actual.dtype] * exact_out.abs().max()
    )
    assert error <= allowed_error, f"error {error:.3g}, allowed {allowed_error:.3g}"
