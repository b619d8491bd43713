# expect: a text may hold any sign
import hashlib
from array import array


def hash_block(parent, tokens, extra=()):
    text = "".join(key + value for key, value in extra)
    return hashlib.sha256((parent or b"") + array("q", tokens).tobytes() + text.encode()).digest()
