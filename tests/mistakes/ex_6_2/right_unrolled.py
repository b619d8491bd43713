# expect: passed
import minivllm.core.scheduler


class Scheduler(minivllm.core.scheduler.Scheduler):
    def schedule(self):
        step = self.open_step()
        for request in list(self.running):
            if request not in self.running:
                continue
            left = self.max_num_batched_tokens - sum(step.num_scheduled_tokens.values())
            n = self.num_new_tokens(request, left)
            if n == 0:
                continue
            if self.advance(step, request, n) is False:
                break
        while True:
            request = self.next_in_line()
            if request is None:
                break
            blocks, cached = self.kv_cache_manager.get_computed_blocks(request)
            n = self.num_new_tokens(request, self.budget_left(step), cached)
            if n < 1:
                break
            if not self.admit(step, request, n, blocks, cached):
                break
        self.close_step(step)
        return step
