"""The page Rubric: the board shows the newest version, and rankings keep theirs."""

import pytest

from labeling_app.db.board.rubrics import rubric_versions
from labeling_app.web.board.session import Board
from rlhf.records.fingerprints import text_hash
from tests.labeling_app.asking import ask as ask_board


def save(ask, text: str, sender: str = "lead") -> str:
    [answer] = ask([("POST", "/lead/rubric/save", {"text": text})], sender)
    return answer.json().get("say") or answer.json()["error"]


def test_the_board_shows_the_newest_and_rankings_keep_theirs(ask, store, queue, fill):
    fill(2, 2)
    board = Board(store, queue)
    queue.add_annotator("ann")
    made_with = []
    for number, text in enumerate(("Be **kind**.", "Be brief.")):
        assert save(ask, text) == "Saved. The board shows it with the next task."
        screen = ask_board(board, "ann", {"op": "next"})
        assert screen["rubric"]["version"] == text_hash(text)
        made_with.append(screen["rubric"]["version"])
        submit = {"op": "submit", "id": str(number), "ticket": screen["task"]["ticket"]}
        submit |= {"tiers": [[0], [1]], "rubric": screen["rubric"]["version"]}
        assert ask_board(board, "ann", submit)["ok"]
    query = "SELECT rubric FROM rankings ORDER BY seq"
    assert [row[0] for row in store.connections.db.execute(query)] == made_with
    shown = [(one.text, one.saved_by) for one in rubric_versions(store.connections)]
    assert shown == [("Be brief.", "lead"), ("Be **kind**.", "lead")]


def test_an_earlier_version_can_come_back_and_none_can_be_shown(ask, store, queue):
    board = Board(store, queue)
    for text in ("one", "two", "one"):
        save(ask, text)
    assert save(ask, "one") == "No change."
    assert board.rubric == {"version": text_hash("one"), "html": "<p>one</p>\n"}
    save(ask, "")
    assert board.rubric == {"version": "", "html": ""}
    assert [one.text for one in rubric_versions(store.connections)] == ["", "one", "two", "one"]


def test_a_leads_rubric_survives_a_start_with_the_same_file(ask, store, queue):
    Board(store, queue, rubric="of the file")
    save(ask, "of the lead")
    assert Board(store, queue, rubric="of the file").rubric["version"] == text_hash("of the lead")
    assert Board(store, queue).rubric["version"] == text_hash("of the lead")
    assert Board(store, queue, rubric="another").rubric["version"] == text_hash("another")


def test_the_preview_is_sanitized_as_on_the_board(ask):
    body = {"text": "**b** <script>x</script> ![i](http://a/b.png) [l](javascript:x)"}
    [answer] = ask([("POST", "/lead/rubric/preview", body)])
    html = answer.json()["html"]
    assert "<strong>b</strong>" in html
    assert not any(tag in html for tag in ("<script", "<img", 'href="javascript'))


@pytest.mark.parametrize("operation", ["save", "preview"])
def test_a_rubric_is_bounded(operation, ask):
    [answer] = ask([("POST", f"/lead/rubric/{operation}", {"text": "x" * 20_001})])
    said = "The rubric has 20,001 characters. Use at most 20,000."
    assert (answer.status_code, answer.json()) == (400, {"error": said})
