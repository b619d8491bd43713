"""Exercise 11.1: text as it grows. Cases and judge, in the parent only."""

from __future__ import annotations

import codecs
import random
from typing import Any

from checks.exercises import RIGHT, Case, Verdict
from checks.exercises.words import count, kind_of
from checks.sandbox.plain import Opaque

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SPECIAL = b"<end>"
FAMILY = "\N{MAN}\N{ZERO WIDTH JOINER}\N{WOMAN}\N{ZERO WIDTH JOINER}\N{GIRL}"
MAX_LOOKED_AT = 8  # tokens the tokenizer is asked about, for each token pushed
MAX_DECODED, MANY_BYTES = 12, 1000  # bytes decoded for each that came, and beside


def push_cases(seed: int, scale: int = 1) -> list[Case]:
    rng = random.Random(f"11.1:{seed}")
    robot, accent = "\N{ROBOT FACE}".encode(), "é".encode()
    cases = [
        _case([b"Hi", b" there", b"!"]),
        _case([b"caf", accent[:1], accent[1:]]),
        _case([robot[:1], robot[1:2], robot[2:3], robot[3:]]),
        _case([b"a" + accent[:1], accent[1:] + b"b" + robot[:2], robot[2:] + b"!"]),
        _case([*(part for char in FAMILY for part in _cut(char.encode(), 2)), b" home"]),
        _case([b"", b"so", b""]),
        _case([b"yes", SPECIAL, b" no"]),
        _case([accent[:1], SPECIAL, accent[1:]]),
        _case([b"yes", SPECIAL], skip_special=False),
        _case([b" the", b" the"], prompt=[b"see"], drops_space=True),
        _case([b" the", b" the"], prompt=[], drops_space=True),
        _case([b" the", b" the"], prompt=[SPECIAL], drops_space=True),
        _case([SPECIAL, b" the", b" the"], prompt=[], drops_space=True),
        _case([robot[:2], robot[2:], b" x"], prompt=[], drops_space=True),
        _case([b"odd: ", REPLACEMENT.encode(), b" is a character"]),
        _case([b"x", *[b"\x80"] * 6, b"y"]),
        _case([b"x", robot[:3], b"y"]),
        _case([b"x", robot[:3]]),
        _case([accent[:1], b"a", accent[1:], b"b"], owners=[0, 1, 0, 1]),
        _case([b" the", b" the", b"m", b"n"], owners=[0, 1, 0, 1], prompt=[], drops_space=True),
    ]
    letters = ["a", "e", " ", "é", "\N{ROBOT FACE}", "日", "本", "ß", "\n", FAMILY]
    for length in (12, 400 * scale):
        data = "".join(rng.choice(letters) for _ in range(length)).encode()
        cases.append(_case(_random_cut(rng, data)))
    garbage = [bytes([rng.choice([0x41, 0xC3, 0xA9, 0xF0, 0x9F, 0x80, 0xFF, 0xE2])]) for _ in range(60)]
    return [*cases, _case(garbage)]


def _cut(data: bytes, at: int) -> list[bytes]:
    return [data[:at], data[at:]]


def _random_cut(rng: random.Random, data: bytes) -> list[bytes]:
    """Into tokens of one to five bytes, wherever that falls."""
    tokens = []
    while data:
        n = rng.randint(1, 5)
        tokens.append(data[:n])
        data = data[n:]
    return tokens


def _case(
    tokens: list[bytes],
    *,
    prompt: list[bytes] = [b"go"],  # noqa: B006
    drops_space: bool = False,
    skip_special: bool = True,
    owners: list[int] | None = None,
) -> Case:
    """owners: whose token each is, where there are several outputs at once."""
    pieces = list(dict.fromkeys([SPECIAL, *prompt, *tokens]))
    owners = owners or [0] * len(tokens)
    shown = [repr(token)[1:] for token in tokens]
    listed = ", ".join(shown if len(shown) <= 8 else [*shown[:6], f"... ({count(len(shown), 'token')})"])
    call = f"push one after the other the tokens of the bytes {listed}"
    if drops_space:
        behind = "a prompt" if [piece for piece in prompt if piece != SPECIAL] else "no text"
        call += f"; behind {behind}, with a tokenizer that drops a text's first space"
    if not skip_special:
        call += "; skip_special_tokens=False"
    if max(owners):
        call += "; two outputs take turns"
    return {
        "pieces": [piece.hex() for piece in pieces],
        "special": [0],
        "prompt": [pieces.index(piece) for piece in prompt],
        "turns": [[owner, pieces.index(token)] for owner, token in zip(owners, tokens, strict=True)],
        "num_outputs": max(owners) + 1,
        "drops_space": drops_space,
        "skip_special": skip_special,
        "call": call,
    }


def _bytes_of(case: Case, which: int) -> list[bytes]:
    """What each token of an output adds to its text."""
    at_start = case["drops_space"] and all(i in case["special"] for i in case["prompt"])
    found = []
    for owner, token_id in case["turns"]:
        if owner != which:
            continue
        if token_id in case["special"] and case["skip_special"]:
            found.append(b"")
            continue
        data = bytes.fromhex(case["pieces"][token_id])
        found.append(data.removeprefix(b" ") if at_start else data)
        at_start = False
    return found


