"""Drives a batch twin and the single caches that it stands for side by side, and compares them after each step.

`Drive` feeds one layer's K, V and queries by the calls that mlx-lm's BatchGenerator makes: merge, prepare, update and
attend, finalize, filter, extend, extract, deep copy, state. What is padding has numbers of its own, large ones, which
must not be seen anywhere. `serve` runs a real BatchGenerator, with sequences that come and go in the middle.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention

from veloxquant.caches.held import held_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PADDING = 3000.0
"""What padded K, V and queries are made of: a thousand times what tokens are made of."""


class Shape(NamedTuple):
    """Of one layer."""

    heads: int = 2
    repeats: int = 2
    """Query heads of one KV head."""
    width: int = 32
    value_width: int = 32


class Sequence_(NamedTuple):  # noqa: N801 -- not the abstract one
    """A row's own single cache, and what its numbers are drawn from."""

    cache: Any
    numbers: np.random.Generator


class Drive:
    """A twin and its rows' single caches. `held` lists the arrays of a single cache that have a meaning, slack cut.

    `make` gives an empty single cache. All comparisons raise AssertionError. Attention agrees to `near`, relative to
    values of unit variance; what is stored agrees to the bit.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        held: Callable[[Any], list[Any]],
        *,
        shape: Shape | None = None,
        near: float = 2e-5,
        dtype: Any = mx.float32,
        window: int | None = None,
    ) -> None:
        self.make, self.held, self.near, self.dtype, self.window = make, held, near, dtype, window
        self.shape = shape or Shape()
        self.made = 0
        self.rows: list[Sequence_] = []
        self.twin: Any = None
        self._bytes: dict[int, int] = {}

    # What mlx-lm does, one function each.

    def start(self, lengths: Sequence[int]) -> None:
        """Merge single caches that hold so many tokens (0: empty ones), and extend the twin by them if there is one."""
        rows = [self._row(length) for length in lengths]
        # As mlx-lm does for a prompt cache that is used again: what is merged is not touched afterwards.
        other = rows[0].cache.merge([copy.deepcopy(row.cache) for row in rows])
        if self.twin is None:
            self.twin, self.rows = other, rows
        else:
            self.twin.extend(other)
            self.rows = self.rows + rows
        self.check()

    def prompt(self, counts: Sequence[int], step: int = 2048, *, left: bool = False) -> None:
        """Tokens for every row, padded to the longest, in calls of `step`: PromptProcessingBatch.prompt."""
        most = max(counts)
        padding = [most - count for count in counts]
        if any(padding) and left:
            self.twin.prepare(left_padding=padding)
        elif any(padding):
            self.twin.prepare(lengths=list(counts), right_padding=padding)
        for first in range(0, most, step):
            size = min(step, most - first)
            starts = padding if left else [0] * len(counts)
            ends = [most] * len(counts) if left else counts
            spans = [
                (min(max(0, start - first), size), min(max(0, end - first), size))
                for start, end in zip(starts, ends, strict=True)
            ]
            self._call(size, spans)
        if any(padding):
            self.twin.finalize()
        self.check()

    def decode(self, steps: int) -> None:
        """So many steps of one token for every row."""
        for _ in range(steps):
            self._call(1, [(0, 1)] * len(self.rows))
            self._bytes_agree()
        self.check()

    def filter(self, keep: Sequence[int]) -> None:
        """Only these rows stay."""
        self.twin.filter(list(keep))
        self.rows = [self.rows[at] for at in keep]
        self.check()

    def split(self, away: Sequence[int]) -> Drive:
        """These rows go to a driver of their own, as PromptProcessingBatch.split does: a deep copy, both filtered."""
        other = copy.copy(self)
        other.twin = copy.deepcopy(self.twin)
        kept = [at for at in range(len(self.rows)) if at not in away]
        self.filter(kept)
        other.filter(sorted(away))
        return other

    def join(self, other: Drive) -> None:
        """The other's rows come behind ours."""
        self.twin.extend(other.twin)
        self.rows = self.rows + other.rows
        self.check()

    def copy(self) -> None:
        """Go on with a deep copy; the first one is written to, which the copy must not see."""
        first, self.twin = self.twin, copy.deepcopy(self.twin)
        self._scribble(first)
        self.check()

    def restore(self) -> None:
        """Go on with one made from the state; the first one is written to."""
        first = self.twin
        mx.eval(first.state)
        self.twin = type(first).from_state(first.state)
        self._scribble(first)
        self.check()

    def extract(self, at: int, tokens: int = 3) -> None:
        """A row taken out goes on alone as its single run does, and the twin is not touched by it."""
        one, row = self.twin.extract(at), self.rows[at]
        assert type(one) is type(row.cache)
        assert one.nbytes == held_bytes(one)
        own = copy.deepcopy(row.cache)
        for count in (*[1] * tokens, 9):
            keys, values, queries = self._drawn(np.random.default_rng(count), count)
            ours = self._attended(one, keys, values, queries)
            theirs = self._attended(own, keys, values, queries)
            assert float(mx.abs(ours - theirs).max()) <= self.near
            assert one.offset == own.offset
        self._same(one, own, at)
        self.check()

    # What must hold after each of them.

    def check(self) -> None:
        """Offsets, size, bytes, and every row's stored arrays."""
        offsets = [row.cache.offset for row in self.rows]
        assert self.twin.offset.tolist() == offsets
        assert self.twin.empty() == (not any(offsets))
        assert self.twin.size() >= max(offsets, default=0)
        assert bool(self.twin)
        assert not hasattr(self.twin, "__len__")
        assert hasattr(self.twin, "bits") == hasattr(self.twin, "group_size")
        self._bytes_agree()
        for at, row in enumerate(self.rows):
            self._same(self.twin.extract(at), row.cache, at)

    def _bytes_agree(self) -> None:
        mx.eval(self.twin.state)
        longest = max((row.cache.offset for row in self.rows), default=0)
        assert self.twin.nbytes == held_bytes(self.twin) == len(self.rows) * self.bytes_of(longest)

    def bytes_of(self, length: int) -> int:
        """A single cache's bytes after one call of so many tokens."""
        if length not in self._bytes:
            cache = self.make()
            if length:
                keys, values, _ = self._drawn(np.random.default_rng(0), length)
                cache.update_and_fetch(keys, values)
            self._bytes[length] = held_bytes(cache)
        return self._bytes[length]

    def _same(self, ours: Any, theirs: Any, at: int) -> None:
        mine, own = self.held(ours), self.held(theirs)
        assert len(mine) == len(own)
        for index, (a, b) in enumerate(zip(mine, own, strict=True)):
            assert a.shape == b.shape, (at, index, a.shape, b.shape)
            assert a.dtype == b.dtype
            assert bool(mx.array_equal(a, b)), f"row {at} of {theirs.offset} tokens: array {index} differs"

    def _row(self, length: int) -> Sequence_:
        self.made += 1
        row = Sequence_(self.make(), np.random.default_rng(self.made))
        if length:
            self._attended(row.cache, *self._drawn(row.numbers, length))
        return row

    def _call(self, size: int, spans: Sequence[tuple[int, int]]) -> None:
        """One call of the model: spans are the rows' own columns, the rest is padding."""
        drawn = [self._drawn(row.numbers, end - start) for row, (start, end) in zip(self.rows, spans, strict=True)]
        keys, values, queries = (
            mx.concatenate(
                [
                    mx.pad(one[kind], [(0, 0), (0, 0), (start, size - end), (0, 0)], constant_values=mx.array(PADDING))
                    for one, (start, end) in zip(drawn, spans, strict=True)
                ]
            ).astype(self.dtype)
            for kind in range(3)
        )
        out = self._attended(self.twin, keys, values, queries)
        assert not bool(mx.isnan(out).any())
        assert out.shape == (*queries.shape[:3], self.shape.value_width)
        for at, (row, (start, end)) in enumerate(zip(self.rows, spans, strict=True)):
            if end > start:
                alone = self._attended(row.cache, *drawn[at])
                far = float(mx.abs(out[at : at + 1, :, start:end] - alone).max())
                assert far <= self.near, f"row {at} at {row.cache.offset} tokens is {far} from its single run"

    def _attended(self, cache: Any, keys: Any, values: Any, queries: Any) -> Any:
        """As a model's layer calls it."""
        mask = create_attention_mask(keys.swapaxes(1, 2), cache, self.window)
        held_keys, held_values = cache.update_and_fetch(keys, values)
        scale = self.shape.width**-0.5
        out = scaled_dot_product_attention(queries, held_keys, held_values, cache=cache, scale=scale, mask=mask)
        mx.eval(out, cache.state)
        return out

    def _drawn(self, numbers: np.random.Generator, count: int) -> tuple[Any, Any, Any]:
        heads, repeats, width, value_width = self.shape
        shapes = ((heads, width), (heads, value_width), (heads * repeats, width))
        return tuple(  # type: ignore[return-value]
            mx.array(numbers.standard_normal((1, many, count, wide)), dtype=mx.float32).astype(self.dtype)
            for many, wide in shapes
        )

    def _scribble(self, twin: Any) -> None:
        """One more token for all rows of a twin that is not used any more."""
        heads, _, width, value_width = self.shape
        batch = len(self.rows)
        if batch:
            ones = [mx.full((batch, heads, 1, wide), PADDING, dtype=self.dtype) for wide in (width, value_width)]
            twin.update_and_fetch(*ones)
            mx.eval(twin.state)


