"""When vLLM sleeps and wakes on a GPU, with a stub in the place of the library."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed

from policies.sampling.generate import generation_config
from policies.sampling.vllm_engine import VLLM, shut_down
from rlhf.modeling.adapters import add_adapters
from rlhf.modeling.models import load_causal_lm
from rlhf.modeling.tokens import load_tokenizer
from rlhf.parallel.distributed import COLLECTIVE_TIMEOUT
from rlhf.records.schema import Sampling
from tests.pipeline.loop import read_json

TRIAL = ["generate"]


class LoRARequest(NamedTuple):
    """As vLLM's."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    load_inplace: bool = False


CPU = torch.device("cpu")


def stub(events: list[Any], on_start: Callable[[], None] = lambda: None) -> ModuleType:
    """The part of vLLM that is used here; what is called stands in `events`."""

    class LLM:
        def __init__(self, **options: Any) -> None:
            on_start()
            core = SimpleNamespace(
                _finalizer=SimpleNamespace(atexit=True), shutdown=lambda: events.append("shutdown")
            )
            config = SimpleNamespace(get_vocab_size=lambda: 64)
            self.llm_engine = SimpleNamespace(
                engine_core=core, model_config=config, add_lora=self.add_lora
            )
            self.may_sleep = options["enable_sleep_mode"]
            if options["enable_lora"]:
                events.append((options["max_lora_rank"], options["load_format"]))

        def generate(
            self, prompts: Any, how: Any, use_tqdm: bool, lora_request: Any = None
        ) -> list[Any]:
            events.append("generate")
            # vLLM would read the files again for every token
            assert lora_request is None or not lora_request.load_inplace
            answer = SimpleNamespace(token_ids=[2], logprobs=[{2: SimpleNamespace(logprob=-1.0)}])
            return [SimpleNamespace(outputs=[answer]) for _ in prompts]

        def add_lora(self, request: LoRARequest) -> None:
            assert request.load_inplace  # else it keeps those of the last time
            folder = Path(request.lora_path)
            assert read_json(folder / "adapter_config.json")["r"] == 2
            values = load_file(folder / "adapter_model.safetensors")
            prefix = "base_model.model.model.layers.0.mlp.up_proj.lora"
            shapes = {tuple(values[f"{prefix}_{name}.weight"].shape) for name in "AB"}
            assert shapes == {(2, 32), (64, 2)}
            events.append(float(values[f"{prefix}_B.weight"].mean()))

        def sleep(self, level: int) -> None:
            assert self.may_sleep
            events.append(f"sleep {level}")

        def wake_up(self, tags: list[str] | None = None) -> None:
            events.append(f"wake {' '.join(tags or ['all'])}")

        def collective_rpc(self, name: str, kwargs: dict[str, Any]) -> None:
            values = [float(value.mean()) for _, value in kwargs["weights_iterator"]]
            events.append((name, set(values)))

        def reset_prefix_cache(self) -> bool:
            events.append("reset prefix cache")
            return True

    module = ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SimpleNamespace  # type: ignore[attr-defined]
    return module


def start_engine(folder: Path, device: str, precision: str = "no", **options: Any) -> VLLM:
    accelerator: Any = SimpleNamespace(
        device=torch.device(device), mixed_precision=precision, num_processes=1
    )
    return VLLM(str(folder), accelerator, longest=20, requests=2, **options)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_it_sleeps_in_updates_and_wakes_with_the_weights_of_the_moment(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    events: list[Any] = []
    monkeypatch.setitem(sys.modules, "vllm", stub(events))
    engine = start_engine(tiny_model, device)
    model = load_causal_lm(str(tiny_model))
    config = generation_config(load_tokenizer(str(tiny_model)), Sampling(max_new_tokens=4))
    for value in (1.0, 2.0):
        events.append("update")
        for weight in model.parameters():
            weight.data.fill_(value)
        # the weights themselves stay where they are: there is no GPU
        done: list[int] = []
        assert engine(model, [[5, 6]], config, 2, done.append) == [([2], [-1.0])]
        assert done == [1]
    shut_down()
    sleep, weights, cache = (
        [["sleep 2"], ["wake weights"], ["wake kv_cache"]] if device == "cuda" else [[], [], []]
    )
    expected = [*TRIAL, *sleep]
    for value in (1.0, 2.0):
        expected += ["update", *weights, ("reload_weights", {value}), *cache]
        expected += ["reset prefix cache", "generate", *sleep]
    assert events == [*expected, "shutdown"]


def test_adapters_go_to_weights_that_wait_in_main_memory(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    monkeypatch.setitem(sys.modules, "vllm", stub(events))
    request = ModuleType("vllm.lora.request")
    request.LoRARequest = LoRARequest  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.lora.request", request)
    engine = start_engine(tiny_model, "cuda", "bf16", lora_rank=2)
    engine.device = CPU  # there is no GPU
    model = load_causal_lm(str(tiny_model))
    add_adapters(model, rank=2, alpha=4, seed=0)
    config = generation_config(load_tokenizer(str(tiny_model)), Sampling(max_new_tokens=4))
    for value in (1.0, 2.0):
        for name, weight in model.named_parameters():
            weight.data.fill_(value if "lora_B" in name else 0.0)
        assert engine(model, [[5, 6]], config, 2, lambda count: None) == [([2], [-1.0])]
    shut_down()
    steps = [("wake all", "reset prefix cache", value, "generate", "sleep 1") for value in (1, 2)]
    assert events == [(8, "auto"), *TRIAL, "sleep 1", *steps[0], *steps[1], "shutdown"]


@pytest.mark.parametrize(("precision", "rank"), [("no", 2), ("bf16", None)])
def test_adapters_are_merged_in_float32_or_on_4_bits(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, precision: str, rank: int | None
) -> None:
    events: list[Any] = []
    monkeypatch.setitem(sys.modules, "vllm", stub(events))
    engine = start_engine(tiny_model, "cpu", precision, lora_rank=rank)
    model = load_causal_lm(str(tiny_model))
    add_adapters(model, rank=2, alpha=4, seed=0)
    for name, weight in model.named_parameters():
        weight.data.fill_(0.5 if "lora_" in name else 0.25)
    config = generation_config(load_tokenizer(str(tiny_model)), Sampling(max_new_tokens=4))
    engine(model, [[5, 6]], config, 2, lambda count: None)
    shut_down()
    # 2 · 0.5 · 0.5, for each of 2 ranks, scaled by 4 / 2, is 1
    assert ("reload_weights", {0.25, 1.25}) in events


def test_a_model_that_is_not_trained_stays_awake(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    monkeypatch.setitem(sys.modules, "vllm", stub(events))
    engine = start_engine(tiny_model, "cuda", lora_rank=0)
    config = generation_config(load_tokenizer(str(tiny_model)), Sampling(max_new_tokens=4))
    engine(None, [[5, 6]], config, 2, lambda count: None)
    shut_down()
    assert events == [*TRIAL, "generate", "shutdown"]


def test_groups_that_it_adds_wait_as_long_as_the_watchdog_needs(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[Any] = []
    monkeypatch.setitem(
        sys.modules, "vllm", stub([], lambda: added.append(distributed.new_group([0])))
    )
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
    )
    try:
        start_engine(tiny_model, "cpu")
        assert added[0]._get_backend(CPU).options._timeout == COLLECTIVE_TIMEOUT
    finally:
        shut_down()
        distributed.destroy_process_group()
