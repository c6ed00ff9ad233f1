"""One end of a broadcast that is measured: a program that may run in another interpreter, so it needs nothing of ours.

    python collective_end.py gloo|nccl|penstock RANK RECEIVERS ADDRESS

Says "ready", then answers each line of JSON with one: what it was to do, and when that happened (nanoseconds of the
machine's monotonic clock). Rank 0 sends. Leaves to `collective` what is made of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import sys
import time
from datetime import timedelta
from typing import Any

now = time.monotonic_ns


class Ranks:
    """torch.distributed: gloo on the CPU, or nccl with a device for each rank. All ranks do the same, in one order."""

    def __init__(self, backend: str, rank: int, receivers: int, address: str) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        self._place = f"cuda:{rank}" if backend == "nccl" else "cpu"
        if backend == "nccl":
            torch.cuda.set_device(rank)  # broadcast_object_list moves its tensors there, and back
        torch.distributed.init_process_group(
            backend, init_method=address, rank=rank, world_size=receivers + 1, timeout=timedelta(minutes=5)
        )
        self._torch = torch
        self._rank = rank

    def about(self) -> dict[str, Any]:
        return {"torch": str(self._torch.__version__), "devices": int(self._torch.cuda.device_count())}

    def expect(self, what: str, nbytes: int) -> Any:
        """Returns what is to be done once, as a function. On a device it returns when the device is done."""
        torch, distributed = self._torch, self._torch.distributed
        frame = bytes(nbytes) if self._rank == 0 else None
        if what == "whole":
            return lambda: distributed.broadcast_object_list([frame], src=0)
        if what == "size":
            size = torch.zeros(1, dtype=torch.long, device=self._place)
            return lambda: self._broadcast(size)
        if what == "data":  # as it would be if the size were known
            content = torch.zeros(len(pickle.dumps(bytes(nbytes))), dtype=torch.uint8, device=self._place)
            return lambda: self._broadcast(content)
        if what == "known":  # a whole call, if the size were known
            return self._known(nbytes, frame)
        return self._alone(what, nbytes, frame)

    def _broadcast(self, tensor: Any) -> None:
        self._torch.distributed.broadcast(tensor, src=0)
        if tensor.is_cuda:
            self._torch.cuda.synchronize()

    def _known(self, nbytes: int, frame: bytes | None) -> Any:
        torch = self._torch
        room = torch.zeros(len(pickle.dumps(bytes(nbytes))), dtype=torch.uint8, device=self._place)

        def whole() -> None:
            if frame is None:
                self._broadcast(room)
                pickle.loads(room.cpu().numpy().tobytes())
            else:
                sent = torch.frombuffer(bytearray(pickle.dumps(frame)), dtype=torch.uint8)
                self._broadcast(sent.to(self._place))

        return whole

    def _alone(self, what: str, nbytes: int, frame: bytes | None) -> Any:
        """Returns what only the sender does."""
        torch = self._torch
        halves = [torch.zeros(nbytes // 2, dtype=torch.uint8) for _ in range(2)]
        if what == "concatenate":
            return lambda: torch.cat(halves)
        if what == "serialise":
            return lambda: torch.frombuffer(bytearray(pickle.dumps(frame)), dtype=torch.uint8)
        assert what == "device", f"asked to do {what!r}"
        whole = torch.zeros(nbytes, dtype=torch.uint8)

        def there_and_back() -> None:
            whole.to("cuda").cpu()

        return there_and_back

    def close(self) -> None:
        self._torch.distributed.destroy_process_group()


class Penstock:
    def __init__(self, rank: int, receivers: int, address: str) -> None:
        import penstock

        channel: Any = penstock.attach(address)
        self._end = channel.open_sender() if rank == 0 else channel.open_receiver(rank - 1)
        self._rank = rank

    def about(self) -> dict[str, Any]:
        return {}

    def expect(self, what: str, nbytes: int) -> Any:
        assert what == "whole", f"asked to do {what!r}"
        frame = bytes(nbytes)
        if self._rank == 0:
            return lambda: self._end.send(frame, 60.0)
        return lambda: self._end.receive(60.0)

    def close(self) -> None:
        self._end.close()


def perform(step: Any, messages: int, pace_ns: int) -> dict[str, list[int]]:
    """Each time when it began and when it was over; paced: one begins every so often."""
    begins, ends = [0] * messages, [0] * messages
    due = now()
    for index in range(messages):
        if pace_ns:
            while (left := due - now()) > 0:
                time.sleep(left / 1e9)
            due += pace_ns
        begins[index] = now()
        step()
        ends[index] = now()
    return {"begins": begins, "ends": ends}


def main() -> None:
    kind, rank, receivers, address = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # however the parent ends, this process goes with it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ours = kind == "penstock"
    end = Penstock(rank, receivers, address) if ours else Ranks(kind, rank, receivers, address)
    print(json.dumps({"ready": end.about()}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        step = end.expect(order["what"], order["nbytes"])
        # Receivers wait for what comes; only the sender keeps the pace.
        answer = perform(step, order["messages"], order["pace_ns"] if rank == 0 else 0)
        print(json.dumps(answer), flush=True)
    end.close()
    sys.stdout.flush()
    os._exit(0)  # background threads of a library must not hold up the exit


if __name__ == "__main__":
    main()
