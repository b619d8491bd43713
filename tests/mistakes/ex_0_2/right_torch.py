# expect: passed
import torch


def step_time(flops, bytes, launches, device):
    times = torch.tensor([flops / device.flops, bytes / device.bandwidth], dtype=torch.float64)
    return times.max() + launches * device.launch_overhead
