"""Values kept within a bound, against a list that is kept by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from veloxquant.daemon.bounded import Bounded

steps = st.lists(
    st.tuples(st.sampled_from(["put", "get", "drop", "drop where"]), st.integers(0, 5), st.integers(0, 60))
)


@given(steps, st.integers(0, 150))
def test_the_least_lately_used_goes_first_and_bytes_are_the_sum(todo: list[tuple[str, int, int]], limit: int) -> None:
    """Keys weigh one byte each, values what they say; a value too heavy by itself moves nothing but its namesake."""
    left: list[int] = []
    kept: Bounded[int, int] = Bounded(limit, lambda _key, value: value + 1, left.append)
    model: list[tuple[int, int]] = []  # the least lately used first
    gone: list[int] = []
    for what, key, value in todo:
        found = dict(model).get(key)
        others = [one for one in model if one[0] != key]
        if what == "get":
            assert kept.get(key) == found
            model = model if found is None else [*others, (key, found)]
        elif what == "drop where":
            kept.drop_where(lambda held, least=value: held >= least)  # type: ignore[misc]
            gone += [one for one, held in model if held >= value]
            model = [(one, held) for one, held in model if held < value]
        else:
            gone += [key] * (found is not None)
            model = others
            if what == "drop":
                kept.drop(key)
            else:
                kept.put(key, value)
                model += [(key, value)] * (value < limit)
                while sum(weight + 1 for _, weight in model) > limit:
                    gone.append(model.pop(0)[0])
        assert kept.bytes == sum(weight + 1 for _, weight in model) <= limit
        assert (len(kept), kept.oldest()) == (len(model), model[0] if model else None)
        assert left == gone
