"""What a method author subclasses: a planning half in plain Python, a building half that may use MLX.

The planning half is called by a long-running daemon: it must not import mlx, do I/O or keep state. The building half
(`build`) is called in the trace worker and in the inference process, and imports MLX inside the function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from veloxquant.errors import MethodRefused
from veloxquant.profiles.model import CachePart

if TYPE_CHECKING:
    from veloxquant.profiles.calibration import Calibration

Param = int | float | str | bool


class Variant(msgspec.Struct, frozen=True, kw_only=True):
    """A method with one set of parameters. `label` is unique over all methods and names it in records and plans."""

    method: str
    label: str
    params: Mapping[str, Param] = {}


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """One parameter a user may set when building a method's caches. `None` is taken only where it is the default."""

    name: str
    kind: Literal["int", "float", "str", "bool"]
    default: Param | None = None
    low: float | None = None
    """Least and greatest value of a number, inclusive; None: no bound."""
    high: float | None = None
    choices: tuple[Param, ...] = ()
    """The only values taken; empty: any within the bounds."""
    help: str = ""


class QualityPrior(msgspec.Struct, frozen=True, kw_only=True):
    """The author's own figure for a variant: mean KL in nats a token against the 16-bit cache, and where it is from."""

    kl_mean: float
    low: float
    high: float
    source: str
    perplexity_delta: float | None = None


class LayerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What `build` is told about the layer it builds a cache for."""

    index: int
    part: CachePart


class LayerPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One packed layer among all of them, as `layer_params` is told of it."""

    index: int
    """Its place in the engine's cache list."""
    order: int
    """Its place among the packed layers, from 0."""
    count: int
    """Packed layers."""
    part: CachePart


class Method:
    """A way to keep K and V. Subclass, set the class attributes, override what differs.

    Bits are stored bits for each number, scales and zero points included, so that
    bytes of one slot of one sequence = heads x (key_bits x key_width + value_bits x value_width) / 8.
    """

    name: str = ""
    version: str = "1"
    summary: str = ""
    paper: str = ""
    """arXiv id or address; empty for an engine's own format."""
    idea: str = ""
    """One sentence: why it works."""
    keeps: str = ""
    """One sentence: what stays in full precision, beside what is packed."""
    batchable: bool = False
    """Its caches can be merged into one batch and stay packed."""
    trimmable: bool = True
    drops_tokens: bool = False
    fused_attention: bool = False
    """Attention over its caches materializes no score matrix."""

    def variants(self) -> Sequence[Variant]:
        """Every parameter set worth planning with; called once at load."""
        raise NotImplementedError(f"{type(self).__name__} does not implement variants()")

    def parameters(self) -> Sequence[Parameter]:
        """What `Variant.params` may hold besides the values in `variants()`; called once at load. Empty: nothing.

        `refuses` still decides about combinations and widths.
        """
        return ()

    def refuses(self, variant: Variant, part: CachePart) -> tuple[str, str] | None:
        """Why this growing part cannot be kept under the variant: (reason code of the protocol, sentence), or None.

        Reason codes an author uses: "width_not_divisible", "not_supported_by_engine".
        """
        return None

    def key_bits(self, variant: Variant, part: CachePart) -> float:
        """Stored bits for one key number, scales included."""
        raise NotImplementedError(f"{type(self).__name__} does not implement key_bits()")

    def value_bits(self, variant: Variant, part: CachePart) -> float:
        """Stored bits for one value number, scales included."""
        raise NotImplementedError(f"{type(self).__name__} does not implement value_bits()")

    def fixed_bytes(self, variant: Variant, part: CachePart) -> int:
        """Bytes of one sequence that do not grow with length (sinks, recent window, codebooks)."""
        return 0

    def workspace_bytes(self, variant: Variant, part: CachePart, queries: int, slots: int) -> int:
        """Most temporary bytes of one layer's attention for one sequence.

        `queries` tokens attend to `slots` others, all that came before; bounded memory holds fewer of them. Unpacked
        blocks or float copies that are gone after the call, and blocks of scores where `fused_attention` says that no
        whole score matrix is made. 0 for kernels that read what is stored.
        """
        return 0

    def slot_step(self, variant: Variant, part: CachePart) -> int:
        """Slots the buffers grow by; 1 for a cache without slack. Growth follows the engine's rule (docs/engine.md)."""
        return part.step

    def slots(self, variant: Variant, part: CachePart, tokens: int) -> int | None:
        """Slots of the growing part that are held after `tokens` tokens of one sequence, however they were cut up.

        Never fewer with more tokens. None: growth follows the engine's rule with `slot_step`, which depends on the
        calls. Stored bytes of one sequence are slots x bytes of a slot + `fixed_bytes`, exactly; sinks, rings and
        whatever else does not grow is `fixed_bytes`.
        """
        return None

    def layer_params(
        self, variant: Variant, places: Sequence[LayerPlace], calibration: Calibration | None
    ) -> Sequence[Mapping[str, Param]] | None:
        """Parameters that differ from layer to layer: one mapping for each packed layer; None: all are alike.

        Everything else is then asked, and built, with `variant` whose `params` have the layer's mapping on top.
        Raises MethodRefused where it needs a calibration and this one, or none, does not serve; the hint says how to
        get one.
        """
        return None

    def quality_prior(self, variant: Variant) -> QualityPrior:
        """What the author claims about quality, with a source."""
        raise NotImplementedError(f"{type(self).__name__} does not implement quality_prior()")

    def quality_at(self, variant: Variant, tokens: int) -> QualityPrior:
        """The same for a sequence of `tokens` tokens, where loss depends on the length, as of dropped tokens it does.

        What the planner asks. Never less with more tokens.
        """
        return self.quality_prior(variant)

    def unpack_cost(self, variant: Variant) -> float:
        """Extra decode time for each stored number in picoseconds on the planned GPU; 0 when native kernels read it."""
        return 0.0

    def unpack_bytes(self, variant: Variant) -> float:
        """Bytes moved in decode for each stored number, besides reading what is stored.

        Unpacked copies that are written and read again; 0 when native kernels read what is stored. The planner divides
        by the machine's bandwidth, so that a fast machine pays less.
        """
        return 0.0

    def engine_settings(self, variant: Variant) -> Mapping[str, Param] | None:
        """The stock engine's own flags for this variant (kv_bits, ...), None where it cannot express it."""
        return None

    def build(self, layer: LayerSpec, variant: Variant) -> Any:
        """A fresh servable cache for one layer: what mlx-lm's model code takes in place of its KVCache.

        Raises MethodRefused before any token is processed when the layer cannot be served.
        """
        raise MethodRefused(f"{self.name} builds no servable cache", hint="choose another method")

    def build_standalone(self, head_dim: int, variant: Variant) -> Any:
        """A single-head cache of `append_key`, `append_value`, `append`, `attend`, `memory_bytes` and `len`.

        `head_dim` is the width of K and of V. Raises MethodRefused for a method that only serves, or for this width.
        """
        raise MethodRefused(
            f"{self.name} builds no standalone cache", hint="build for a model, or choose another method"
        )
