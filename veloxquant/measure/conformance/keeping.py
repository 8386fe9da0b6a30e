"""What a cache hands out of itself: its state, a saved file read in another process, a deep copy."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from veloxquant.caches.held import arrays
from veloxquant.measure.conformance import another_process
from veloxquant.measure.conformance.outcome import failed, unless
from veloxquant.measure.conformance.subject import Run

if TYPE_CHECKING:
    from veloxquant.measure.conformance.outcome import Verdict
    from veloxquant.measure.conformance.subject import Subject


def state_is_all_and_restores(subject: Subject) -> Verdict:
    """`state` lists every array, empty too; a cache made from it, and one that is given it, go on as the first."""
    import mlx.core as mx

    for caches, when in ((subject.caches(), "empty"), (subject.held, "filled")):
        for index, cache in subject.packed(caches).items():
            mx.eval(cache.state)
            held = {id(array): tuple(array.shape) for array in arrays(cache)}
            listed = {id(array): tuple(array.shape) for array in arrays(list(_leaves(cache.state)))}
            if listed.keys() != held.keys():
                missing = [shape for array, shape in held.items() if array not in listed]
                expected = f"every array of layer {index}, {when}, in its state"
                return failed(expected, f"{len(listed)} of {len(held)}, without {missing}")
    for way in ("from_state", "the state's setter"):
        caches = subject.filled()
        for index, cache in subject.packed(caches).items():
            caches[index] = _given(subject, index, cache) if "setter" in way else type(cache).from_state(cache.state)
        told = subject.unlike(Run(subject.logits(caches, subject.more)), subject.continued)
        if told is not None:
            return failed(f"a cache restored by {way} to go on as the one it came from", told)
    return unless([])


def _leaves(state: Any) -> Any:
    """Containers of a state are the caller's own; what is in them counts."""
    return state if isinstance(state, list | tuple) else [state]


def _given(subject: Subject, index: int, cache: Any) -> Any:
    fresh = subject.build(index, subject.part(index))
    fresh.state = cache.state
    return fresh


def saved_and_loaded_elsewhere(subject: Subject) -> Verdict:
    """`save_prompt_cache` here, `load_prompt_cache` in another process: equal bytes, and the logits that follow."""
    from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

    with tempfile.TemporaryDirectory(prefix="vq-conformance-") as folder:
        file = str(Path(folder) / "prompt.safetensors")
        save_prompt_cache(file, subject.caches())
        for cache in subject.packed(load_prompt_cache(file)).values():
            if not cache.empty() or cache.offset:
                return failed("an empty cache after saving and loading one", f"offset {cache.offset}")
        held = [int(cache.nbytes) for cache in subject.packed(subject.held).values()]
        save_prompt_cache(file, subject.held)
        answer = another_process.load(file, subject.architecture.name, subject.more, subject.probe.packed)
    if answer.error is not None:
        return failed("a list of caches that another process can load", answer.error)
    if answer.nbytes != held:
        return failed(f"{held} bytes in the packed layers after loading", str(answer.nbytes))
    told = subject.unlike(Run(answer.logits), subject.continued)
    return unless([] if told is None else [("the saved prompt to go on in another process as it does here", told)])


def deep_copy_goes_its_own_way(subject: Subject) -> Verdict:
    """A copy goes on as the cache would, and the cache is what it was before."""
    import mlx.core as mx

    caches = subject.filled()
    copied = copy.deepcopy(caches)
    mx.eval([cache.state for cache in caches])
    before = [_contents(cache) for cache in subject.packed(caches).values()]
    offsets = [cache.offset for cache in subject.packed(caches).values()]
    seen = subject.logits(copied, subject.more)
    after = [_contents(cache) for cache in subject.packed(caches).values()]
    if offsets != [cache.offset for cache in subject.packed(caches).values()] or before != after:
        return failed("a cache that stays as it was when its copy goes on", "other contents")
    told = subject.unlike(Run(seen), Run(subject.logits(caches, subject.more)))
    return unless([] if told is None else [("a deep copy to go on as the cache itself", told)])


def _contents(cache: Any) -> list[bytes]:
    """Of every array, in an order that does not depend on where arrays lie."""
    import mlx.core as mx

    flat: list[Any] = [mx.contiguous(array.flatten()).view(mx.uint8) for array in arrays(cache)]
    return sorted(bytes(memoryview(one)) for one in flat)
