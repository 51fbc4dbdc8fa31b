"""What an evaluation may claim: win rates with intervals, tests, and measures of variety.

Pure functions of numbers and texts. Letters: P prompts, S policy responses per prompt, M reference
responses per prompt. The prompt is the unit of every interval: responses to one prompt resemble
each other, so counting each of them as independent evidence would make an interval too narrow.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy import ndarray
from sacrebleu.metrics.bleu import BLEU
from scipy import special, stats

from rlhf.run.intervals import MIN_PROMPTS

MAX_SELF_BLEU = 100  # texts; the cost grows with their square
WORD = re.compile(r"\w+(?:['\u2019]\w+)*")
RESAMPLES_PER_BATCH = 1000


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A mean over prompts and its confidence interval.

    Worked example: wins of (1, 1, 0, 0.5) have the value 0.625; low and high come from resampling
    them, were they five or more. Of fewer prompts low and high are NaN: resampling them gives
    intervals that are far too narrow.
    """

    value: float
    low: float
    high: float
    n: int
    level: float = 0.95

    def to_json(self) -> dict[str, Any]:
        """This interval as a JSON object."""
        return asdict(self)


def compare(
    policy_scores: Float[ndarray, "P S"], reference_scores: Float[ndarray, "P M"]
) -> Float[ndarray, " P"]:
    """Each prompt's fraction of comparisons that the policy wins, a tie counting half.

    w_p = 1/(S·M) · Σ_s Σ_m [a_ps > b_pm] + ½·[a_ps = b_pm]

    This is the Mann-Whitney statistic U/(S·M) within a prompt (Mann and Whitney, 1947).

    Raises:
        ValueError: the numbers of prompts differ, no responses, or a score that is not a number.
    """
    if policy_scores.shape[0] != reference_scores.shape[0]:
        raise ValueError(
            f"{policy_scores.shape[0]} prompts against {reference_scores.shape[0]}: not the same"
        )
    if policy_scores.shape[1] == 0 or reference_scores.shape[1] == 0:
        raise ValueError("a prompt without a response cannot be compared")
    if np.isnan(policy_scores).any() or np.isnan(reference_scores).any():
        raise ValueError("a score is NaN: it is neither a win nor a loss")
    ours = policy_scores[:, :, None]  # P S 1
    theirs = reference_scores[:, None, :]  # P 1 M
    points = np.where(ours > theirs, 1.0, np.where(ours == theirs, 0.5, 0.0))  # P S M
    shares: Float[ndarray, " P"] = points.mean(axis=(1, 2))
    return shares


def bootstrap_interval(
    values: Float[ndarray, " P"], *, samples: int = 10_000, seed: int, level: float = 0.95
) -> Interval:
    """The mean of `values` with its percentile bootstrap interval (Efron, 1979).

    Draw P prompts with replacement, take their mean, repeat; low and high are the (1 - level)/2 and
    (1 + level)/2 quantiles of those means, NaN of fewer than five values. Values that are all equal
    give an interval of no width: read it together with `sign_test`.

    Args:
        values: one number per prompt.
        samples: how often to resample.
        seed: of the resampling.
        level: the fraction of such intervals that contain the true mean.

    Raises:
        ValueError: no values.
    """
    return _resample((values,), np.mean, samples, seed, level)


def mean_per_token(
    nats: Float[ndarray, " P"],
    tokens: Float[ndarray, " P"],
    *,
    samples: int = 10_000,
    seed: int,
    level: float = 0.95,
) -> Interval:
    """Nats per token, Σ nats / Σ tokens, with its percentile bootstrap interval.

    Resamples prompts or texts, as `bootstrap_interval` does: tokens of one are not independent.

    Args:
        nats: of each prompt or text, added up over its tokens.
        tokens: their number.
        samples: how often to resample.
        seed: of the resampling.
        level: the fraction of such intervals that contain the true mean.

    Raises:
        ValueError: no values.
    """
    return _resample((nats, tokens), _ratio_of_sums, samples, seed, level)


