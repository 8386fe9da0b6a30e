"""The recipe of docs/methods.md is code that works."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

from veloxquant.methods.checks import check_figures, check_parameters, check_returned, check_variants, sample_part
from veloxquant.methods.parameters import variant_for

RECIPE = Path(__file__).parents[2] / "docs" / "methods.md"


def test_the_recipe_gives_a_sound_method() -> None:
    """The six steps, pasted together, pass every check that a plugin must pass."""
    blocks = re.findall(r"```python\n(.*?)```", RECIPE.read_text(), re.DOTALL)
    source = textwrap.dedent("\n".join(blocks))
    space: dict[str, Any] = {}
    exec(source, space)  # noqa: S102 -- our own documentation
    (method,) = check_returned(space["veloxquant_methods"]())
    variants = check_variants(method)
    check_figures(method, variants)
    assert method.key_bits(variants[0], sample_part(64, 2)) == 8.25
    assert method.refuses(variants[0], sample_part(66, 2)) == (
        "width_not_divisible",
        "rows of 66 do not fill 32-bit words",
    )
    assert [parameter.name for parameter in check_parameters(method)] == ["clip"]
    assert variant_for(method, {}) == variants[0]
    other = variant_for(method, {"clip": 0.75})
    assert (other.label, other.params) == ("plain8-clip.0.75", {"bits": 8, "clip": 0.75})
