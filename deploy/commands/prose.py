"""The public-domain novel that ships with the project (texts/NOTICE says where it is from)."""

from __future__ import annotations

from pathlib import Path

TEXT = Path(__file__).parents[1] / "texts" / "persuasion.txt"


def paragraphs() -> list[str]:
    """The novel's paragraphs, title and chapter headings included, each on one line."""
    return [" ".join(part.split()) for part in TEXT.read_text(encoding="utf-8").split("\n\n")]
