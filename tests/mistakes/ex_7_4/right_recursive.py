# expect: passed
from minivllm.core.radix_cache import RadixNode


class RadixCache:
    def __init__(self):
        self.root = RadixNode()

    def match_prefix(self, keys):
        return self.below(self.root, list(keys))

    def below(self, node, keys):
        child = node.children.get(keys[0]) if keys else None
        if child is None:
            return []
        n = 0
        while n < min(len(keys), len(child.keys)) and keys[n] == child.keys[n]:
            n += 1
        rest = self.below(child, keys[n:]) if n == len(child.keys) else []
        return child.blocks[:n] + rest
