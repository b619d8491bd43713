# expect: one tenant would find the other's block
import hashlib
from array import array


def hash_block(parent, tokens, extra=()):
    values = "".join(value for _, value in extra)
    return hashlib.sha256((parent or b"") + array("q", tokens).tobytes() + values.encode()).digest()
