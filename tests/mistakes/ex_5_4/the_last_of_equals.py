# expect: request.sort_key says both at once
import minivllm.core.scheduler
from minivllm.core.request import RequestStatus


class Scheduler(minivllm.core.scheduler.Scheduler):
    def pick_victim(self):
        """Who gives its blocks back: the one we would have served last."""
        if self.policy == "priority":
            return max(reversed(self.running), key=lambda request: request.priority)  # of equals the last in the list
        return self.running[-1]

    def preempt(self, request):
        """Its KV goes, its tokens stay, and it waits again, first in line."""
        self.kv_cache_manager.free(request)
        self.running.remove(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        self.preempted_req_ids.append(request.request_id)
        self.waiting.prepend(request)
