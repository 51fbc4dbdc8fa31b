"""Which prompts go back to the annotators."""

import json
import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from labeling_app.db.store import Store
from policies.rounds.candidates import candidate, choose
from reward.scoring.texts import load_text_reward
from rlhf.cli import main
from rlhf.modeling.tokens import load_tokenizer
from rlhf.parallel.distributed import start_alone
from rlhf.records.schema import Message, Prompt, Response, Sampling
from tests.pipeline.loop import SIGNAL
from tests.pipeline.signals import count_vowels
from tests.policies.conftest import Inputs


def test_the_reasons_take_turns_in_proportion_and_never_meet() -> None:
    nats = [float(n) for n in range(20)]  # the last are farthest
    uncertainty = [-float(n) for n in range(20)]  # the first are most uncertain
    chosen = choose(nats, uncertainty, pick=10, random_share=0.2, seed=0)
    places = [place for place, _ in chosen]
    assert len(set(places)) == 10
    by_reason = {reason: [p for p, why in chosen if why == reason] for _, reason in chosen}
    assert {reason: len(found) for reason, found in by_reason.items()} == {
        "random": 2,
        "divergent": 4,
        "uncertain": 4,
    }
    taken = set(by_reason["random"])
    assert by_reason["divergent"] == [p for p in range(19, 0, -1) if p not in taken][:4]
    assert by_reason["uncertain"] == [p for p in range(20) if p not in taken][:4]


def test_all_or_none_at_random_and_never_more_than_there_are() -> None:
    chosen = choose([1.0, 2.0], [1.0, 2.0], pick=9, random_share=1.0, seed=0)
    assert sorted(chosen) == [(0, "random"), (1, "random")]
    assert [why for _, why in choose([1.0, 2.0], [2.0, 1.0], pick=2, random_share=0, seed=0)] == [
        "divergent",
        "uncertain",
    ]


def test_what_reads_the_same_is_ranked_once() -> None:
    prompt = Prompt.create((Message(role="user", content="How?"),), "train", "")
    said = [
        Response(id=str(n), prompt_id=prompt.id, text=text, model="m", sampling=Sampling())
        for n, text in enumerate(["well", "so", "well", "so", "badly"])
    ]
    found = candidate(prompt, said, np.array([0.5, 1.0, 0.5, 1.0, -2.0]), 3.0)
    assert [response.id for response in found.responses] == ["0", "1", "4"]
    # chosen ones are no samples of the model, and must not be reused as such
    assert {response.sampling for response in found.responses} == {None}
    assert found.rewards.tolist() == [0.5, 1.0, -2.0]
    assert found.nats == 3.0


def log_prob(model: PreTrainedModel, prompt: list[int], response: Response) -> float:
    """log p(response | prompt), by transformers alone."""
    whole = torch.tensor([[*prompt, *(response.token_ids or ())]])
    with torch.no_grad():
        logits = model(whole).logits[0, len(prompt) - 1 : -1]
    return float(logits.log_softmax(-1).gather(1, whole[0, len(prompt) :, None]).sum())


def entropy(responses: list[Response]) -> float:
    """Mean entropy of σ(difference of rewards) over all pairs of responses."""
    return entropy_of([count_vowels("", one.text.replace("(no answer)", "")) for one in responses])


def entropy_of(rewards: Sequence[float]) -> float:
    """Mean entropy of σ(difference) over all pairs of some rewards."""
    gaps = np.array([abs(a - b) for a, b in combinations(rewards, 2)])
    # −p log p − (1 − p) log(1 − p) with p = σ(gap), of which 1 − p may be too small beside 1
    return float(np.mean(np.log1p(np.exp(-gaps)) + gaps / (1 + np.exp(gaps))))


