# expect: the parent belongs into the name
import hashlib
from array import array


def hash_block(parent, tokens, extra=()):
    return hashlib.sha256((parent or b"")[:8] + array("q", tokens).tobytes() + repr(extra).encode()).digest()