ACTS = ("start", "prompt", "left", "decode", "filter", "split", "copy", "restore", "extract")
PLANS = st.lists(
    st.tuples(st.sampled_from(ACTS), st.lists(st.integers(0, 1000), min_size=1, max_size=4)), min_size=2, max_size=7
)
"""What `played` does with a driver without rows."""


def played(drive: Drive, plan: Sequence[tuple[str, list[int]]]) -> None:
    """A list of (what, numbers) as hypothesis draws it; numbers are brought into range, the first call starts rows.

    "start", "prompt", "left" (a left-padded prompt for an empty twin), "decode", "filter", "split" (apart, a step each,
    and together again), "copy", "restore", "extract".
    """
    for what, numbers in plan:
        count = len(drive.rows)
        if not count or what == "start":
            drive.start([number % 200 if number % 3 else 0 for number in numbers[:3]])
        elif what == "prompt" or (what == "left" and not drive.twin.empty()):
            drive.prompt([1 + numbers[at % len(numbers)] % 150 for at in range(count)], step=1 + numbers[0] % 97)
        elif what == "left":
            drive.prompt([1 + numbers[at % len(numbers)] % 150 for at in range(count)], left=True)
        elif what == "decode":
            drive.decode(1 + numbers[0] % 40)
        elif what == "filter":
            drive.filter(sorted({number % count for number in numbers}))
        elif what == "split" and count > 1:
            other = drive.split([numbers[0] % count])
            other.decode(1)
            drive.decode(1)
            drive.join(other)
        elif what == "extract":
            drive.extract(numbers[0] % count)
        elif what in ("copy", "restore"):
            getattr(drive, what)()


