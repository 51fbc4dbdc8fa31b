from collections.abc import Iterator

import pytest
from accelerate import Accelerator

from reward.scoring.files import score_file
from reward.scoring.scorer import load_scorer
from reward.settings import ScoreSettings
from rlhf.errors import InputError, InterruptedRunError
from rlhf.modeling.models import new_reward_model, save_model
from rlhf.modeling.tokens import encode_prompt, encode_response, load_tokenizer, pad_right
from rlhf.records.jsonl import read_jsonl, write_jsonl
from tests.reward.conftest import build_record
from tests.servers.reward import RewardServer

LINES = [
    {"prompt": "How was it?", "responses": ["Lovely!", "It rained all day."], "id": 7},
    {"messages": [{"role": "user", "content": "And the dog?"}], "response": "Happy."},
    {"prompt": "Nobody answered", "responses": []},
]


@pytest.fixture
def file(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", LINES)
    return tmp_path / "in.jsonl"


def score(file, reward, **changes):
    out = file.parent / "out.jsonl"
    result = score_file(ScoreSettings(file, reward=reward, out=out, precision="fp32", **changes))
    return result, list(read_jsonl(out))


@pytest.mark.parametrize("tokens", [1, 4096])
def test_a_reward_model_scores_as_the_scorer_of_the_policies(tiny_model, tmp_path, tokens):
    folder = tmp_path / "model"
    model = new_reward_model(str(tiny_model), 0, seed=3)
    model.config.reward_bias = 0.5
    tokenizer = load_tokenizer(str(tiny_model))
    save_model(model, tokenizer, folder)
    records = [build_record(n) for n in range(3)]
    write_jsonl(tmp_path / "in.jsonl", [record.to_json() for record in records])
    result, lines = score(tmp_path / "in.jsonl", str(folder), micro_tokens=tokens)

    scorer = load_scorer(str(folder), Accelerator(mixed_precision="no"))
    for record, line in zip(records, lines, strict=True):
        prompt = encode_prompt(tokenizer, record.prompt)
        whole = [prompt + encode_response(tokenizer, one, "") for one in record.responses]
        assert line["rewards"] == pytest.approx(scorer(pad_right(whole, 0)).tolist(), abs=1e-5)
    assert (result["prompts"], result["responses"]) == (3, 12)


def test_a_python_function_is_a_reward(file, monkeypatch):
    monkeypatch.syspath_prepend(file.parent)
    code = "def letters(p, r): return len(p) * 100 + len(r)"
    (file.parent / "my_signal.py").write_text(code)
    result, lines = score(file, "signal:my_signal:letters")
    assert lines == [
        {**LINES[0], "rewards": [1107.0, 1118.0]},
        {**LINES[1], "reward": 1206.0},
        {**LINES[2], "rewards": []},
    ]
    assert result["mean"] == pytest.approx((1107 + 1118 + 1206) / 3)


@pytest.fixture
def server(monkeypatch) -> Iterator[RewardServer]:
    """A real server on a free port, asked again without a pause."""
    monkeypatch.setattr("rlhf.endpoints.retries.time.sleep", lambda seconds: None)
    with RewardServer() as server:
        yield server


def test_an_endpoint_is_a_reward(file, server):
    _, lines = score(file, server.url)
    assert [line.get("rewards", line.get("reward")) for line in lines] == [[7.0, 18.0], 6.0, []]
    assert server.requests[0][2] == {
        "messages": [{"role": "user", "content": "And the dog?"}],
        "response": "Happy.",
    }


def test_an_endpoint_that_drops_connections_is_asked_again(file, server):
    server.failures = ["closed", "reset", "cut", "503"]
    _, lines = score(file, server.url)
    assert lines[1]["reward"] == 6.0
    assert len(server.requests) == 5


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ("closed", "Remote end closed connection without response"),
        ("cut", "IncompleteRead"),
        ("429", "status 429"),
    ],
)
def test_an_endpoint_that_stays_away_can_be_asked_later(file, server, failure, words):
    server.failures = [failure] * 5
    with pytest.raises(InterruptedRunError, match=f"not answer after 5 attempts .*{words}"):
        score(file, server.url)
    assert not (file.parent / "out.jsonl").exists()
    assert score(file, server.url)[1][1]["reward"] == 6.0


def test_an_endpoint_that_refuses_is_asked_once(file, server):
    server.failures = ["404"]
    with pytest.raises(InputError, match=r"refused the request \(status 404\)"):
        score(file, server.url)
    assert len(server.requests) == 1


