"""From tokens to text, one token at a time: the incremental detokenizer, and the search for stop strings in what it yields.

Lab 11 builds `IncrementalDetokenizer.push` (exercise 11.1). May not know torch, nor where tokens come from.

A token is a piece of UTF-8, not of text: an emoji is four bytes, often two to four tokens. So text is made from the stream of
*bytes*, and a character is given out when its last byte is there.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from minivllm.text.tokenizer import REPLACEMENT, Tokenizer


class IncrementalDetokenizer:
    """Text of one request's output, as it grows. All pieces, joined, are the text of all tokens.

    The output continues the prompt, so its first token keeps its leading space (SentencePiece-like decoders drop one at the
    start of a text) unless the prompt holds no text at all. Its characters are its own: bytes that would finish a character of
    the prompt's are not one.
    """

    capabilities: frozenset[str] = frozenset()

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.hidden_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self.at_start = all(token_id in self.hidden_ids for token_id in prompt_token_ids)
        # Holds back the bytes of an unfinished character: three at most. Bytes that no later byte can make right (the decoder
        # knows at once) become U+FFFD, so a run of garbage neither stalls the stream nor piles up.
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that `token_id` completes: "" while a character is unfinished, else one or more whole characters."""
        if token_id in self.hidden_ids:
            return ""
        is_first, self.at_start = self.at_start, False
        return self.utf8.decode(self.bytes_of(token_id, is_first))

    def bytes_of(self, token_id: int, is_first: bool) -> bytes:
        """What the token adds to the text. Some tokenizers drop a space at the start of one."""
        text = self.tokenizer.token_text(token_id, first=True) if is_first else REPLACEMENT
        return self.tokenizer.token_bytes(token_id) if REPLACEMENT in text else text.encode()

    def finish(self) -> str:
        """What is still held back: U+FFFD if the output ends inside a character, else ""."""
        return self.utf8.decode(b"", final=True)


class StopStringMatcher:
    """Ends a text before the first stop string in it, wherever the borders of the pushed pieces fall.

    The last `max(len(stop)) - 1` characters are held back: they could be the beginning of a stop string, and a stream cannot
    take back what it gave out. With `include_stop_str` nothing is: the text then ends after the match.
    The first match is the one complete first, so the result depends on the text alone, not on how it came in pieces.
    `matched` is that stop string, None until then.
    """

    def __init__(self, stop: Sequence[str], include_stop_str: bool = False) -> None:
        self._stop = tuple(stop)
        self._include = include_stop_str
        self._keep = max((len(s) for s in self._stop), default=1) - 1
        self._tail = ""  # the last `_keep` characters: a match may begin in them
        self.matched: str | None = None

    def push(self, text: str, armed: bool = True) -> str:
        """The text that may be given out now. Matches that end in `text` while not `armed` (min_tokens) do not count."""
        window = self._tail + text
        if armed and (match := self._first_match(window)):
            start, end = match
            self.matched = window[start:end]
            given = window[len(self._tail) : end] if self._include else window[:start]
            self._tail = ""
            return given
        border = max(0, len(window) - self._keep)
        given = text if self._include else window[:border]
        self._tail = window[border:]
        return given

    def finish(self) -> str:
        """What is still held back when the text ends without a match."""
        rest, self._tail = self._tail, ""
        return "" if self._include else rest

    def _first_match(self, window: str) -> tuple[int, int] | None:
        """(start, end) of the match that ends first in the new part of `window`; of two that end together, the longer."""
        found: list[tuple[int, int]] = []
        for stop in self._stop:
            start = window.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if start >= 0:
                found.append((start, start + len(stop)))
        return min(found, key=lambda match: (match[1], match[0]), default=None)
