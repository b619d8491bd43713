# expect: That ends the loop
import minivllm.core.scheduler
from minivllm.core.request import RequestStatus


class Scheduler(minivllm.core.scheduler.Scheduler):
    capabilities = frozenset({"stops", "whole prompts", "preemption", "priority"})

    def schedule(self):
        step = self.open_step()
        budget = self.max_num_batched_tokens
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting.peek()
            n = request.num_tokens
            if n > budget or not self.admit(step, request, n):
                break
            budget -= n
        if step.num_scheduled_tokens:
            return self.close_step(step)
        for request in list(self.running):
            if request.status is RequestStatus.RUNNING:
                self.advance(step, request, 1)
        return self.close_step(step)
