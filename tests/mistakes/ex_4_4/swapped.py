# expect: should hold the key of token 0, and holds the value of token 0
import torch


def write_kv(key, value, kv_cache, slot_mapping):
    flat = kv_cache.flatten(1, 2)
    flat[0, slot_mapping] = value
    flat[1, slot_mapping] = key
