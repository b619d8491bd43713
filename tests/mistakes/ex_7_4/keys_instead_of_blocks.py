# expect: that the nodes hold
from minivllm.core.radix_cache import RadixNode


class RadixCache:
    def __init__(self):
        self.root = RadixNode()

    def match_prefix(self, keys):
        node, at, hits = self.root, 0, []
        while child := node.children.get(keys[at] if at < len(keys) else None):
            pairs = list(zip(child.keys, keys[at:]))
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            hits.extend(child.keys[:same])
            if same < len(child.keys):
                break
            node, at = child, at + same
        return hits
