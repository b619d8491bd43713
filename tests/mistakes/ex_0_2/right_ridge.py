# expect: passed
def step_time(flops, num_bytes, num_launches, device):
    launch = num_launches * device.launch_overhead
    if num_bytes * device.ridge > flops:  # below the ridge: memory
        return launch + num_bytes / device.bandwidth
    return launch + flops / device.flops
