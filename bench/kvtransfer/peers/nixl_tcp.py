"""NIXL with UCX over TCP: the writer's one-sided writes, with prepared descriptor lists, as its serving integrations use it.

  python nixl_tcp.py PAGES PAGE_BYTES ROUNDS SMALL_PAGES SMALL_ROUNDS
"""

import os

os.environ.setdefault("UCX_TLS", "tcp")
os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")

import pages  # noqa: E402


class Side:
    def __init__(self, memory, pipe, writer):
        from nixl._api import nixl_agent, nixl_agent_config

        self.memory, self.name = memory, "writer" if writer else "reader"
        self.agent = nixl_agent(self.name, nixl_agent_config(backends=["UCX"]))
        self.registered = self.agent.register_memory([(memory.address(), memory.bytes(), 0, "")], mem_type="DRAM")
        pipe.send((self.agent.get_agent_metadata(), memory.address()))
        metadata, there = pipe.recv()
        self.peer = self.agent.add_remote_agent(metadata)
        if not writer:
            return
        size = memory.page_bytes
        self.local = self.agent.prep_xfer_dlist("", [(memory.address(i), size, 0) for i in range(memory.n)], mem_type="DRAM")
        self.remote = self.agent.prep_xfer_dlist(self.peer, [(there + i * size, size, 0) for i in range(memory.n)], mem_type="DRAM")

    def prepare(self, src, dst):
        return self.agent.make_prepped_xfer("WRITE", self.local, src.tolist(), self.remote, dst.tolist(), b"done")

    def move(self, job):
        state = self.agent.transfer(job)
        while state != "DONE":
            if state == "ERR":
                raise SystemExit("the transfer failed")
            state = self.agent.check_xfer_state(job)

    def wait(self, pipe):
        while not pipe.poll(0):  # UCX makes progress only while it is polled
            self.agent.get_new_notifs()

    def done(self, job):
        self.agent.release_xfer_handle(job)

    def close(self):
        pass


if __name__ == "__main__":
    pages.main(Side)
