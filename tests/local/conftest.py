"""These models are so small that a second thread only waits for the first."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _use_one_thread(one_thread: None) -> None: ...