def judge_push(case: Case, output: Any) -> Verdict:
    for which, (given, rest) in enumerate(zip(output["given"], output["rest"], strict=True)):
        whose = f"output {which + 1}, " if case["num_outputs"] > 1 else ""
        if wrong := _judge_output(case, which, given, rest, whose):
            return wrong
    if output["looked_at"] > MAX_LOOKED_AT * len(case["turns"]):
        told = (
            f"The text is right, but the tokenizer was asked about {output['looked_at']:,} tokens for an output of"
            f" {count(len(case['turns']), 'token')}: each push decodes what has been decoded before, so the work for a token"
            " grows with the text. Keep only what is unfinished."
        )
        return Verdict("wrong calls", told)
    num_bytes = sum(len(bytes.fromhex(case["pieces"][token_id])) for _, token_id in case["turns"])
    if output["decoded"] > MAX_DECODED * num_bytes + MANY_BYTES:
        told = (
            f"The text is right, but {output['decoded']:,} bytes were decoded for an output of {num_bytes:,}: each push decodes"
            " again what came before, so the work for a token grows with the text. Keep the bytes of the unfinished character"
            " alone: self.utf8 does."
        )
        return Verdict("wrong calls", told)
    return RIGHT


def _judge_output(case: Case, which: int, given: list[Any], rest: Any, whose: str) -> Verdict | None:
    data = _bytes_of(case, which)
    ids = [token_id for owner, token_id in case["turns"] if owner == which]
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    wanted = [decoder.decode(piece) for piece in data]
    whole = "".join(wanted) + decoder.decode(b"", final=True)
    for number, piece in enumerate(given, start=1):
        if not isinstance(piece, str):
            shown = "None. Is a `return` missing?" if piece is None else kind_of(piece)
            hint = " bytes.decode() makes text of bytes." if isinstance(piece, Opaque) and "bytes" in piece.type_name else ""
            return Verdict("wrong type", f"{whose}push number {number} should return text, and returned {shown}{hint}")
    got = 0
    is_clean = REPLACEMENT not in whole
    for number, piece in enumerate(given, start=1):
        before, now = "".join(given[: number - 1]), "".join(given[:number])
        place = f"{whose}push number {number}, of {bytes.fromhex(case['pieces'][ids[number - 1]])!r:.40},"
        if not whole.startswith(now):
            return Verdict("wrong value", f"{place} returned {piece!r}. {_why(case, data, before, piece, number, whole)}")
        complete = "".join(wanted[:number])
        if len(now) < len(complete) and (is_clean or len(complete) - len(now) > 3):
            told = f"{place} returned {piece!r}, and {complete[len(before) :]!r} is complete by now."
            told += f" {_why_late(case, given, number, is_clean)}"
            return Verdict("wrong value", told)
        got = len(now)
    if not isinstance(rest, str) or "".join(given) + rest != whole:
        told = f"{whose}all pieces and finish() together are {''.join(given) + str(rest)!r:.80}, and the text is {whole!r:.80}."
        if got < len(whole):
            told += " What is held back must be where finish(), which is given, finds it: in self.utf8."
        return Verdict("wrong value", told)
    return None


def _why(case: Case, data: list[bytes], before: str, piece: str, number: int, whole: str) -> str:
    token = bytes.fromhex(case["pieces"][next(t for i, t in enumerate(_ids(case, data)) if i == number - 1)])
    if case["num_outputs"] > 1:
        return "Is there state that both outputs share, in the class or outside of it? Each detokenizer has its own."
    if piece == token.decode("utf-8", errors="replace") and REPLACEMENT in piece:
        return (
            f"{REPLACEMENT} stands for bytes that are no character: the token holds a part of one, and the rest comes with the"
            " next token. Give out nothing until a character is whole."
        )
    if not data[number - 1] and token == SPECIAL and piece:
        return "A token in hidden_ids is no text, and adds nothing."
    if case["drops_space"] and piece.lstrip(" ") == token.decode("utf-8", errors="replace").lstrip(" "):
        if piece.startswith(" "):
            return "It is the first token of the text, so this tokenizer writes no space there: bytes_of(token_id, True)."
        return "Its space belongs to the text: only the first token of a text that nothing stands before loses it."
    if before and piece.startswith(before):
        return "The whole text came again. push returns what is new."
    if len(piece) and not whole.startswith(before + piece):
        return f"The text goes on with {whole[len(before) : len(before) + 12]!r}."
    return ""


def _ids(case: Case, data: list[bytes]) -> list[int]:
    for which in range(case["num_outputs"]):
        ids = [token_id for owner, token_id in case["turns"] if owner == which]
        if len(ids) == len(data) and _bytes_of(case, which) == data:
            return ids
    return []


def _why_late(case: Case, given: list[str], number: int, is_clean: bool) -> str:
    if not is_clean:
        return (
            f"Bytes that can never become a character are {REPLACEMENT} at once: a reader must not wait for what cannot come,"
            " nor the memory for it grow."
        )
    if case["drops_space"]:
        return "Is the first token's text lost?"
    if not any(given[:number]):
        return "Nothing has come out so far."
    return "What is whole is given out at once, and only the bytes of an unfinished character are held back."
