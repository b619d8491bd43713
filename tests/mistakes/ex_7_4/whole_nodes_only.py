# expect: A part of a node is a match too
from minivllm.core.radix_cache import RadixNode


class RadixCache:
    def __init__(self):
        self.root = RadixNode()

    def match_prefix(self, keys):
        node, hits = self.root, []
        while len(hits) < len(keys) and (child := node.children.get(keys[len(hits)])) is not None:
            if child.keys != keys[len(hits) : len(hits) + len(child.keys)]:
                break
            hits += child.blocks
            node = child
        return hits
