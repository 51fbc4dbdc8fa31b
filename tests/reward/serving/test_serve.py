"""A reward model at an address gives the rewards of the model in process."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reward.scoring.texts import PromptResponses, load_text_reward
from reward.serving.batches import QueueFullError, RequestCounts, SharedBatches
from rlhf.errors import InputError
from rlhf.modeling.models import describe_model, new_reward_model, save_model
from rlhf.modeling.tokens import load_tokenizer
from rlhf.parallel.distributed import start
from tests.reward.conftest import build_record
from tests.servers.coroutines import run_alone
from tests.servers.served_reward import ServedReward, served_reward

LONG = "very " * 600


def build_answers(number: int) -> PromptResponses:
    record = build_record(number)
    return record.prompt, record.responses


def body_of(*texts: str) -> bytes:
    messages = [{"role": "user", "content": "How was it?"}]
    return json.dumps({"items": [{"messages": messages, "response": t} for t in texts]}).encode()


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ensemble of two random reward models."""
    folder = tmp_path_factory.mktemp("served") / "model"
    for seed, place in ((3, folder), (4, folder / "member-1")):
        model = new_reward_model(str(tiny_model), 0, seed=seed)
        model.config.reward_bias = 0.5
        save_model(model, load_tokenizer(str(tiny_model)), place)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServedReward]:
    with served_reward(folder) as server:
        yield server


def test_eight_callers_get_the_rewards_of_the_model_in_process(
    server: ServedReward, folder: Path
) -> None:
    questions = [[build_answers(n) for n in range(first, first + 4)] for first in range(0, 32, 4)]
    questions[0] = [
        (p, (*r, type(r[0])(id="t", prompt_id=p.id, text="<think>sad</think>Happy.", model="m")))
        for p, r in questions[0]
    ]
    accelerator = start("fp32", 0)
    expected = [load_text_reward(str(folder), accelerator, 4096)(one) for one in questions]
    asked = load_text_reward(server.url, accelerator, 1)
    before = server.metrics()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(asked, questions))
    for mine, theirs in zip(found, expected, strict=True):
        for row, other in zip(mine, theirs, strict=True):
            assert row == pytest.approx(other, abs=1e-5)
    after = server.metrics()
    assert after["requests_total"] - before["requests_total"] == 8
    assert after["items_total"] - before["items_total"] == 8 * 16 + 4
    assert 1 <= after["batches_total"] - before["batches_total"] <= 8
    assert after["tokens_total"] > 8 * 16 * 10
    assert after["scoring_seconds_total"] > 0
    assert after["queue_items"] == 0


def test_health_names_the_model(server: ServedReward, folder: Path) -> None:
    health = json.loads(server.get("/health"))
    described = describe_model(str(folder))
    assert health["status"] == "ready"
    assert health["reward"] == {"path": described["path"], "hash": described["hash"]}
    assert health["uptime_seconds"] > 0


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "The body is not valid JSON"),
        (b"[" * 5000, 400, "The body"),
        (b"[]", 400, "The body is a JSON list, not an object."),
        (b"{}", 400, 'The body must be {"items": ['),
        (b'{"items": [{"response": "x"}]}', 400, "Item 0 must have 'messages', a list"),
        (b'{"items": [{"messages": [], "response": "x"}]}', 400, "Item 0: A prompt must end with"),
        (b'{"items": [{"messages": [1], "response": "x"}]}', 400, "Item 0 has a message that is"),
        (b'{"items": [{"messages": [], "response": "\\ud800"}]}', 400, "not valid JSON"),
        (body_of("x" * 2**24), 413, "The body is larger than 16777216 bytes."),
        (body_of("Fine.", LONG), 400, "1 prompts with their responses are longer than the 512 tok"),
        (body_of(*["x"] * 4097), 400, "The request has 4097 items, and at most 4096 may wait"),
    ],
    ids=[
        "cut",
        "deep",
        "list",
        "none",
        "fields",
        "empty",
        "turn",
        "surrogate",
        "large",
        "long",
        "many",
    ],
)
def test_what_cannot_be_scored_is_refused_with_a_sentence(
    server: ServedReward, body: bytes, status: int, words: str
) -> None:
    found, answer = server.post(body)
    assert found == status
    assert words in answer["error"]


