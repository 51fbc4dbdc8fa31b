"""Models of a wanted shape with random weights, made on the device: nothing is downloaded.

Speed and memory do not depend on what the weights say, but the lengths of answers do. So the end
token has the same probability everywhere, and lengths are geometric: many short answers, a few at
the limit. To that end the first dimension of all hidden states keeps one value, and the end token's
row of the output matrix reads that alone.
"""

import math
from argparse import Namespace
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from examples.benchmarks.gpu import machine
from examples.benchmarks.gpu.results import REPOSITORY, say
from examples.benchmarks.gpu.texts import ANSWER, REHEARSAL, build_tokenizer
from rlhf.modeling.adapters import FOLDER, add_adapters, save_adapters
from rlhf.modeling.heads import put_head_on, reward_head, start_head
from rlhf.modeling.models import describe_model, new_reward_model, save_model
from rlhf.records.jsonl import new_folder

SHAPE = REPOSITORY / "examples" / "six_billion" / "llama_6b"
SIZES = {
    "6b": {},
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,  # or that of 6b stays
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the least that vLLM attends with on CPUs
        "vocab_size": 512,
    },
}
RANK = 16
CONSTANT = 1.0


def write_model(arguments: Namespace) -> Path:
    """A language model with its tokenizer; made once, however often a command is killed."""
    size = "tiny" if arguments.rehearse else arguments.size
    folder: Path = arguments.work / f"model-{size}"
    if (folder / "config.json").is_file():
        return folder
    tokenizer = build_tokenizer()
    config = AutoConfig.from_pretrained(SHAPE, trust_remote_code=False, **SIZES[size])
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    config.bos_token_id = None
    torch.manual_seed(0)
    with torch.device(machine.name()):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, trust_remote_code=False
        )
    answer = ANSWER // REHEARSAL if arguments.rehearse else ANSWER
    end_answers(model, int(tokenizer.eos_token_id), answer)
    with new_folder(folder) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    gib = sum(file.stat().st_size for file in folder.iterdir()) / machine.GIB
    say(f"{folder}: {gib:.3g} GiB written")
    return folder


@torch.no_grad()
def end_answers(model: PreTrainedModel, end: int, tokens: int) -> None:
    """Give the end token a probability of 1 / tokens, whatever was said before."""
    model.get_input_embeddings().weight[:, 0] = CONSTANT
    for layer in model.base_model.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    matrix = model.get_output_embeddings().weight
    matrix[end] = 0
    ids = torch.randint(3, len(matrix), (8, 64), device=matrix.device)
    states = model.base_model(ids).last_hidden_state.flatten(0, 1)
    others = (states @ matrix.T).float()
    others[:, end] = float("-inf")
    wanted = others.logsumexp(dim=1).mean() - math.log(tokens - 1)
    matrix[end, 0] = (wanted / states[:, 0].float().mean()).to(matrix.dtype)


def write_reward_model(arguments: Namespace, model: Path) -> Path:
    """A reward model on the same weights with a random head."""
    folder: Path = arguments.work / f"reward-{model.name}"
    if not (folder / "config.json").is_file():
        tokenizer = build_tokenizer()
        reward = new_reward_model(str(model), int(tokenizer.pad_token_id), seed=1)
        save_model(reward, tokenizer, folder)
    return folder


def write_reward_adapter(arguments: Namespace, model: Path) -> Path:
    """A reward model of which only adapter and head are kept, to be put on the same weights."""
    folder: Path = arguments.work / f"adapter-{model.name}"
    if (folder / FOLDER / "base.json").is_file():
        return folder
    tokenizer = build_tokenizer()
    base = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.bfloat16, trust_remote_code=False
    )
    classifier = put_head_on(base.base_model, int(tokenizer.pad_token_id))
    start_head(reward_head(classifier), seed=1)
    add_adapters(classifier, RANK, 2 * RANK, seed=1)
    classifier.config.reward_bias = 0.0
    classifier.config.architectures = [type(classifier).__name__]
    classifier.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_adapters(folder, classifier, classifier.state_dict(), describe_model(str(model)))
    return folder
