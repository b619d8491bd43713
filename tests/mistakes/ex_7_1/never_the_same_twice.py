# expect: must be found again
import hashlib
import os


def hash_block(parent, tokens, extra=()):
    return hashlib.sha256(os.urandom(8) + repr((parent, tokens, extra)).encode()).digest()
