# expect: 8 bytes
def hash_block(parent, tokens, extra=()):
    return hash((parent, tuple(tokens), extra)).to_bytes(8, "little", signed=True)
