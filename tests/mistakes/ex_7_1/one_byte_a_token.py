# expect: does not fit into one byte
import hashlib


def hash_block(parent, tokens, extra=()):
    data = bytes(token % 256 for token in tokens)
    return hashlib.sha256((parent or b"") + data + repr(extra).encode()).digest()
