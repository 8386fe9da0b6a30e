"""Loading: from a folder alone, never the network, and what cannot be read is said with what to do."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import tiny_model

from veloxquant.errors import InvalidParams, ModelConfigInvalid, ModelError, ModelNotSupported
from veloxquant.measure import loading
from veloxquant.models.resolve import resolve

if TYPE_CHECKING:
    from pathlib import Path
    from types import SimpleNamespace


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder to break."""
    return tiny_model.save(tmp_path / "broken")


def source(folder: Path) -> Any:
    """The folder, resolved."""
    return resolve(path=str(folder))


def test_a_prompt_without_a_template_is_encoded_as_it_is(tiny: SimpleNamespace) -> None:
    """One token a byte, whether a chat is wanted or not, as this tokenizer has no template."""
    assert len(loading.encode(tiny.tokenizer, "abc é", chat=True)) == 6
    assert loading.encode(tiny.tokenizer, "abc é", chat=False) == loading.encode(tiny.tokenizer, "abc é", chat=True)


def test_a_chat_template_is_put_around_the_prompt(folder: Path) -> None:
    """As mlx_lm.generate does: one message of a user, then the words that ask for an answer."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{{ '!' if add_generation_prompt }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    tokenizer = loading.load_tokenizer(source(folder))
    assert tokenizer.decode(loading.encode(tokenizer, "hi", chat=True)) == "<user>hi!"
    assert tokenizer.decode(loading.encode(tokenizer, "hi", chat=False)) == "hi"


def test_a_text_without_tokens_is_refused(tiny: SimpleNamespace) -> None:
    """An empty text has nothing to continue."""
    with pytest.raises(InvalidParams, match="no tokens"):
        loading.encode(tiny.tokenizer, "", chat=False)


def test_a_config_without_weights_cannot_run() -> None:
    """A plan can be made for a config; a generation needs the folder."""
    inline = resolve(config=dict(tiny_model.CONFIG))
    for load in (loading.load_model, loading.load_tokenizer):
        with pytest.raises(InvalidParams, match="no weights"):
            load(inline)


def test_missing_weights_are_told(folder: Path) -> None:
    """No safetensors: the folder is named."""
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelConfigInvalid, match="broken"):
        loading.load_model(source(folder))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_broken_file_is_an_error_of_ours(folder: Path, name: str) -> None:
    """Whatever the libraries raise for it, a sentence comes out."""
    (folder / name).write_bytes(b"not what it should be")
    with pytest.raises(ModelError, match=rf"broken|{re.escape(name)}"):
        (loading.load_model if name.startswith("model") else loading.load_tokenizer)(source(folder))


def test_code_of_a_model_is_never_run(folder: Path) -> None:
    """A config that names a Python file of its own is refused, and the file not run."""
    (folder / "own.py").write_text("raise SystemExit('run')")
    (folder / "config.json").write_text(json.dumps({**tiny_model.CONFIG, "model_file": "own.py"}))
    with pytest.raises(ModelNotSupported, match=r"own\.py"):
        loading.load_model(source(folder))


def test_code_of_a_tokenizer_is_never_run_nor_asked_for(folder: Path) -> None:
    """The tokenizer library would find it by its auto_map, and ask on a terminal: it is told no."""
    ran = folder / "was_run"
    (folder / "own.py").write_text(f"from pathlib import Path\nPath({str(ran)!r}).touch()\nclass T: pass\n")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    named = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["own.T", "own.T"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, **named}))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelConfigInvalid, match="contains custom code"):
        loading.load_tokenizer(source(folder))
    assert not ran.exists()


def test_an_architecture_that_the_engine_lacks_is_told(folder: Path) -> None:
    """The engine's own word is passed on."""
    (folder / "config.json").write_text(json.dumps({**tiny_model.CONFIG, "model_type": "nonesuch"}))
    with pytest.raises(ModelNotSupported, match="nonesuch"):
        loading.load_model(source(folder))
