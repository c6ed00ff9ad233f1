"""A directory with a real tokenizer, small and made on the spot: byte-level pairs, of this project's own text."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
WORDS = 8192


def train(directory: Path) -> int:
    """Writes it there. Returns how many ids it has."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=WORDS, initial_alphabet=alphabet, show_progress=False)
    texts = [each.read_text() for folder in ("src", "bench") for each in sorted((ROOT / folder).rglob("*.py"))]
    tokenizer.train_from_iterator(texts, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return int(tokenizer.get_vocab_size())
