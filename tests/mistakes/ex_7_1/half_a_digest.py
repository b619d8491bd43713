# expect: 16 bytes
import hashlib
from array import array


def hash_block(parent, tokens, extra=()):
    return hashlib.sha256((parent or b"") + array("q", tokens).tobytes() + repr(extra).encode()).digest()[:16]
