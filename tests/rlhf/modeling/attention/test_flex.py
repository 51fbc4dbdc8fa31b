"""FlexAttention on packed rows. PyTorch runs it on CPUs without compiling it, forward only unless
a check is lifted; the last test compiles it, on a machine with a GPU.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reward.data.batches import lay_out
from reward.model.module import RewardModule
from rlhf.modeling.attention import flex
from rlhf.modeling.attention.layout import Segment
from rlhf.modeling.attention.prefix_matmul import prefix_attention
from rlhf.modeling.attention.shared_prefix import share_prompts
from tests.reward.model.classifiers import FAMILIES, SIZES, build_classifier
from tests.rlhf.fake_device import DEVICE, waiting
from tests.rlhf.modeling.attention.groups import GROUPS, rewards_and_gradients

CPU = torch.device("cpu")
COMPILER_WARNS = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)


@pytest.fixture
def _uncompiled(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    with torch.compiler.set_stance("force_eager"):
        yield


def uncompiled(test):
    """Run FlexAttention as it is written; PyTorch warns of that, and of its own compiler."""
    eager = "ignore:flex_attention called without torch.compile:UserWarning"
    test = pytest.mark.filterwarnings(eager)(COMPILER_WARNS(test))
    return pytest.mark.usefixtures("_uncompiled")(test)


def test_a_response_sees_its_prompt_and_itself():
    places = torch.arange(7)
    layout = (Segment(2, (2, 1)), Segment(1, (0, 1)))
    seen = flex.visible(layout, CPU)(places, places, places[:, None], places)
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],  # a prompt of two tokens
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],  # its first response
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],  # its second
        [0, 0, 0, 0, 0, 1, 0],  # the next prompt; its first response is empty
        [0, 0, 0, 0, 0, 1, 1],
    ]


def test_masked_blocks_are_skipped():
    layout = (Segment(128, (128, 128)), Segment(128, (128,)))
    mask = flex.block_mask(layout, CPU)
    assert mask.to_dense()[0, 0].tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def test_blocks_are_those_of_all_places():
    generator = np.random.default_rng(0)
    for _ in range(8):
        layout = flex.fill_block(
            tuple(
                Segment(int(generator.integers(0, 300)), tuple(generator.integers(0, 200, 3)))
                for _ in range(generator.integers(1, 6))
            )
        )
        tokens = flex.count_tokens(layout)
        places = torch.arange(tokens)
        seen = flex.visible(layout, CPU)(places, places, places[:, None], places)
        blocks = seen.view(tokens // 128, 128, -1, 128).sum(dim=(1, 3))
        assert flex.count_visible(layout).tolist() == blocks.tolist()
        mask = flex.block_mask(layout, CPU)
        again = create_block_mask(flex.visible(layout, CPU), None, None, tokens, tokens, CPU)
        assert torch.equal(mask.to_dense(), again.to_dense())
        for number, indices in (
            ("kv_num_blocks", "kv_indices"),
            ("full_kv_num_blocks", "full_kv_indices"),
            ("q_num_blocks", "q_indices"),
            ("full_q_num_blocks", "full_q_indices"),
        ):
            counts = getattr(mask, number)[0, 0]
            assert torch.equal(counts, getattr(again, number)[0, 0])
            both = (getattr(one, indices)[0, 0] for one in (mask, again))
            for count, mine, other in zip(counts, *both, strict=True):
                assert torch.equal(mine[:count], other[:count])


def test_a_mask_is_made_without_all_places_and_without_waiting():
    layout = (Segment(1024, (512, 512)),) * 2
    with waiting() as waits, Largest() as made:
        mask = flex.block_mask.__wrapped__(layout, DEVICE)
        assert mask.kv_indices.device == DEVICE
    assert waits == []
    assert made.numbers <= 4096  # of tokens; all places would be 16 millions


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that is made."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        sizes = [one.numel() for one in tree_leaves(found) if isinstance(one, torch.Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return found


def test_rows_are_filled_to_whole_blocks_that_no_token_of_theirs_sees():
    layout = (Segment(100, (20, 7)),)
    filled = flex.fill_block(layout)
    assert filled == (*layout, Segment(1, ()))
    assert flex.fill_block(filled) is filled
    places = torch.arange(128)
    seen = flex.visible(filled, CPU)(places, places, places[:, None], places)
    assert seen[-1].nonzero().tolist() == [[127]]  # itself: attention to nothing would be NaN
    assert not seen[:-1, -1].any()


@pytest.fixture
def graphs(monkeypatch):
    """Counts graphs. The `eager` backend of torch traces as on GPUs and runs on CPUs."""
    counter = CompileCounterWithBackend("eager")
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    limits = {"recompile_limit": torch._dynamo.config.recompile_limit}
    with torch._dynamo.config.patch(limits):
        torch._dynamo.reset()
        flex._compiled_attention.cache_clear()
        yield counter
        flex._compiled_attention.cache_clear()
        torch._dynamo.reset()


def attend(tokens: int, groups: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a random row of one prompt and two responses: by FlexAttention and exact."""
    prompt, first = tokens // 2, tokens // 4
    layout = (Segment(prompt, (first, tokens - prompt - first)),)
    row = [torch.randn(1, heads, tokens, 16) for heads in (4, groups, groups)]
    exact = prefix_attention(*(one[0].transpose(0, 1) for one in row), layout, 0.25)
    return flex.flex_prefix_attention(*row, layout, 0.25)[0], exact


