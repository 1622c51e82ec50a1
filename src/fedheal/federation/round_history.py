"""The records of a federation's rounds in little memory: a server may run for tens of thousands of rounds."""

import zlib
from collections.abc import Iterable, Sequence
from typing import overload

from fedheal.core.nested_text import parse_json
from fedheal.runs.schema import RoundRecord, parse_round


class RoundHistory(Sequence[RoundRecord]):
    """Records as compressed JSON, about a fifth of their size; reading one makes it anew."""

    def __init__(self, records: Iterable[RoundRecord] = ()) -> None:
        self._lines: list[bytes] = []
        for record in records:
            self.append(record)

    def append(self, record: RoundRecord) -> None:
        """Add a record. Raise ValueError if it is not JSON-serialisable."""
        self._lines.append(zlib.compress(record.to_json().encode()))

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> RoundRecord: ...

    @overload
    def __getitem__(self, index: slice) -> list[RoundRecord]: ...

    def __getitem__(self, index: int | slice) -> RoundRecord | list[RoundRecord]:
        if isinstance(index, slice):
            return [_read_line(line) for line in self._lines[index]]
        return _read_line(self._lines[index])


def _read_line(line: bytes) -> RoundRecord:
    return parse_round(parse_json(zlib.decompress(line)))
