"""Classifiers of four families, with two layers and random weights."""

import torch
from transformers import (
    GPTJConfig,
    GPTJForSequenceClassification,
    GPTNeoXConfig,
    GPTNeoXForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "num_labels": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForSequenceClassification, {"num_key_value_heads": 2}),
    "qwen2": (Qwen2Config, Qwen2ForSequenceClassification, {"num_key_value_heads": 2}),
    "gpt_neox": (GPTNeoXConfig, GPTNeoXForSequenceClassification, {}),
    "gptj": (GPTJConfig, GPTJForSequenceClassification, {"rotary_dim": 4}),
}


def build_classifier(family):
    """A classifier of a family with the same weights each time."""
    config_class, model_class, extra = FAMILIES[family]
    torch.manual_seed(0)
    return model_class(config_class(**SIZES, **extra)).eval()
