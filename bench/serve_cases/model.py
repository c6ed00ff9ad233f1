"""A directory with a small real text model: seeded random weights, and a tokenizer whose every token is visible.

So every token of an answer is an event with a text, in any server, and all count alike.
"""

from __future__ import annotations

from pathlib import Path

from penstock.engine.model_dir import with_model_defaults
from penstock.engine.protocol.config import EngineConfig
from penstock.tools.load.prompts import WORDS

IDS = 1024
LONGEST = 2048  # tokens of a prompt and its answer, where the model knows as many
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
}
SPECIAL = ("<pad>", "<s>", "</s>")
TEMPLATE = "{{ bos_token }}{% for one in messages %}{{ one['content'] }} {% endfor %}"


def make(directory: Path, seed: int = 0) -> None:
    """About 10 MB, of float32."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    numbers = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(
        vocab_size=make_tokenizer(directory), **SHAPE, **numbers, tie_word_embeddings=False
    )
    transformers.LlamaForCausalLM(config).save_pretrained(directory)


def make_tokenizer(directory: Path) -> int:
    """How many ids it has. Of printable ASCII alone: half a character would be an event without a text."""
    import tokenizers
    import transformers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = ["Ġ", *map(chr, range(0x21, 0x7F))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=IDS, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
    )
    texts = [each.read_text() for each in sorted(Path(__file__).parent.parent.rglob("*.py"))]
    words = [" ".join(text.encode("ascii", "ignore").decode().split()) for text in texts]
    made.train_from_iterator([*words, " ".join(WORDS * 20)], trainer)
    special = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    whole = transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)
    whole.chat_template = TEMPLATE
    whole.save_pretrained(directory)
    return int(made.get_vocab_size())


def longest(directory: Path) -> int:
    """Tokens of a prompt and its answer, of both servers: what ours would do by itself, vLLM's has to be told."""
    return with_model_defaults(EngineConfig(model=str(directory), max_model_len=LONGEST)).max_model_len
