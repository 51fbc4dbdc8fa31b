"""A signal annotator: how positive a response sounds, by VADER.

It is a signal, a stand-in for people that costs nothing and never tires. It knows 7,500 words and a
few rules about negation and emphasis; it does not know whether an answer is true, useful or even
about the question. A policy trained on it learns to sound cheerful, which is what the quickstart
measures, and no more than that.

C. J. Hutto and E. Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social
Media Text", ICWSM 2014.
"""

from functools import cache

from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

LONGEST = 10_000  # characters; VADER's time grows with the square of the length


@cache
def _analyzer() -> SentimentIntensityAnalyzer:
    """The analyzer, whose word list is read once."""
    return SentimentIntensityAnalyzer()


def score(prompt: str, response: str) -> float:
    """VADER's compound sentiment of the response.

    compound = s / √(s² + 15), s the sum of the words' valences after VADER's rules.

    Args:
        prompt: not looked at; every signal takes prompt and response.
        response: the text to judge, by its first 10,000 characters; an empty one is neutral.

    Returns:
        A number from -1 (most negative) through 0 (neutral) to 1 (most positive).
    """
    return float(_analyzer().polarity_scores(response[:LONGEST])["compound"])
