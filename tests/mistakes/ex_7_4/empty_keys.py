# expect: IndexError
from minivllm.core.radix_cache import RadixNode


class RadixCache:
    def __init__(self):
        self.root = RadixNode()

    def match_prefix(self, keys):
        node, hits = self.root, []
        while (child := node.children.get(keys[len(hits)])) is not None:
            for key, block in zip(child.keys, child.blocks):
                if len(hits) == len(keys) or keys[len(hits)] != key:
                    return hits
                hits.append(block)
            node = child
        return hits
