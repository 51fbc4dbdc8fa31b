"""Texts of random words whose lengths are spread as real ones are, and a tokenizer for them.

Lengths are log-normal: many short texts, a few long ones. Every word is one token.
"""

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ["time", "people", "water", "house", "music", "light", "paper", "river", "green", "stone"]
REHEARSAL = 16  # times shorter


@dataclass(frozen=True)
class Lengths:
    """Words of a text: the median, the spread (of the logarithm), and the most."""

    median: int
    spread: float
    most: int

    def draw(self, generator: random.Random) -> int:
        """A length, at least 4."""
        drawn = self.median * math.exp(self.spread * generator.gauss(0, 1))
        return min(self.most, max(4, round(drawn)))

    def shorter(self, times: int) -> "Lengths":
        """The same for a rehearsal."""
        return Lengths(self.median // times, self.spread, self.most // times)


PROMPT = Lengths(300, 0.8, 1500)
RESPONSE = Lengths(250, 0.6, 600)
QUESTION = Lengths(150, 0.7, 500)  # of PPO
ANSWER = 128  # mean tokens of what the models say


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of some hundred tokens that knows the words, with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" ".join(["user", "assistant", *WORDS])], trainer)
    pad, _, end = SPECIAL
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token=pad)
    fast.chat_template = TEMPLATE
    return fast


def text(generator: random.Random, count: int) -> str:
    """So many random words."""
    return " ".join(generator.choices(WORDS, k=count))


def write_judgments(file: Path, prompts: int, *, rehearse: bool) -> Path:
    """Prompts with four responses in a strict order, as `reward.py` reads them."""
    generator = random.Random(0)
    prompt, response = (x.shorter(REHEARSAL) if rehearse else x for x in (PROMPT, RESPONSE))
    tiers = [[number] for number in range(4)]
    _write(
        file,
        [
            {
                "prompt": text(generator, prompt.draw(generator)),
                "responses": [text(generator, response.draw(generator)) for _ in tiers],
                "tiers": tiers,
            }
            for _ in range(prompts)
        ],
    )
    return file


def write_prompts(file: Path, prompts: int, *, rehearse: bool) -> Path:
    """Prompts as `rlhf reference` reads them."""
    generator = random.Random(1)
    length = QUESTION.shorter(REHEARSAL) if rehearse else QUESTION
    lines = [{"prompt": text(generator, length.draw(generator))} for _ in range(prompts)]
    _write(file, lines)
    return file


def _write(file: Path, lines: list[dict[str, object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
