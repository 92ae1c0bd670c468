"""The kernels of a decode step, in Triton's interpreter, against the reference."""

import pytest
import torch
from decode_cases import CASES, require_as_reference, step_of

from cab_hf.ops.decode import kernels


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_step_is_the_references(case):
    require_as_reference(case)


def test_a_cache_with_room_behind_what_is_written():
    q, k, v, told = step_of(CASES["group-of-3"])
    index = kernels.index_keys(k, told[3])
    choice = kernels.choose(q, index, *told)
    roomy = [torch.cat((x, x[:, :, :300]), dim=2)[:, :, :1500] for x in (k, v, *index)]
    assert not roomy[0].is_contiguous()
    other = kernels.choose(q, kernels.Index(*roomy[2:]), *told)
    assert torch.equal(other.steps, choice.steps) and torch.equal(other.limit, choice.limit)
    expected = kernels.attend(q, k, v, choice, told[0])
    assert torch.equal(kernels.attend(q, *roomy[:2], other, told[0]), expected)


def test_what_is_not_written_yet_changes_nothing():
    q, k, v, told = step_of(CASES["group-of-3"])
    index = kernels.index_keys(k, told[3])
    choice = kernels.choose(q, index, *told)
    out = kernels.attend(q, k, v, choice, told[0])
    for x in (k, v):
        x[:, :, 1300:] = float("nan")
    index.codes[:, :, 1300:], index.scales[:, :, 1300:] = 255, float("inf")
    other = kernels.choose(q, index, *told)
    assert torch.equal(other.steps, choice.steps)
    assert torch.equal(kernels.attend(q, k, v, other, told[0]), out)
