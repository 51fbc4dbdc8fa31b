"""Questions of live mode as the browser gets them: HTML and positions, no ids and no models."""

from collections.abc import Sequence
from typing import Any

from labeling_app.db.answers.live import Turn
from labeling_app.rankings.verdicts import EDITED, TIE
from labeling_app.web.board.rendering import conversation_to_html, response_to_html
from rlhf.modeling.thinking import split_thinking
from rlhf.records.thumbs import ALL_BAD, LABELS

Payload = dict[str, Any]


def split_texts(texts: Sequence[str]) -> dict[str, list[str]]:
    """The answers so far, and the models' thinking before them, which the page folds."""
    parts = [split_thinking(text) for text in texts]
    return {"texts": [answer for _, answer in parts], "thinking": [thought for thought, _ in parts]}


def turn_payload(turn: Turn, endings: Sequence[str]) -> Payload:
    """An answered question with its votes, without ids of responses.

    Args:
        turn: the question.
        endings: for each answer, in the order shown, the label that says why it ends early.
    """
    return {
        "id": turn.id,
        "prompt": conversation_to_html(turn.prompt.chat),
        "cards": [
            {"text": turn.texts[i], "html": response_to_html(turn.texts[i]), "ending": ending}
            for i, ending in zip(turn.shown_order, endings, strict=True)
        ],
        "thumbs": [_thumb_of(turn, response_id) for response_id in turn.shown_order],
        "choice": choice_of(turn),
        "edit": response_to_html(edit_of(turn) or ""),
    }


def _thumb_of(turn: Turn, response_id: str) -> int:
    for ranking in turn.rankings:
        flags = LABELS.keys() & set(ranking.flags)
        if flags and ranking.tiers == ((response_id,),):
            return 1 if LABELS[flags.pop()] else -1
    return 0


def choice_of(turn: Turn) -> int | str | None:
    """The position that was picked, `tie`, `all-bad`, or None before a vote."""
    for ranking in turn.rankings:
        if {i for tier in ranking.tiers for i in tier} == set(turn.shown_order):
            if ALL_BAD in ranking.flags:
                return ALL_BAD
            return TIE if len(ranking.tiers) == 1 else turn.shown_order.index(ranking.tiers[0][0])
    return None


def edit_of(turn: Turn) -> str | None:
    """The latest edit of one of the answers."""
    edits = [r for r in turn.rankings if EDITED in r.flags and r.tiers[-1][0] in turn.shown_order]
    return turn.texts[edits[-1].tiers[0][0]] if edits else None
