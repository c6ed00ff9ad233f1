"""Tiny models that attend both ways, in the form in which sentence-transformers saves them, and what transformers
computes with them. Import it behind `pytest.importorskip` of torch and transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "initializer_range": 0.3,
}
# Ids of padding, of the beginning and of the end of a text.
BERT, ROBERTA = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2}, {"<s>": 0, "<pad>": 1, "</s>": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"type_vocab_size": 2},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2},  # windows are shorter than the texts
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1},
}


def write_tokenizer(path: Path, name: str) -> int:
    """A token for each byte. Returns the size of the vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ROBERTA if "roberta" in name else BERT
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {**special, **{token: number for number, token in enumerate(alphabet, len(special))}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(list(special))
    first, last = ("<s>", "</s>") if special is ROBERTA else ("[CLS]", "[SEP]")
    pair = f"{first} $A {last} {last} $B {last}" if special is ROBERTA else f"{first} $A {last} $B:1 {last}:1"
    ids = [(token, special[token]) for token in (first, last)]
    tokenizer.post_processor = processors.TemplateProcessing(f"{first} $A {last}", pair, ids)
    tokenizer.enable_truncation(16)  # as the file of all-MiniLM-L6-v2 has it: no text may be cut by it
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(path / "tokenizer.json"))
    return len(vocabulary)


def write_encoder(path: Path, name: str, mode: str = "", *, normalizes: bool = True, **config: Any) -> Path:
    """Writes a model for vectors, which pools by `mode`, or, if that is empty, without a word about pooling; with
    `num_labels`, a classifier."""
    path.mkdir(parents=True)
    special = ROBERTA if "roberta" in name else BERT
    padding, first, last = (special.get(token, special.get(other)) for token, other in TOKENS)
    ids = {"pad_token_id": padding, "bos_token_id": first, "eos_token_id": last}
    ids |= {"cls_token_id": first, "sep_token_id": last} if name == "modernbert" else {}
    vocab_size = write_tokenizer(path, name)
    shape = {**SHAPE, **ids, **FAMILIES[name], **config, "vocab_size": vocab_size}
    torch.manual_seed(7)
    settings = transformers.AutoConfig.for_model(name, **shape)
    is_classifier = "num_labels" in config
    kind = transformers.AutoModelForSequenceClassification if is_classifier else transformers.AutoModel
    if name == "roberta" and not is_classifier:  # with a prefix, and a head that vectors do not need
        kind = transformers.AutoModelForMaskedLM
    kind.from_config(settings).eval().save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    if mode:
        names = ("Transformer", "Pooling", "Normalize")[: 2 + normalizes]
        modules = [{"type": f"sentence_transformers.models.{each}", "path": f"1_{each}"} for each in names]
        (path / "modules.json").write_text(json.dumps(modules))
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    return path


TOKENS = (("[PAD]", "<pad>"), ("[CLS]", "<s>"), ("[SEP]", "</s>"))


def tokenized(path: Path, text: str, second: str | None = None) -> tuple[list[int], list[int]]:
    """Returns the ids of a text or a pair, and their types."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    encoding = tokenizer.encode(text) if second is None else tokenizer.encode(text, second)
    return encoding.ids, encoding.type_ids


@torch.inference_mode()
def reference_vectors(path: Path, prompts: Sequence[list[int]], mode: str) -> list[npt.NDArray[np.float32]]:
    """Returns pooled hidden states of transformers, without a normalization: cls, mean, or last."""
    stock = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    vectors = []
    for ids in prompts:
        states = stock(input_ids=torch.tensor([ids])).last_hidden_state[0]
        pooled = states.mean(0) if mode == "mean" else states[0 if mode == "cls" else -1]
        vectors.append(pooled.numpy())
    return vectors


@torch.inference_mode()
def reference_logits(path: Path, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Returns the logit of each pair that the classifier of transformers gives."""
    stock = transformers.AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    logits = []
    for pair in pairs:
        ids, types = tokenized(path, *pair)
        more = {"token_type_ids": torch.tensor([types])} if stock.config.model_type == "bert" else {}
        logits.append(float(stock(input_ids=torch.tensor([ids]), **more).logits[0, 0]))
    return logits