@COMPILER_WARNS
def test_two_graphs_serve_rows_of_all_lengths(graphs):
    for tokens in range(140, 1100, 48):  # 20 lengths
        found, exact = attend(tokens)
        torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-4)
    assert graphs.frame_count == 2  # of the first length, and of any


@COMPILER_WARNS
def test_too_many_graphs_end_a_run_that_would_go_on_with_all_scores(graphs, monkeypatch):
    monkeypatch.setattr(flex, "GRAPHS", 1)
    torch._dynamo.config.recompile_limit = 1
    attend(140)
    with pytest.raises(FailOnRecompileLimitHit):
        attend(140, groups=4)


def test_all_layers_share_the_mask_of_a_row():
    layout = (Segment(3, (2,)),)
    assert flex.block_mask(layout, CPU) is flex.block_mask((Segment(3, (2,)),), CPU)
    assert flex.block_mask((Segment(2, (3,)),), CPU) is not flex.block_mask(layout, CPU)


@uncompiled
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
def test_rewards_and_gradients_are_those_of_padded_rows(family, monkeypatch):
    monkeypatch.setattr("rlhf.modeling.attention.shared_prefix.is_usable", lambda *_: True)
    module = RewardModule(build_classifier(family).double())
    plain = rewards_and_gradients(module, GROUPS, shared=False)
    assert share_prompts(module.classifier) is None
    found = rewards_and_gradients(module, GROUPS, shared=True)
    torch.testing.assert_close(found, plain, atol=1e-6, rtol=1e-5)


@uncompiled
def test_float32_queries_meet_bf16_values_under_autocast(monkeypatch):
    module = RewardModule(build_classifier("llama"))
    with torch.no_grad():
        exact = module(lay_out(GROUPS, 0, shared=False))
        share_prompts(module.classifier)
        monkeypatch.setattr("rlhf.modeling.attention.shared_prefix.is_usable", lambda *_: True)
        with torch.autocast("cpu", torch.bfloat16):
            rewards = module(lay_out(GROUPS, 0, shared=True))
    torch.testing.assert_close(rewards, exact, atol=0.03, rtol=0)


@uncompiled
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2)])
def test_the_trial_finds_no_difference(heads, groups):
    assert flex.try_flex(heads, groups, 16, torch.float32, CPU) < 1e-5
    assert 1e-4 < flex.try_flex(heads, groups, 16, torch.bfloat16, CPU) < flex.TOLERANCE


@COMPILER_WARNS
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_where_it_does_not_run_matrix_products_are_used_and_stderr_says_so(capsys):
    obstacle = flex._find_obstacle(4, 2, 16, torch.float32, CPU)
    assert obstacle == (
        "does not run here (raised exception NotImplementedError('FlexAttention does not support "
        "backward on CPU. Please set the input requires_grad to False or use another device.'))"
    )
    assert flex._find_obstacle(4, 2, 16, torch.float32, CPU) == obstacle
    assert capsys.readouterr().err == (
        f"FlexAttention {obstacle}: using plain matrix products, which are slower.\n"
    )


def test_it_is_not_used_on_a_cpu():
    row = torch.zeros(1, 4, flex.BLOCK + 1, 16)
    assert not flex.is_usable(row, row, row)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_compiled_on_a_gpu(family, capsys):
    config_class, model_class, extra = FAMILIES[family]
    wide = SIZES | {"hidden_size": 64}  # the kernel wants heads of 16 and more
    module = RewardModule(model_class(config_class(**wide, **extra))).cuda()
    groups = [replace(group, prompt=group.prompt * 6) for group in GROUPS]
    plain = rewards_and_gradients(module, groups, shared=False)
    assert share_prompts(module.classifier) is None
    found = rewards_and_gradients(module, groups, shared=True)
    assert not capsys.readouterr().err
    torch.testing.assert_close(found, plain, atol=1e-3, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("default")
def test_20_lengths_on_a_gpu_with_gradients_and_without_never_hold_all_scores():
    lengths = range(300, 8200, 400)
    for number, tokens in enumerate(lengths):
        layout = (Segment(tokens // 2, (tokens - tokens // 2,)),)
        row = [
            torch.randn(1, heads, tokens, 64, device="cuda", dtype=torch.bfloat16)
            for heads in (16, 4, 4)
        ]
        for one in row:
            one.requires_grad_(number % 2 == 0)
        flex.block_mask(flex.fill_block(layout), row[0].device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        found = flex.flex_prefix_attention(*row, layout, 0.125)
        if found.requires_grad:
            found.sum().backward()
        scratch = torch.cuda.max_memory_allocated() - before
        assert tokens < 2000 or scratch < 16 * tokens**2  # half of the scores in bf16
