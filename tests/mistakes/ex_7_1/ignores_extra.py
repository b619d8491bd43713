# expect: one tenant would find the other's block
import hashlib
from array import array


def hash_block(parent, tokens, extra=()):
    return hashlib.sha256((parent or b"") + array("q", tokens).tobytes()).digest()
