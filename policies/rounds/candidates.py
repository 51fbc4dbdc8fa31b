"""Samples of the newest policy for the annotators, and which prompts they should rank next.

Three reasons to rank a prompt again: the policy has moved far from the original model there, where
the reward model was never tested; the reward model is uncertain about the responses; or the prompt
was drawn at random, which finds problems that neither measure shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from policies.evaluate.judges import score_with_reward
from policies.evaluate.responses import SamplingSetup, reference_responses, sample_responses
from policies.reference.audit import score_responses
from policies.reference.loading import load_reference_model, open_store_and_find_model
from policies.reference.rewards import is_scored_by
from policies.rewards import describe_rewards, load_reward
from policies.rounds.settings import RoundSettings
from rlhf.errors import InputError
from rlhf.modeling.models import (
    describe_model,
    in_memory,
    load_causal_lm,
    policy_folder,
    require_same_tokenizer,
)
from rlhf.modeling.readers import kwargs_for
from rlhf.parallel.distributed import precision_of, start_alone
from rlhf.records.schema import Prompt, Response
from rlhf.run.rundir import require_done

RANDOM, DIVERGENT, UNCERTAIN = "random", "divergent", "uncertain"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A prompt that may be sent to the annotators, with its responses.

    Args:
        prompt: the prompt.
        responses: the original model's first response, then the policy's samples; each text once.
        rewards: of the responses.
        nats: mean log π(y)/π_ref(y) of the policy's samples.
    """

    prompt: Prompt
    responses: tuple[Response, ...]
    rewards: Float[ndarray, " K"]
    nats: float


def sample_candidates(
    settings: RoundSettings,
) -> tuple[list[Candidate], dict[str, dict[str, str]]]:
    """Sample responses to the store's training prompts; also returns the hashes of the inputs.

    Prompts whose responses all have the same text are left out.

    Raises:
        InputError: an input is missing or belongs to another model, or there is no such prompt.
    """
    accelerator = start_alone(settings.precision, settings.seed)
    path = policy_folder(settings.policy, "--policy")
    outputs = require_done(settings.reference, "reference", "outputs").outputs
    store = open_store_and_find_model(outputs, path)
    given = store.template_kwargs
    policy = describe_model(path, kwargs_for(path, given))
    inputs = {
        "policy": policy,
        **describe_rewards([settings.reward], policy),
        "reference": {"path": str(settings.reference), "hash": store.content_hash},
    }
    require_same_tokenizer(store.manifest["model"], policy)
    groups = store.by_prompt("train")
    if not groups:
        raise InputError(
            f"The store {settings.reference} has no training prompts",
            "Make it from prompts of the train split: rlhf reference --prompts DIR …",
        )
    tokenizer = store.load_tokenizer(policy["path"])
    sampling = replace(store.sampling, seed=settings.seed)
    encoded = [group[0].prompt_ids for group in groups]
    size = settings.batch_size
    setup = SamplingSetup(engine=settings.engine, samples=settings.k, batch_size=size)
    ours = sample_responses(accelerator, tokenizer, policy, encoded, sampling, setup)
    repeated = [ids for ids in encoded for _ in range(settings.k)]
    responses = [sample.token_ids for row in ours.samples for sample in row]
    scored = (tokenizer, repeated, responses, sampling.temperature, size)
    with in_memory(load_causal_lm(policy["path"]).to(accelerator.device)) as model:
        log_probs = score_responses(accelerator, model, *scored)
    with in_memory(load_reference_model(store, accelerator)) as reference:
        reference_log_probs = score_responses(accelerator, reference, *scored)
    log_ratios = [
        float(mine.sum()) - float(original.sum())
        for mine, original in zip(log_probs, reference_log_probs, strict=True)
    ]
    nats = np.array(log_ratios).reshape(len(groups), -1).mean(axis=1)
    reward = load_reward([settings.reward], accelerator, given=given)
    by_model = {"policy": ours, "reference": reference_responses(groups, store)}
    is_stored = is_scored_by(store, reward, precision_of(accelerator))
    pad_id = int(tokenizer.pad_token_id)
    rewards = score_with_reward(groups, by_model, reward, pad_id, is_stored=is_stored)
    prompts = [group[0].prompt for group in groups]
    originals = by_model["reference"].responses(prompts)
    news = ours.responses(prompts)
    candidates = []
    for row, prompt in enumerate(prompts):
        prompt_responses = (originals[row][0], *news[row])
        scores = np.array([rewards["reference"][row][0], *rewards["policy"][row]])
        candidates.append(candidate(prompt, prompt_responses, scores, float(nats[row])))
    return [proposal for proposal in candidates if len(proposal.responses) > 1], inputs


def candidate(
    prompt: Prompt, responses: Sequence[Response], rewards: Float[ndarray, " K"], nats: float
) -> Candidate:
    """A candidate with every text once: two equal texts cannot be ranked.

    Chosen by text and reward, its responses are no samples of their models any more. So they lose
    their sampling settings, without which `rlhf reference` does not reuse them.

    Args:
        prompt: as in `Candidate`.
        responses: some may have the same text.
        rewards: of each of them.
        nats: as in `Candidate`.
    """
    texts = [response.text for response in responses]
    distinct = [index for index, text in enumerate(texts) if texts.index(text) == index]
    return Candidate(
        prompt=prompt,
        responses=tuple(replace(responses[index], sampling=None) for index in distinct),
        rewards=rewards[distinct],
        nats=nats,
    )


def choose(
    nats: Sequence[float],
    uncertainty: Sequence[float],
    *,
    pick: int,
    random_share: float,
    seed: int,
) -> list[tuple[int, str]]:
    """Indices of the chosen prompts with the reason for each, in the order to rank them.

    Every reason has its own list, best first: the farthest from the original, the most uncertain, a
    random order. The lists take turns in proportion to their shares and skip prompts that are
    already chosen.

    Args:
        nats: log-ratio of policy to original on each prompt, as in `Candidate`.
        uncertainty: of the reward model about each prompt's responses.
        pick: how many to choose, at most all.
        random_share: share of those drawn at random; the rest is halved.
        seed: of the random order.
    """
    orders = {
        RANDOM: list(np.random.default_rng(seed).permutation(len(nats))),
        DIVERGENT: list(np.argsort(-np.array(nats), kind="stable")),
        UNCERTAIN: list(np.argsort(-np.array(uncertainty), kind="stable")),
    }
    rest = (1 - random_share) / 2
    shares = {RANDOM: random_share, DIVERGENT: rest, UNCERTAIN: rest}
    taken: dict[int, str] = {}
    counts = dict.fromkeys(orders, 0)
    while len(taken) < min(pick, len(nats)):
        # the reason that is furthest behind its share
        reason = max(orders, key=lambda name: shares[name] * (len(taken) + 1) - counts[name])
        index = next(int(i) for i in orders[reason] if int(i) not in taken)
        taken[index] = reason
        counts[reason] += 1
    return list(taken.items())
