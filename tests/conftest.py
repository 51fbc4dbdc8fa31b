"""Fixtures for all tests: no network, one thread, a tiny chat model and the real one."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import fcntl
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf.cli import main
from tests.servers.commands import REPOSITORY

REAL_MODEL = REPOSITORY / "models" / "SmolLM2-135M-Instruct"
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "The weather was lovely and the people were kind. We loved the warm food and the happy music.",
    "It rained all day, the train was late, and the hotel was awful. I hated the cold, sad room.",
    "How was the trip? Tell me about the house, the garden, the dog, and the meeting at work.",
]


HELPERS = ("browser", "labeling_app", "pipeline", "policies", "reward", "rlhf", "trust")
pytest.register_assert_rewrite(*(f"tests.{name}" for name in HELPERS))  # to say what differs


LONG = (  # files of minutes: begun first, so that no worker is left with one at the end
    "tests/reward/training/",
    "tests/pipeline/",
    "tests/rlhf/run/",
    "tests/rlhf/commands/",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the files for parallel workers, which take one after the other."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def build_tokenizer(corpus: list[str] | None = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template, trained on a few sentences."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus or CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    return fast


def build_tiny_model(folder: Path, seed: int = 0, head_dim: int = 8) -> Path:
    """Save a two-layer Llama with random weights and the tokenizer above."""
    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def build_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], object]) -> Path:
    """A folder that one of the test workers fills; the others wait, and all of them only read it.

    Args:
        factory: of the worker.
        name: of the folder.
        build: fills it.
    """
    base = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of all workers
    folder, is_built = base / f"shared-{name}", base / f"shared-{name}.built"
    with (base / f"shared-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_built.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of a worker that failed
            folder.mkdir()
            build(folder)
            is_built.touch()
    return folder


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs `rlhf` with arguments that it refuses (exit code 2): its message, in one line."""

    def run(*arguments: object, exit_code: int = 2) -> str:
        assert main([str(argument) for argument in arguments]) == exit_code
        said = " ".join(capsys.readouterr().err.split())
        assert "Traceback" not in said
        return said

    return run


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict]:
    """Runs `rlhf` with `--json`: what it prints last."""

    def run(*arguments: object) -> dict:
        assert main([*map(str, arguments), "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny chat model; tests must not write into it."""
    return build_once(tmp_path_factory, "tiny", build_tiny_model)


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of SmolLM2-135M-Instruct, fetched by `make model`."""
    if not (REAL_MODEL / "config.json").is_file():
        pytest.skip(f"no model in {REAL_MODEL}: run `make model`")
    return REAL_MODEL
