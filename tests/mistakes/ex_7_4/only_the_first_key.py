# expect: compare every key of a node
from minivllm.core.radix_cache import RadixNode


class RadixCache:
    def __init__(self):
        self.root = RadixNode()

    def match_prefix(self, keys):
        node, hits = self.root, []
        while len(hits) < len(keys) and (child := node.children.get(keys[len(hits)])) is not None:
            hits += child.blocks[: len(keys) - len(hits)]
            node = child
        return hits
