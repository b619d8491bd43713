# expect: Slot 5 (block 1, row 1) should hold the key of token 1, and holds the key of token 0
import torch


def write_kv(key, value, kv_cache, slot_mapping):
    flat = kv_cache.flatten(1, 2)
    slots = slot_mapping.sort().values
    flat[0, slots] = key
    flat[1, slots] = value
