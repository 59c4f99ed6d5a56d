"""Fixtures that several parts share."""

import pytest

from sluice.model.make_checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    """A seeded checkpoint with all layer types, ratios 4 and 16, window 8, in fp32."""
    folder = tmp_path_factory.mktemp("checkpoints") / "tiny"
    make_checkpoint(folder, seed=7)
    return folder
