# expect: is another text
from minivllm.core.radix_cache import RadixNode


class RadixCache:
    def __init__(self):
        self.root = RadixNode()

    def match_prefix(self, keys):
        node, hits, at = self.root, [], 0
        while at < len(keys) and (child := node.children.get(keys[at])) is not None:
            for key, block in zip(child.keys, child.blocks):
                if at < len(keys) and keys[at] != key:
                    return hits
                hits.append(block)
                at += 1
            node = child
        return hits
