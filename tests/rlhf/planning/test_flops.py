"""Counted operations are those of the profiler's counter, for every kind of pass that we make."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeModel,
)

from policies.sampling.continuous import ContinuousSampler
from rlhf.modeling.adapters import add_adapters, without_adapters
from rlhf.modeling.attention.checkpointing import checkpoint_activations
from rlhf.modeling.attention.layout import TrunkInputs, pack_prompts, states
from rlhf.modeling.attention.packing import pack_prefixes
from rlhf.modeling.attention.shared_prefix import share_prompts
from rlhf.modeling.log_probs import Sequences, response_log_probs
from rlhf.modeling.models import new_reward_model
from rlhf.parallel.distributed import start
from rlhf.planning.flops import (
    Matrices,
    backward_flops,
    count_flops,
    experts_of,
    take_flops,
    trunk_flops,
)

PROFILED = 0.05


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that what is not counted (heads, padded blocks) weighs as in a real model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    folder = tmp_path_factory.mktemp("models") / "wide"
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def counted(function: Callable[[], object]) -> tuple[float, float]:
    """Our count of a function's operations, and the profiler's."""
    take_flops()
    with FlopCounterMode(display=False) as profiler:
        function()
    return take_flops().flops, float(profiler.get_total_flops())


def require_close(function: Callable[[], object]) -> None:
    ours, profiled = counted(function)
    assert profiled > 0
    assert ours == pytest.approx(profiled, rel=PROFILED)


def packed() -> TrunkInputs:
    """Three prompts of 30 to 60 tokens, each with four responses of about 20."""
    groups = [
        (range(5, 5 + length), [range(70 + n, 90 + 2 * n) for n in range(4)])
        for length in (30, 45, 60)
    ]
    return pack_prompts(groups, 0)


def padded() -> TrunkInputs:
    ids = torch.randint(1, 1000, (6, 70), generator=torch.Generator().manual_seed(0))
    return TrunkInputs(ids, torch.arange(6) * 70 + 69)


def sequences(prompts: int) -> Sequences:
    """Eight answers, to one prompt each or to two prompts."""
    asked = [list(range(5 + n % prompts, 60 + n % prompts)) for n in range(8)]
    said = [list(range(100 + n, 124 + 2 * n)) for n in range(8)]
    return Sequences.of(asked, said, 0)


def reward_model(folder: Path) -> PreTrainedModel:
    model = new_reward_model(str(folder), 0, 0)
    assert share_prompts(model) is None
    count_flops(model)
    return model.train()


def policy(folder: Path) -> PreTrainedModel:
    model = LlamaForCausalLM.from_pretrained(folder)
    assert pack_prefixes(model) is None
    count_flops(model)
    return model


def test_the_formula_of_a_pass_worked_out_by_hand() -> None:
    # 10 tokens, matrices of 100 numbers, of which 80 read something with a gradient and 60 train;
    # 25 pairs, and query heads that are 8 numbers wide in all layers together
    sizes = Matrices(all=100, reached=80, trained=60, recomputed=90, query_width=8)
    assert trunk_flops(sizes, 10, 25) == 2 * 10 * 100 + 4 * 8 * 25
    assert backward_flops(sizes, 10, 25) == 2 * 10 * (80 + 60) + 8 * 8 * 25


@pytest.mark.parametrize("rows", [packed, padded])
def test_reward_training_and_scoring(model_folder: Path, rows: Callable[[], TrunkInputs]) -> None:
    model, inputs = reward_model(model_folder), rows()

    def score() -> None:
        with torch.no_grad():
            states(model, inputs)

    require_close(lambda: states(model, inputs).sum().backward())
    require_close(score)


def test_tokens_and_passes_are_counted(model_folder: Path) -> None:
    model, inputs = reward_model(model_folder), padded()
    take_flops()
    with torch.no_grad():
        states(model, inputs)
        states(model, inputs)
    found = take_flops()
    assert (found.tokens, found.passes) == (2 * 6 * 70, 2)
    assert take_flops().passes == 0


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_mixture_counts_the_experts_that_tokens_are_sent_to(recomputes: bool) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=128,
        moe_intermediate_size=96,
        num_experts=8,
        num_experts_per_tok=3,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        experts_implementation="eager",  # in products that the profiler knows
        attn_implementation="eager",
    )
    model = Qwen3MoeModel(config).train()
    if recomputes:
        checkpoint_activations(model)
    count_flops(model)
    require_close(lambda: model(padded().ids).last_hidden_state.sum().backward())


def test_what_counts_as_experts() -> None:
    stacked = nn.Module()
    stacked.weight = nn.Parameter(torch.zeros(4, 3, 2))
    assert experts_of(stacked, SimpleNamespace(num_experts_per_tok=2)) == [stacked.weight]
    assert experts_of(stacked, SimpleNamespace(top_k_experts=2)) == [stacked.weight]
    assert experts_of(stacked, SimpleNamespace(moe_topk=[2, 1])) == [stacked.weight]
    assert experts_of(stacked, SimpleNamespace()) == []  # a bias of tokens, as rwkv has
    sharded = nn.Module()  # by DeepSpeed, which keeps the shape
    sharded.weight = nn.Parameter(torch.zeros(0))
    sharded.weight.ds_shape = torch.Size((4, 3, 2))
    assert experts_of(sharded, SimpleNamespace(moe_topk=2)) == [sharded.weight]


@pytest.mark.parametrize("rows", [packed, padded])
def test_adapters_train_on_frozen_weights(
    model_folder: Path, rows: Callable[[], TrunkInputs]
) -> None:
    model, inputs = new_reward_model(str(model_folder), 0, 0), rows()
    share_prompts(model)
    add_adapters(model, 16, 32, 0)
    count_flops(model)
    model.train()
    require_close(lambda: states(model, inputs).sum().backward())
    model.requires_grad_(False)

    def without() -> None:
        with torch.no_grad(), without_adapters(model):
            states(model, inputs)

    require_close(without)


def test_recomputed_activations_are_counted(model_folder: Path) -> None:
    model, inputs = reward_model(model_folder), packed()
    checkpoint_activations(model)
    require_close(lambda: states(model, inputs).sum().backward())
    add_adapters(model, 16, 32, 0)
    count_flops(model)
    require_close(lambda: states(model, inputs).sum().backward())


@pytest.mark.parametrize("prompts", [2, 8])
def test_log_probs_of_policies(model_folder: Path, prompts: int) -> None:
    model, both = policy(model_folder), sequences(prompts)

    def read() -> torch.Tensor:
        return response_log_probs(model, both, 1.0).first(both.responses.mask).sum()

    with torch.no_grad():
        read()  # finds out whether the model returns logits unchanged
        require_close(read)
    require_close(lambda: read().backward())


def test_sampling_with_a_cache(model_folder: Path) -> None:
    model = policy(model_folder).eval()
    asked = torch.randint(1, 1000, (4, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(asked)
    require_close(
        lambda: model.generate(
            input_ids=asked, attention_mask=mask, max_new_tokens=12, min_new_tokens=12
        )
    )


def test_continuous_batching_counts_each_sequence_with_its_own_keys(model_folder: Path) -> None:
    """Prompts of 4 and 3 tokens are read at once, then two passes of a token of each.

    Tokens: 7 + 2 + 2. Pairs: 4² + 3², then 5 + 4, then 6 + 5. Matrices of a layer: two of 128², two
    of 128 · 64, three of 128 · 384. Logits: three times two.
    """
    model = policy(model_folder).eval()
    config = GenerationConfig(max_new_tokens=3, do_sample=True, eos_token_id=-1, pad_token_id=0)
    take_flops()
    sampler, prompts = ContinuousSampler(start("fp32", 0)), [[5, 6, 7, 8], [9, 10, 11]]
    sampler(model, prompts, config, 2, lambda count: None)
    found = take_flops()
    assert (found.tokens, found.passes) == (11, 3)
    trunk = 2 * 11 * 3 * (2 * 128**2 + 2 * 128 * 64 + 3 * 128 * 384)
    attention = 4 * (3 * 4 * 32) * (25 + 9 + 11)
    assert found.flops == trunk + attention + 2 * 6 * 128 * 1000


def test_a_copy_of_a_counted_model_is_counted_too(model_folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(model_folder)
    count_flops(model)
    ids = torch.tensor([[5, 6, 7]])
    expected = counted(lambda: model(ids))
    assert expected[0] > 0
    assert counted(lambda: copy.deepcopy(model)(ids)) == expected
