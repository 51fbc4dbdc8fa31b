"""Tiny classifiers that read text pairs, with random weights and a tokenizer of their own."""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.conftest import CORPUS

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
}
# pad, begin, separator; a separator between the texts, and one more in RoBERTa's pairs
STYLES = {
    "bert": ("[PAD]", "[CLS]", "[SEP]", "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
    "roberta": ("<pad>", "<s>", "</s>", "<s> $A </s>", "<s> $A </s> </s> $B </s>"),
}


def build_pair_tokenizer(style: str = "bert") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that writes pairs as BERT or RoBERTa do."""
    pad, begin, separator, single, pair = STYLES[style]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [pad, begin, separator] if style == "bert" else [begin, pad, separator]
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    ids = [(name, tokenizer.token_to_id(name)) for name in special]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=ids
    )
    names = {"pad_token": pad, "cls_token": begin, "sep_token": separator}
    if style == "roberta":
        names |= {"eos_token": separator, "bos_token": begin}
    else:
        names["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def build_encoder(
    folder: Path, family: str = "Bert", style: str = "bert", labels: int = 1, **config: object
) -> Path:
    """Save a classifier of a family such as `Bert` or `Roberta`, with large random weights."""
    tokenizer = build_pair_tokenizer(style)
    torch.manual_seed(0)
    settings = {**SIZES, "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    settings |= {"num_labels": labels, **config}
    kind = getattr(transformers, f"{family}Config")
    model = getattr(transformers, f"{family}ForSequenceClassification")(kind(**settings))
    with torch.no_grad():
        for value in model.parameters():
            if value.dim() > 1:  # the usual 0.02 gives all texts nearly one reward
                value.normal_(std=value.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
