"""Several methods: each beside the engine's own cache of the same session, a failing one beside the others."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import tiny_model
from mlx_lm.models.cache import KVCache
from tiny_model import FLOAT_SLOT, LAYERS, NUMBERS, PACKED_SLOT

from veloxquant.errors import MethodRefused
from veloxquant.measure.comparison import Comparison, agreeing, compare
from veloxquant.measure.measurement import Subject

if TYPE_CHECKING:
    from types import SimpleNamespace


def compared(tiny: SimpleNamespace, *subjects: Any, **settings: Any) -> Comparison:
    """These subjects on 20 tokens, 4 generated; a word stands for a variant of the registry."""
    made = [tiny_model.subject(tiny.model, one) if isinstance(one, str) else one for one in subjects]
    return compare(tiny.model, tiny.tokenizer, tiny.prompt[:20], made, max_tokens=4, **settings)


def broken(error: BaseException) -> Subject:
    """A method whose caches cannot be had."""

    def build() -> list[Any]:
        raise error

    return Subject(label="broken-x", method="broken", build=build, planned=True)


def test_ratios_are_to_the_engines_own_cache_of_the_session(tiny: SimpleNamespace) -> None:
    """Both hold 256 slots: the ratio is that of their slots."""
    found = compared(tiny, "fp16", "affine4-g64")
    own, packed = found.runs
    assert found.baseline is own
    assert found.ratio_to_fp16_run(own) == 1.0
    assert found.ratio_to_fp16_run(packed) == pytest.approx(PACKED_SLOT / FLOAT_SLOT)
    assert (found.same_text(own), found.agreeing_tokens(own)) == (True, 4)


@pytest.mark.parametrize(
    ("types", "wide"),
    [(("float32",), True), (("bfloat16",), False), (("bfloat16", "float32"), False), (("float16", "uint32"), False)],
)
def test_a_baseline_of_32_bits_is_told(tiny: SimpleNamespace, types: tuple[str, ...], *, wide: bool) -> None:
    """A model that computes in 32 bits keeps 32; states in 32 beside K and V in 16 make no difference."""
    found = compared(tiny, "fp16")
    assert found.runs[0].number_types == ("float32",)
    changed = msgspec.structs.replace(found.runs[0], number_types=types)
    assert msgspec.structs.replace(found, runs=(changed,)).is_wide is wide


def test_without_the_engines_own_cache_there_is_no_ratio(tiny: SimpleNamespace) -> None:
    """Nothing is compared with a figure of another comparison."""
    found = compared(tiny, "affine4-g64")
    (only,) = found.runs
    assert (
        found.baseline,
        found.ratio_to_fp16_run(only),
        found.memory_reduction(only),
        found.same_text(only),
        found.agreeing_tokens(only),
    ) == (None,) * 5


@pytest.mark.parametrize(
    ("error", "name", "message"),
    [
        (MethodRefused("not this width", hint="another"), "method_refused", "not this width"),
        (MemoryError(), "MemoryError", "MemoryError"),
        (RuntimeError("[metal::malloc] too large"), "RuntimeError", "[metal::malloc] too large"),
    ],
)
def test_a_failing_method_keeps_nobody_from_running(
    tiny: SimpleNamespace, error: Exception, name: str, message: str
) -> None:
    """It is a row with its reason; those before and after it are measured."""
    found = compared(tiny, "fp16", broken(error), "affine8-g64")
    assert [one.label for one in found.runs] == ["fp16", "affine8-g64"]
    (failed,) = found.failures
    assert (failed.label, failed.method, failed.planned) == ("broken-x", "broken", True)
    assert (failed.error, failed.message) == (name, message)


def test_an_interrupt_ends_it(tiny: SimpleNamespace) -> None:
    """Control-C is no failure of a method."""
    with pytest.raises(KeyboardInterrupt):
        compared(tiny, "fp16", broken(KeyboardInterrupt()))


def test_progress_covers_all_methods(tiny: SimpleNamespace) -> None:
    """2 methods x 2 runs x 24 tokens, told with the method at work."""
    told: list[tuple[str, int]] = []
    compared(tiny, "fp16", "affine4-g64", watch=lambda subject, done: told.append((subject.label, done)))
    assert [done for _, done in told] == sorted(done for _, done in told)
    assert told[-1] == ("affine4-g64", 96)


@pytest.mark.parametrize(
    ("ours", "theirs", "count"), [((), (), 0), ((1, 2), (1, 2), 2), ((1, 2, 3), (1, 5, 3), 1), ((1,), (1, 2), 1)]
)
def test_agreement_is_the_common_beginning(ours: tuple[int, ...], theirs: tuple[int, ...], count: int) -> None:
    """Tokens after the first difference count for nothing: the texts have parted."""
    assert agreeing(ours, theirs) == count


def test_conditions_are_kept_with_the_figures(tiny: SimpleNamespace) -> None:
    """The versions, the chip's backend and greedy sampling stand beside what was measured."""
    from importlib.metadata import version

    about = compared(tiny).conditions
    assert (about.mlx_version, about.mlx_lm_version) == (version("mlx"), version("mlx-lm"))
    assert about.temperature == 0
    assert about.backend in about.machine


