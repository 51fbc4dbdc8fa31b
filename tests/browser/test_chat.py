"""`rlhf chat` in a real browser: two models in the process, and after a vote their rewards by the
reward model that the policy was trained with.
"""

import shutil
from pathlib import Path

import pytest

from labeling_app.db.store import Store
from reward.scoring.texts import load_text_reward
from rlhf.modeling.models import new_reward_model, save_model
from rlhf.modeling.tokens import load_tokenizer
from rlhf.parallel.distributed import start
from rlhf.records.jsonl import write_json
from tests.browser.conftest import ProcessApp
from tests.conftest import build_tiny_model

pytestmark = pytest.mark.browser


class Chat(ProcessApp):
    """`rlhf chat` as a process of its own."""

    command = "chat"


@pytest.fixture
def chat(tmp_path: Path, tiny_model: Path):
    build_tiny_model(tmp_path / "ppo" / "policy", seed=7)
    shutil.copytree(tiny_model, tmp_path / "original")
    tokenizer = load_tokenizer(str(tiny_model))
    reward = new_reward_model(str(tiny_model), int(tokenizer.pad_token_id), seed=0)
    save_model(reward, tokenizer, tmp_path / "reward")
    inputs = {"reward": {"path": str(tmp_path / "reward")}}
    stage = {"stage": "ppo", "status": "done", "inputs": inputs}
    write_json(tmp_path / "ppo" / "stage.json", stage)
    app = Chat(
        tmp_path / "labels.db",
        *("--policy", str(tmp_path / "ppo"), "--reference", str(tmp_path / "original")),
        *("--max-new-tokens", "8", "--annotator", "ann"),
    )
    yield app
    app.stop()


def test_both_models_answer_blind_and_a_vote_shows_whose_answer_it_was(chat, open_page) -> None:
    page = open_page(chat.url + "live")
    page.fill("#prompt", "How was the trip?")
    page.press("#prompt", "Enter")
    page.wait_for_selector(".saved:has-text('The answers are complete')", timeout=60_000)
    notes = page.locator(".card .note")
    assert [notes.nth(n).is_visible() for n in (0, 1)] == [False, False]
    page.locator(".card .up").first.click()
    notes.first.wait_for(timeout=60_000)
    with Store(chat.db) as store:
        [record] = store.ranked_prompts()
    [thumb] = record.rankings
    assert thumb.flags == ("thumbs-up",)
    assert thumb.kind == "human"
    [liked] = thumb.tiers[0]
    in_order = sorted(record.responses, key=lambda response: response.id != liked)
    score = load_text_reward(str(chat.db.parent / "reward"), start("fp32", 0), 4096)
    [rewards] = score([(record.prompt, tuple(in_order))])
    for response, text, reward in zip(in_order, notes.all_inner_texts(), rewards, strict=True):
        name, _, said = text.partition(", reward ")
        assert name == {"policy": "new", "original": "original"}[Path(response.model).name]
        assert float(said) == pytest.approx(reward, abs=0.03)  # the app may round to bf16
