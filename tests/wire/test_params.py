"""What each call takes, and which field an error names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from veloxquant.errors import InvalidParams
from veloxquant.profiles import WorkloadProfile
from veloxquant.wire import messages
from veloxquant.wire.params import MAX_CONFIG_DEPTH, MAX_CONFIG_ITEMS, TOPICS

MODEL = {"path": "/m"}


def refused(method: str, params: Any) -> InvalidParams:
    """The error these params end in."""
    with pytest.raises(InvalidParams) as caught:
        messages.convert_params(method, params)
    assert caught.value.hint
    return caught.value


def nested(depth: int) -> Any:
    """Lists in lists."""
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("method", "params", "hint"),
    [
        ("plan", {"model": MODEL, "workload": {"contxt_length": 1}}, "did you mean context_length?"),
        ("plan", {"model": {"ids": "o/n"}}, "did you mean id?"),
        ("hello", {"zzz": 1}, "it takes client, protocol, want"),
        ("explain", {"plan_id": "x", "engine": {"zzz": 1}}, "engine takes name, version"),
        ("ping", {"zzz": 1}, "it takes nothing"),
        ("plan", {}, "give model"),
        ("plan", {"model": MODEL, "engine": {"name": "vllm"}}, "use mlx-lm"),
        ("subscribe", {"topics": ["x"]}, "use one of generation, records, methods, hardware, warnings"),
        ("records", {"limit": 0}, "give limit as the message says, or leave it out"),
        ("plan", [], "give an object"),
    ],
)
def test_the_way_out_is_in_the_hint(method: str, params: Any, hint: str) -> None:
    """In words of its own: the page on the protocol is in no wheel."""
    assert refused(method, params).hint == hint


def test_the_calls_are_the_protocols() -> None:
    """No call is missing and none is there that nobody promised."""
    names = "hello ping plan fit explain methods records hardware status metrics reload subscribe unsubscribe shutdown"
    assert set(messages.PARAMS) == set(names.split())


def test_defaults_are_the_protocols() -> None:
    """A model alone is a whole question."""
    params = messages.convert_params("plan", {"model": MODEL})
    assert isinstance(params, messages.PlanParams)
    assert params.workload == WorkloadProfile(
        context_length=4096, generation_length=512, batch_size=1, num_concurrent_requests=1, objective="balanced"
    )
    assert params.workload.prefill_step_size == 2048
    assert (params.hardware, params.engine, params.memory_budget_bytes, params.methods) == (None, None, None, None)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": {}}, "model"),
        ({"model": {"path": "/m", "id": "o/n"}}, "model"),
        ({"model": {"path": ""}}, "model.path"),
        ({"model": {"path": "/m\0"}}, "model.path"),
        ({"model": {"path": 3}}, "model.path"),
        ({"model": {"path": "/m", "weights_bytes": 1}}, "model.weights_bytes"),
        ({"model": {"id": "o/n", "model_id": "x"}}, "model.model_id"),
        ({"model": {"config": []}}, "model.config"),
        ({"model": {"config": {"a": nested(MAX_CONFIG_DEPTH + 1)}}}, "model.config"),
        ({"model": {"config": {"a": [0] * MAX_CONFIG_ITEMS}}}, "model.config"),
        ({"model": {"config": {"a": 2**64}}}, "model.config"),
        ({"model": {"config": {}, "weights_bytes": 0}}, "model.weights_bytes"),
        ({"model": {"folder": "/m"}}, "model.folder"),
        ({"workload": {"context_length": -1}}, "workload.context_length"),
        ({"workload": {"context_length": 10**9}}, "workload.context_length"),
        ({"workload": {"context_length": 10**30}}, "workload.context_length"),
        ({"workload": {"context_length": "4k"}}, "workload.context_length"),
        ({"workload": {"generation_length": -1}}, "workload.generation_length"),
        ({"workload": {"batch_size": 0}}, "workload.batch_size"),
        ({"workload": {"num_concurrent_requests": 0}}, "workload.num_concurrent_requests"),
        ({"workload": {"objective": "fastest"}}, "workload.objective"),
        ({"workload": {"max_kl": -0.1}}, "workload.max_kl"),
        ({"workload": {"max_kl": float("nan")}}, "workload.max_kl"),
        ({"workload": {"max_latency_ms": float("inf")}}, "workload.max_latency_ms"),
        ({"workload": {"prefill_step_size": 0}}, "workload.prefill_step_size"),
        ({"workload": {"contxt_length": 1}}, "workload.contxt_length"),
        ({"hardware": {"gpu_cores": 0}}, "hardware.gpu_cores"),
        ({"hardware": {"bandwidth_gbps": -1}}, "hardware.bandwidth_gbps"),
        ({"hardware": {"working_set_bytes": 0}}, "hardware.working_set_bytes"),
        ({"hardware": {"active_bytes": -1}}, "hardware.active_bytes"),
        ({"hardware": {"total_memory_bytes": 2**53 + 1}}, "hardware.total_memory_bytes"),
        ({"hardware": {"ram": 1}}, "hardware.ram"),
        ({"engine": {"name": "vllm"}}, "engine.name"),
        ({"memory_budget_bytes": -1}, "memory_budget_bytes"),
        ({"memory_budget_bytes": 1.5}, "memory_budget_bytes"),
        ({"methods": []}, "methods"),
        ({"methods": ["fp16", 1]}, "methods[1]"),
        ({"methods": "fp16"}, "methods"),
        ({"contex_length": 1}, "contex_length"),
    ],
)
def test_a_wrong_field_is_named_by_its_path(change: dict[str, Any], field: str) -> None:
    """The path is the one in the request, from params downwards."""
    assert refused("plan", {"model": MODEL} | change).field == field


def test_a_model_is_required() -> None:
    """Nothing is planned for no model."""
    assert refused("plan", {}).field == "model"
    assert refused("fit", {}).field == "model"


@pytest.mark.parametrize("params", [[], None, 3, "x"])
def test_params_are_an_object(params: Any) -> None:
    """Positional params are not taken."""
    assert refused("ping", params).field == "params"


def test_fit_takes_no_context() -> None:
    """The context is what fit answers."""
    assert refused("fit", {"model": MODEL, "workload": {"context_length": 1}}).field == "workload.context_length"
    assert refused("fit", {"model": MODEL, "workload": {"batch_size": 0}}).field == "workload.batch_size"
    params = messages.convert_params("fit", {"model": MODEL, "workload": {"batch_size": 4, "max_kl": 0.5}})
    assert isinstance(params, messages.FitParams)
    assert (params.workload_profile.batch_size, params.workload_profile.max_kl) == (4, 0.5)


def test_fit_takes_every_other_field_of_a_workload() -> None:
    """Under the same name, with the same type and default."""
    whole, without = msgspec.structs.fields(WorkloadProfile), msgspec.structs.fields(messages.FitWorkload)
    assert [(f.name, f.type, f.default) for f in without] == [
        (f.name, f.type, f.default) for f in whole if f.name != "context_length"
    ]


def test_explain_takes_a_plan_or_its_id() -> None:
    """Neither is refused, and so is an id with params that it already has."""
    assert refused("explain", {}).field == "plan_id"
    assert refused("explain", {"plan_id": "p", "model": MODEL}).field == "plan_id"
    assert refused("explain", {"plan_id": "p", "methods": ["fp16"]}).field == "methods"
    assert refused("explain", {"model": MODEL, "workload": {"batch_size": 0}}).field == "workload.batch_size"
    params = messages.convert_params("explain", {"model": MODEL, "methods": ["fp16"], "label": "fp16"})
    assert isinstance(params, messages.ExplainParams)
    assert params.plan_params() == messages.convert_params("plan", {"model": MODEL, "methods": ["fp16"]})


def test_an_explanation_by_id_has_no_plan_to_make() -> None:
    """Asking for one is a typed error, not a crash."""
    with pytest.raises(InvalidParams):
        messages.ExplainParams(plan_id="p").plan_params()


def test_subscribing_to_nothing_in_particular_means_all() -> None:
    """And a topic nobody has is refused."""
    params = messages.convert_params("subscribe", {})
    assert isinstance(params, messages.SubscribeParams)
    assert params.topics == TOPICS
    assert refused("subscribe", {"topics": ["weather"]}).field == "topics[0]"
    assert refused("unsubscribe", {"topics": []}).field == "topics"


@pytest.mark.parametrize(
    ("method", "params", "field"),
    [
        ("records", {"limit": 0}, "limit"),
        ("records", {"limit": 501}, "limit"),
        ("records", {"offset": -1}, "offset"),
        ("records", {"since": "yesterday"}, "since"),
        ("records", {"since": "2026-02-30"}, "since"),
        ("records", {"chip": ""}, "chip"),
        ("hello", {"protocol": []}, "protocol"),
        ("hello", {"protocol": ["1"]}, "protocol[0]"),
        ("methods", {"name": ""}, "name"),
        ("hardware", {"hardware": {"chip": ""}}, "hardware.chip"),
        ("status", {"verbose": True}, "verbose"),
    ],
)
def test_r20_the_other_calls_are_as_strict(method: str, params: dict[str, Any], field: str) -> None:
    """Ranges and unknown fields are refused by name everywhere."""
    assert refused(method, params).field == field


def test_overrides_tell_what_was_given() -> None:
    """Null means "as this machine", zero is a figure."""
    params = messages.convert_params(
        "hardware", {"hardware": {"chip": "Apple M2", "active_bytes": 0, "gpu_cores": None}}
    )
    assert isinstance(params, messages.HardwareParams)
    assert params.hardware is not None
    assert params.hardware.given() == {"chip": "Apple M2", "active_bytes": 0}