# A real BatchGenerator.


class Served(NamedTuple):
    """What one sequence got."""

    tokens: list[int]
    logprobs: Any
    """(tokens, vocabulary)"""
    caches: list[Any]
    """Its own, extracted when it ended."""


class Request(NamedTuple):
    """One sequence: `arrives` after so many rounds of the generator; `leaves` after so many tokens."""

    prompt: list[int]
    leaves: int = 8
    arrives: int = 0
    caches: list[Any] | None = None
    """With tokens of an earlier prompt; None: fresh ones."""


def serve(
    model: Any,
    make: Callable[[], list[Any]],
    requests: Sequence[Request],
    each: Callable[[list[Any]], None] | None = None,
    **options: Any,
) -> list[Served]:
    """Run them through one BatchGenerator; `each` is given the generating batch's caches after every round."""
    generator = BatchGenerator(model, **{"prefill_step_size": 64, **options})
    order: dict[int, int] = {}
    found = [Served([], [], []) for _ in requests]
    rounds = 0
    while len(order) < len(requests) or any(not one.caches for one in found):
        for at, request in enumerate(requests):
            if request.arrives == rounds:
                held = [request.caches if request.caches is not None else make()]
                (uid,) = generator.insert([list(request.prompt)], max_tokens=[request.leaves], caches=held)
                order[uid] = at
        _, answers = generator.next()
        for answer in answers:
            one = found[order[answer.uid]]
            one.tokens.append(answer.token)
            one.logprobs.append(answer.logprobs)
            one.caches.extend(answer.prompt_cache or [])
        if each is not None:
            each(generator._generation_batch.prompt_cache)
        rounds += 1
    generator.close()
    return [one._replace(logprobs=mx.stack(one.logprobs)) for one in found]


def alone(model: Any, caches: list[Any], request: Request, step: int = 64) -> Served:
    """The same request by mlx-lm's loop for one sequence."""
    prompt = mx.array(request.prompt)
    made = list(generate_step(prompt, model, max_tokens=request.leaves, prompt_cache=caches, prefill_step_size=step))
    return Served([int(token) for token, _ in made], mx.stack([logprobs for _, logprobs in made]), caches)


def agree(together: Served, single: Served, near: float) -> None:
    """The same tokens, and the same logprobs to `near` nats."""
    assert together.tokens == single.tokens
    assert float(mx.abs(together.logprobs - single.logprobs).max()) <= near
