"""Models that end a turn with several tokens, or not with `tokenizer.eos_token`: every stage."""

import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from labeling_app.db.store import Store
from policies.reference.store import open_store
from policies.sampling.generate import cut_at_end_token
from reward.scoring.scorer import load_scorer
from rlhf.cli import main
from rlhf.modeling.chat_template import end_token_ids
from rlhf.modeling.models import load_causal_lm, save_model
from rlhf.modeling.tokens import encode_response, load_tokenizer, pad_right, tokenizer_fingerprint
from rlhf.parallel.distributed import start
from rlhf.records.jsonl import write_jsonl
from rlhf.records.schema import Response
from tests.families import FAMILIES, Family, build_family_model
from tests.pipeline.loop import SHORT, SIGNAL, read_json, write_prompts


@dataclass(frozen=True)
class Made:
    """What the stages left for one family."""

    family: Family
    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)


# the closing token is the end token of no other file (qwen), or one of several that end a turn
QUICK = ("qwen", "llama3")
PARAMS = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES
]


@pytest.fixture(scope="module", params=PARAMS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """generate → export → train-reward → reference → ppo, each by its command."""
    made = Made(FAMILIES[request.param], tmp_path_factory.mktemp(request.param))
    build_family_model(made.folder / "model", made.family)
    prompts = write_prompts(made.folder / "prompts.jsonl")
    db = ["--db", made.path("labels.db")]
    model, out = ["--model", made.path("model")], lambda name: ["--out", made.path(name)]
    prompts_of = ["--prompts", made.path("export")]
    reward = ["--reward", made.path("reward")]
    few = ["--reference", made.path("reference"), "--steps", "1", "--episodes-per-step", "8"]
    reads = ["--rankings", made.path("export"), "--precision", "fp32"]
    for arguments in (
        ["import", str(prompts), *db],
        ["generate", *db, *model, "-k", "3", *SHORT],
        ["annotate", *db, "--annotator", f"signal:{SIGNAL}"],
        ["export", *db, "--format", "ranked", *out("export")],
        ["train-reward", *reads, *model, *out("reward")],
        ["reference", *prompts_of, *model, *reward, *out("reference"), *SHORT],
        ["ppo", *model, *reward, *few, "--precision", "fp32", *out("ppo")],
    ):
        assert main(arguments) == 0, arguments
    return made


def test_every_stage_ends_at_the_whole_set(made: Made) -> None:
    tokenizer = load_tokenizer(made.path("model"))
    ends = end_token_ids(tokenizer)
    closing = tokenizer.convert_tokens_to_ids(made.family.closing)
    assert ends[0] == closing
    assert set(ends) == set(tokenizer.convert_tokens_to_ids(sorted(made.family.all_ends)))
    assert tokenizer.pad_token_id not in (closing, tokenizer.eos_token_id)

    with Store(Path(made.path("labels.db"))) as store:
        prompts = [row["id"] for row in store.connections.db.query("SELECT id FROM prompts")]
        responses = [one for prompt in prompts for one in store.responses(prompt)]
    last = {one.token_ids[-1] for one in responses if one.finished}
    assert last == set(ends)  # each of them ended some
    for one in responses:
        sample = cut_at_end_token(list(one.token_ids), ends)
        assert (sample.token_ids, sample.finished) == (list(one.token_ids), one.finished)
        assert not any(token in one.text for token in made.family.special)

    store = open_store(made.folder / "reference" / "outputs")
    assert store.manifest["end_token_ids"] == list(ends)
    for row in store.rows:
        assert row.finished is (row.response_ids[-1] in ends)
        assert not set(row.response_ids[:-1]) & set(ends)

    steps = (made.folder / "ppo" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    # an end token ends an answer of 12 tokens with probability 1 − (1 − .24)^12 = .96 or more
    assert all(json.loads(step)["eos_rate"] > 0.6 for step in steps)
    stored = read_json(made.folder / "ppo" / "policy" / "generation_config.json")["eos_token_id"]
    assert set(stored) == set(ends)


def test_a_reward_model_reads_every_response_closed_by_its_template(made: Made) -> None:
    tokenizer = load_tokenizer(made.path("reward/model"))
    fingerprint = tokenizer_fingerprint(tokenizer)
    closing = tokenizer.convert_tokens_to_ids(made.family.closing)
    scorer = load_scorer(made.path("reward"), start("fp32", 0))
    for row in open_store(made.folder / "reference" / "outputs").rows:
        known = {"id": "a", "prompt_id": "p", "text": row.text, "model": "m"}
        response = Response(
            **known, token_ids=tuple(row.response_ids), tokenizer_fingerprint=fingerprint
        )
        words = row.response_ids[:-1] if row.finished else row.response_ids
        read = encode_response(tokenizer, response, fingerprint)
        assert read == [*words, closing]
        # the store's reward came from the sampled tokens, whichever token ended them
        expected = scorer.each(pad_right([row.prompt_ids + read], 0)).item()
        assert row.reward == pytest.approx(expected, abs=0.01)


def test_a_store_from_before_there_were_several_opens_and_ends_where_it_did(
    made: Made, tmp_path: Path
) -> None:
    folder = made.folder / "reference" / "outputs"
    manifest = read_json(folder / "manifest.json")
    del manifest["end_token_ids"]
    text = (folder / "manifest.json").read_text(encoding="utf-8")
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    try:
        tokenizer = open_store(folder).load_tokenizer(made.path("model"))
    finally:
        (folder / "manifest.json").write_text(text, encoding="utf-8")
    assert end_token_ids(tokenizer) == (tokenizer.eos_token_id,)
    known = read_json(made.folder / "model" / "generation_config.json")["eos_token_id"]
    save_model(load_causal_lm(made.path("model")), tokenizer, tmp_path / "saved")
    stored = read_json(tmp_path / "saved" / "generation_config.json")["eos_token_id"]
    assert set(stored) == {*known, tokenizer.eos_token_id}
    assert pq.read_metadata(next(folder.glob("*.parquet"))).num_rows


def test_template_values_given_to_the_first_stages_hold_in_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_family_model(tmp_path / "model", FAMILIES["qwen"])
    rows = [{"prompt": f"How was trip {n}?", "responses": ["a", "e e"]} for n in range(12)]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    db, model = ["--db", str(tmp_path / "labels.db")], ["--model", str(tmp_path / "model")]
    without = ["--chat-template-kwargs", '{"enable_thinking": false}']
    names = ("export", "reward", "reference", "ppo", "evaluate")
    paths = {name: str(tmp_path / name) for name in names}
    fp32 = ["--precision", "fp32"]
    few = ["--steps", "1", "--episodes-per-step", "4", *fp32]
    first = ["--split", "train", "--samples", "1", *fp32]
    train = ["train-reward", "--rankings", paths["export"], *fp32]
    reward = ["--reward", paths["reward"]]
    stored = [*reward, "--reference", paths["reference"]]
    reference = ["reference", "--prompts", paths["export"], *model, *reward, *SHORT]
    for arguments in (
        ["import", str(tmp_path / "rows.jsonl"), *db],
        ["generate", *db, *model, "-k", "1", *without, *SHORT],
        ["annotate", *db, "--annotator", f"signal:{SIGNAL}"],
        ["export", *db, "--format", "ranked", "--out", paths["export"]],
        [*train, *model, "--out", paths["reward"], *without],
        [*reference, *without, "--out", paths["reference"]],
        ["ppo", *model, *stored, "--out", paths["ppo"], *few],
        ["evaluate", "--policy", paths["ppo"], *stored, "--out", paths["evaluate"], *first],
    ):
        assert main(arguments) == 0, arguments
    store = open_store(tmp_path / "reference" / "outputs")
    assert store.template_kwargs == {"enable_thinking": False}
    tokenizer = load_tokenizer(str(tmp_path / "ppo" / "policy"))
    for row in store.rows:
        asked = tokenizer.decode(row.prompt_ids)
        assert asked.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert row.reused  # what was generated with these values

    capsys.readouterr()
    assert main([*reference, "--out", str(tmp_path / "other")]) == 2
    words = " ".join(capsys.readouterr().err.split())
    assert "have different tokenizers or chat templates" in words
    assert "with the same --chat-template-kwargs" in words
