# expect: may overlap the end
class NgramDrafter:
    def __init__(self, prompt_lookup_max=5, prompt_lookup_min=2):
        self.prompt_lookup_max = prompt_lookup_max
        self.prompt_lookup_min = prompt_lookup_min

    def propose(self, token_ids, k):
        tokens = token_ids.tolist()
        for n in range(self.prompt_lookup_max, self.prompt_lookup_min - 1, -1):
            for start in range(len(tokens) - 2 * n, -1, -1):
                if tokens[start : start + n] == tokens[len(tokens) - n :]:
                    for i in range(k):
                        tokens.append(tokens[start + n + i])
                    return tokens[-k:]
        return []
