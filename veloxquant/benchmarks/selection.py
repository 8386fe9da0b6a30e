"""Which records are asked for: the filters of a page and of an export."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from veloxquant.benchmarks.eviction import PINNED, recorded_at
from veloxquant.benchmarks.matching import chip_key

if TYPE_CHECKING:
    from veloxquant.benchmarks.records import BenchmarkRecord


@dataclass(frozen=True)
class Selection:
    """What a record must be; None and False ask for nothing. All that is asked must hold."""

    method: str | None = None
    model_id: str | None = None
    architecture: str | None = None
    chip: str | None = None
    """As the system names it or in short, in any case: Apple M4 Max, m4 max."""
    mlx_version: str | None = None
    source: str | None = None
    tag: str | None = None
    pinned: bool = False
    since_s: float | None = None
    """Measured at this second since 1970 or later; a record without a date is not."""

    def takes(self, record: BenchmarkRecord) -> bool:
        """Whether the record is one of those."""
        return (
            self.method in (None, record.method)
            and self.model_id in (None, record.model_id)
            and self.architecture in (None, record.architecture)
            and (self.chip is None or chip_key(self.chip) == chip_key(record.chip))
            and self.mlx_version in (None, record.mlx_version)
            and self.source in (None, record.source)
            and (self.tag is None or self.tag in record.tags)
            and (not self.pinned or PINNED in record.tags)
            and (self.since_s is None or recorded_at(record) >= self.since_s)
        )
