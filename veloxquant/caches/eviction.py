"""When a bounded cache drops tokens, and which: arithmetic of positions, and the policies of five papers.

Tokens are dropped only when a row's length reaches a multiple of `stride`, and whenever more than `budget` are held
there. Both are facts of the row's own length, so that neither how a prompt is cut into calls nor what other rows do
changes what is kept. Importing this needs no mlx: methods plan with the same arithmetic.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from veloxquant.caches.limits import whole
from veloxquant.errors import InvalidParams, MethodRefused, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from veloxquant.caches.rows import Ints

STRIDE = 64
"""Tokens from one eviction to the next, unless said otherwise."""
LONGEST = 2**31 - 1
"""No token has this position: positions are int32, and a slot without a token has it."""
UNIT = 2**18
"""Attention weights are summed as whole numbers of 1 / UNIT: sums that do not depend on their order, so that a token
kept by a hair is kept whatever the calls. A weight below 2**-19 counts as none."""
MOST = 2**30
"""Where such sums stop (4,096 times all the attention of one query); whatever is there is kept before all else."""
_BUDGETS = 2**24


class Rule(NamedTuple):
    """Arithmetic of one row. `budget` is the most tokens a head holds after an eviction; before it, `stride` more."""

    budget: int
    stride: int = STRIDE

    @property
    def first(self) -> int:
        """Length at which tokens are dropped for the first time: the first multiple of stride above budget."""
        return self.stride * (self.budget // self.stride + 1)

    def due(self, length: int) -> bool:
        """Whether tokens are dropped when a row reaches this length."""
        return length >= self.first and length % self.stride == 0

    def held(self, length: int) -> int:
        """Tokens that each head holds at this length, an eviction that is due there done."""
        return length if length < self.first else self.budget + length % self.stride

    def due_rows(self, lengths: Ints) -> Any:
        """`due` of each row, (rows,) bool."""
        return (lengths >= self.first) & (lengths % self.stride == 0)

    def held_rows(self, lengths: Ints) -> Ints:
        """`held` of each row."""
        return lengths + (lengths >= self.first) * (self.budget + lengths % self.stride - lengths)

    def slots(self, length: int) -> int:
        """Slots that are allocated at this length: whole strides until there is room for budget + stride."""
        return min(self.budget + self.stride, self.stride * -(-length // self.stride))

    def check(self, policy: Policy) -> Rule:
        """Itself. Raises InvalidParams for numbers out of range, and where the policy keeps more than the budget."""
        whole(self.budget, "budget", 1, _BUDGETS)
        whole(self.stride, "stride", 1, _BUDGETS)
        always = policy.sinks + policy.recent
        if always > self.budget:
            message = f"{policy.name} always keeps {policy.sinks} first and {policy.recent} recent tokens, over budget"
            raise InvalidParams(message, hint=f"set a budget of {always} or more", field="budget")
        if policy.watches > self.stride:
            message = f"the last {policy.watches} queries are watched, and an eviction is every {self.stride} tokens"
            raise InvalidParams(message, hint=f"set a stride of {policy.watches} or more", field="stride")
        return self


class Held(NamedTuple):
    """What a policy is shown at an eviction."""

    positions: Any
    """(batch, KV heads, slots) int32, rising; LONGEST where there is no token."""
    end: Any
    """(batch, 1, 1) int32: tokens seen."""
    attention: Any
    """(batch, KV heads, slots) int32: attention by the watched queries, in 1 / UNIT; None where none are watched."""
    keys: Callable[[], Any]
    """Keys as they are stored, unpacked: (batch, KV heads, slots, width) float32."""


class Policy(Protocol):
    """Immutable. What it says about a token must depend on what `Held` has and on nothing else."""

    @property
    def name(self) -> str:
        """Of the method."""

    @property
    def sinks(self) -> int:
        """First tokens that are always kept."""

    @property
    def recent(self) -> int:
        """Last tokens that are always kept."""

    @property
    def watches(self) -> int:
        """Queries before an eviction whose attention counts: 0 none, -1 all since the first token."""

    def worth(self, held: Held) -> Any:
        """(batch, KV heads, slots), any real format: the least worth is dropped first."""


@dataclass(frozen=True)
class Streaming:
    """The first tokens and the last ones (arXiv 2309.17453)."""

    sinks: int = 4
    recent: int = 0
    name = "streaming"
    watches = 0

    def __post_init__(self) -> None:
        _counts(self)

    def worth(self, held: Held) -> Any:
        """The newest first."""
        return held.positions - held.end


@dataclass(frozen=True)
class KeyNorm:
    """Keys of small norm are those that get attention (arXiv 2406.11430).

    Models that normalise their keys (Gemma 3 and 4, Qwen3) may give all tokens one norm but for float noise, which
    depends on how a prompt is cut into calls and must not choose. Squares of norms are rounded to eight significant
    bits, and of those then equal the newer stays. So an older token may go in the place of one whose norm is larger by
    at most 1/256, and noise chooses only where a square is as near as noise to halfway between two such values.
    """

    sinks: int = 0
    recent: int = 0
    name = "knorm"
    watches = 0

    def __post_init__(self) -> None:
        _counts(self)

    def worth(self, held: Held) -> Any:
        """The squared norm of the stored key in bfloat16, which has eight significant bits. The largest goes first."""
        import mlx.core as mx

        keys = held.keys()
        return -(keys * keys).sum(axis=-1).astype(mx.bfloat16)


@dataclass(frozen=True)
class SnapKV:
    """What the last `recent` queries attend to, smoothed over `kernel` neighbours (arXiv 2404.14469).

    Neighbours are those among the tokens still held. The window itself is kept and takes no part in the smoothing.
    """

    recent: int = 32
    kernel: int = 7
    pooling: str = "max"
    sinks: int = 0
    name = "snapkv"

    def __post_init__(self) -> None:
        _counts(self)
        whole(self.recent, "recent", 1, _BUDGETS)
        if whole(self.kernel, "kernel", 1, 63) % 2 == 0:
            raise InvalidParams(f"a kernel of {self.kernel} has no middle", hint="give an odd kernel", field="kernel")
        if self.pooling not in ("max", "avg"):
            message = f"no such pooling: {quoted(self.pooling)}"
            raise InvalidParams(message, hint='use "max" or "avg"', field="pooling")

    @property
    def watches(self) -> int:
        """The observation window."""
        return self.recent

    def worth(self, held: Held) -> Any:
        """Pooled sums. "avg" leaves out the division by the kernel, which changes no order."""
        import mlx.core as mx

        before = mx.where(held.positions < held.end - self.recent, held.attention, 0)
        side = self.kernel // 2
        padded = mx.pad(before, [(0, 0), (0, 0), (side, side)])
        slots = before.shape[-1]
        near = [padded[..., shift : shift + slots] for shift in range(self.kernel)]
        pooled = near[0].astype(mx.float32)
        for other in near[1:]:
            pooled = mx.maximum(pooled, other) if self.pooling == "max" else pooled + other
        return pooled


@dataclass(frozen=True)
class HeavyHitters:
    """What all queries so far attended to most, and the `recent` last tokens (H2O, arXiv 2306.14048)."""

    recent: int
    sinks: int = 0
    name = "h2o"
    watches = -1

    def __post_init__(self) -> None:
        _counts(self)

    def worth(self, held: Held) -> Any:
        """The sums."""
        return held.attention


_POLICIES: Mapping[str, Callable[..., Any]] = {
    "streaming": Streaming,
    "knorm": KeyNorm,
    "snapkv": SnapKV,
    "h2o": HeavyHitters,
}


def describe(policy: Policy) -> dict[str, int | str]:
    """Name and parameters, from which `make` builds an equal policy in another process."""
    return {"name": policy.name, **asdict(policy)}  # type: ignore[call-overload]


def make(description: Mapping[str, int | str]) -> Policy:
    """The policy that `describe()` described. Raises MethodRefused for another name or parameter."""
    parameters = dict(description)
    made = _POLICIES.get(str(parameters.pop("name", None)))
    unknown = MethodRefused(
        f"no such way to drop tokens: {quoted(description)}",
        hint=f"use {', '.join(_POLICIES)}, as describe() writes it",
    )
    if made is None:
        raise unknown
    try:
        policy: Policy = made(**parameters)
    except TypeError as error:
        raise unknown from error
    return policy


def keep(policy: Policy, budget: int, held: Held) -> Any:
    """The slots that stay, rising: (batch, KV heads, budget), exactly so many for each head.

    Of tokens of equal worth the newer stays.
    """
    import mlx.core as mx

    always = (held.positions < policy.sinks) | (held.positions >= held.end - policy.recent)
    # No token is worth as little as an empty slot, be its key's norm infinite.
    finite = mx.maximum(policy.worth(held).astype(mx.float32), mx.finfo(mx.float32).min)
    worth = mx.where(always, mx.inf, finite)
    worth = mx.where(held.positions == LONGEST, -mx.inf, worth)
    return mx.sort(mx.argsort(worth, axis=-1)[..., -budget:].astype(mx.int32), axis=-1)


def _counts(policy: Policy) -> None:
    whole(policy.sinks, "sinks", 0, _BUDGETS)
    whole(policy.recent, "recent", 0, _BUDGETS)
