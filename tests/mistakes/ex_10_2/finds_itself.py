# expect: IndexError|and 9 followed
import numpy as np


class NgramDrafter:
    def __init__(self, prompt_lookup_max=5, prompt_lookup_min=2):
        self.prompt_lookup_max = prompt_lookup_max
        self.prompt_lookup_min = prompt_lookup_min

    def propose(self, token_ids, k):
        tokens = token_ids.tolist()
        for n in range(min(self.prompt_lookup_max, len(tokens) - 1), self.prompt_lookup_min - 1, -1):
            for end in range(len(tokens), n - 1, -1):
                if tokens[end - n : end] == tokens[len(tokens) - n :]:
                    for i in range(k):
                        tokens.append(tokens[end + i])
                    return tokens[-k:]
        return []
