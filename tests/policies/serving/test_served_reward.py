"""PPO against `rlhf serve --reward` has the numbers of PPO with the same model in process."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from tests.conftest import SPECIAL_TOKENS, TEMPLATE
from tests.policies.training import TrainingInputs, build_training, metrics_of
from tests.servers.commands import run_process
from tests.servers.served_reward import served_reward

# Without a critic, which would begin as a copy of the reward model if there is one in process.
OPTIONS = ("--advantages", "rloo", "--samples-per-prompt", "2")
QUESTIONS = "user assistant Tell me about the How was house dog train garden meeting music hotel"


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> TrainingInputs:
    """PPO's inputs with one token for each word: what is sampled is encoded as it was."""
    folder = tmp_path_factory.mktemp("words")
    vocabulary = [*SPECIAL_TOKENS, "<unk>", *QUESTIONS.split(), *(f"w{n}" for n in range(4000))]
    tokenizer = Tokenizer(
        models.WordLevel({word: n for n, word in enumerate(vocabulary)}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL_TOKENS, strict=True)),
        unk_token="<unk>",
    )
    fast.chat_template = TEMPLATE
    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    fast.save_pretrained(folder / "model")
    return build_training(folder, folder / "model")


def require_same_metrics(one: Path, other: Path) -> None:
    mine, theirs = metrics_of(one), metrics_of(other)
    assert len(mine) == 2
    for row, expected in zip(mine, theirs, strict=True):
        assert {"reward/mean", "loss/policy"} <= set(row)
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_ppo_against_a_server(words: TrainingInputs, tmp_path: Path) -> None:
    assert words.ppo(tmp_path / "model", *OPTIONS, steps=2) == 0
    with served_reward(words.reward) as server:
        options = (*OPTIONS, "--reward", server.url)
        assert words.ppo(tmp_path / "served", *options, steps=2) == 0
        assert server.metrics()["items_total"] >= 8
    require_same_metrics(tmp_path / "served", tmp_path / "model")


@pytest.mark.slow
def test_two_processes_against_a_server(words: TrainingInputs, tmp_path: Path) -> None:
    def run(out: Path, *more: str) -> None:
        done = run_process(*words.arguments(out, "--processes", "2", *OPTIONS, *more, steps=2))
        assert done.returncode == 0, done.stderr[-4000:]

    run(tmp_path / "model")
    with served_reward(words.reward) as server:
        run(tmp_path / "served", "--reward", server.url)
    require_same_metrics(tmp_path / "served", tmp_path / "model")
