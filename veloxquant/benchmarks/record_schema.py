"""The JSON schema of a record, for programs that write records without us.

It says what `BenchmarkRecord.from_dict` accepts, field by field; a test holds the two to each other. Further keys are
allowed, as they are kept. Its patterns mean the same in Python, ECMAScript and RE2.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

NAME = "record.schema.json"


@cache
def shipped() -> dict[str, Any]:
    """The schema as it lies in the package: JSON Schema 2020-12."""
    found: dict[str, Any] = msgspec.json.decode(files("veloxquant.benchmarks").joinpath(NAME).read_bytes())
    return found
