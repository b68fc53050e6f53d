"""Mooncake's transfer engine over TCP, in batches of 1,024 pages: more at a time is refused by its queue.

  python mooncake_tcp.py PAGES PAGE_BYTES ROUNDS SMALL_PAGES SMALL_ROUNDS
"""

import pages

BATCH = 1024


class Side:
    def __init__(self, memory, pipe, writer):
        from mooncake.engine import TransferEngine

        self.memory, self.engine = memory, TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise SystemExit("the engine did not start")
        if self.engine.register_memory(memory.address(), memory.bytes()) != 0:
            raise SystemExit("the memory was not registered")
        pipe.send((f"127.0.0.1:{self.engine.get_rpc_port()}", memory.address()))
        self.peer, self.there = pipe.recv()

    def prepare(self, src, dst):
        size = self.memory.page_bytes
        a = [self.memory.address(i) for i in src]
        b = [self.there + int(i) * size for i in dst]
        return [(a[i : i + BATCH], b[i : i + BATCH], [size] * len(a[i : i + BATCH])) for i in range(0, len(a), BATCH)]

    def move(self, job):
        for a, b, n in job:
            if self.engine.batch_transfer_sync_write(self.peer, a, b, n) != 0:
                raise SystemExit("the transfer failed")

    def wait(self, pipe):
        pass  # it has threads of its own

    def done(self, job):
        pass

    def close(self):
        self.engine.unregister_memory(self.memory.address())


if __name__ == "__main__":
    pages.main(Side)
