"""Small configs of architectures that differ in how they attend, from the recorded runs and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GEMMA4 = {
    "model_type": "gemma4_text",
    "hidden_size": 128,
    "num_hidden_layers": 10,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 1000,
    "vocab_size_per_layer_input": 1000,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 4,
    "hidden_size_per_layer_input": 32,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 5,
}
"""Ten layers, every second one full; the last four share K and V, so layers 4 and 5 are the donors."""

_ARCHS = json.loads((Path(__file__).parent.parent / "data" / "mlx_lm_archs.json").read_text())["archs"]
CONFIGS: dict[str, dict[str, Any]] = {name: arch["runs"][0]["config"] for name, arch in _ARCHS.items() if arch["runs"]}

DEEPSEEK = {"kv_lora_rank": 64, "qk_rope_head_dim": 32, "q_lora_rank": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
