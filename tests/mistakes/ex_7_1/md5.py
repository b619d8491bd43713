# expect: 16 bytes
import hashlib
from array import array


def hash_block(parent, tokens, extra=()):
    return hashlib.md5((parent or b"") + array("q", tokens).tobytes() + repr(extra).encode()).digest()
