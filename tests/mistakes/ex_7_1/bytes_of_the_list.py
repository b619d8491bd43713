# expect: bytes must be in range(0, 256)
import hashlib


def hash_block(parent, tokens, extra=()):
    return hashlib.sha256((parent or b"") + bytes(tokens) + repr(extra).encode()).digest()
