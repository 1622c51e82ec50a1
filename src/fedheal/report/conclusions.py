"""What may be concluded from a comparison, in plain sentences."""

from __future__ import annotations

from collections.abc import Sequence

from fedheal.report.rows import Row


def sentences(found: Sequence[Row], reference: str | None = None) -> list[str]:
    """One sentence a method and number against the reference method."""
    return []
