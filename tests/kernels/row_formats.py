"""Row formats, and rows that are hard to pack: shared with the interpreted tests."""

import numpy as np
import torch

from sluice.cache.row_format import RowFormat

FP8_V4 = RowFormat("fp8_v4", 448, 64, tile=64, code="e4m3", scale="ue8m0")
FP8_INDEX = RowFormat("fp8", 128, 0, tile=128, code="e4m3", scale="float32", rotated=True)
FP4_INDEX = RowFormat("fp4", 128, 0, tile=32, code="e2m1", scale="ue8m0", rotated=True)
FP8_SMALL = RowFormat("fp8_v4", 48, 16, tile=64, code="e4m3", scale="ue8m0")
FP8_ODD = RowFormat("fp8_v4", 70, 6, tile=32, code="e4m3", scale="ue8m0")
FORMATS = (FP8_V4, FP8_INDEX, FP4_INDEX, FP8_SMALL, FP8_ODD)

# Magnitudes by code, from the definitions of the formats.
E4M3 = [m / 8 * 2.0**-6 for m in range(8)]
E4M3 += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
MAGNITUDES = {"e4m3": np.array(E4M3), "e2m1": np.array(E2M1)}


def awkward_rows(form):
    """[n, dim] fp32: random rows, ties, subnormals, zeros, the largest values, NaN, infinities."""
    rows = torch.randn(7, form.dim) * torch.exp2(torch.randint(-12, 12, (7, form.dim)).float())
    magnitudes = MAGNITUDES[form.code]
    ties = torch.tensor((magnitudes[1:] + magnitudes[:-1]) / 2, dtype=torch.float32)
    chosen = ties[torch.randint(len(ties), (form.dim,))] * torch.randn(form.dim).sign()
    chosen[:: form.tile] = magnitudes[-1]  # so that the scale is 1
    beyond = torch.full((form.dim,), float(np.nextafter(np.float32(magnitudes[-1]), np.inf)))
    tiny = torch.randn(form.dim) * 2.0**-140  # fp32 subnormals
    special = torch.randn(3, form.dim)
    special[0, 1], special[1, 2], special[2, 3] = torch.nan, torch.inf, -torch.inf
    zeros = torch.zeros(2, form.dim)
    zeros[1] = -zeros[1]
    largest = torch.full((1, form.dim), torch.finfo(torch.float32).max)
    return torch.cat([rows, chosen[None], beyond[None], tiny[None], special, zeros, largest])
