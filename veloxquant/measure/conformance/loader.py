"""The other process: loads saved prompts as a user's program would, which only called `register_caches`.

Reads one JSON object a line (file, architecture, tokens, packed), gives the tokens to the model of the same seed,
writes the logits to a file beside the prompt, and answers with one JSON object a line (nbytes, error).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import mlx.core as mx

from veloxquant.caches.registration import register_caches
from veloxquant.measure.conformance import models
from veloxquant.measure.conformance.another_process import logits_of


def _answer(asked: dict[str, Any]) -> dict[str, Any]:
    from mlx_lm.models.cache import load_prompt_cache

    caches = load_prompt_cache(asked["file"])
    nbytes = [int(caches[index].nbytes) for index in asked["packed"]]
    logits = models.logits(models.model(asked["architecture"]), caches, tuple(asked["tokens"]))
    mx.save_safetensors(logits_of(asked["file"]), {"logits": logits})
    return {"nbytes": nbytes, "error": None}


def _serve() -> None:
    register_caches()
    for line in sys.stdin:
        try:
            answer = _answer(json.loads(line))
        except Exception as error:  # noqa: BLE001 -- a stranger's cache: whatever it raises is the answer
            answer = {"nbytes": [], "error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
