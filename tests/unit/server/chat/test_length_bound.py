"""The bound of a text's tokens by its characters is never above what the tokenizer makes of it."""

import json
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

tokenizers = pytest.importorskip("tokenizers")

from penstock.engine.protocol.config import SHIPPED  # noqa: E402
from penstock.server.chat.length_bound import NFC_SHRINKS, LengthBound, length_bound  # noqa: E402

FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]
BYTES = tokenizers.pre_tokenizers.ByteLevel.alphabet()
TEXTS = st.text() | st.text(alphabet="ab \n<x>\u0301e\u1100\u1161\u11a8é", max_size=300)


def byte_level(**parts: Any) -> Any:
    vocabulary = {piece: item for item, piece in enumerate([*BYTES, "ab", "abab", "\u0120\u0120"])}
    merges = [("a", "b"), ("ab", "ab"), ("\u0120", "\u0120")]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _with(tokenizer, parts)


def byte_fallback(**parts: Any) -> Any:
    pieces = ["<unk>", *FALLBACK, "a", "b", "ab", "\u2581", "\u2581\u2581"]
    vocabulary = {piece: item for item, piece in enumerate(pieces)}
    merges = [("a", "b"), ("\u2581", "\u2581")]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    normalizers = tokenizers.normalizers
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return _with(tokenizer, parts)


def _with(created: Any, parts: dict[str, Any]) -> Any:
    for name, part in parts.items():
        setattr(created, name, part)
    return created


def bound_of(tokenizer: Any, folder: Path) -> LengthBound | None:
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return length_bound(path)


def nfc() -> Any:
    return tokenizers.normalizers.NFC()


@pytest.mark.parametrize(
    ("make", "characters"),
    [
        (byte_level, 4),
        (lambda: byte_level(normalizer=nfc()), 4 * NFC_SHRINKS),
        (byte_fallback, 6),
        (
            lambda: byte_level(
                pre_tokenizer=tokenizers.pre_tokenizers.Sequence(
                    [
                        tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"\w+|\s+"), "isolated"),
                        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                    ]
                )
            ),
            4,
        ),
    ],
)
def test_no_text_has_fewer_tokens_than_its_bound(make: Any, characters: int, tmp_path: Path) -> None:
    tokenizer = make()
    tokenizer.add_special_tokens(["<x>"])
    bound = bound_of(tokenizer, tmp_path)
    assert bound == LengthBound(characters, True)

    @given(TEXTS)
    def holds(text: str) -> None:
        assert bound is not None
        assert bound.min_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False).ids)

    holds()


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_spaces_are_not_counted_where_a_token_takes_those_beside_it(side: str, tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([tokenizers.AddedToken("<x>", **{side: True})])
    bound = bound_of(tokenizer, tmp_path)
    assert bound == LengthBound(4, False)
    for space in filter(str.isspace, map(chr, range(sys.maxunicode + 1))):
        text = "<x>" + space * 100 if side == "rstrip" else space * 100 + "<x>"
        assert bound.min_tokens(text) <= len(tokenizer.encode(text).ids), hex(ord(space))
    assert bound.min_tokens("a" * 100) == 25


def test_there_is_no_bound_where_a_text_may_be_few_tokens(tmp_path: Path) -> None:
    normalizers, pre = tokenizers.normalizers, tokenizers.pre_tokenizers
    truncated = byte_level()
    truncated.enable_truncation(10)
    words = tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    letters = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    for tokenizer, text in (
        (truncated, "a" * 5000),
        (words, "a" * 5000),
        (letters, "c" * 5000),
        (byte_level(pre_tokenizer=pre.Digits()), "\n" * 5000),
        (tokenizers.Tokenizer(tokenizers.models.Unigram([("<unk>", 0.0), ("a", 0.0)], 0)), "c" * 5000),
        (byte_level(normalizer=normalizers.StripAccents()), "e" + "\u0301" * 5000),
        (byte_level(normalizer=normalizers.Strip()), " " * 5000),
        (byte_level(normalizer=normalizers.Replace(tokenizers.Regex(" +"), " ")), " " * 5000),
        (byte_level(normalizer=normalizers.Replace("aa", "")), "a" * 5000),
        (byte_level(pre_tokenizer=pre.Sequence([pre.WhitespaceSplit(), pre.ByteLevel()])), " " * 5000),
        (byte_level(pre_tokenizer=pre.Sequence([pre.Split(" ", "removed"), pre.ByteLevel()])), " " * 5000),
    ):
        assert len(tokenizer.encode(text).ids) < 5000 / 4, "else there might be a bound"
        assert bound_of(tokenizer, tmp_path) is None, tokenizer.to_str()
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": 7}}))
    assert length_bound(tmp_path / "tokenizer.json") is None


def test_no_character_is_composed_of_more_than_the_bound_says() -> None:
    decomposed = (unicodedata.normalize("NFD", chr(index)) for index in range(sys.maxunicode + 1))
    assert max(map(len, decomposed)) == NFC_SHRINKS


def test_the_model_that_ships_has_a_bound() -> None:
    bound = length_bound(Path(SHIPPED) / "tokenizer.json")
    assert bound is not None and bound.counts_spaces and bound.characters < 40
