"""Random tensors are the same in every run."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for row_formats.py


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
