"""A lower bound of the number of tokens of a text, by its characters: a text that must be too long is not tokenized.

A token covers at most as many characters as the longest token of the vocabulary has, unless the tokenizer drops
characters or makes one token of several unknown ones. If tokenizer.json does not rule that out, there is no bound.
`prompt_builder` decides which texts are checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

NFC_SHRINKS = 4  # no character decomposes into more than so many, so no more become one

_GROWING = ("Lowercase", "NFD", "NFKD", "Prepend", "ByteLevel")  # normalizers that drop no character
_KEEPING = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")  # pre-tokenizers that drop no character
_UNLESS_REMOVED = ("Split", "Punctuation")


class _AddedToken(msgspec.Struct):
    content: str
    lstrip: bool = False
    rstrip: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]]
    type: str = "BPE"
    byte_fallback: bool = False


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[_AddedToken] = []
    truncation: Any = None
    normalizer: Any = None
    pre_tokenizer: Any = None


class LengthBound(NamedTuple):
    characters: int  # that one token covers, at most
    counts_spaces: bool  # False: some tokens take the spaces beside them, however many

    def min_tokens(self, text: str) -> int:
        count = len(text) if self.counts_spaces else len("".join(text.split()))
        return -(-count // self.characters)


def length_bound(path: Path) -> LengthBound | None:
    """Returns the bound for the tokenizer in this file; None: there is none."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except msgspec.DecodeError:  # a kind of tokenizer that has no vocabulary of this form
        return None
    shrinks = _shrinks(file.normalizer)
    vocabulary = [token if isinstance(token, str) else token[0] for token in file.model.vocab]
    is_whole = shrinks and file.truncation is None and _keeps_all(file.pre_tokenizer)
    writes_bytes = "ByteLevel" in (*_kinds(file.normalizer), *_kinds(file.pre_tokenizer))
    if not is_whole or not _has_all_bytes(file.model, set(vocabulary), writes_bytes):
        return None
    longest = max(map(len, [*vocabulary, *(token.content for token in file.added_tokens)]))
    return LengthBound(longest * shrinks, not any(token.lstrip or token.rstrip for token in file.added_tokens))


def _kinds(part: Any) -> list[str]:
    """Returns the types of a normalizer or pre-tokenizer, and of the members of a sequence."""
    if part is None:
        return []
    parts = part.get("normalizers", part.get("pretokenizers", ()))
    return [part.get("type"), *(kind for member in parts for kind in _kinds(member))]


def _shrinks(normalizer: Any) -> int:
    """Returns how many characters a normalizer may join into one; 0: any number."""
    if normalizer is None:
        return 1
    kind = normalizer.get("type")
    if kind == "Sequence":
        product = 1
        for member in normalizer.get("normalizers", ()):
            product *= _shrinks(member)
        return product
    if kind in ("NFC", "NFKC"):
        return NFC_SHRINKS
    if kind == "Replace":
        pattern = normalizer["pattern"].get("String", "")
        return 1 if 0 < len(pattern) <= len(normalizer["content"]) else 0
    return 1 if kind in _GROWING else 0


def _keeps_all(pre_tokenizer: Any) -> bool:
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer.get("type")
    if kind == "Sequence":
        return all(map(_keeps_all, pre_tokenizer.get("pretokenizers", ())))
    return kind in _KEEPING or (kind in _UNLESS_REMOVED and pre_tokenizer.get("behavior") not in (None, "Removed"))


def _has_all_bytes(model: _Model, vocabulary: set[str], writes_bytes: bool) -> bool:
    """Returns whether every character has tokens: of unknown characters, several may become one token, or none."""
    from tokenizers.pre_tokenizers import ByteLevel

    if model.type == "BPE" and writes_bytes and vocabulary.issuperset(ByteLevel.alphabet()):
        return True
    fallback = {f"<0x{byte:02X}>" for byte in range(256)}
    return model.type in ("BPE", "Unigram") and model.byte_fallback and vocabulary >= fallback
