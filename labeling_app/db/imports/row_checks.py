"""Checks on new rows: the rows they refer to exist, and their ids are not taken.

A row that is stored never changes. So a known id with the same content is skipped, and one with
other content is an error.
"""

import json

from sqlite_utils import Database

from labeling_app.db.connection import UNFINISHED, VISIBLE
from labeling_app.db.people.pseudonyms import is_pseudonym
from labeling_app.db.rankings import ranking_of_id
from labeling_app.rankings.flags import ADJUDICATED
from rlhf.errors import InputError, UnusableContentError
from rlhf.records.schema import Prompt, Ranking, Response

REMEDY = "Give it another id; what is in the database stays as it is."


def make_visible(db: Database, table: str, id_: str, import_id: int) -> bool:
    """Show a row that an unfinished import holds, because somebody else has now added it too.

    Returns whether it was such a row; for whoever adds it, the row is new.
    """
    if import_id:
        return False
    query = f"UPDATE {table} SET import_id = 0 WHERE id = ? AND import_id IN {UNFINISHED}"
    return bool(db.execute(query, [id_]).rowcount)


def require_same_prompt(db: Database, prompt: Prompt) -> None:
    """Check that the prompt of this id has the same text.

    Raises:
        InputError: it has another.
    """
    query = "SELECT messages FROM prompts WHERE id = ?"
    [messages] = db.execute(query, [prompt.id]).fetchone()
    if json.loads(messages) != prompt.chat:
        raise InputError(f"Prompt {prompt.id} is in the database with another text", REMEDY)


def require_same_response(db: Database, response: Response) -> None:
    """Check that the response of this id answers the same prompt with the same text.

    Raises:
        InputError: it does not.
    """
    query = "SELECT prompt_id, text FROM responses WHERE id = ?"
    prompt_id, text = db.execute(query, [response.id]).fetchone()
    if prompt_id != response.prompt_id:
        raise InputError(
            f"Response {response.id} to prompt {response.prompt_id} is in the database as one to "
            f"prompt {prompt_id}",
            REMEDY,
        )
    if text != response.text:
        raise InputError(f"Response {response.id} is in the database with another text", REMEDY)


def require_same_ranking(db: Database, ranking: Ranking) -> None:
    """Check that the ranking of this id says the same of the same prompt.

    Exports call people by pseudonyms, so these may stand for any name.

    Raises:
        InputError: it does not.
    """
    stored = ranking_of_id(db, ranking.id)
    names = stored.annotator, ranking.annotator
    same = {
        "prompt": stored.prompt_id == ranking.prompt_id,
        "annotator": names[0] == names[1] or any(map(is_pseudonym, names)),
        "order": stored.tiers == ranking.tiers,
        "strength": stored.strengths == ranking.strengths,
        # a lead may have decided on the task since the export
        "flag": {*stored.flags} - {ADJUDICATED} == {*ranking.flags} - {ADJUDICATED},
    }
    for part, is_same in same.items():
        if not is_same:
            raise InputError(f"Ranking {ranking.id} is in the database with another {part}", REMEDY)


def require_usable(db: Database, response: Response, import_id: int) -> None:
    """Check that a response is not empty, and that its prompt is in the database.

    Raises:
        InputError: it does not.
    """
    if not response.text.strip():
        raise UnusableContentError(
            f"Response {response.id} to prompt {response.prompt_id} is empty",
            "Leave empty responses out; nobody can judge them.",
        )
    query = f"SELECT 1 FROM prompts WHERE id = ? AND ({VISIBLE} OR import_id = ?)"
    if not db.execute(query, [response.prompt_id, import_id]).fetchone():
        raise InputError(
            f"Response {response.id} answers prompt {response.prompt_id}, which is not in the "
            "database",
            "Add the prompt first.",
        )


def require_own_responses(db: Database, ranking: Ranking, import_id: int) -> None:
    """Check that a ranking names responses, all of them its prompt's.

    Raises:
        InputError: it does not.
    """
    query = f"SELECT id FROM responses WHERE prompt_id = ? AND ({VISIBLE} OR import_id = ?)"
    known = {row[0] for row in db.execute(query, [ranking.prompt_id, import_id])}
    unknown = sorted({i for tier in ranking.tiers for i in tier} - known)
    if not ranking.tiers:
        raise InputError(f"Ranking {ranking.id} ranks no response", "Name some in its tiers.")
    if unknown:
        raise InputError(
            f"Ranking {ranking.id} names responses its prompt does not have: {unknown}",
            "Add the responses first.",
        )
