# expect: should return a tensor
import torch
from minivllm.sampling.sampler import INVALID, choose


def rejection_sample(draft_ids, draft_probs, target_probs, noise):
    return [[int(t) for t in row] for row in draft_ids]
