"""A directory with a small real text model: seeded random weights, and a tokenizer with visible tokens only.

So every token of an answer is an event with a text, in any server, and all count alike.
"""

from __future__ import annotations

import json
from pathlib import Path

from penstock.engine.model_dir import with_model_defaults
from penstock.engine.protocol.config import EngineConfig
from penstock.tools.load.prompts import WORDS

IDS = 1024
LONGEST = 3072  # tokens of a prompt and its answer, where the model knows as many
SMALL, REAL = "small", "qwen3-0.6b"  # shapes
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
}
REAL_SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
REAL_IDS = 151_936
SPECIAL = ("<pad>", "<s>", "</s>")
TEMPLATE = "{{ bos_token }}{% for one in messages %}{{ one['content'] }} {% endfor %}"


def make(directory: Path, shape: str = SMALL, seed: int = 0, device: str = "cpu") -> None:
    """Saves random weights and a tokenizer: 10 MB of float32, or 1.2 GB of bfloat16, which `device` draws."""
    import torch
    import transformers
    from safetensors.torch import save_file

    transformers.logging.disable_progress_bar()
    torch.manual_seed(seed)
    numbers = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if shape == REAL:
        make_tokenizer(directory, REAL_IDS)
        large = transformers.Qwen3Config(vocab_size=REAL_IDS, **REAL_SHAPE, **numbers, dtype="bfloat16")
        large.architectures = ["Qwen3ForCausalLM"]
        large.save_pretrained(directory)
        with torch.device("meta"):  # names and shapes
            stock = transformers.Qwen3ForCausalLM(large).state_dict()
        del stock["lm_head.weight"]  # tied to the embedding
        weights = {
            name: torch.ones(tensor.shape, dtype=torch.bfloat16)
            if "norm" in name
            else torch.randn(tensor.shape, device=device).mul_(large.initializer_range).to(torch.bfloat16).cpu()
            for name, tensor in stock.items()
        }
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        return
    make_tokenizer(directory, IDS)
    small = transformers.LlamaConfig(vocab_size=IDS, **SHAPE, **numbers, tie_word_embeddings=False)
    transformers.LlamaForCausalLM(small).save_pretrained(directory)


def make_tokenizer(directory: Path, ids: int = IDS) -> None:
    """Trains a tokenizer of 1,024 ids, and adds made-up words up to `ids`, so that each id has a text.
    All texts are printable ASCII: half a character would be a chunk without text."""
    import tokenizers
    import transformers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = ["Ġ", *map(chr, range(0x21, 0x7F))]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=IDS, initial_alphabet=alphabet, special_tokens=list(SPECIAL), show_progress=False
    )
    texts = [each.read_text() for each in sorted(Path(__file__).parent.parent.rglob("*.py"))]
    words = [" ".join(text.encode("ascii", "ignore").decode().split()) for text in texts]
    tokenizer.train_from_iterator([*words, " ".join(WORDS * 20)], trainer)
    trained = json.loads(tokenizer.to_str())
    vocabulary = trained["model"]["vocab"]
    if len(vocabulary) != IDS:
        raise ValueError(f"expected a tokenizer of {IDS} ids, got {len(vocabulary)}")
    vocabulary.update({f"Ġ{number:x}#": number for number in range(IDS, ids)})
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(trained)),
        **dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL, strict=True)),
    )
    whole.chat_template = TEMPLATE
    whole.save_pretrained(directory)


def longest(directory: Path) -> int:
    """Tokens of a prompt and its answer, of both servers: what ours would do by itself, vLLM's has to be told."""
    return with_model_defaults(EngineConfig(model=str(directory), max_model_len=LONGEST)).max_model_len
