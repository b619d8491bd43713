"""IncrementalDetokenizer: pieces add up to the whole, no half characters, no stall, bounded work (case 24)."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minivllm.text.detokenizer import IncrementalDetokenizer
from minivllm.text.tokenizer import REPLACEMENT, Tokenizer

FAMILY = "👩‍👩‍👧‍👦"  # seven code points, four of four bytes, joined
TEXTS = st.one_of(
    st.text(max_size=40), st.lists(st.sampled_from(["😀", FAMILY, "é", "e\u0301", "日", " ", "the", "\n"])).map("".join)
)
TOKENIZERS = ("byte_level", "sentencepiece", "smollm2_tokenizer")


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def pieces_of(tokenizer: Tokenizer, ids: list[int], **options: object) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, **options)  # type: ignore[arg-type]
    return [*map(detokenizer.push, ids), detokenizer.finish()]


@given(text=TEXTS)
def test_pieces_add_up_to_the_decoded_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@given(text=TEXTS)
def test_no_piece_holds_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assume(REPLACEMENT not in tokenizer.decode(ids))  # as where a vocabulary lacks a byte (SmolLM2's has no 0xF1)
    assert not any(REPLACEMENT in piece for piece in pieces_of(tokenizer, ids))


@given(data=st.data())
def test_any_token_ids_add_up_for_byte_level_tokenizers(
    smollm2_tokenizer: Tokenizer, byte_level: Tokenizer, data: st.DataObject
) -> None:
    tokenizer = data.draw(st.sampled_from([smollm2_tokenizer, byte_level]))
    lone = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
    ids = data.draw(st.lists(st.sampled_from(lone) | st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    skip = data.draw(st.booleans())
    assert "".join(pieces_of(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.data())
def test_the_output_reads_as_the_continuation_of_the_prompt(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = tokenizer.encode(data.draw(TEXTS))
    cut = data.draw(st.integers(0, len(ids)))
    prompt, output = ids[:cut], ids[cut:]
    assume(not tokenizer.decode(prompt).endswith(REPLACEMENT))  # a prompt that ends inside a character
    pieces = pieces_of(tokenizer, output, prompt_token_ids=prompt)
    assert tokenizer.decode(prompt) + "".join(pieces) == tokenizer.decode(ids)


def test_an_emoji_split_over_tokens_comes_in_one_piece(byte_level: Tokenizer) -> None:
    ids = [next(i for i in range(byte_level.vocab_size) if byte_level.token_bytes(i) == bytes([b])) for b in "🤖".encode()]
    assert len(ids) == 4
    assert pieces_of(byte_level, ids) == ["", "", "", "🤖", ""]


def test_a_run_of_lone_continuation_bytes_neither_stalls_nor_grows(tokenizer: Tokenizer) -> None:
    lone = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\x80")
    assert pieces_of(tokenizer, [lone] * 1000) == [REPLACEMENT] * 1000 + [""]


def test_text_after_garbage_is_whole_again(sentencepiece: Tokenizer) -> None:
    byte = {b: sentencepiece.token_to_id(f"<0x{b:02X}>") for b in range(256)}
    ids = [byte[0xFF], *(byte[b] for b in "€".encode()), byte[0xE2], *(byte[b] for b in "😀".encode())]
    assert "".join(pieces_of(sentencepiece, ids, prompt_token_ids=[1])) == f"{REPLACEMENT}€{REPLACEMENT}😀"


def test_an_output_that_ends_inside_a_character_says_so_at_the_end_only(byte_level: Tokenizer) -> None:
    ids = [next(i for i in range(byte_level.vocab_size) if byte_level.token_bytes(i) == bytes([b])) for b in "🤖".encode()[:3]]
    assert pieces_of(byte_level, ids) == ["", "", "", REPLACEMENT]


def test_a_special_token_inside_a_character_does_not_break_it(byte_level: Tokenizer) -> None:
    first, second = (
        next(i for i in range(byte_level.vocab_size) if byte_level.token_bytes(i) == bytes([b])) for b in "¢".encode()
    )
    assert pieces_of(byte_level, [first, byte_level.eos_token_id, second]) == ["", "", "¢", ""]


def test_the_first_word_keeps_its_space_after_a_prompt_and_drops_it_without(sentencepiece: Tokenizer) -> None:
    the = sentencepiece.token_to_id("▁the")
    assert pieces_of(sentencepiece, [the, the], prompt_token_ids=sentencepiece.encode("see")) == [" the", " the", ""]
    assert pieces_of(sentencepiece, [the, the], prompt_token_ids=[]) == ["the", " the", ""]
    assert pieces_of(sentencepiece, [the, the], prompt_token_ids=[1]) == ["the", " the", ""]  # BOS is no text


def test_special_tokens_are_shown_when_asked(byte_level: Tokenizer) -> None:
    ids = [*byte_level.encode("fox"), byte_level.eos_token_id]
    assert "".join(pieces_of(byte_level, ids, skip_special_tokens=False)) == "fox<|eos|>"
