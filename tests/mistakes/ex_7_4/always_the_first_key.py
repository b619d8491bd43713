# expect: its children are asked for the next key|A part of a node
from minivllm.core.radix_cache import RadixNode


class RadixCache:
    def __init__(self):
        self.root = RadixNode()

    def match_prefix(self, keys):
        node, hits = self.root, []
        while len(hits) < len(keys) and (child := node.children.get(keys[0])) is not None:
            for key, block in zip(child.keys, child.blocks):
                if len(hits) == len(keys) or keys[len(hits)] != key:
                    return hits
                hits.append(block)
            node = child
        return hits
