"""The content of the label database: prompts, responses, rubrics, annotators and their rankings.

A worked example:

    with Store(Path("labels.db")) as store:
        store.add_prompts([prompt])
        store.add_responses([first, second])
        store.add_rankings([Ranking(id="r1", prompt_id=prompt.id, annotator="ann", kind="human",
                                    tiers=((first.id,), (second.id,)))])
        [record] = store.ranked_prompts()
"""

import json
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, get_args

from sqlite_utils import Database

from labeling_app.db.connection import UNFINISHED, VISIBLE, Connections, dump, read_setting
from labeling_app.db.files.label_file import no_database
from labeling_app.db.imports.row_checks import (
    make_visible,
    require_own_responses,
    require_same_prompt,
    require_same_ranking,
    require_same_response,
    require_usable,
)
from labeling_app.db.imports.unfinished import defer_link, defer_tasks
from labeling_app.db.rankings import insert_ranking, rankings_of_prompt, retire_outside_tasks
from labeling_app.db.tasks import queue_tasks
from rlhf.errors import InputError
from rlhf.records.fingerprints import text_hash
from rlhf.records.ranked import SPLITS
from rlhf.records.schema import (
    AnnotatorKind,
    Message,
    Prompt,
    RankedPrompt,
    Ranking,
    Response,
    Sampling,
    Split,
)

KINDS: tuple[AnnotatorKind, ...] = get_args(AnnotatorKind)
Row = dict[str, Any]


