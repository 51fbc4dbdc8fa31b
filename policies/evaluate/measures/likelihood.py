"""How likely texts are: the policy's responses under the original model, neutral text under both.

The KLs, the log-likelihood of responses and what the policy forgot need the same two language
models, so they are measured together, with one of them in memory at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from jaxtyping import Float
from numpy import ndarray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from policies.evaluate.measures.statistics import mean_per_token
from policies.reference.audit import estimate_reverse_kl, measure_forward_kl, score_responses
from policies.reference.loading import load_reference_model
from policies.reference.store import ReferenceRow, ReferenceStore
from rlhf.errors import InputError
from rlhf.modeling.attention.packing import pack_prefixes
from rlhf.modeling.models import in_memory, load_causal_lm
from rlhf.records.jsonl import PLAIN_TEXT, read_lines, read_text, text_of
from rlhf.run.metrics import progress

NEUTRAL_TEXT = Path(__file__).with_name("neutral.txt")
LONGEST_TEXT = 512  # tokens; the rest of a text is not read
TEXTS_AT_ONCE = 4  # in one forward pass

TokenIds = Sequence[Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class LikelihoodInputs:
    """The sequences that the policy and the original model read.

    Args:
        store: the reference outputs.
        groups: its rows, by prompt.
        responses: by model (`policy` and, with --against, `rival`), for each prompt the token ids
            of its responses in the policy's tokenizer.
        texts: token ids of neutral texts.
        batch_size: sequences scored at once.
        seed: of the bootstrap.
    """

    store: ReferenceStore
    groups: Sequence[tuple[ReferenceRow, ...]]
    responses: Mapping[str, Sequence[TokenIds]]
    texts: Sequence[list[int]]
    batch_size: int
    seed: int

    @property
    def rows(self) -> list[ReferenceRow]:
        """All stored rows, prompt by prompt."""
        return [row for group in self.groups for row in group]

    def flat(self, name: str) -> tuple[list[list[int]], list[list[int]]]:
        """Prompts and responses of one model, as token ids, an item for each response."""
        pairs = [
            (group[0].prompt_ids, list(ids))
            for group, responses in zip(self.groups, self.responses[name], strict=True)
            for ids in responses
        ]
        return [prompt for prompt, _ in pairs], [ids for _, ids in pairs]


def measure_likelihoods(
    accelerator: Accelerator,
    tokenizer: PreTrainedTokenizerBase,
    policy: str,
    inputs: LikelihoodInputs,
) -> dict[str, Any]:
    """`kl`, `log_likelihood` and `retained`, as report.json holds them.

    Args:
        accelerator: device and precision.
        tokenizer: of policy and original.
        policy: folder of the trained model.
        inputs: what both models read.

    Raises:
        InputError: the original model is not where the store says, or has changed.
    """
    options = (inputs.store.sampling.temperature, inputs.batch_size)
    responses = {name: inputs.flat(name) for name in inputs.responses}
    sizes = {name: len(ids) for name, (_, ids) in responses.items()}
    total = len(inputs.rows) + sizes["policy"] + sum(sizes.values()) + 2 * len(inputs.texts)
    with progress("measuring log-probs", total) as bar:
        with in_memory(load_causal_lm(policy).to(accelerator.device)) as model:
            pack_prefixes(model)
            forward = measure_forward_kl(accelerator, model, tokenizer, inputs.rows, *options)
            bar.advance(len(inputs.rows))
            ours = score_responses(accelerator, model, tokenizer, *responses["policy"], *options)
            bar.advance(sizes["policy"])
            after = _nats_of_texts(accelerator, model, tokenizer, inputs.texts)
            bar.advance(len(inputs.texts))
        scored = {}
        with in_memory(load_reference_model(inputs.store, accelerator)) as original:
            for name, of in responses.items():
                scored[name] = score_responses(accelerator, original, tokenizer, *of, *options)
                bar.advance(sizes[name])
            before = _nats_of_texts(accelerator, original, tokenizer, inputs.texts)
            bar.advance(len(inputs.texts))
    reverse = estimate_reverse_kl(responses["policy"][0], ours, scored["policy"])
    kls = {"forward": forward, "reverse": reverse}
    tokens = np.array([len(ids) - 1.0 for ids in inputs.texts])
    return {
        "kl": {name: {**kl, "sqrt_nats": max(0.0, kl["nats"]) ** 0.5} for name, kl in kls.items()},
        "log_likelihood": _log_likelihoods(inputs, scored),
        "retained": compare_texts(before, after, tokens, inputs.seed),
    }


def _log_likelihoods(
    inputs: LikelihoodInputs, scored: Mapping[str, Sequence[Tensor]]
) -> dict[str, dict[str, Any]]:
    """Mean log-probability per token under the original model, of its own responses and the others.

    At the temperature of the stored responses, as the KLs are.
    """
    of_prompts = {"reference": [[row.log_probs for row in group] for group in inputs.groups]}
    for name, log_probs in scored.items():
        left = iter(log_probs)
        of_prompts[name] = [
            [next(left).tolist() for _ in responses] for responses in inputs.responses[name]
        ]
    return {
        name: mean_per_token(
            np.array([sum(map(sum, responses)) for responses in prompts], dtype=float),
            np.array([sum(map(len, responses)) for responses in prompts], dtype=float),
            seed=inputs.seed,
        ).to_json()
        for name, prompts in of_prompts.items()
    }


def compare_texts(
    before: Float[ndarray, " T"],
    after: Float[ndarray, " T"],
    tokens: Float[ndarray, " T"],
    seed: int,
) -> dict[str, Any]:
    """Negative log-likelihood per token of neutral texts before and after, and the difference.

    Args:
        before: nats of each text under the original model.
        after: under the policy.
        tokens: how many were predicted in each text.
        seed: of the bootstrap over texts.
    """
    return {
        "before": float(before.sum() / tokens.sum()),
        "after": float(after.sum() / tokens.sum()),
        "difference": mean_per_token(after - before, tokens, seed=seed).to_json(),
        "tokens": int(tokens.sum()),
    }


def read_texts(path: Path | None) -> list[str]:
    """Texts of a file: paragraphs of a .txt, divided by blank lines, or JSON Lines with `text`.

    Args:
        path: the file; None for the neutral text of this package.

    Raises:
        InputError: there is no such file.
        BadLineError: a line has no `text`.
    """
    path = path or NEUTRAL_TEXT
    if path.name.endswith(PLAIN_TEXT):
        stripped = [line.strip() for line in read_text(path)]
        parts = groupby(stripped, key=bool)
        return ["\n".join(lines) for is_text, lines in parts if is_text]
    return [text_of(line, location) for location, line in read_lines(path)]


def encode_texts(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], context: int | None = None
) -> list[list[int]]:
    """Token ids of each text, at most `context`; a single token predicts nothing and is left out.

    Raises:
        InputError: no text is left.
    """
    longest = min(LONGEST_TEXT, context or LONGEST_TEXT)
    encoded = [tokenizer(text, verbose=False)["input_ids"][:longest] for text in texts]
    token_ids = [ids for ids in encoded if len(ids) > 1]
    if not token_ids:
        raise InputError(
            "--retain holds no text of two tokens or more",
            "Give a .txt file with paragraphs, or leave --retain out: a text is provided.",
        )
    return token_ids


def _nats_of_texts(
    accelerator: Accelerator,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[list[int]],
) -> Float[ndarray, " T"]:
    """−Σ log p of each text, of every token after the first, at temperature 1."""
    first, rest = [ids[:1] for ids in texts], [ids[1:] for ids in texts]
    scored = score_responses(accelerator, model, tokenizer, first, rest, 1.0, TEXTS_AT_ONCE)
    return np.array([-float(log_probs.sum()) for log_probs in scored])
