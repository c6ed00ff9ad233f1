"""From ids to text: whole characters only, and what stop strings leave of it."""

import random
from typing import Any

import pytest

from penstock.engine.text.detokenizer import StopStringFilter, Vocabulary, build_vocabulary
from tests.support.columns import ints

tokenizers = pytest.importorskip("tokenizers")

SENTENCES = [
    "the cat sat on the mat",
    "naïve café",
    "日本語のテキスト",
    "🙂🙃 smile 👩‍👩‍👧",
    'he said: "no\\n"\n\tstop',
]
BYTES = Vocabulary([bytes([token]) for token in range(256)], special=(0,))


def byte_level(size: int = 300) -> Any:
    """A tiny tokenizer that writes bytes: nearly every character beyond ASCII is several ids."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"])
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens(["<tool é>"])
    return tokenizer


def with_fallback() -> Any:
    """A tiny one in the manner of sentencepiece: what it has no piece for is bytes."""
    pieces = ["<s>", "</s>", "<unk>", "▁", "▁the", "▁cat", "s", "a", "t", "c", "h", "e", "o", "n", "m"]
    vocabulary = {
        piece: number for number, piece in enumerate([*pieces, *(f"<0x{number:02X}>" for number in range(256))])
    }
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    decoders = tokenizers.decoders
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def word_piece() -> Any:
    """A tokenizer with texts that differ from the sum of the pieces."""
    pieces = ["[UNK]", "the", "cat", "##s", "sat", ",", "o", "##n"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token="[UNK]")
    )
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    return tokenizer


def written(text: StopStringFilter, ids: Any) -> list[str]:
    """What is shown with each id, and at the end."""
    return [*(text.add(token) for token in ids), text.end()]


# ── characters ──
@pytest.mark.parametrize("sentence", SENTENCES)
def test_detokenized_text_has_no_half_characters(sentence: str) -> None:
    tokenizer = byte_level()
    vocabulary = build_vocabulary(tokenizer)
    shown = written(StopStringFilter(vocabulary.stream((), True)), tokenizer.encode(sentence).ids)
    assert "".join(shown) == sentence and len(shown) > 2
    assert all("\ufffd" not in text for text in shown)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("skip_special", [True, False])
def test_any_ids_give_the_text_that_the_tokenizer_gives_for_all_at_once(seed: int, skip_special: bool) -> None:
    tokenizer = byte_level()
    vocabulary = build_vocabulary(tokenizer)
    chance = random.Random(seed)
    ids = [chance.randrange(tokenizer.get_vocab_size() + 3) for _ in range(200)]
    shown = written(StopStringFilter(vocabulary.stream((), skip_special)), ids)
    assert "".join(shown) == tokenizer.decode(ids, skip_special_tokens=skip_special)


def test_bytes_at_the_end_that_are_no_character_are_shown_as_such() -> None:
    shown = written(StopStringFilter(BYTES.stream((), True)), "é".encode()[:1])
    assert shown == ["", "\ufffd"]
    shown = written(StopStringFilter(BYTES.stream((), True)), b"\xe2\x82a")
    assert shown == ["", "", "\ufffda", ""]


def test_bytes_for_want_of_a_piece_become_characters() -> None:
    tokenizer = with_fallback()
    vocabulary = build_vocabulary(tokenizer)
    ids = [tokenizer.token_to_id(piece) for piece in ("▁the", "▁cat", "<0xE2>", "<0x82>", "<0xAC>", "s", "</s>")]
    shown = written(StopStringFilter(vocabulary.stream((0, 4), True)), ids)
    assert shown == [" the", " cat", "", "", "€", "s", "", ""]
    shown = written(StopStringFilter(vocabulary.stream((0, 4), False)), ids)
    assert "".join(shown) == " the cat€s</s>"


def test_unknown_tokenizer_decodes_by_itself() -> None:
    tokenizer = word_piece()
    vocabulary = build_vocabulary(tokenizer)
    assert not vocabulary.is_whole[: vocabulary.stride].any()
    shown = written(StopStringFilter(vocabulary.stream((1,), True)), [2, 3, 4, 6, 7, 5, 1])
    assert "".join(shown) == " cats sat on, the"


def test_a_tokenizers_own_stream_is_flushed_as_well() -> None:
    tokenizer = byte_level()
    pieces = [b""] * tokenizer.get_vocab_size()
    vocabulary = Vocabulary(pieces, (), tokenizer)
    ids = tokenizer.encode("a€").ids
    shown = written(StopStringFilter(vocabulary.stream(ids[-8:], True)), ids[:-1])
    assert "".join(shown) == "a\ufffd" and "\ufffd" not in "".join(shown[:-1])


def test_vocabulary_has_plain_and_quoted_text_of_each_id() -> None:
    tokenizer = byte_level()
    vocabulary = build_vocabulary(tokenizer)
    quote, eos = tokenizer.token_to_id('"'), tokenizer.token_to_id("</s>")
    skip, keep, none = (table * vocabulary.stride for table in range(3))
    rows = vocabulary.rows(ints(quote, eos, eos, quote, 1 << 30, -1), ints(skip, skip, keep, none, skip, keep))
    assert [vocabulary.texts[row] for row in rows] == [b'"', b"", b"</s>", b"", b"", b""]
    assert vocabulary.quoted[rows[0]] == b'\\"'
    assert vocabulary.is_whole[rows].all()
    assert vocabulary.token_bytes(1 << 30) == vocabulary.token_bytes(-1) == b""


# ── stop strings ──
def test_stop_string_may_end_in_a_character_completed_by_the_end() -> None:
    text = StopStringFilter(BYTES.stream((), True), ("a\ufffd",))
    assert "".join(written(text, b"xa\xe2")) == "x" and text.stop == "a\ufffd"