def share_of_gain(
    student: Float[ndarray, "P S"],
    teacher: Float[ndarray, "P T"],
    original: Float[ndarray, "P M"],
    *,
    seed: int,
) -> Interval:
    """How much of a teacher's gain in score a student has kept, with a bootstrap interval.

    Σ_p (s̄_p − o_p) / Σ_p (t̄_p − o_p), of each prompt's mean scores s̄, t̄ and o. Resamples prompts.
    It means something only where the teacher's gain is clearly above 0.

    Args:
        student: scores of the student's responses.
        teacher: of its teacher's.
        original: of the original model's.
        seed: of the resampling.
    """
    before = original.mean(axis=1)
    gains = student.mean(axis=1) - before, teacher.mean(axis=1) - before
    return _resample(gains, _ratio_of_sums, 10_000, seed, 0.95)


def _ratio_of_sums(
    nats: Float[ndarray, "*R P"], tokens: Float[ndarray, "*R P"], axis: int = -1
) -> Float[ndarray, "*R"]:
    ratio: Float[ndarray, "*R"] = nats.sum(axis=axis) / tokens.sum(axis=axis)
    return ratio


def _resample(
    values: tuple[Float[ndarray, " P"], ...],
    statistic: Callable[..., Any],
    samples: int,
    seed: int,
    level: float,
) -> Interval:
    """A statistic with its percentile bootstrap interval; the same P are drawn from all values."""
    number = values[0].size
    if number == 0:
        raise ValueError("no values: there is no interval")
    value = float(statistic(*values))
    if number < MIN_PROMPTS:
        nan = float("nan")
        return Interval(value=value, low=nan, high=nan, n=number, level=level)
    result = stats.bootstrap(
        values,
        statistic,
        paired=len(values) > 1,
        n_resamples=samples,
        batch=RESAMPLES_PER_BATCH,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    low, high = result.confidence_interval
    return Interval(value=value, low=float(low), high=float(high), n=number, level=level)


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p-value of `wins` against `losses` as a fair coin's tosses; ties are left out.

    p = min(1, 2 · Σ_{i ≤ min(wins, losses)} C(n, i) / 2ⁿ), n = wins + losses (Dixon and Mood, 1946)
    """
    if wins + losses == 0:
        return 1.0
    return float(stats.binomtest(wins, wins + losses).pvalue)


def judge_wins(
    wins: Float[ndarray, " P"], *, seed: int, level: float = 0.95
) -> dict[str, float | int]:
    """Win rate, interval and sign test of per-prompt win fractions, as `compare` gives them.

    The win rate is their mean, 1/P · Σ w_p: a half says that the two are equal. A prompt is won
    when the policy takes more than half of its comparisons.

    Returns:
        value, low, high, n, level as in `Interval`; wins, ties, losses in prompts; p_value.

    Raises:
        ValueError: no prompts, or a fraction outside 0 to 1.
    """
    if not ((wins >= 0) & (wins <= 1)).all():
        raise ValueError("win fractions lie between 0 and 1")
    won, lost = int((wins > 0.5).sum()), int((wins < 0.5).sum())
    return {
        **bootstrap_interval(wins, seed=seed, level=level).to_json(),
        "wins": won,
        "ties": wins.size - won - lost,
        "losses": lost,
        "p_value": sign_test(won, lost),
    }


def spread(values: Float[ndarray, " N"]) -> dict[str, float]:
    """`mean` and `std`, that of the population (ddof 0), of a set of scores."""
    return {"mean": float(values.mean()), "std": float(values.std())}


def distinct_n(texts: Sequence[str], n: int) -> float:
    """Distinct n-grams of words as a fraction of all, over all texts.

    distinct-n = |{n-grams}| / #n-grams (Li et al., 2016, arXiv 1510.03055); 0 when there are none.
    Words are lower-cased runs of letters and digits; no n-gram spans two texts. It falls as texts
    grow longer, so compare it only between sets of equal size and similar length.
    """
    grams = [gram for text in texts for gram in _n_grams(WORD.findall(text.lower()), n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def _n_grams(text_words: list[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(text_words[start : start + n]) for start in range(len(text_words) - n + 1)]


def commonest_phrase(texts: Sequence[str], prompts: Sequence[str], n: int = 4) -> tuple[str, float]:
    """The n words in a row that the most texts have, and the share of texts that have them.

    A policy that has found one phrase that a reward model likes uses it everywhere: a template.
    What a text quotes from its own prompt is no template and is left out. Words are those of
    `distinct_n`; of phrases in equally many texts the first to appear counts, and without n words
    in any text the phrase is empty and the share 0.

    Args:
        texts: the responses.
        prompts: what each of them responds to.
        n: words of a phrase.
    """
    counts: Counter[tuple[str, ...]] = Counter()
    for text, prompt in zip(texts, prompts, strict=True):
        quoted = set(_n_grams(WORD.findall(prompt.lower()), n))
        grams = dict.fromkeys(_n_grams(WORD.findall(text.lower()), n))  # once a text, in order
        counts.update([gram for gram in grams if gram not in quoted])
    if not counts:
        return "", 0.0
    [(phrase, count)] = counts.most_common(1)
    return " ".join(phrase), count / len(texts)


def repeating_fraction(texts: Sequence[str], n: int = 4) -> float:
    """The fraction of texts in which some n words in a row occur twice; 0 of no texts."""
    repeats = []
    for text in texts:
        grams = _n_grams(WORD.findall(text.lower()), n)
        repeats.append(len(set(grams)) < len(grams))
    return sum(repeats) / max(len(repeats), 1)


def self_bleu(texts: Sequence[str]) -> float:
    """How much texts repeat each other: the mean BLEU of each against all the others, 0 to 1.

    1/N · Σ_i BLEU(t_i; all t_j, j ≠ i) (Zhu et al., 2018, arXiv 1802.01886), by sacreBLEU's
    sentence score with effective order, of the first 100 texts. It grows with the number of texts,
    so compare it only between sets of equal size. 0 for a single text.
    """
    chosen = list(texts[:MAX_SELF_BLEU])
    if len(chosen) < 2:
        return 0.0
    bleu = BLEU(effective_order=True)
    scores = [
        bleu.sentence_score(text, chosen[:index] + chosen[index + 1 :]).score
        for index, text in enumerate(chosen)
    ]
    return float(np.mean(scores)) / 100


def best_of_n(
    rewards: Float[ndarray, "P M"], values: Float[ndarray, "P M"], n: int
) -> Float[ndarray, " P"]:
    """For each prompt the expected value of the response with the highest reward among n of its M.

    Σ_i C(i−1, n−1)/C(M, n) · v_(i), where (i) orders the responses of a prompt by their reward,
    lowest first: the mean over all subsets of n responses, hence unbiased (Nakano et al., 2021,
    arXiv 2112.09332). Among responses with the same reward chance chooses.

    Args:
        rewards: what chooses.
        values: what the chosen response is worth: the rewards themselves, or gold scores.
        n: responses to choose among.

    Raises:
        ValueError: n is not between 1 and M.
    """
    num_responses = rewards.shape[1]
    if not 1 <= n <= num_responses:
        raise ValueError(f"the best of {n} cannot be taken from {num_responses} responses")
    order = rewards.argsort(axis=1, kind="stable")
    ties = (rewards[:, :, None] == rewards[:, None, :]).astype(float)
    values = (ties @ values[:, :, None])[:, :, 0] / ties.sum(axis=2)  # any of the tied is chosen
    below = np.arange(num_responses)  # how many responses stand below each, in order of reward
    weights = special.comb(below, n - 1) / special.comb(num_responses, n)
    expected: Float[ndarray, " P"] = np.take_along_axis(values, order, axis=1) @ weights
    return expected


def best_of_n_nats(n: int) -> float:
    """The KL of best-of-n from the model that it chooses from: log n − (n − 1)/n.

    Exact where no two responses have the same reward or text, an upper bound otherwise (Beirami et
    al., 2024, arXiv 2401.01879).
    """
    return float(np.log(n) - (n - 1) / n)


def votes_needed(
    votes: Float[ndarray, " P"], *, level: float = 0.95, power: float = 0.8
) -> int | None:
    """How many prompts would prove a win rate like that of these votes; None at one half.

    N = ⌈(z_level + z_power)² · s² / (m − ½)²⌉, the sample size of a z-test, with m and s² the mean
    and variance of the votes and of one more for each side: a few votes that all went one way do
    not promise certainty.

    Args:
        votes: of each prompt: 1 for us, ½ for a tie, 0 for the other; of several votes the mean.
        level: of the two-sided test.
        power: the chance that N votes prove it, if m and s are the true ones.
    """
    padded = np.concatenate([votes, [0.0, 1.0]])
    distance = float(padded.mean()) - 0.5
    if distance == 0:
        return None
    z = stats.norm.ppf((1 + level) / 2) + stats.norm.ppf(power)
    return int(np.ceil(z**2 * padded.var() / distance**2))
