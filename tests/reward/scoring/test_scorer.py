import json
import shutil

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file

from reward.scoring.scorer import load_scorer
from reward.scoring.texts import load_text_reward
from rlhf.errors import InputError
from rlhf.modeling.models import load_reward_model, new_reward_model, save_model
from rlhf.modeling.tokens import encode_prompt, join, load_tokenizer, pad_left, pad_right
from rlhf.parallel.distributed import start
from rlhf.records.schema import Response
from tests.reward.conftest import build_record
from tests.rlhf.fake_device import on_device, use_device, waiting


@pytest.fixture(scope="module")
def reward_folder(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward") / "model"
    model = new_reward_model(str(tiny_model), 0, seed=3)
    model.config.reward_bias = 0.25
    save_model(model, load_tokenizer(str(tiny_model)), folder)
    return folder


def test_scores_are_head_plus_bias_whatever_the_padding(reward_folder):
    scorer = load_scorer(str(reward_folder), Accelerator(mixed_precision="no"))
    prompts, responses = [[7, 8], [9], [10, 11, 12]], [[20, 21], [22, 0], [23, 2]]
    whole = [p + r for p, r in zip(prompts, responses, strict=True)]
    # 2 is the end token: rows that were cut short are closed, the third one is already
    closed = [s if s[-1] == 2 else [*s, 2] for s in whole]
    plain = load_reward_model(str(reward_folder)).eval()
    with torch.no_grad():
        hidden = [plain.model(torch.tensor([s])).last_hidden_state[0, -1] for s in closed]
        expected = [float(plain.score(h)) + 0.25 for h in hidden]
    for batch in (
        pad_right(whole, 0),
        pad_left(whole, 0),
        join(pad_left(prompts, 0), pad_right(responses, 0)),
    ):
        for budget in (1, 6, 1000):
            assert scorer(batch, budget).tolist() == pytest.approx(expected, abs=1e-6)


def test_what_rows_begin_with_in_common_is_read_once(reward_folder):
    scorer = load_scorer(str(reward_folder), Accelerator(mixed_precision="no"))
    rows = [[5, 6, 7, 8, 9, 20, 2], [5, 6, 7, 8, 9, 21], [5, 6, 7, 8, 9]]
    widths: list[int] = []
    [(module, _)] = scorer._members
    module.classifier.base_model.embed_tokens.register_forward_pre_hook(
        lambda _, inputs: widths.append(inputs[0].numel())
    )
    together = scorer(pad_right(rows, 0)).tolist()
    alone = [scorer(pad_right([row], 0)).item() for row in rows]
    assert together == pytest.approx(alone, abs=1e-6)
    assert widths[0] == 5 + 2 + 2 + 1  # closed by the end token, 2


def test_a_prompt_is_read_once_for_all_its_responses(reward_folder):
    scorer = load_scorer(str(reward_folder), Accelerator(mixed_precision="no"))
    prompts, rows = zip(
        *[
            ("a", [5, 6, 7, 8, 9, 20, 21, 2]),
            ("b", [30, 31, 32, 33, 34, 35, 40]),
            ("a", [5, 6, 7, 8, 9, 22]),
            ("b", [30, 31, 32, 33, 34, 35, 41, 42]),
            ("a", [5, 6, 7, 8, 9, 20, 21, 2]),  # the same response again
        ],
        strict=True,
    )
    widths: list[int] = []
    [(module, _)] = scorer._members
    module.classifier.base_model.embed_tokens.register_forward_pre_hook(
        lambda _, inputs: widths.append(inputs[0].numel())
    )
    alone = [scorer(pad_right([row], 0)).item() for row in rows]
    # the prompt and each response with its end token, 2: 5 + (3 + 2 + 3) and 6 + (2 + 3), in two
    # passes of 14 tokens, in three of 11: a prompt is read again where its responses do not fit
    for budget, packed in ((1000, [24]), (14, [11, 13]), (11, [11, 11, 7])):
        for batch in (pad_right(rows, 0), pad_left(rows, 0)):
            widths.clear()
            found = scorer(batch, budget, prompts)
            assert found.tolist() == pytest.approx(alone, abs=1e-6)
            assert widths == packed


def test_scoring_works_under_bf16_autocast(reward_folder):
    exact = load_scorer(str(reward_folder), Accelerator(mixed_precision="no"))
    batch = pad_right([[7, 8, 9], [10]], 0)
    expected = exact(batch).tolist()
    with torch.autocast("cpu", torch.bfloat16):
        rewards = exact(batch)
    assert rewards.dtype == torch.float32
    assert rewards.tolist() == pytest.approx(expected, abs=0.05)


def test_rewards_from_a_gpu_come_to_where_their_batch_lies(reward_folder, monkeypatch):
    batch = pad_right([[7, 8, 9], [10]], 0)
    expected = load_scorer(str(reward_folder), start("fp32", 0))(batch)
    scorer = load_scorer(str(reward_folder), start("fp32", 0))
    scorer._accelerator = use_device(monkeypatch)
    on_device(scorer._members[0][0])
    with waiting():
        found = scorer(batch)
    torch.testing.assert_close(found, expected)
    assert found.device == torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_on_the_cpu_are_scored_on_a_gpu(reward_folder):
    scorer = load_scorer(str(reward_folder), Accelerator(mixed_precision="no"))
    batch = pad_right([[7, 8, 9], [10]], 0)
    rewards = scorer(batch)
    assert rewards.device == torch.device("cpu")
    there = scorer(batch.to(torch.device("cuda")))
    torch.testing.assert_close(there.cpu(), rewards)


def test_a_language_model_is_refused(tiny_model):
    with pytest.raises(InputError, match="is not a reward model") as caught:
        load_scorer(str(tiny_model), Accelerator(mixed_precision="no"))
    assert "rlhf train-reward" in caught.value.remedy


def test_broken_weights_are_named(reward_folder, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in reward_folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    state = load_file(broken / "model.safetensors")
    state["score.weight"] *= float("nan")
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    reward = load_text_reward(str(broken), Accelerator(mixed_precision="no"), 4096)
    record = build_record(0)
    words = "broken gave 4 of 4 responses a reward that is not a number, the first of them to 'How"
    with pytest.raises(InputError, match=words):
        reward([(record.prompt, record.responses)])


def test_text_inside_think_tags_is_not_read_unless_the_model_was_trained_to(
    reward_folder, tmp_path
):
    prompt = build_record(1).prompt
    texts = ["<think>It rained.</think>Lovely!", "Awful."]
    tokenizer = load_tokenizer(str(reward_folder))
    start, end = encode_prompt(tokenizer, prompt), tokenizer.eos_token_id
    said = [tokenizer(text)["input_ids"] for text in texts]
    batch = join(pad_left([start, start], 0), pad_right(said, 0))
    folders = {}
    for reads in (False, True):
        folders[reads] = tmp_path / str(reads)
        shutil.copytree(reward_folder, folders[reads])
        config = json.loads((folders[reads] / "config.json").read_text(encoding="utf-8"))
        changed = json.dumps({**config, "reads_thinking": reads})
        (folders[reads] / "config.json").write_text(changed, encoding="utf-8")
    responses = [Response(id=t, prompt_id=prompt.id, text=t, model="m") for t in texts]
    answer = [tokenizer("Lovely!")["input_ids"], said[1]]
    for reads, read in ((False, answer), (True, said)):
        scorer = load_scorer(str(folders[reads]), Accelerator(mixed_precision="no"))
        rows = pad_right([[*start, *ids, end] for ids in read], 0)
        expected = pytest.approx(scorer(rows).tolist(), abs=1e-6)
        assert scorer(scorer.without_thinking([prompt, prompt], texts, batch)).tolist() == expected
        by_text = load_text_reward(str(folders[reads]), Accelerator(mixed_precision="no"), 1000)
        assert by_text([(prompt, tuple(responses))])[0] == expected
