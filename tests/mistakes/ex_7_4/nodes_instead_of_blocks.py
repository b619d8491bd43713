# expect: a list of the blocks|returned a list of
from minivllm.core.radix_cache import RadixNode


class RadixCache:
    def __init__(self):
        self.root = RadixNode()

    def match_prefix(self, keys):
        node, hits = self.root, []
        at = 0
        while at < len(keys) and (child := node.children.get(keys[at])) is not None:
            hits.append(child)
            at += len(child.keys)
            node = child
        return hits
