"""Live mode over a real server: what is asked, shown, judged, stored and exported."""

import json
import time

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from labeling_app.data_io.exporting import export
from labeling_app.db.answers.live import find_turn
from labeling_app.web.live import live as live_module
from labeling_app.web.live.endpoint_model import EndpointModel
from labeling_app.web.live.live import Live
from labeling_app.web.live.routes import add_live_routes
from rlhf.records.jsonl import read_jsonl
from rlhf.records.schema import Sampling
from tests.servers.chat import ChatServer

SAMPLING = Sampling(temperature=0.7, top_p=0.9, max_new_tokens=40)


@pytest.fixture
def server():
    with ChatServer() as running:
        yield running


@pytest.fixture
def live(store, server):
    made = Live(store, [EndpointModel(url=server.url, model="secret-model", sampling=SAMPLING)])
    yield made
    server.gate.set()
    made.close()
    wait_until_over(made)


def wait_until_over(live: Live, who: str = "ann") -> None:
    deadline = time.monotonic() + 20
    while (question := live._questions.get(who)) and not question.over:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ask(live: Live, text: str, turn: str = "t1", who: str = "ann", **more) -> dict:
    answer = live.answer(who, {"op": "ask", "id": turn, "text": text, **more})
    assert answer["ok"], answer
    wait_until_over(live, who)
    return live.find(who, turn)["turn"]


def vote(live: Live, op: str, id: str, turn: str = "t1", who: str = "ann", **more) -> dict:
    return live.answer(who, {"op": op, "id": id, "turn": turn, **more})


def rankings(store) -> list[tuple[list[list[str]], tuple[str, ...]]]:
    [record] = list(store.ranked_prompts())
    texts = {response.id: response.text for response in record.responses}
    return [([[texts[i] for i in tier] for tier in r.tiers], r.flags) for r in record.rankings]


def test_a_question_and_its_answers_are_stored_blind(live, store, server):
    turn = ask(live, "How are you?")
    assert sorted(card["text"] for card in turn["cards"]) == [
        "four **five** six", "one two three"
    ]  # fmt: skip
    assert "<strong>five</strong>" in "".join(card["html"] for card in turn["cards"])
    assert "secret-model" not in json.dumps(turn)
    [record] = list(store.ranked_prompts())
    assert record.prompt.source == "live"
    assert {response.model for response in record.responses} == {"secret-model"}
    for response in record.responses:
        assert response.finished is True
        assert (response.sampling.temperature, response.sampling.top_p) == (0.7, 0.9)
    call = server.calls[0]
    assert call["path"] == "/v1/chat/completions"
    assert call["messages"] == [{"role": "user", "content": "How are you?"}]
    assert (call["max_tokens"], call["stream"], call["model"]) == (40, True, "secret-model")
    # the same question is not put before others
    assert store.counts()["tasks"] == 0


def test_the_order_shown_is_random(store, server):
    models = [EndpointModel(url=server.url, model=m, sampling=SAMPLING) for m in ("x", "y")]
    live = Live(store, models)
    first = {"x": 0, "y": 0}
    for number in range(30):
        ask(live, f"q{number}", f"t{number}")
        query = "SELECT shown FROM live_turns WHERE id = ?"
        [shown] = store.connections.db.execute(query, [f"t{number}"]).fetchone()
        query = "SELECT model FROM responses WHERE id = ?"
        first[store.connections.db.execute(query, [json.loads(shown)[0]]).fetchone()[0]] += 1
    # 30 fair coins: 3 or fewer of a side come once in 100,000
    assert min(first.values()) > 3


def test_equal_models_do_not_say_the_same(store, server):
    models = [EndpointModel(url=server.url, model="x", sampling=SAMPLING)] * 2
    ask(Live(store, models), "Hi?")
    assert len({call["seed"] for call in server.calls}) == 2


def test_asked_again_a_question_has_none_of_what_was_said_of_other_answers(live, server, store):
    ask(live, "Hi?")
    assert vote(live, "pick", "r1", choice=1)["turn"]["choice"] == 1
    vote(live, "thumb", "r2", place=0, value=-1)
    server.answers = ["seven", "eight"]
    again = ask(live, "Hi?", "t2")
    assert (again["choice"], again["thumbs"]) == (None, [0, 0])
    assert find_turn(store, "ann", "t2").rankings == ()
    assert vote(live, "pick", "r3", turn="t2", choice="tie")["turn"]["choice"] == "tie"
    first = live.find("ann", "t1")["turn"]
    assert (first["choice"], first["thumbs"]) == (1, [-1, 0])