def test_the_farthest_and_the_least_certain_prompts_come_first(
    inputs: Inputs, already_loaded: list[int], tmp_path: Path
) -> None:
    Store(tmp_path / "labels.db").close()
    command = ["round", "--db", str(tmp_path / "labels.db"), "--policy", inputs.path("policy")]
    command += ["--reference", inputs.path("reference"), "--reward", f"signal:{SIGNAL}"]
    assert main([*command, "--random-share", "0.1"]) == 2
    assert main([*command, "--pick", "8", "--precision", "fp32"]) == 0
    assert already_loaded == [0] * 3  # one model at a time is in memory
    original, policy = (
        AutoModelForCausalLM.from_pretrained(inputs.path(name)) for name in ("original", "policy")
    )
    template = load_tokenizer(inputs.path("policy")).apply_chat_template
    nats, unsure = {}, {}
    with Store(tmp_path / "labels.db") as store:
        query = "SELECT prompt_id, responses, reason FROM tasks ORDER BY priority DESC"
        tasks = store.connections.db.execute(query).fetchall()
        for prompt in store.prompts("train"):
            known = {response.id: response for response in store.responses(prompt.id)}
            [ids] = [json.loads(ids) for prompt_id, ids, _ in tasks if prompt_id == prompt.id]
            shown = [known[id_] for id_ in ids]
            assert [Path(one.model).name for one in shown] == ["original"] + ["policy"] * 3
            asked = template(prompt.chat, add_generation_prompt=True, return_dict=False)
            moved = [log_prob(policy, asked, y) - log_prob(original, asked, y) for y in shown[1:]]
            nats[prompt.id], unsure[prompt.id] = np.mean(moved), entropy(shown)
    left = dict.fromkeys(nats)
    reasons = [reason.removeprefix("round 1: ") for _, _, reason in tasks]
    for (prompt_id, _, _), reason in zip(tasks, reasons, strict=True):
        measured = {"divergent": nats, "uncertain": unsure}.get(reason)
        if measured:
            assert prompt_id == max(left, key=measured.__getitem__)
        del left[prompt_id]
    assert [reasons.count(one) for one in ("divergent", "uncertain", "random")] == [3, 3, 2]


def test_uncertainty_is_that_of_the_log_odds_that_were_trained(
    inputs: Inputs, tmp_path: Path
) -> None:
    """A saved reward model's rewards have standard deviation 1; the loss was on those over gain."""
    shutil.copytree(inputs.path("reward"), tmp_path / "run" / "model")
    reward, gain = str(tmp_path / "run" / "model"), 0.002
    report = {"normalisation": {"gain": gain}}
    (tmp_path / "run" / "report.json").write_text(json.dumps(report))
    Store(tmp_path / "labels.db").close()
    command = ["round", "--db", str(tmp_path / "labels.db"), "--policy", inputs.path("policy")]
    command += ["--reference", inputs.path("reference"), "--reward", reward]
    assert main([*command, "--pick", "8", "--precision", "fp32"]) == 0
    score = load_text_reward(reward, start_alone("fp32", 0), 4096)
    trained, saved, reasons = {}, {}, {}
    with Store(tmp_path / "labels.db") as store:
        query = "SELECT prompt_id, responses, reason FROM tasks ORDER BY priority DESC"
        for prompt_id, ids, reason in store.connections.db.execute(query):
            known = {response.id: response for response in store.responses(prompt_id)}
            [prompt] = [one for one in store.prompts("train") if one.id == prompt_id]
            [rewards] = score([(prompt, tuple(known[one] for one in json.loads(ids)))])
            saved[prompt_id] = entropy_of(rewards)
            trained[prompt_id] = entropy_of([value / gain for value in rewards])
            reasons[prompt_id] = reason.removeprefix("round 1: ")
    for measured, is_chosen_by in ((trained, True), (saved, False)):
        left, first = list(reasons), []
        for prompt_id, reason in reasons.items():
            if reason == "uncertain":
                first.append(prompt_id == max(left, key=measured.__getitem__))
            left.remove(prompt_id)
        assert all(first) == is_chosen_by
