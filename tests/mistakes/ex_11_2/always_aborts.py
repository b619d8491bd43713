# expect: leave looks into self.queues first
from minivllm.serving.async_llm import OutputQueue, OutputStream


class OutputRouter:
    def __init__(self, abort):
        self.abort = abort
        self.queues = {}

    def __len__(self):
        return len(self.queues)

    def open(self, request_id):
        self.queues[request_id] = queue = OutputQueue()
        return OutputStream(request_id, queue, self.leave)

    def route(self, request_id, output):
        if request_id in self.queues:
            self.queues[request_id].put(output)
            if output.finished:
                del self.queues[request_id]

    def leave(self, request_id):
        self.queues.pop(request_id, None)
        self.abort(request_id)

    def fail(self, error, request_id=None):
        for key in list(self.queues) if request_id is None else [request_id]:
            if (queue := self.queues.pop(key, None)) is not None:
                queue.fail(error)
