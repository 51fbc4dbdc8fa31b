"""Live mode: a person asks, models answer blind and side by side, the person judges.

Each question is answered in its own thread, so ranking never waits for a model. A vote does not
cut answers short: votes compare complete answers. A vote cast early is stored when the answers are
complete, and can be changed until the next question. Stop cuts all answers.

The operations use the board's protocol (`session.py`): plain JSON, positions in the order shown,
no model names.
"""

import random
import sqlite3
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain
from typing import Any, Protocol

from labeling_app.db.answers.live import (
    Turn,
    add_verdict,
    find_turn,
    latest_turn,
    require_new_turn,
    require_turn,
    retire_verdict,
    save_turn,
)
from labeling_app.db.store import Store
from labeling_app.quality.truncation import cut_offs
from labeling_app.rankings.verdicts import EDITED, PERSON, THUMBS, pick
from labeling_app.web.board.rendering import conversation_to_html
from labeling_app.web.live.payloads import Payload, choice_of, edit_of, split_texts, turn_payload
from rlhf.errors import InputError
from rlhf.records.schema import Message, Prompt, Ranking, Response, content_id

SOURCE = "live"
MAX_QUESTIONS = 8
MAX_CHARACTERS = 20_000
VOTES = ("thumb", "pick", "edit")
STOPPED = "Stopped"
BROKEN = "The server failed while answering. Try again; your question is kept."

OnText = Callable[[int, str], bool]
# The text under each response, shown once the person has judged one of them.
Note = Callable[[Prompt, Sequence[Response]], list[str]]


class ChatModel(Protocol):
    """A model that answers: in this process or on a server."""

    def answer(
        self, prompt: Prompt, ids: Sequence[str], seed: int, on_text: OnText
    ) -> list[Response]:
        """One response for each id.

        Args:
            prompt: the conversation so far.
            ids: the ids that the responses get.
            seed: makes this sampling repeatable.
            on_text: called with a position in `ids` and its whole text so far; returns whether to
                go on with it.

        Raises:
            InputError: it cannot answer; the message is shown to the person who asked.
        """
        ...


class RunningQuestion:
    """A question that is being answered.

    Args:
        turn_id: the browser's id of the question.
        prompt: the conversation with the question.
        num_responses: how many answers are wanted.
    """

    def __init__(self, turn_id: str, prompt: Prompt, num_responses: int) -> None:
        self.id = turn_id
        self.prompt = prompt
        self.ids = [content_id(SOURCE, turn_id, position) for position in range(num_responses)]
        self.texts = [""] * num_responses
        self.stopped = False
        self.over = False
        self.problem = BROKEN

    def update(self, position: int, text: str) -> bool:
        """Set the text of an answer so far. Returns False when the answer should stop."""
        if not self.stopped:
            self.texts[position] = text
        return not self.stopped

    def payload(self) -> Payload:
        """The question for the browser; more text follows in the stream."""
        return {
            "id": self.id,
            "prompt": conversation_to_html(self.prompt.chat),
            "asked": self.prompt.messages[-1].content,
            **split_texts(self.texts),
        }