class Store:
    """The label database in one file.

    Args:
        path: the file; created when it does not exist.
        must_exist: refuse a path where there is no file yet.
        read_only: as `must_exist`, and leave the file as it is.

    Raises:
        InputError: no such file (with `must_exist`), or not a label database.
    """

    def __init__(self, path: Path, *, must_exist: bool = False, read_only: bool = False) -> None:
        if (must_exist or read_only) and not path.is_file():
            raise no_database(path)
        self.connections = Connections(path, read_only=read_only)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection."""
        self.connections.close()

    @property
    def board_id(self) -> str:
        """An id of this database, by which a browser keeps the drafts of two databases apart."""
        return read_setting(self.connections.db, "board") or ""

    @property
    def secret(self) -> str:
        """The secret that signs cookies and makes pseudonyms; it never leaves the server."""
        return read_setting(self.connections.db, "secret") or ""

    # ------------------------------------------------------------------ prompts and responses

    def add_prompts(self, prompts: Iterable[Prompt], *, import_id: int = 0) -> int:
        """Store prompts that are not there yet, perhaps for an import. Returns how many were new.

        Raises:
            InputError: a prompt's id is there with another text.
        """
        new = 0
        with self.connections.write() as db:
            for p in prompts:
                values = [p.id, dump(p.chat), p.split, p.source, time.time(), import_id]
                cursor = db.execute(
                    "INSERT OR IGNORE INTO prompts (id, messages, split, source, created_at,"
                    " import_id) VALUES (?, ?, ?, ?, ?, ?)",
                    values,
                )
                if not cursor.rowcount:
                    require_same_prompt(db, p)
                new += cursor.rowcount or make_visible(db, "prompts", p.id, import_id)
        return new

    def add_responses(
        self, responses: Iterable[Response], *, queue: bool = True, import_id: int = 0
    ) -> int:
        """Store responses that are not there yet and queue their prompts for ranking.

        Without `queue` they are only kept: somebody has judged them already. Those of an import are
        queued when it is whole.

        Returns how many were new.

        Raises:
            InputError: a response is empty, its prompt is not in the database, or its id is there
            with another text.
        """
        new, touched = 0, dict[str, None]()
        with self.connections.write() as db:
            for response in responses:
                require_usable(db, response, import_id)
                cursor = db.execute(
                    "INSERT OR IGNORE INTO responses (id, prompt_id, text, model,"
                    " model_fingerprint, tokenizer_fingerprint, sampling, sample_index,"
                    " token_ids, finished, created_at, import_id)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    [*_response_values(response), import_id],
                )
                if not cursor.rowcount:
                    require_same_response(db, response)
                if cursor.rowcount or make_visible(db, "responses", response.id, import_id):
                    new += 1
                    touched[response.prompt_id] = None
            if queue and import_id:
                defer_tasks(db, import_id, touched)
            elif queue:
                queue_tasks(db, touched)
        return new

    def prompts(self, split: Split | None = None) -> list[Prompt]:
        """All prompts, or those of one split, in the order they came."""
        query = f"SELECT * FROM prompts WHERE ? IN (split, '') AND {VISIBLE} ORDER BY seq"
        return [_prompt(row) for row in self.connections.db.query(query, [split or ""])]

    def has_prompts(self, split: Split) -> bool:
        """Whether there is a prompt of a split, checks of annotators aside."""
        query = f"""SELECT 1 FROM prompts p WHERE split = ? AND {VISIBLE} AND NOT EXISTS
            (SELECT 1 FROM tasks t WHERE t.prompt_id = p.id AND t.purpose IN ('gold', 'training'))
            LIMIT 1"""
        return self.connections.db.execute(query, [split]).fetchone() is not None

    def has_unanswered_prompts(self) -> bool:
        """Whether a prompt has no response at all."""
        query = f"""SELECT 1 FROM prompts p WHERE {VISIBLE} AND NOT EXISTS
            (SELECT 1 FROM responses r WHERE r.prompt_id = p.id) LIMIT 1"""
        return self.connections.db.execute(query).fetchone() is not None

    def prompts_lacking_responses(
        self, k: int, model_fingerprint: str, *, only_unanswered: bool = False
    ) -> list[tuple[Prompt, int]]:
        """Prompts, checks aside, with fewer than `k` responses of that model, and how many.

        With `only_unanswered`, those with other responses are left out.
        """
        others = """AND NOT EXISTS (SELECT 1 FROM responses r WHERE r.prompt_id = p.id
            AND r.model_fingerprint IS NOT :model)"""
        query = f"""
            SELECT p.*, (SELECT COUNT(*) FROM responses r WHERE r.prompt_id = p.id
                         AND r.model_fingerprint = :model AND r.{VISIBLE}) AS have
            FROM prompts p WHERE have < :k AND p.{VISIBLE} AND NOT EXISTS (SELECT 1 FROM tasks t
                WHERE t.prompt_id = p.id AND t.purpose IN ('gold', 'training'))
            {others if only_unanswered else ""}
            ORDER BY p.seq"""
        rows = self.connections.db.query(query, {"model": model_fingerprint, "k": k})
        return [(_prompt(row), row["have"]) for row in rows]

    def responses(self, prompt_id: str) -> list[Response]:
        """The responses to a prompt, ordered by model and sample index."""
        return _responses(self.connections.db, prompt_id)

    # ------------------------------------------------------------------ rankings

    def add_rankings(
        self,
        rankings: Iterable[Ranking],
        *,
        supersede: bool = False,
        rubric: str = "",
        import_id: int = 0,
        times_by_id: Mapping[str, Mapping[str, float]] | None = None,
    ) -> int:
        """Store rankings that are not there yet. Returns how many were new.

        Args:
            rankings: each with the kind of its annotator; new annotators are added.
            supersede: retire earlier rankings of the same prompt by the same annotator. They stay
                in the database and are no longer exported.
            rubric: version of the rubric that they were made by, as `add_rubric` gives it.
            import_id: the import they belong to; a ranking that is there must then say the same.
            times_by_id: `created_at` and `duration_ms` of rankings; by default they are made now.

        Raises:
            InputError: a ranking names a response its prompt does not have, or an annotator of
            another kind; an imported one's id is there with another order.
        """
        new = 0
        with self.connections.write() as db:
            for ranking in rankings:
                ensure_annotator(db, ranking.annotator, ranking.kind, import_id)
                require_own_responses(db, ranking, import_id)
                if db.execute("SELECT 1 FROM rankings WHERE id = ?", [ranking.id]).fetchone():
                    if import_id:
                        require_same_ranking(db, ranking)
                    new += make_visible(db, "rankings", ranking.id, import_id)
                    continue
                if supersede:
                    retire_outside_tasks(db, ranking.prompt_id, ranking.annotator)
                times = (times_by_id or {}).get(ranking.id, {})
                insert_ranking(db, ranking, rubric=rubric, import_id=import_id, **times)
                if import_id and ranking.kind == "human":
                    defer_link(db, import_id, ranking.prompt_id)
                new += 1
        return new

    def ranked_prompts(
        self,
        *,
        kinds: Collection[AnnotatorKind] = (),
        annotators: Collection[str] = (),
        moment: Database | None = None,
    ) -> Iterator[RankedPrompt]:
        """Every prompt that has responses, with its live rankings, as of one moment.

        Answers to checks and votes on pairs of an evaluation are left out: they are for testing.
        Where a lead has adjudicated a task, the lead's ranking, flagged `adjudicated`, stands
        instead of the others, unless particular annotators are asked for.

        Args:
            kinds: only rankings of these kinds of annotator; empty means all.
            annotators: only rankings of these annotators; empty means all.
            moment: a `snapshot` that shows the moment; default: now.
        """
        with nullcontext(moment) if moment else self.connections.snapshot() as db:
            for row in db.query(f"SELECT * FROM prompts WHERE {VISIBLE} ORDER BY seq"):
                responses = _responses(db, row["id"])
                if responses:
                    stored = rankings_of_prompt(db, row["id"], without_adjudicated=not annotators)
                    rankings = tuple(
                        ranking
                        for ranking in stored
                        if (not kinds or ranking.kind in kinds)
                        and (not annotators or ranking.annotator in annotators)
                    )
                    yield RankedPrompt(
                        prompt=_prompt(row), responses=tuple(responses), rankings=rankings
                    )

    def counts(self) -> dict[str, int]:
        """Prompts, responses, live rankings, tasks and open tasks; triggers keep the numbers."""
        hidden = (
            f"(SELECT COUNT(import_id) FROM {{}} WHERE import_id > 0 AND import_id IN {UNFINISHED})"
        )
        query = f"""SELECT name, value - CASE name WHEN 'prompts' THEN {hidden.format("prompts")}
                        WHEN 'responses' THEN {hidden.format("responses")}
                        WHEN 'rankings' THEN {hidden.format("rankings")} ELSE 0 END FROM totals"""
        return dict(self.connections.db.execute(query).fetchall())

    def prompts_by_split(self, moment: Database | None = None) -> dict[str, int]:
        """How many prompts each split has, with and without responses.

        Args:
            moment: a `snapshot` that shows the moment; default: now.
        """
        query = f"SELECT split, COUNT(*) FROM prompts WHERE {VISIBLE} GROUP BY split"
        counts = dict((moment or self.connections.db).execute(query).fetchall())
        return {split: counts.get(split, 0) for split in SPLITS}

    def add_rubric(self, text: str) -> str:
        """Store a rubric and return its version, a hash of its text."""
        version = text_hash(text)
        with self.connections.write() as db:
            values = [version, text, time.time()]
            db.execute("INSERT OR IGNORE INTO rubrics VALUES (?, ?, ?)", values)
        return version

    def annotators(self) -> dict[str, AnnotatorKind]:
        """Every annotator's kind, by name."""
        query = """SELECT name, kind FROM annotators
                   WHERE name NOT IN (SELECT name FROM import_annotators) ORDER BY name"""
        rows = self.connections.db.query(query)
        return {row["name"]: row["kind"] for row in rows}


