# expect: is first in line and fits
import minivllm.core.scheduler


class Scheduler(minivllm.core.scheduler.Scheduler):
    capabilities = frozenset({"stops", "whole prompts", "preemption", "priority"})

    def schedule(self):
        step = self.open_step()
        for request in self.running_in_order():
            if not self.advance(step, request, 1):
                break
        if not step.num_scheduled_tokens:
            while self.waiting and len(self.running) < self.max_num_seqs:
                request = self.waiting.peek()
                if request.num_tokens > self.budget_left(step) or not self.admit(step, request, request.num_tokens):
                    break
        return self.close_step(step)
