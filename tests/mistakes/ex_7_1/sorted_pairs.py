# expect: The order of the pairs counts
import hashlib
from array import array


def hash_block(parent, tokens, extra=()):
    return hashlib.sha256((parent or b"") + array("q", tokens).tobytes() + repr(sorted(extra)).encode()).digest()
