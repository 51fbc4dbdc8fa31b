"""`rlhf sft` on the tiny model: it learns, resumes to the same bytes, and refuses."""

import json

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM
from trl.trainer.sft_config import SFTConfig

from policies.sft.demonstrations import read_demonstrations
from policies.sft.settings import SFTSettings
from policies.sft.train import _build_trainer
from policies.trl_training.train import trainer_arguments
from rlhf.cli import main
from rlhf.errors import ConfigError, InputError
from rlhf.modeling.chat_template import template_kwargs
from rlhf.modeling.tokens import load_tokenizer
from rlhf.records.jsonl import write_jsonl
from rlhf.run.rundir import RunDir
from tests.families import FAMILIES, build_family_model
from tests.policies.sft.demonstrations import LINES


@pytest.fixture
def lines(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    return path


@pytest.fixture(autouse=True)
def _own_precision():
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.fixture
def sft(tiny_model, tmp_path, capsys):
    def run(source, *more: str, out: str = "out", model=tiny_model) -> dict | str:
        arguments = ["sft", "--demonstrations", str(source), "--model", str(model), "--json"]
        arguments += ["--out", str(tmp_path / out), "--batch-size", "2"]
        arguments += [] if "--micro-batch-size" in more else ["--micro-batch-size", "2"]
        code = main([*arguments, "--precision", "fp32", "--learning-rate", "0.01", *more])
        captured = capsys.readouterr()
        return captured.err if code else json.loads(captured.out.splitlines()[-1])

    return run


def exported(tmp_path, held_out=("lovely",)):
    """Demonstrations as `rlhf export` leaves them, two to train on."""
    from labeling_app.data_io.exporting import export
    from labeling_app.db.store import Store
    from labeling_app.rankings.verdicts import EDITED, PERSON
    from rlhf.records.schema import Message, Prompt, Ranking, Response

    with Store(tmp_path / "labels.db") as store:
        written = [("train", "lovely")] * 2 + [("test", text) for text in held_out]
        for number, (split, best) in enumerate(written):
            words = (Message(role="user", content=f"Trip {number}?"),)
            prompt = Prompt.create(words, split, "live")
            texts = [(best, PERSON), ("awful", "m")]
            responses = [
                Response(id=f"{number}{t}", prompt_id=prompt.id, text=t, model=m) for t, m in texts
            ]
            store.add_prompts([prompt])
            store.add_responses(responses)
            tiers = tuple((response.id,) for response in responses)
            ranking = Ranking(
                id=f"r{number}", prompt_id=prompt.id, annotator="ann", kind="human", tiers=tiers,
                flags=(EDITED,),
            )  # fmt: skip
            store.add_rankings([ranking])
        export(store, tmp_path / "demonstrations", "demonstrations")
    return tmp_path / "demonstrations"


def weights(folder) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_what_people_wrote_is_learnt(sft, tmp_path):
    report = sft(exported(tmp_path), "--epochs", "25")
    assert report["demonstrations"] == {"train": 2, "test": 1}
    assert report["steps"] == 25
    assert report["held_out_loss"]["after"] < report["held_out_loss"]["before"] / 2
    run = RunDir(tmp_path / "out")
    assert (run.read_stage()["stage"], run.read_stage()["status"]) == ("sft", "done")
    losses = [json.loads(line)["loss"] for line in run.metrics_file.read_text().splitlines()]
    assert len(losses) == 25
    assert losses[-1] < losses[0] / 2
    again = sft(tmp_path / "demonstrations", "--epochs", "25", "--resume")
    assert again["already_done"] is True


def test_the_held_out_loss_does_not_depend_on_how_many_examples_a_pass_reads(sft, tmp_path):
    source = exported(tmp_path, held_out=("lovely", "It was lovely, warm and kind. " * 8))
    losses = [
        sft(source, "--epochs", "1", "--micro-batch-size", size, out=size)["held_out_loss"]
        for size in ("1", "2")
    ]
    assert losses[0]["before"] == pytest.approx(losses[1]["before"], rel=1e-5)


def test_an_interrupted_run_ends_with_the_same_bytes(sft, lines, tmp_path):
    sft(lines, "--epochs", "2", "--save-every", "1", "--keep-checkpoints", "9", out="whole")
    sft(lines, "--epochs", "2", "--save-every", "1", "--keep-checkpoints", "9", out="cut")
    cut = RunDir(tmp_path / "cut")
    for step in (3, 4):  # as if it had been killed in the middle of the third checkpoint
        (cut.checkpoints / f"checkpoint-{step}" / "trainer_state.json").unlink()
    stage = cut.read_stage() | {"status": "interrupted"}
    cut.stage_file.write_text(json.dumps(stage))
    resumed = sft(
        lines, "--epochs", "2", "--save-every", "1", "--keep-checkpoints", "9", "--resume",
        out="cut",
    )  # fmt: skip
    assert resumed["steps"] == 4
    steps = [json.loads(line)["step"] for line in cut.metrics_file.read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    first, second = weights(tmp_path / "whole" / "model"), weights(cut.model)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_refusals(sft, lines, tmp_path):
    message = sft(lines, "--max-length", "8", out="c")
    assert "4 of 4 demonstrations have more than 8 tokens" in message
    with pytest.raises(ConfigError, match="--batch-size is 2, no multiple of --micro-batch-size 3"):
        SFTSettings(demonstrations=lines, model="m", out=tmp_path, batch_size=2, micro_batch_size=3)
    lines.write_text('{"prompt": "Hi?"}\n')
    assert f"{lines}:1: A demonstration needs prompt and completion" in sft(lines, out="c")
    lines.write_text('{"messages": [{"role": "user", "content": "Hi?"}]}\n')
    assert f"{lines}:1: A demonstration must end with one response" in sft(lines, out="c")
    lines.write_text("\n")
    assert "holds no demonstrations" in sft(lines, out="c")
    assert not (tmp_path / "c").exists()


def test_dry_run_plans_the_memory(sft, lines, tmp_path):
    result = sft(lines, "--dry-run")
    assert "Memory of each process for supervised fine-tuning" in result["memory_plan"]
    assert "2 sequences of 2048 tokens" in result["memory_plan"]
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_no_number_ends_the_run(sft, lines, tiny_model, tmp_path):
    broken = AutoModelForCausalLM.from_pretrained(tiny_model)
    broken.model.norm.weight.data.fill_(1e38)  # logits beyond float32
    broken.save_pretrained(tmp_path / "broken")
    load_tokenizer(str(tiny_model)).save_pretrained(tmp_path / "broken")
    errors = sft(lines, model=tmp_path / "broken")
    assert "The loss is not a number at step 1" in errors
    assert not (tmp_path / "out" / "model").exists()
    assert RunDir(tmp_path / "out").read_stage()["status"] == "failed"


def test_test_lines_of_a_file_are_held_out(tmp_path):
    file = tmp_path / "lines.jsonl"
    one = {"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "C"}]}
    write_jsonl(
        file,
        [{"prompt": "a", "completion": "A"}, {"prompt": "b", "completion": "B", "split": "test"},
         {**one, "split": "train"}],
    )  # fmt: skip
    rows, _ = read_demonstrations(file)
    found = {name: [row["completion"][0]["content"] for row in of] for name, of in rows.items()}
    assert found == {"train": ["A", "C"], "test": ["B"]}
    write_jsonl(file, [{"prompt": "a", "completion": "A", "split": "dev"}])
    with pytest.raises(InputError, match=r"lines.jsonl:1: Unknown split 'dev'"):
        read_demonstrations(file)


def test_template_values_reach_every_row_and_are_kept(tmp_path, sft, lines):
    folder = build_family_model(tmp_path / "qwen", FAMILIES["qwen"])
    given = ["--chat-template-kwargs", '{"enable_thinking": false}']
    sft(lines, *given, "--epochs", "1", model=folder)
    tokenizer = load_tokenizer(str(tmp_path / "out" / "model"))
    assert template_kwargs(tokenizer) == {"enable_thinking": False}
    settings = SFTSettings(demonstrations=lines, model=str(folder), out=tmp_path / "other")
    rows, _ = read_demonstrations(lines)
    arguments = trainer_arguments(settings, SFTConfig)
    trainer = _build_trainer(settings, arguments, rows, tokenizer)
    for row in trainer.train_dataset:
        assert "assistant\n<think>\n\n</think>\n\n" in tokenizer.decode(row["input_ids"])
