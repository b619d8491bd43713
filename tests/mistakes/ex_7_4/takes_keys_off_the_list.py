# expect: the list `keys` was changed
from minivllm.core.radix_cache import RadixNode


class RadixCache:
    def __init__(self):
        self.root = RadixNode()

    def match_prefix(self, keys):
        node, hits = self.root, []
        while keys and (child := node.children.get(keys[0])) is not None:
            for key, block in zip(child.keys, child.blocks):
                if not keys or keys[0] != key:
                    return hits
                hits.append(block)
                keys.pop(0)
            node = child
        return hits
