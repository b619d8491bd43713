# expect: a digest of it collides with it
import hashlib


def hash_block(parent, tokens, extra=()):
    return hashlib.sha256(str(hash((parent, tuple(tokens), extra))).encode()).digest()
