# expect: A step mixes prompts and decodes|it comes first
import minivllm.core.scheduler


class Scheduler(minivllm.core.scheduler.Scheduler):
    def schedule(self):
        step = self.open_step()
        for request in self.running_in_order():
            n = self.num_new_tokens(request, self.budget_left(step))
            if n > 0 and not self.advance(step, request, n):
                break
        if step.num_scheduled_tokens:
            return self.close_step(step)
        while (request := self.next_in_line()) is not None:
            n = self.num_new_tokens(request, self.budget_left(step))
            if n == 0 or not self.admit(step, request, n):
                break
        return self.close_step(step)
