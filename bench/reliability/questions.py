"""The lines that the scripts send: Llama-3.1-8B on a 16 GiB M2, each line another context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from veloxquant.wire.messages import encode_request

DATA = Path(__file__).resolve().parents[1] / "data"
LLAMA = json.loads((DATA / "llama-3.1-8b" / "config.json").read_text(encoding="utf-8"))
MODEL = {"config": LLAMA, "model_id": "meta-llama/Meta-Llama-3.1-8B", "weights_bytes": 9 * 2**29}
HARDWARE = {"chip": "Apple M2", "gpu_cores": 10, "total_memory_bytes": 16 * 2**30, "working_set_bytes": 11 * 2**30}
PING = b'{"jsonrpc":"2.0","id":1,"method":"ping"}\n'


def params(context: int) -> dict[str, Any]:
    """The params of a plan for this context."""
    return {"model": MODEL, "hardware": HARDWARE, "workload": {"context_length": context}}


def plans(count: int) -> list[bytes]:
    """So many different questions."""
    return [encode_request(1, "plan", params(4096 + number)) for number in range(count)]
