# expect: passed
import numpy as np


class NgramDrafter:
    def __init__(self, prompt_lookup_max=5, prompt_lookup_min=2):
        self.prompt_lookup_max = prompt_lookup_max
        self.prompt_lookup_min = prompt_lookup_min

    def propose(self, token_ids, k):
        tokens = [int(t) for t in token_ids]
        text = "".join(chr(256 + t) for t in tokens)
        for n in range(min(self.prompt_lookup_max, len(tokens) - 1), self.prompt_lookup_min - 1, -1):
            at = text[:-1].rfind(text[-n:])
            if at >= 0:
                for i in range(k):
                    tokens.append(tokens[at + n + i])
                return tuple(tokens[len(text) :])
        return []
