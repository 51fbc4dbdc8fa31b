"""The records that travel between stages, as frozen dataclasses and as JSON objects.

A worked example, one line of an exported ranking file:

    {"prompt": {"id": "5c1f0e2ab93d7f10", "split": "train", "source": "travel",
                "messages": [{"role": "user", "content": "How was the beach?"}]},
     "responses": [{"id": "a1", "text": "Lovely!", "model": "m", ...},
                   {"id": "b2", "text": "Cold.", ...}],
     "rankings": [{"annotator": "ann", "kind": "human", "tiers": [["a1"], ["b2"]],
                   "strengths": [2], ...}]}
"""

import hashlib
import json
import sys
from dataclasses import asdict, dataclass, fields
from itertools import islice, pairwise
from typing import Any, Literal, Self

from rlhf.errors import InputError, UnusableContentError

Split = Literal["train", "test"]
AnnotatorKind = Literal["human", "ai", "signal"]
JsonObject = dict[str, Any]

ROLES = ("system", "user", "assistant")
KINDS = ("human", "ai", "signal")
STRENGTHS = (1, 2, 3)
INT64 = 2**63  # SQLite's integers end here
MAX_TOKEN_ID = 2**31 - 1


def content_id(*parts: Any) -> str:
    """A 16-digit hexadecimal id that depends on content alone: importing twice changes nothing."""
    text = json.dumps(parts, ensure_ascii=False, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_finite_number(value: Any) -> bool:
    """Whether a JSON value is a number that a float holds, neither NaN nor infinite."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max


def _field(value: Any, name: str, kind: type, record: str) -> Any:
    if not isinstance(value, dict):
        raise InputError(
            f"A {record} must be a JSON object, found {value!r}",
            f"Write a {record} as an object with a field {name!r}.",
        )
    if not isinstance(value.get(name), kind):
        raise InputError(
            f"A {record} needs {name!r} as {kind.__name__}, found {value.get(name)!r}",
            f"Give every {record} a field {name!r}.",
        )
    return value[name]


def _optional(value: JsonObject, name: str, kind: type, record: str, default: Any = None) -> Any:
    """A field that may be left out, or null if its default is None."""
    if isinstance(value, dict) and value.get(name, default) is default:
        return default
    return _field(value, name, kind, record)


def _list_of(value: JsonObject, name: str, kind: type, record: str) -> tuple[Any, ...]:
    """A list that may be left out, each of its values of one kind."""
    values = _optional(value, name, list, record, ())
    if not all(type(item) is kind for item in values):
        raise InputError(
            f"A {record} needs {name!r} as a list of {kind.__name__}, found {values!r:.80}",
            f"Give {kind.__name__} values only, or leave {name!r} out.",
        )
    return tuple(values)


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str

    @classmethod
    def from_json(cls, value: JsonObject) -> Self:
        """Read a message.

        Raises:
            InputError: unknown role, or content that is not text.
        """
        role = _field(value, "role", str, "message")
        if role not in ROLES:
            raise InputError(
                f"Unknown role {role!r} in a message", f"Use one of {', '.join(ROLES)}."
            )
        return cls(role=role, content=_field(value, "content", str, "message"))


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A conversation that ends with a user turn."""

    id: str
    messages: tuple[Message, ...]
    split: Split
    source: str

    @classmethod
    def create(cls, messages: tuple[Message, ...], split: Split, source: str) -> Self:
        """Make a prompt whose id follows from its messages.

        Raises:
            InputError: no messages, an empty user turn, or an end that is not a user turn.
        """
        if not messages or messages[-1].role != "user":
            last = messages[-1].role if messages else "nothing"
            raise InputError(
                f"A prompt must end with a user turn, this one ends with {last}",
                "Put the response, if any, into responses, and leave the question last.",
            )
        if not messages[-1].content.strip():
            raise UnusableContentError(
                "The user turn of a prompt is empty", "Give the prompt some text."
            )
        if split not in ("train", "test"):
            raise InputError(f"Unknown split {split!r}", "Use train or test.")
        return cls(
            id=content_id([asdict(message) for message in messages]),
            messages=messages,
            split=split,
            source=source,
        )

    @property
    def chat(self) -> list[dict[str, str]]:
        """The messages as chat templates want them."""
        return [asdict(message) for message in self.messages]

    @property
    def text(self) -> str:
        """The conversation as plain text: only the user's words where there is one turn."""
        turns = [message for message in self.messages if message.role != "system"]
        if len(turns) == 1:
            return turns[0].content
        return "\n\n".join(f"{turn.role.capitalize()}: {turn.content}" for turn in turns)

    @classmethod
    def from_json(cls, value: JsonObject) -> Self:
        """Read a prompt as `to_json` wrote it.

        Raises:
            InputError: a field is missing or malformed.
        """
        messages = tuple(Message.from_json(m) for m in _field(value, "messages", list, "prompt"))
        source = _optional(value, "source", str, "prompt") or ""
        prompt = cls.create(messages, value.get("split", "train"), source)
        given = value.get("id")
        return cls(
            id=prompt.id if given is None else str(given),
            messages=messages,
            split=prompt.split,
            source=prompt.source,
        )

    def to_json(self) -> JsonObject:
        """This prompt as a JSON object."""
        return {"id": self.id, "messages": self.chat, "split": self.split, "source": self.source}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The settings that produced a response; `top_k = 0` and `top_p = 1` cut nothing off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    seed: int = 0

    @classmethod
    def from_json(cls, value: JsonObject) -> Self:
        """Read sampling settings as a response's `to_json` wrote them.

        Raises:
            InputError: an unknown sampling setting, or a value that is not a number.
        """
        known = [field.name for field in fields(cls)]
        unknown = sorted(set(value) - set(known))
        if unknown:
            raise InputError(
                f"Unknown sampling settings: {', '.join(unknown)}", f"Use {', '.join(known)}."
            )
        for name, number in value.items():
            is_right = is_finite_number(number) and abs(number) < INT64
            if not is_right or (isinstance(getattr(cls, name), int) and type(number) is not int):
                raise InputError(
                    f"Sampling setting {name} is {number!r:.80}",
                    f"Give a number, such as {getattr(cls, name)}, or leave it out.",
                )
        return cls(**value)

    @property
    def is_untruncated(self) -> bool:
        """True when samples come from the model's full distribution, as KL estimates need."""
        return self.top_p == 1.0 and self.top_k == 0


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response to a prompt; the token fields are there when a model of ours sampled it."""

    id: str
    prompt_id: str
    text: str
    model: str
    model_fingerprint: str | None = None
    tokenizer_fingerprint: str | None = None
    sampling: Sampling | None = None
    sample_index: int = 0
    token_ids: tuple[int, ...] | None = None
    finished: bool | None = None

    @classmethod
    def from_json(cls, value: JsonObject) -> Self:
        """Read a response as `to_json` wrote it.

        Raises:
            InputError: a required field is missing, or one of another type or beyond its range.
        """
        sampling = _optional(value, "sampling", dict, "response")
        index = _optional(value, "sample_index", int, "response", 0)
        if not 0 <= index < INT64:
            raise InputError(
                f"A response needs 'sample_index' from 0 to 2^63 - 1, found {index}",
                "Count the responses of a prompt from 0.",
            )
        tokens = None
        if value.get("token_ids") is not None:
            tokens = _list_of(value, "token_ids", int, "response")
            if not all(0 <= token <= MAX_TOKEN_ID for token in tokens):
                raise InputError(
                    "A response's token_ids must lie from 0 to 2^31 - 1",
                    "Give the ids that the tokenizer gave, or leave them out.",
                )
        return cls(
            id=_field(value, "id", str, "response"),
            prompt_id=_field(value, "prompt_id", str, "response"),
            text=_field(value, "text", str, "response"),
            model=_field(value, "model", str, "response"),
            model_fingerprint=_optional(value, "model_fingerprint", str, "response"),
            tokenizer_fingerprint=_optional(value, "tokenizer_fingerprint", str, "response"),
            sampling=Sampling.from_json(sampling) if sampling else None,
            sample_index=index,
            token_ids=tokens,
            finished=_optional(value, "finished", bool, "response"),
        )

    def to_json(self) -> JsonObject:
        """This response as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """One annotator's judgment of the responses to one prompt.

    `tiers` holds response ids, best first; the responses of one tier are tied; responses left out
    were not judged. `strengths[i]` (1 slight, 2 clear, 3 large) says how far tier i stands above
    tier i + 1; empty when not given. `scores` holds a number for each ranked response, in the order
    of the tiers, higher is better; empty when not given. Within a tier they may differ.
    """

    id: str
    prompt_id: str
    annotator: str
    kind: AnnotatorKind
    tiers: tuple[tuple[str, ...], ...]
    strengths: tuple[int, ...] = ()
    scores: tuple[float, ...] = ()
    flags: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        ids = [response_id for tier in self.tiers for response_id in tier]
        if len(ids) != len(set(ids)) or any(not tier for tier in self.tiers):
            raise InputError(
                f"Ranking {self.id} has an empty tier or a response in two tiers: {self.tiers}",
                "Put each response into exactly one tier.",
            )
        if self.strengths and len(self.strengths) != len(self.tiers) - 1:
            raise InputError(
                f"Ranking {self.id} has {len(self.tiers)} tiers but {len(self.strengths)} "
                "strengths",
                "Give one strength between each tier and the next, or none.",
            )
        if any(strength not in STRENGTHS for strength in self.strengths):
            raise InputError(
                f"Ranking {self.id} has strengths {list(self.strengths)}",
                "Use 1 (slight), 2 (clear) or 3 (large).",
            )
        if self.kind not in KINDS:
            raise InputError(
                f"Ranking {self.id} has annotator kind {self.kind!r}",
                f"Use one of {', '.join(KINDS)}.",
            )
        if self.scores:
            self._check_scores(len(ids))

    def _check_scores(self, num_ranked: int) -> None:
        if len(self.scores) != num_ranked:
            raise InputError(
                f"Ranking {self.id} has {num_ranked} responses in its tiers but "
                f"{len(self.scores)} scores",
                "Give one score for each, in the order of the tiers, or none.",
            )
        if not all(is_finite_number(score) for score in self.scores):
            raise InputError(
                f"Ranking {self.id} has scores {list(self.scores)}", "Use finite numbers."
            )
        ordered = iter(self.scores)
        tiers = [list(islice(ordered, len(tier))) for tier in self.tiers]
        for better, worse in pairwise(tiers):
            if max(worse) > min(better):
                raise InputError(
                    f"Ranking {self.id} has score {min(better)} in a tier above score {max(worse)}",
                    "Fix the scores or the tiers: a better tier has no lower score.",
                )

    @classmethod
    def from_json(cls, value: JsonObject) -> Self:
        """Read a ranking as `to_json` wrote it.

        Raises:
            InputError: a field is missing, or tiers and scores contradict each other.
        """
        tiers = _field(value, "tiers", list, "ranking")
        if not all(
            isinstance(tier, list) and all(isinstance(i, str) for i in tier) for tier in tiers
        ):
            raise InputError(
                f"Each tier of a ranking must be a list of response ids, found {tiers!r}",
                'Write for example {"tiers": [["a1"], ["b2", "c3"]]}.',
            )
        return cls(
            id=_field(value, "id", str, "ranking"),
            prompt_id=_field(value, "prompt_id", str, "ranking"),
            annotator=_field(value, "annotator", str, "ranking"),
            kind=value.get("kind", "human"),
            tiers=tuple(tuple(tier) for tier in tiers),
            strengths=tuple(_optional(value, "strengths", list, "ranking", ())),
            scores=tuple(_optional(value, "scores", list, "ranking", ())),
            flags=_list_of(value, "flags", str, "ranking"),
            note=_optional(value, "note", str, "ranking") or "",
        )

    def to_json(self) -> JsonObject:
        """This ranking as a JSON object."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class RankedPrompt:
    """A prompt with its responses and every live ranking of them: one line of an export."""

    prompt: Prompt
    responses: tuple[Response, ...]
    rankings: tuple[Ranking, ...]

    @classmethod
    def from_json(cls, value: JsonObject) -> Self:
        """Read one line of an export.

        Raises:
            InputError: a field is missing, or a ranking names a response that is not there.
        """
        record = cls(
            prompt=Prompt.from_json(_field(value, "prompt", dict, "ranked prompt")),
            responses=tuple(
                Response.from_json(r) for r in _field(value, "responses", list, "ranked prompt")
            ),
            rankings=tuple(
                Ranking.from_json(r) for r in _field(value, "rankings", list, "ranked prompt")
            ),
        )
        known = {response.id for response in record.responses}
        for ranking in record.rankings:
            if unknown := {i for tier in ranking.tiers for i in tier} - known:
                raise InputError(
                    f"Ranking {ranking.id} names responses that are not there: {sorted(unknown)}",
                    "Export the dataset again with `rlhf export`.",
                )
        return record

    def to_json(self) -> JsonObject:
        """This record as one JSON object."""
        return {
            "prompt": self.prompt.to_json(),
            "responses": [response.to_json() for response in self.responses],
            "rankings": [ranking.to_json() for ranking in self.rankings],
        }
