"""Root-mean-square normalisation, with a weight or without."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, statistics and product in fp32.

    x: [..., dim]; weight: [dim] fp32, or None for ones. Returns a new tensor of x's dtype.
    """
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)
