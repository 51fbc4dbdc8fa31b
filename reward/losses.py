"""Losses over the rewards of one prompt's responses.

Differs from InstructGPT (arXiv 2203.02155): ties count as half a win each way, and every pair may
carry a margin and a weight. Letters: P pairs, over all prompts of a batch.
"""

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry(
    first: Float[Tensor, " P"],
    second: Float[Tensor, " P"],
    outcome: Float[Tensor, " P"],
    margin: Float[Tensor, " P"],
) -> Float[Tensor, " P"]:
    """Negative log-likelihood of each judgement under Bradley and Terry (1952).

    −t·log σ(d − m) − (1 − t)·log σ(−d − m) with d = first − second; a tie (t = ½, m = 0) is half a
    win each way.

    Args:
        first: reward of the response named first.
        second: reward of the other one.
        outcome: t, 1 where first won, ½ for a tie, 0 where second won.
        margin: m ≥ 0, by how much the winner should lead (arXiv 2307.09288, 3.2.2); 0 for ties.
    """
    difference = first - second
    won = logsigmoid(difference - margin)
    lost = logsigmoid(-difference - margin)
    return -outcome * won - (1 - outcome) * lost


def sum_of_prompt_means(
    losses: Float[Tensor, " P"], weights: Float[Tensor, " P"], prompt: Int[Tensor, " P"]
) -> Float[Tensor, ""]:
    """Add up, over prompts, the weighted mean loss of each one's pairs: a prompt counts once.

    Σ_x (Σ_p w_p·l_p / Σ_p w_p), p over the pairs of prompt x. Divide by the number of prompts of
    the whole batch, over all forward passes and processes, for arXiv 2203.02155, equation 1.

    Args:
        losses: loss of each pair.
        weights: weight of each pair, not all 0 within a prompt.
        prompt: number of the prompt that each pair belongs to.
    """
    if prompt.numel() == 0:
        return losses.sum()
    totals = weights.new_zeros(int(prompt.max()) + 1).index_add(0, prompt, weights)
    return (losses * weights / totals[prompt]).sum()