class Turned(KVCache):
    """A method that writes another text."""

    def update_and_fetch(self, keys: Any, values: Any) -> Any:
        """Values of the other sign."""
        return super().update_and_fetch(keys, -values)


TURNED = Subject(label="turned", method="turned", build=lambda: [Turned() for _ in range(LAYERS)])


def ended(tiny: SimpleNamespace, end: int, *subjects: Any) -> Comparison:
    """240 tokens and at most 40 more, where the token `end` ends a text: with 17 generated another step of slots."""
    tokenizer = copy.copy(tiny.tokenizer)
    tokenizer.eos_token_ids = {end}
    made = [tiny_model.subject(tiny.model, one) if isinstance(one, str) else one for one in subjects]
    return compare(tiny.model, tokenizer, tiny.prompt[:240], made, max_tokens=40)


def test_a_method_that_ends_its_text_goes_on(tiny: SimpleNamespace) -> None:
    """It holds as many tokens as the engine's own cache, or its bytes would be of another length; its text is short."""
    own, other = ended(tiny, tiny_model.END, "fp16", TURNED).runs
    end = next(token for token in other.tokens[:10] if token not in own.tokens)
    found = ended(tiny, end, "fp16", TURNED, "affine4-g64")
    assert [one.generated_tokens for one in found.runs] == [len(one.tokens) for one in found.runs] == [40] * 3
    assert found.generated_tokens == 40
    other = found.runs[1]
    assert other.text_tokens == other.tokens.index(end) + 1 <= 10
    assert other.text == tiny.tokenizer.decode(other.tokens[: other.text_tokens - 1])
    assert other.timeline[-1].tokens == other.report.sequence_tokens == 280
    assert found.ratio_to_fp16_run(other) == 1.0
    assert found.runs[0].text_tokens == 40
    first = found.agreeing_tokens(other)
    assert first is not None
    assert own.tokens[:first] == other.tokens[:first]
    assert own.tokens[first] != other.tokens[first]


@pytest.mark.parametrize("order", [("fp16", TURNED), (TURNED, "fp16")])
def test_the_engines_own_text_sets_the_length(tiny: SimpleNamespace, order: tuple[Any, ...]) -> None:
    """Where it ends by itself the others have no more tokens; the order of the rows is the one asked for."""
    own, other = ended(tiny, tiny_model.END, "fp16", TURNED).runs
    end = next(token for token in own.tokens if token not in other.tokens)
    length = own.tokens.index(end) + 1
    assert length < 40
    found = ended(tiny, end, *order)
    assert [one.label for one in found.runs] == [one if isinstance(one, str) else one.label for one in order]
    assert [(one.generated_tokens, one.report.sequence_tokens) for one in found.runs] == [(length, 240 + length)] * 2


def test_without_the_engines_own_the_first_that_runs_sets_the_length(tiny: SimpleNamespace) -> None:
    """A failure sets none."""
    (own, other) = ended(tiny, tiny_model.END, "fp16", TURNED).runs
    end = next(token for token in other.tokens if token not in own.tokens)
    found = ended(tiny, end, broken(MemoryError()), TURNED, "affine8-g64")
    assert [one.generated_tokens for one in found.runs] == [other.tokens.index(end) + 1] * 2


def test_records_compare_with_sixteen_bits_a_number(tiny: SimpleNamespace) -> None:
    """Half of the slots of floats that this model keeps: 2 layers x 256 slots x two bytes for each number."""
    found = compared(tiny, "fp16", "affine4-g64")
    assert found.fp16_cache_bytes == LAYERS * 256 * NUMBERS * 2
    assert [found.memory_reduction(one) for one in found.runs] == [2.0, 2 * PACKED_SLOT / FLOAT_SLOT]


def test_states_stay_as_wide_as_they_are(tiny: SimpleNamespace) -> None:
    """1,000 bytes of a 16-bit cache of which 400 are K and V in 32 bits, as one model may mix them: 800."""
    (own,) = compared(tiny, "fp16").runs
    mixed = msgspec.structs.replace(own, resident_bytes=1000, float32_kv_bytes=400)
    found = msgspec.structs.replace(compared(tiny, "fp16"), runs=(mixed,))
    assert found.fp16_cache_bytes == 800
    assert msgspec.structs.replace(found, runs=()).fp16_cache_bytes is None


def test_matrices_of_the_process_are_counted_once(tiny: SimpleNamespace) -> None:
    """A rotation of width 64 takes 4 x 64^2 bytes and twice that in parts; measuring again adds none."""
    found = compared(tiny, "turboquant-mse4")
    assert found.process_bytes >= 3 * 4 * 64**2
    assert compared(tiny, "turboquant-mse4").process_bytes == found.process_bytes
