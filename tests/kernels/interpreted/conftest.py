"""Kernels against their references: on CPU tensors in Triton's interpreter, or on a device.

Triton decides at its import which it is, so tests/kernels/test_kernels.py runs these files in a
process of its own; on a machine with a GPU they also run as they are, with `-m gpu`.
"""

import pytest
import torch

from sluice.kernels.launch import INTERPRETED

collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*.py"]
INTERPRETER = pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="compiled"))
DEVICE = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(INTERPRETED, reason="interpreted")],
)


@pytest.fixture(autouse=True, params=[INTERPRETER, DEVICE])
def device(request):
    """The default device of a test's tensors."""
    with torch.device(request.param):
        yield request.param


@pytest.fixture(autouse=True)
def poisoned(monkeypatch, device):
    """New tensors begin as NaN, or as a number that no slot has: what is not written shows."""

    def poison(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.dtype == torch.uint8:
                return tensor.fill_(255)
            return tensor.fill_(torch.nan if tensor.is_floating_point() else -(2**30))

        return made

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