def ensure_annotator(db: Database, name: str, kind: AnnotatorKind, import_id: int = 0) -> None:
    """Add an annotator, perhaps for an import, or check that one of that name is of that kind.

    Raises:
        InputError: there is one of another kind: a signal or a judge must never pass for a person.
    """
    if not require_kind(db, name, kind):
        db.execute("INSERT INTO annotators VALUES (?, ?, ?)", [name, kind, time.time()])
        if import_id:
            db.execute("INSERT OR IGNORE INTO import_annotators VALUES (?)", [name])
    elif not import_id:  # no longer of an unfinished import alone
        db.execute("DELETE FROM import_annotators WHERE name = ?", [name])


def require_kind(db: Database, name: str, kind: AnnotatorKind) -> bool:
    """Whether there is an annotator of that name, who then must be of that kind.

    Raises:
        InputError: there is one of another kind.
    """
    row = db.execute("SELECT kind FROM annotators WHERE name = ?", [name]).fetchone()
    if row is not None and row[0] != kind:
        raise InputError(
            f"{name!r} is an annotator of kind {row[0]} in this database, not {kind}",
            "Give --annotator another name; people, judges and signals are kept apart.",
        )
    return row is not None


def _response_values(response: Response) -> list[Any]:
    return [
        response.id,
        response.prompt_id,
        response.text,
        response.model,
        response.model_fingerprint,
        response.tokenizer_fingerprint,
        dump(asdict(response.sampling)) if response.sampling else None,
        response.sample_index,
        dump(response.token_ids) if response.token_ids is not None else None,
        response.finished,
        time.time(),
    ]


def _prompt(row: Row) -> Prompt:
    messages = tuple(Message(**message) for message in json.loads(row["messages"]))
    return Prompt(id=row["id"], messages=messages, split=row["split"], source=row["source"])


def _responses(db: Database, prompt_id: str) -> list[Response]:
    query = f"""SELECT * FROM responses WHERE prompt_id = ? AND {VISIBLE}
                ORDER BY model, sample_index, seq"""
    return [_response(row) for row in db.query(query, [prompt_id])]


def _response(row: Row) -> Response:
    tokens = row["token_ids"]
    return Response(
        id=row["id"],
        prompt_id=row["prompt_id"],
        text=row["text"],
        model=row["model"],
        model_fingerprint=row["model_fingerprint"],
        tokenizer_fingerprint=row["tokenizer_fingerprint"],
        sampling=Sampling(**json.loads(row["sampling"])) if row["sampling"] else None,
        sample_index=row["sample_index"],
        token_ids=tuple(json.loads(tokens)) if tokens is not None else None,
        finished=None if row["finished"] is None else bool(row["finished"]),
    )