class Live:
    """The questions of all annotators of one database.

    Args:
        store: the database.
        models: the models; the answers to a question are spread evenly over them.
        num_responses: answers to each question.
        has_sign_in: whether people signed in, and so may sign out.
        note: the text under each answer, shown after the vote so that it cannot influence it.
    """

    def __init__(
        self,
        store: Store,
        models: Sequence[ChatModel],
        *,
        num_responses: int = 2,
        has_sign_in: bool = False,
        note: Note | None = None,
    ) -> None:
        self.store = store
        self.note = note
        self._notes: dict[str, tuple[str, list[str]]] = {}  # of each annotator's last question
        self.models = models
        self.num_responses = num_responses
        self.has_sign_in = has_sign_in
        self._questions: dict[str, RunningQuestion] = {}
        self._lock = threading.Lock()
        self._operations: dict[str, Callable[[str, Payload], Payload]] = {
            "state": self._state,
            "ask": self._ask,
            "stop": self._stop,
            "thumb": self._thumb,
            "pick": self._pick,
            "edit": self._edit,
        }

    def answer(self, annotator: str, payload: Payload) -> Payload:
        """Do what the browser asks; every answer has `ok`, a refusal `error` and `retry`."""
        operation = self._operations.get(str(payload.get("op")))
        if operation is None:
            return _refusal(f"Unknown operation {payload.get('op')!r}. Reload the page.")
        question = self.question(annotator, str(payload.get("turn")))
        if payload["op"] in VOTES and question is not None and not question.over:
            return _refusal("Your vote will be sent when the answers are complete.", retry=True)
        try:
            return {"ok": True, **operation(annotator, payload)}
        except InputError as error:
            return _refusal(f"{error.problem}. {error.remedy}")
        except sqlite3.DatabaseError as error:
            return _refusal(f"The database could not write ({error}).", retry=True)
        except (LookupError, TypeError, ValueError, OverflowError):
            # Not in the error's own words, which may hold ids of the database.
            return _refusal("The request is malformed. Reload the page.")

    def question(self, annotator: str, turn_id: str) -> RunningQuestion | None:
        """The question of that id, if it is this annotator's last one since the server started."""
        question = self._questions.get(annotator)
        return question if question is not None and question.id == turn_id else None

    def close(self) -> None:
        """Stop all answers, so that the process can end."""
        for question in self._questions.values():
            question.stopped = True

    def find(self, annotator: str, turn_id: str) -> Payload:
        """`{"turn": …}`: an answered question as the browser shows it, or None."""
        turn = find_turn(self.store, annotator, turn_id)
        return {"turn": self._noted(turn) if turn else None}

    def _noted(self, turn: Turn) -> Payload:
        """An answered question, with its notes once the person has judged an answer."""
        endings = cut_offs(self.store.connections, turn.shown_order, without_limit=STOPPED)
        payload = turn_payload(turn, endings)
        if self.note is None or not turn.rankings:
            return payload
        noted_turn, notes = self._notes.get(turn.annotator, ("", []))
        if noted_turn != turn.id:
            responses = {r.id: r for r in self.store.responses(turn.prompt.id)}
            notes = self.note(turn.prompt, [responses[i] for i in turn.shown_order])
            self._notes[turn.annotator] = turn.id, notes
        return payload | {"notes": notes}

    # ------------------------------------------------------------------ asking

    def _state(self, annotator: str, payload: Payload) -> Payload:
        question = self._questions.get(annotator)
        turn = latest_turn(self.store, annotator)
        return {
            "board": f"live:{self.store.board_id}",
            "annotator": annotator,
            "has_sign_in": self.has_sign_in,
            "running": question.payload() if question and not question.over else None,
            "turn": self._noted(turn) if turn else None,
        }

    def _ask(self, annotator: str, payload: Payload) -> Payload:
        turn_id, text = _text(payload, "id", 64), _text(payload, "text", MAX_CHARACTERS)
        history = self._history(annotator, payload.get("after"))
        prompt = Prompt.create((*history, Message(role="user", content=text)), "train", SOURCE)
        with self._lock:
            known = self.question(annotator, turn_id)
            if known is not None:
                return {"running": known.payload()}
            require_new_turn(self.store, turn_id)
            self._require_free(annotator)
            question = RunningQuestion(turn_id, prompt, self.num_responses)
            self._questions[annotator] = question
        # A daemon: Ctrl+C must not wait for a model.
        threading.Thread(target=self._run, args=(annotator, question), daemon=True).start()
        return {"running": question.payload()}

    def _history(self, annotator: str, after: Any) -> tuple[Message, ...]:
        """The conversation up to a judged question, with the chosen answer."""
        if after is None:
            return ()
        turn = require_turn(self.store, annotator, str(after))
        choice, edited = choice_of(turn), edit_of(turn)
        if choice is None and edited is None:
            raise InputError(
                "No answer is picked yet",
                "Pick one: the conversation continues with it.",
            )
        # After a tie, or when all are bad, it continues with the first one.
        chosen = edited or turn.texts[turn.shown_order[choice if isinstance(choice, int) else 0]]
        return (*turn.prompt.messages, Message(role="assistant", content=chosen))

    def _require_free(self, annotator: str) -> None:
        busy = {name for name, question in self._questions.items() if not question.over}
        if annotator in busy:
            raise InputError("Your last question is still being answered", "Wait, or press Stop.")
        if len(busy) >= MAX_QUESTIONS:
            raise InputError(
                f"The models are busy with {len(busy)} other questions",
                "Try again in a moment; your question is kept.",
            )

    def _run(self, annotator: str, question: RunningQuestion) -> None:
        try:
            responses = self._responses(question)
            if question.stopped and not any(question.texts):
                raise InputError(
                    "Stopped before the models wrote anything", "Your question is kept."
                )
            if question.stopped:
                # cut or chosen by when somebody pressed Stop, they are no samples of their models
                responses = [replace(response, sampling=None) for response in responses]
            save_turn(self.store, question.id, annotator, question.prompt, responses)
            question.problem = ""
        except InputError as error:
            question.problem = f"{error.problem}. {error.remedy}"
        except sqlite3.DatabaseError as error:
            question.problem = f"The answers could not be stored ({error}). Try again later."
        finally:
            question.over = True

    def _responses(self, question: RunningQuestion) -> list[Response]:
        """Ask all models at once; their answers are shown in random order."""
        models = random.sample(self.models, len(self.models))
        count = len(question.ids)
        # With more positions than models, the extra ones are assigned at random.
        positions = random.sample(range(count), count)

        def ask_model(number: int) -> list[tuple[int, Response]]:
            own = positions[number :: len(models)]
            ids = [question.ids[position] for position in own]

            def on_text(row: int, text: str) -> bool:
                return question.update(own[row], text)

            # Each model has its own seed: with one seed, equal models would answer alike.
            seed = random.getrandbits(31)
            try:
                responses = (
                    models[number].answer(question.prompt, ids, seed, on_text) if own else []
                )
            except InputError:
                question.stopped = True  # a single answer cannot be compared
                raise
            return list(zip(own, responses, strict=True))

        with ThreadPoolExecutor(len(models)) as pool:
            answered = dict(chain.from_iterable(pool.map(ask_model, range(len(models)))))
        return [answered[position] for position in range(count)]

    def _stop(self, annotator: str, payload: Payload) -> Payload:
        question = self.question(annotator, _text(payload, "turn", 64))
        if question is not None:
            question.stopped = True
        return {}

    # ------------------------------------------------------------------ judging

    def _thumb(self, annotator: str, payload: Payload) -> Payload:
        value = int(payload["value"])
        turn = require_turn(self.store, annotator, _text(payload, "turn", 64))
        tiers = ((_shown(turn, payload),),)
        ranking = _ranking(turn, payload, tiers, (THUMBS[value or 1],))
        if value:
            add_verdict(self.store, ranking, tiers[0])
        else:
            retire_verdict(self.store, turn, ranking)
        return self.find(annotator, turn.id)

    def _pick(self, annotator: str, payload: Payload) -> Payload:
        turn = require_turn(self.store, annotator, _text(payload, "turn", 64))
        tiers, flags = pick(turn.shown_order, payload["choice"])
        add_verdict(self.store, _ranking(turn, payload, tiers, flags), turn.shown_order)
        return self.find(annotator, turn.id)

    def _edit(self, annotator: str, payload: Payload) -> Payload:
        """Store an edited answer: a demonstration, and preferred to the original."""
        turn = require_turn(self.store, annotator, _text(payload, "turn", 64))
        original = _shown(turn, payload)
        text = _text(payload, "text", MAX_CHARACTERS)
        if not text.strip() or text == turn.texts[original]:
            raise InputError(
                "The edit is empty or changes nothing", "Change the text, or press Cancel."
            )
        edited = Response(
            id=content_id("edit", turn.id, original, text),
            prompt_id=turn.prompt.id,
            text=text,
            model=PERSON,
            finished=True,
        )
        ranking = _ranking(turn, payload, ((edited.id,), (original,)), (EDITED,))
        with self.store.connections.write():
            self.store.add_responses([edited], queue=False)
            add_verdict(self.store, ranking, [original, edited.id])
        return self.find(annotator, turn.id)


def _ranking(
    turn: Turn, payload: Payload, tiers: tuple[tuple[str, ...], ...], flags: tuple[str, ...]
) -> Ranking:
    return Ranking(
        id=_text(payload, "id", 64),
        prompt_id=turn.prompt.id,
        annotator=turn.annotator,
        kind="human",
        tiers=tiers,
        flags=flags,
    )


def _shown(turn: Turn, payload: Payload) -> str:
    position = int(payload["place"])
    if not 0 <= position < len(turn.shown_order):
        raise InputError(f"There is no answer at place {position}", "Reload the page.")
    return turn.shown_order[position]


def _text(payload: Payload, name: str, limit: int) -> str:
    value = payload.get(name)
    if not isinstance(value, str) or not value or len(value) > limit:
        raise InputError(f"The {name} must be text of 1 to {limit} characters", "Shorten it.")
    return value


def _refusal(error: str, *, retry: bool = False) -> Payload:
    return {"ok": False, "error": error, "retry": retry}