def test_a_pick_is_a_ranking_and_a_changed_one_takes_its_place(live, store):
    turn = ask(live, "Hi?")
    texts = [card["text"] for card in turn["cards"]]
    assert vote(live, "pick", "v1", choice=0)["turn"]["choice"] == 0
    assert vote(live, "pick", "v2", choice=1)["turn"]["choice"] == 1
    assert vote(live, "pick", "v1", choice=0)["turn"]["choice"] == 1  # a late repetition
    assert rankings(store) == [([[texts[1]], [texts[0]]], ())]
    query = "SELECT id, live, supersedes FROM rankings ORDER BY seq"
    rows = store.connections.db.execute(query).fetchall()
    assert rows == [("v1", 0, None), ("v2", 1, "v1")]
    assert vote(live, "pick", "v3", choice="all-bad")["turn"]["choice"] == "all-bad"
    assert rankings(store)[0][1] == ("all-bad",)


def test_thumbs_are_kept_changed_and_taken_back(live, store):
    texts = [card["text"] for card in ask(live, "Hi?")["cards"]]
    vote(live, "thumb", "v1", place=0, value=1)
    assert vote(live, "thumb", "v2", place=1, value=-1)["turn"]["thumbs"] == [1, -1]
    assert vote(live, "thumb", "v3", place=0, value=-1)["turn"]["thumbs"] == [-1, -1]
    assert vote(live, "thumb", "v4", place=1, value=0)["turn"]["thumbs"] == [-1, 0]
    assert rankings(store) == [([[texts[0]]], ("thumbs-down",))]
    assert store.connections.db.execute("SELECT COUNT(*) FROM rankings").fetchone() == (3,)


def test_an_edit_is_a_demonstration_and_a_pair(live, store, tmp_path):
    texts = [card["text"] for card in ask(live, "Hi?")["cards"]]
    vote(live, "pick", "v1", choice=1)
    vote(live, "thumb", "v2", place=0, value=-1)
    vote(live, "edit", "v3", place=1, text="worse still")
    edited = vote(live, "edit", "v4", place=1, text="**much** better")
    assert "<strong>much</strong>" in edited["turn"]["edit"]
    out = tmp_path / "demonstrations"
    export(store, out, "demonstrations")
    [demonstration] = read_jsonl(out / "train.jsonl")
    prompt = [{"role": "user", "content": "Hi?"}]
    better = [{"role": "assistant", "content": "**much** better"}]
    assert demonstration == {"prompt": prompt, "completion": better}
    export(store, tmp_path / "pairs", "trl")
    pairs = {(r["chosen"], r["rejected"]) for r in read_jsonl(tmp_path / "pairs" / "train.jsonl")}
    assert pairs == {(texts[1], texts[0]), ("**much** better", texts[1])}
    export(store, tmp_path / "kto", "kto")
    rows = list(read_jsonl(tmp_path / "kto" / "train.jsonl"))
    labels = {row["completion"][0]["content"]: row["label"] for row in rows}
    assert labels == {texts[0]: False, texts[1]: True, "**much** better": True}
    assert len(rows) == 3


def test_the_conversation_goes_on_with_the_chosen_answer(live, server):
    texts = [card["text"] for card in ask(live, "Hi?")["cards"]]
    refusal = live.answer("ann", {"op": "ask", "id": "t2", "text": "And?", "after": "t1"})
    assert refusal["error"].startswith("No answer is picked yet. Pick one")
    vote(live, "pick", "v1", choice=1)
    ask(live, "And?", "t2", after="t1")
    assert server.calls[-1]["messages"] == [
        {"role": "user", "content": "Hi?"},
        {"role": "assistant", "content": texts[1]},
        {"role": "user", "content": "And?"},
    ]
    vote(live, "pick", "v2", "t2", choice="tie")
    vote(live, "edit", "v3", "t2", place=0, text="my own words")
    ask(live, "So?", "t3", after="t2")
    assert server.calls[-1]["messages"][3] == {"role": "assistant", "content": "my own words"}


def test_a_vote_before_the_end_waits_for_it(live, server):
    server.gate.clear()
    live.answer("ann", {"op": "ask", "id": "t1", "text": "Hi?"})
    early = vote(live, "pick", "v1", choice=0)
    assert (early["ok"], early["retry"]) == (False, True)
    assert early["error"] == "Your vote will be sent when the answers are complete."
    busy = live.answer("ann", {"op": "ask", "id": "t2", "text": "And?"})
    assert busy["error"].startswith("Your last question is still being answered")
    again = live.answer("ann", {"op": "ask", "id": "t1", "text": "Hi?"})
    assert again["running"]["id"] == "t1"
    server.gate.set()
    wait_until_over(live)
    assert vote(live, "pick", "v1", choice=0)["turn"]["choice"] == 0
    assert len(server.calls) == 2


