# expect: passed
import numpy as np


class NgramDrafter:
    def __init__(self, prompt_lookup_max=5, prompt_lookup_min=2):
        self.prompt_lookup_max = prompt_lookup_max
        self.prompt_lookup_min = prompt_lookup_min

    def propose(self, token_ids, k):
        size = len(token_ids)
        for n in range(min(self.prompt_lookup_max, size - 1), self.prompt_lookup_min - 1, -1):
            windows = np.lib.stride_tricks.sliding_window_view(token_ids[:-1], n)
            places = (windows == token_ids[-n:]).all(axis=1).nonzero()[0]
            if len(places):
                followed = token_ids[places[-1] + n :]
                return np.resize(followed, k).tolist()
        return []