def test_sigterm_answers_what_was_accepted_and_ends_with_0(folder: Path) -> None:
    with served_reward(folder) as server, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.post, body_of(*["very " * 60] * 400))
        while not server.metrics()["queue_items"]:
            time.sleep(0.01)
        code, said = server.stop()
        status, answer = waiting.result()
    assert (code, status, len(answer["rewards"])) == (0, 200, 400)
    assert "Traceback" not in said
    assert f"at {server.url}  (Ctrl+C stops)" in said


class BlockedScore:
    """Scores texts by their length when `may_go` is set; refuses the text 'bad'."""

    def __init__(self) -> None:
        self.may_go = threading.Event()
        self.sizes: list[int] = []

    def __call__(self, answers: Sequence[PromptResponses]) -> list[float]:
        assert self.may_go.wait(10)
        self.sizes.append(len(answers))
        texts = [response.text for _, (response,) in answers]
        if "bad" in texts:
            raise InputError("bad", "Leave it out.")
        return [float(len(text)) for text in texts]


def ask(*texts: str) -> list[PromptResponses]:
    prompt, (response, *_) = build_answers(0)
    return [(prompt, (type(response)(id="", prompt_id="", text=t, model=""),)) for t in texts]


def test_requests_that_wait_share_a_batch_and_a_bad_one_fails_alone() -> None:
    score = BlockedScore()

    async def run() -> list[object]:
        batches = SharedBatches(score, RequestCounts(), max_waiting=7)
        first = asyncio.create_task(batches.rewards(ask("a")))
        await asyncio.sleep(0)  # it is accepted
        await asyncio.sleep(0)  # it is being scored
        others = [asyncio.create_task(batches.rewards(ask(*t))) for t in ("ab", ["bad"], "abc")]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError):
            await batches.rewards(ask("a"))
        score.may_go.set()
        found = await asyncio.gather(first, *others, return_exceptions=True)
        assert await batches.rewards(ask("abc")) == [3.0]
        assert batches.counts.waiting_items == 0
        return found

    one, two, bad, three = run_alone(run())
    assert (one, two, three) == ([1.0], [1.0, 1.0], [1.0, 1.0, 1.0])
    assert isinstance(bad, InputError)
    assert score.sizes == [1, 6, 2, 1, 3, 1]  # together, then each by itself


def test_a_full_queue_is_answered_503(monkeypatch: pytest.MonkeyPatch) -> None:
    from starlette.testclient import TestClient

    from reward.serving.app import build_app

    score = BlockedScore()
    batches = SharedBatches(score, RequestCounts(), max_waiting=1)
    app = build_app(batches, {"path": "p", "hash": "h"})
    with TestClient(app) as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, "/", content=body_of("abc"))
        while not batches.counts.waiting_items:
            time.sleep(0.01)
        full = client.post("/", content=body_of("abcd"))
        score.may_go.set()
        assert first.result().json() == {"rewards": [3.0]}
    assert (full.status_code, full.headers["Retry-After"]) == (503, "1")
    assert full.json() == {"error": "1 responses wait already. Ask again."}


@pytest.mark.parametrize("reward", ["signal:tests.pipeline.signals:count_vowels", "http://x/"])
def test_only_models_are_served(refused: Callable[..., str], reward: str) -> None:
    said = refused("serve", "--reward", reward)
    assert f"--reward is '{reward}', and only reward models are served" in said


def test_a_port_in_use_is_refused(
    refused: Callable[..., str], server: ServedReward, folder: Path
) -> None:
    port = server.url.rpartition(":")[2]
    said = refused("serve", "--reward", folder, "--port", port)
    assert f"Port {port} of 127.0.0.1 cannot be used (Address already in use)" in said