@pytest.mark.parametrize("first", ["one two", "one"])  # which usually has ended by then
def test_stop_keeps_what_was_said_and_no_answer_is_a_sample(live, server, store, first):
    server.answers[0] = f"{first} three" if first == "one two" else first
    server.gate.clear()
    live.answer("ann", {"op": "ask", "id": "t1", "text": "Hi?"})
    deadline = time.monotonic() + 10
    while not all(live.question("ann", "t1").texts) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert live.answer("ann", {"op": "stop", "turn": "t1"})["ok"]
    server.gate.set()
    wait_until_over(live)
    [record] = list(store.ranked_prompts())
    assert {response.text for response in record.responses} == {first, "four **five**"}
    assert {response.sampling for response in record.responses} == {None}
    if first == "one two":
        assert {response.finished for response in record.responses} == {False}
        turn = Live(store, live.models).answer("ann", {"op": "state"})["turn"]
        assert [card["ending"] for card in turn["cards"]] == ["Stopped", "Stopped"]


@pytest.mark.parametrize(("ending", "said"), [("length", "Cut off at 40 tokens"), ("stop", "")])
def test_an_answer_that_was_cut_off_says_so(live, server, ending, said):
    server.ending = ending
    assert [card["ending"] for card in ask(live, "Hi?")["cards"]] == [said, said]


def test_stopped_before_anything_was_said(live, server, store):
    server.answers = [" one", " two"]  # the gate is before the first word
    server.gate.clear()
    live.answer("ann", {"op": "ask", "id": "t1", "text": "Hi?"})
    live.answer("ann", {"op": "stop", "turn": "t1"})
    server.gate.set()
    wait_until_over(live)
    assert live.question("ann", "t1").problem.startswith("Stopped before the models wrote anything")
    assert store.counts()["responses"] == 0


def test_too_many_questions_at_once(live, server, monkeypatch):
    monkeypatch.setattr(live_module, "MAX_QUESTIONS", 1)
    server.gate.clear()
    live.answer("bob", {"op": "ask", "id": "t0", "text": "Hi?"})
    refusal = live.answer("ann", {"op": "ask", "id": "t1", "text": "Hi?"})
    assert refusal["error"] == (
        "The models are busy with 1 other questions. Try again in a moment; your question is kept."
    )
    server.gate.set()
    wait_until_over(live, "bob")
    assert ask(live, "Hi?")


def test_nobody_votes_on_the_questions_of_others(live, store):
    ask(live, "Hi?")
    stranger = vote(live, "pick", "v1", who="bob", choice=0)
    assert stranger["error"].startswith("The answers to this question are not stored")
    assert live.answer("bob", {"op": "ask", "id": "x", "text": "So?", "after": "t1"})["ok"] is False
    assert store.counts()["rankings"] == 0


def test_a_vote_under_a_used_id_is_refused_and_not_dropped(live, store):
    ask(live, "Hi?")
    assert vote(live, "pick", "v1", choice=0)["turn"]["choice"] == 0
    other = vote(live, "pick", "v1", choice=1)
    assert (other["ok"], other["retry"]) == (False, False)
    assert other["error"].startswith("This id was used before, for something else.")
    assert vote(live, "thumb", "v1", place=0, value=1)["ok"] is False
    assert live.find("ann", "t1")["turn"]["choice"] == 0


def test_a_question_under_a_used_id_is_refused_and_not_dropped(live, store, server):
    ask(live, "Hi?")
    ask(live, "So?", "t2")
    calls = len(server.calls)
    for who in ("ann", "bob"):
        answer = live.answer(who, {"op": "ask", "id": "t1", "text": "And?"})
        assert answer["error"].startswith("This id was used before, for something else.")
    assert len(server.calls) == calls
    assert store.counts()["prompts"] == 2


def test_nothing_that_a_page_gets_holds_an_id_or_the_name_of_a_model(live, store):
    ask(live, "Hi?")
    payloads = [
        {"op": "pick", "choice": choice} for choice in (7, "x", None, [0], 1.0, True, 0)
    ] + [{"op": "thumb", "place": place, "value": value}
         for place in (9, "x", None, 0) for value in (7, "x", None, 1)]  # fmt: skip
    payloads += [{"op": "edit", "place": 0, "text": text} for text in ("", 7, "mine")]
    payloads += [{"op": "state"}, {"op": "ask", "text": "x", "after": ["t1"]}]
    said = [live.answer("ann", {"id": f"v{n}", "turn": "t1", **p}) for n, p in enumerate(payloads)]
    text = json.dumps([*said, live.find("ann", "t1")])
    rows = store.connections.db.execute("SELECT id FROM responses UNION SELECT id FROM prompts")
    assert [one for one in [*(row[0] for row in rows), "secret-model"] if one in text] == []


