# expect: shorter
def step_time(flops, bytes, launches, device):
    return min(flops / device.flops, bytes / device.bandwidth) + launches * device.launch_overhead
