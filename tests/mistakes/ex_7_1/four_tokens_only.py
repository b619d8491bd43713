# expect: Every token counts
import hashlib
from array import array


def hash_block(parent, tokens, extra=()):
    return hashlib.sha256((parent or b"") + array("q", tokens[:4]).tobytes() + repr(extra).encode()).digest()
