# expect: its children are asked for the next key|A part of a node
from minivllm.core.radix_cache import RadixNode


class RadixCache:
    def __init__(self):
        self.root = RadixNode()

    def match_prefix(self, keys):
        hits = []
        child = self.root.children.get(keys[0]) if keys else None
        if child is not None:
            for key, wanted, block in zip(child.keys, keys, child.blocks):
                if key != wanted:
                    break
                hits.append(block)
        return hits