def test_a_restart_finds_the_last_question(live, store, server):
    ask(live, "Hi?")
    vote(live, "pick", "v1", choice=0)
    after = Live(store, live.models).answer("ann", {"op": "state"})
    assert after["running"] is None
    assert (after["turn"]["id"], after["turn"]["choice"]) == ("t1", 0)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("503", "The model server refused the question (status 503)"),
        (
            "silent",
            "The model server sent nothing for 0.5 seconds. Try again; your question is kept",
        ),
        ("cut", "The model server ended its answer early"),
        ("error", "The model server ended its answer early"),
        ("foreign", "does not speak the chat completions protocol"),
    ],
)
def test_failures_in_plain_words(store, server, failure, words):
    server.failures = [failure]
    silent = failure == "silent"
    if silent:
        server.gate.clear()
    seconds = 0.5 if silent else 20.0
    model = EndpointModel(url=server.url, model="m", sampling=SAMPLING, timeout_seconds=seconds)
    live = Live(store, [model])
    live.answer("ann", {"op": "ask", "id": "t1", "text": "Hi?"})
    wait_until_over(live)
    server.gate.set()
    assert words in live.question("ann", "t1").problem
    assert store.counts()["prompts"] == 0


def test_after_a_failure_the_same_question_is_answered(live, server):
    server.failures = ["503"]
    live.answer("ann", {"op": "ask", "id": "t1", "text": "Hi?"})
    wait_until_over(live)
    assert ask(live, "Hi?", "t2")["cards"]


def test_a_server_that_is_down(store):
    model = EndpointModel(url="http://127.0.0.1:9/v1", model="m", sampling=SAMPLING)
    live = Live(store, [model])
    live.answer("ann", {"op": "ask", "id": "t1", "text": "Hi?"})
    wait_until_over(live)
    assert live.question("ann", "t1").problem.startswith("The model server cannot be reached")


def test_a_server_that_does_not_stream(live, server, store):
    server.streams, server.ending, server.answers = False, "length", ["", "cut sho"]
    assert sorted(card["text"] for card in ask(live, "Hi?")["cards"]) == ["(no answer)", "cut sho"]
    assert {r.finished for r in next(store.ranked_prompts()).responses} == {False}


@pytest.mark.parametrize(
    "payload",
    [
        {"op": "no"},
        {"op": "ask", "id": "", "text": "x"},
        {"op": "ask", "id": "t", "text": " "},
        {"op": "ask", "id": "t", "text": "x" * 20_001},
        {"op": "pick", "id": "v", "turn": "t1", "choice": 7},
        {"op": "thumb", "id": "v", "turn": "t1", "place": -1, "value": 1},
        {"op": "thumb", "id": "v", "turn": "t1", "place": 0, "value": 5},
        {"op": "edit", "id": "v", "turn": "t1", "place": 0, "text": "  "},
        {"op": "edit", "id": "v", "turn": "t1"},
    ],
)
def test_nonsense_is_refused(live, store, payload):
    ask(live, "Hi?")
    answer = live.answer("ann", payload)
    assert answer["ok"] is False
    assert answer["error"]
    assert store.counts()["rankings"] == 0


def test_notes_come_with_the_first_vote_and_are_made_once(live, store, server):
    calls = []

    def note(prompt, responses):
        calls.append([response.text for response in responses])
        return [f"{prompt.text} {response.text[:3]}" for response in responses]

    live.note = note
    texts = [card["text"] for card in ask(live, "Hi?")["cards"]]
    assert "notes" not in live.find("ann", "t1")["turn"]
    assert calls == []
    voted = vote(live, "thumb", "v1", place=0, value=1)["turn"]
    assert voted["notes"] == [f"Hi? {text[:3]}" for text in texts]
    assert vote(live, "pick", "v2", choice=1)["turn"]["notes"] == voted["notes"]
    assert live.answer("ann", {"op": "state"})["turn"]["notes"] == voted["notes"]
    assert calls == [texts]


def test_the_page_of_one_person_asks_nothing_under_the_name_of_another(live):
    app = FastAPI()
    add_live_routes(app, live, lambda request: "bob")
    browser = TestClient(app)
    ask = {"op": "ask", "id": "t1", "text": "Hi?", "annotator": "ann"}
    answer = browser.post("/live", json=ask)
    assert (answer.status_code, answer.json()["ok"]) == (403, False)
    assert (
        answer.json()["error"]
        == "This page was opened by ann, but bob is signed in now. Reload it."
    )
    assert live.question("bob", "t1") is None
    assert browser.post("/live", json={**ask, "annotator": "bob"}).json()["ok"]
    wait_until_over(live, "bob")
