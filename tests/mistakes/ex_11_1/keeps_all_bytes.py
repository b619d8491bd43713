# expect: bytes were decoded for an output of
import codecs

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class IncrementalDetokenizer:
    def __init__(self, tokenizer, prompt_token_ids=(), skip_special_tokens=True):
        self.tokenizer = tokenizer
        self.hidden_ids = tokenizer.special_ids if skip_special_tokens else frozenset()
        self.at_start = all(token_id in self.hidden_ids for token_id in prompt_token_ids)
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id):
        if token_id in self.hidden_ids:
            return ""
        is_first, self.at_start = self.at_start, False
        self.data = getattr(self, "data", b"") + self.bytes_of(token_id, is_first)
        self.sent = getattr(self, "sent", "")
        self.utf8.reset()
        text = self.utf8.decode(self.data)
        new, self.sent = text[len(self.sent):], text
        return new

    def bytes_of(self, token_id, is_first):
        text = self.tokenizer.token_text(token_id, first=True) if is_first else REPLACEMENT
        return self.tokenizer.token_bytes(token_id) if REPLACEMENT in text else text.encode()

    def finish(self):
        return self.utf8.decode(b"", final=True)
