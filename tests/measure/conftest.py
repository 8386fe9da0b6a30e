"""One tiny model for all tests of this room, loaded as `profile` loads it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tiny_model

from veloxquant.measure import loading
from veloxquant.models.resolve import resolve


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Model, tokenizer and source of the tiny llama, and a prompt of 300 tokens."""
    folder = tiny_model.save(tmp_path_factory.mktemp("tiny") / "tiny-llama")
    source = resolve(path=str(folder))
    prompt = [(7 * at + 3) % 256 for at in range(300)]
    return SimpleNamespace(
        model=loading.load_model(source), tokenizer=loading.load_tokenizer(source), source=source, prompt=prompt
    )
