# expect: passed
import hashlib
import json


def hash_block(parent, tokens, extra=()):
    before = "" if parent is None else parent.hex()
    return hashlib.blake2b(json.dumps([before, tokens, extra]).encode(), digest_size=20).digest()