def test_a_reward_that_is_not_a_number_writes_nothing(file, server):
    server.answer = {"rewards": [1.0, float("nan"), 2.0]}
    words = "gave 1 of 3 responses a reward that is not a number, the first of them to 'How was it"
    with pytest.raises(InputError, match=words):
        score(file, server.url)
    assert not (file.parent / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"rewards": [1.0]}, "answered 1 rewards for 3 items"),
        ({"scores": []}, "answered something else than rewards"),
        ({"rewards": ["high", 1, 2]}, "answered something else than rewards"),
        ({"rewards": "123"}, r"something else than rewards \("),
        ({"rewards": {"1": 0, "2": 0, "3": 0}}, r"something else than rewards \("),
        ({"rewards": ["1", "2", "3"]}, r"something else than rewards \("),
        ({"rewards": [True, False, True]}, r"something else than rewards \("),
        ({"rewards": [1, 2, 10**400]}, r"something else than rewards \("),
        ([1, 2, 3], "answered something else than rewards"),
        (b"[" * 100_000, "answered something else than rewards"),
        (b'{"rewards": [' + b"9" * 5_000 + b", 1, 2]}", "answered something else than rewards"),
        (b'{"rewards": [1, 2, "\xff"]}', "answered something else than rewards"),
    ],
)
def test_an_endpoint_that_answers_nonsense_is_named(file, server, answer, words):
    server.answer = answer
    with pytest.raises(InputError, match=words):
        score(file, server.url)


def test_an_endpoint_that_is_not_there_is_named(file, monkeypatch):
    pauses = []
    monkeypatch.setattr("rlhf.endpoints.retries.time.sleep", pauses.append)
    with pytest.raises(
        InterruptedRunError, match=r"9/ does not answer after 5 .*refused"
    ) as caught:
        score(file, "http://127.0.0.1:9/")
    assert "Check the address, and that the server runs; then" in caught.value.remedy
    assert pauses == [1.0, 2.0, 4.0, 8.0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"response": "x"}, "needs 'prompt' or 'messages'"),
        ({"prompt": "x"}, "needs 'response' or 'responses'"),
        ({"prompt": "x", "responses": "y"}, "needs 'response' or 'responses'"),
        ({"prompt": " ", "response": "y"}, "user turn of a prompt is empty"),
    ],
)
def test_bad_lines_are_named_by_file_and_line(tmp_path, line, words):
    write_jsonl(tmp_path / "in.jsonl", [LINES[0], line])
    with pytest.raises(InputError, match=words) as caught:
        score(tmp_path / "in.jsonl", "signal:math:pow")
    assert "in.jsonl:2: " in caught.value.problem


def test_preferences_are_sent_to_rankings(tmp_path):
    table, lines = tmp_path / "pairs.csv", tmp_path / "pairs.jsonl"
    table.write_text("prompt,chosen,rejected\nHi,Hello,Away\n")
    write_jsonl(lines, [{"prompt": "Hi", "chosen": "Hello", "rejected": "Away"}])
    problems = (f"{table} is a table; FILE has one JSON object on each line", f"{lines}:1: A line")
    for file, problem in zip((table, lines), problems, strict=True):
        with pytest.raises(InputError) as caught:
            score(file, "signal:math:pow")
        assert caught.value.problem.startswith(problem)
        assert caught.value.remedy == (
            f"Preferences are read by: rlhf score --rankings {file} --reward REWARD --out OUT"
        )


def test_a_file_without_responses_and_an_existing_out_are_refused(tmp_path, file):
    write_jsonl(tmp_path / "none.jsonl", [LINES[2]])
    with pytest.raises(InputError, match="has no response to score"):
        score(tmp_path / "none.jsonl", "signal:math:pow")
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(InputError, match="already exists"):
        score(file, "signal:math:pow")


def test_a_prompt_beyond_the_context_is_refused_with_its_length(tiny_model, tmp_path):
    folder = tmp_path / "model"
    tokenizer = load_tokenizer(str(tiny_model))
    save_model(new_reward_model(str(tiny_model), 0, seed=3), tokenizer, folder)
    write_jsonl(tmp_path / "in.jsonl", [{"prompt": "x" * 2000, "response": "y"}])
    with pytest.raises(InputError, match="longer than the 512 tokens"):
        score(tmp_path / "in.jsonl", str(folder))
