"""Settings, runs, exports, stores and answers of endpoints, mutated: one message or a result."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator
from hypothesis import strategies as st

from labeling_app.web.live.endpoint_model import EndpointModel, served_model
from policies.reference.store import ReferenceStore
from policies.reference.store import read_manifest as read_store_manifest
from reward.scoring.texts import load_text_reward
from rlhf import cli
from rlhf.config import load_settings
from rlhf.endpoints import judge
from rlhf.errors import InputError, InterruptedRunError
from rlhf.modeling.models import policy_folder
from rlhf.records.jsonl import write_json
from rlhf.records.ranked import read_ranked, write_ranked
from rlhf.records.schema import Message, Prompt, RankedPrompt, Response, Sampling
from rlhf.run.checkpoint import newest_checkpoint
from rlhf.run.metrics import forget_metrics_after
from rlhf.run.rundir import RunDir, open_stage, require_done, stage_status
from rlhf.run.status import differing_settings, overview, read_run, tables
from tests.trust.mutations import mutated, run_cases, spliced
from tests.trust.stages import METRICS, REPORT, Stage

COUNTS = pytest.mark.parametrize("count", [100, pytest.param(100_000, marks=pytest.mark.slow)])
# several files make one reader, or another test reads nearly the same
PART = pytest.mark.parametrize("count", [50, pytest.param(25_000, marks=pytest.mark.slow)])
PROMPT = Prompt.create((Message(role="user", content="Hi?"),), "train", "test")
RESPONSE = Response(id="a", prompt_id=PROMPT.id, text="Yes", model="m")


def refusal(read: Callable[[], Any]) -> str | None:
    """The problem that an InputError tells; None where there is none."""
    try:
        read()
    except InputError as error:
        return error.problem
    return None


SETTINGS = b"""# a file of settings
model: &model runs/first/policy
responses: [a.jsonl, *model]
reward: &more {a: 1, b: [1.5, 2e-3, true, null]}
again: *more
out: 2026-01-01
tokens-per-batch: 4096
"""


@COUNTS
def test_settings_files(in_memory: Path, count: int) -> None:
    file = in_memory / "settings.yaml"

    def check(content: bytes) -> None:
        file.write_bytes(content)
        problem = refusal(lambda: json.dumps(load_settings([file])))
        assert problem is None or str(file) in problem

    run_cases(check, spliced(SETTINGS), count)


@pytest.mark.parametrize("count", [20, pytest.param(5_000, marks=pytest.mark.slow)])
def test_settings_files_through_the_command_line(
    in_memory: Path, count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    file = in_memory / "settings.yaml"
    whole = b"model: m\nreward: [r]\nreference: s\nout: o\nkl:\n  coefficient: 0.5\nsteps: 3\n"

    def check(content: bytes) -> None:
        file.write_bytes(content)
        assert cli.main(["ppo", "--config", str(file), "--no-such-flag"]) == 2
        assert "Traceback" not in capfd.readouterr().err

    run_cases(check, spliced(whole), count)


WORK = {"title": "t", "done": 1, "total": 2, "seconds_left": 9.5, "at": 1.0, "is_stage": True}
HEART = {"rank": 0, "host": "h", "pid": 1, "beats": 3, "phase": "p", "step": 1, "waits": None}
HEART |= {"work": WORK}


@pytest.fixture
def run(in_memory: Path) -> RunDir:
    """A PPO stage that says it is done."""
    inputs = {"model": {"path": "m", "hash": "h"}, "reward": {"path": "r", "hash": "h"}}
    run = open_stage(in_memory / "run" / "ppo", "ppo", Stage(Path("out")), inputs, resume=False)
    with stage_status(run):
        run.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in METRICS))
    write_json(run.report_json, REPORT)
    write_json(run.heartbeat / "rank-00000.json", HEART)
    run.policy.mkdir()
    return run


def read_all(run: RunDir) -> None:
    """What `rlhf status` and the next stage read of a run."""
    runs = {"run": read_run(run.path.parent, {})}
    text = overview(runs, differing_settings(runs)) + tables(runs, differing_settings(runs))
    (text + json.dumps(runs, ensure_ascii=False)).encode()
    policy_folder(str(run.path))
    require_done(run.path, "ppo", "policy")
    if run.is_done:
        open_stage(run.path, "ppo", Stage(Path("out")), run.inputs, resume=True)
    forget_metrics_after(run.metrics_file, 3)


@PART
@pytest.mark.parametrize("name", ["stage.json", "report.json", "metrics.jsonl", "config.yaml"])
def test_files_of_a_run(run: RunDir, name: str, count: int) -> None:
    read_all(run)
    file = run.path / name
    whole = file.read_bytes()
    cases = spliced(whole)
    if name.endswith(".json"):
        documents = [json.loads(whole), {**json.loads(whole), "status": "running"}]
        cases = st.sampled_from(documents).flatmap(mutated)
    if name == "metrics.jsonl":
        lines = whole.splitlines(keepends=True)
        row = st.sampled_from(METRICS).flatmap(mutated)
        cases = cases | row.map(lambda line: lines[0] + line + b"\n" + lines[1])

    def check(content: bytes) -> None:
        file.write_bytes(content)
        try:
            problem = refusal(lambda: read_all(run))
        finally:
            file.write_bytes(whole)
        assert problem is None or str(run.path) in problem

    run_cases(check, cases, count)


@PART
def test_heartbeats(run: RunDir, count: int) -> None:
    write_json(run.stage_file, {**run.read_stage(), "status": "running"})

    def check(content: bytes) -> None:
        (run.heartbeat / "rank-00000.json").write_bytes(content)
        problem = refusal(lambda: read_run(run.path, {}))
        assert problem is None or "rank-00000.json" in problem

    run_cases(check, mutated(HEART), count)


@PART
def test_manifests_of_exports(in_memory: Path, count: int) -> None:
    record = RankedPrompt(prompt=PROMPT, responses=(RESPONSE,), rankings=())
    manifest = write_ranked(in_memory, [record], {"checked": True})

    def check(content: bytes) -> None:
        (in_memory / "manifest.json").write_bytes(content)
        problem = refusal(lambda: read_ranked(in_memory))
        assert problem is None or str(in_memory) in problem

    run_cases(check, mutated(manifest), count)


MODEL = {"path": "m", "hash": "h", "tokenizer": "t", "chat_template_kwargs": '{"a": [false]}'}
STORE = {
    "format_version": 2,
    "model": MODEL,
    "reward": MODEL,
    "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 8, "seed": 0},
    "shards": {"train-00000.parquet": {"rows": 4, "hash": "h", "rewards": "r"}},
    "samples_per_prompt": 2,
    "longest_prompt": 9,
    "stored_top_k": 0,
    "end_token_ids": [2, 7],
}


@PART
def test_manifests_of_stores(in_memory: Path, count: int) -> None:
    def read() -> None:
        manifest = read_store_manifest(in_memory)
        store = ReferenceStore(in_memory, manifest, manifest["model"]["path"])
        assert store.content_hash
        assert len(store.rows) >= len(store.by_prompt("train"))
        assert store.sampling.is_untruncated
        assert "tokenize" not in store.template_kwargs
        assert all(one >= 0 for one in manifest.get("end_token_ids", [0]))

    def check(content: bytes) -> None:
        (in_memory / "manifest.json").write_bytes(content)
        problem = refusal(read)
        assert problem is None or str(in_memory) in problem

    run_cases(check, mutated(STORE), count)


@PART
def test_names_of_the_latest_checkpoint(in_memory: Path, count: int) -> None:
    def check(content: bytes) -> None:
        (in_memory / "latest").write_bytes(content)
        problem = refusal(lambda: newest_checkpoint(in_memory))
        if problem is not None:
            assert "latest does not name a checkpoint" in problem
            return
        found = newest_checkpoint(in_memory)
        assert found is not None
        assert found.parent == in_memory

    run_cases(check, spliced(b"step-000100"), count)


class Answering:
    """A server that reads a request and sends the bytes of `answer`, whatever they are."""

    def __init__(self) -> None:
        self.answer = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with client, client.makefile("rb") as stream:
                length = 0
                while (line := stream.readline()) not in (b"\r\n", b""):
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                stream.read(length)
                with suppress(OSError):  # it has gone
                    client.sendall(self.answer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answering]:
    monkeypatch.setattr("rlhf.endpoints.retries.time.sleep", lambda seconds: None)
    server = Answering()
    yield server
    server.close()


CHAT = {"choices": [{"message": {"content": "So. [[A]]"}, "finish_reason": "stop"}]}
EVENT = {"choices": [{"delta": {"content": "Hi"}, "finish_reason": "stop"}]}


def whole_answer(body: bytes, kind: bytes = b"application/json") -> bytes:
    size = str(len(body)).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %b\r\n\r\n%b" % (
        kind,
        size,
        body,
    )


def answers(document: Any) -> st.SearchStrategy[bytes]:
    """Answers with another body, and answers spliced anywhere."""
    body = json.dumps(document).encode()
    return mutated(document).map(whole_answer) | spliced(whole_answer(body))


def check_answers(
    server: Answering, ask: Callable[[], Any], cases: st.SearchStrategy[bytes], count: int
) -> None:
    def check(answer: bytes) -> None:
        server.answer = answer
        with suppress(InputError, InterruptedRunError):
            ask()

    run_cases(check, cases, count)


@COUNTS
def test_answers_of_judges(answering: Answering, count: int) -> None:
    endpoint = judge.Endpoint(url=answering.url, model="m", timeout_seconds=3)
    question = judge.build_request("Which?", "one", "two", rubric="")

    def ask() -> None:
        text = judge.complete(endpoint, question)
        assert judge.read_verdict(text) in ("first", "second", "tie", "unclear")
        text.encode()

    check_answers(answering, ask, answers(CHAT), count)


@COUNTS
def test_answers_of_reward_endpoints(answering: Answering, count: int) -> None:
    score = load_text_reward(answering.url, Accelerator(cpu=True), tokens_per_batch=1)
    both = (RESPONSE, RESPONSE)

    def ask() -> None:
        [rewards] = score([(PROMPT, both)])
        assert [type(reward) for reward in rewards] == [float, float]

    check_answers(answering, ask, answers({"rewards": [1, -0.5]}), count)


@PART
def test_streams_of_live_mode(
    answering: Answering, count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    voice = EndpointModel(url=answering.url, model="m", sampling=Sampling(), timeout_seconds=1)
    stream = b"data: " + json.dumps(EVENT).encode() + b"\n\n"
    kind = b"text/event-stream"
    event = mutated(EVENT).map(lambda one: whole_answer(stream + b"data: " + one + b"\n\n", kind))
    cases = event | spliced(whole_answer(stream + b"data: [DONE]\n\n", kind)) | answers(CHAT)

    def ask() -> None:
        [response] = voice.answer(PROMPT, ["a"], 0, lambda row, text: True)
        response.text.encode()

    check_answers(answering, ask, cases, count)
    capfd.readouterr()


@PART
def test_lists_of_served_models(answering: Answering, count: int) -> None:
    cases = answers({"data": [{"id": "model"}]})
    check_answers(answering, lambda: served_model(answering.url).encode(), cases, count)
