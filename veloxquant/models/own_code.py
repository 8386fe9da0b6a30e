"""Models that bring Python code along. It is never run, here or in a worker, and a model that needs it is refused.

mlx-lm runs the file that `model_file` names when its caller passes trust_remote_code=True, which nothing here does.
`auto_map` is how transformers finds such code; mlx-lm does not look at it, and has classes of its own for most models
that have one, so that it alone is no reason to refuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from veloxquant.errors import ModelNotSupported, quoted

if TYPE_CHECKING:
    from collections.abc import Mapping

_HINT = "use a model whose architecture mlx-lm has"


def refuse(config: Mapping[str, Any], field: str) -> None:
    """Raises ModelNotSupported for a config that asks for code of its own to be run."""
    if config.get("model_file") is not None:
        raise ModelNotSupported(
            f"the config asks to run a Python file of its own ({quoted(config['model_file'])}), which is never done",
            hint=_HINT,
            field=field,
        )
    if config.get("trust_remote_code"):
        raise ModelNotSupported(
            "the config asks to trust code that comes with the model, which is never done", hint=_HINT, field=field
        )


def note(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What is to be said of a model that names code and does without it."""
    if not config.get("auto_map"):
        return ()
    return ("the config names Python code of its own (auto_map); it is never run",)
