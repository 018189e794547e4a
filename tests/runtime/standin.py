"""A rank process that speaks the wire without torch: warms up, joins, parks, forms, and does what STANDIN tells it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

from rerail.runtime.clock import Phase, StepClock
from rerail.runtime.frames import decode_to_rank, frame, recv_frame
from rerail.runtime.wire import Assign, Form, Formed, Interrupt, Joined, Message, Parked, Resumed, Stop, Warm


def main() -> None:
    script_mode = os.environ.get("RERAIL_STANDBY") == "script"
    words = os.environ.get("STANDIN", "").split()
    sock = socket.socket(fileno=int(os.environ["RERAIL_LINK_FD"]))

    def say(message: Message) -> None:
        sock.sendall(frame(message))

    print("warming", flush=True)
    if script_mode and "needs-rank" in words:
        print(os.environ["RANK"])
    say(Warm(at_join=script_mode))
    clock, rank = None, -1
    while (received := recv_frame(sock)) is not None:
        message, fds = decode_to_rank(received[0]), received[1]
        match message:
            case Assign():
                rank = message.rank
                clock = StepClock(fds[0])
                print(f"rank {rank} of {message.world_size} in {message.env.get('LOCAL_RANK')}", flush=True)
                begin(words, clock)
                if "unaware" not in words:
                    say(Joined(rank=rank, generation=message.generation, replaceable=True))
                    say(parked(rank, message.generation))
            case Interrupt():
                say(parked(rank, message.generation))
            case Form():
                generation = message.plan.generation
                clock.set_step(message.plan.version) if clock else None
                say(Formed(rank=rank, generation=generation, version=message.plan.version))
                say(Resumed(rank=rank, generation=generation, version=message.plan.version + 1, step_s=0.01))
            case Stop():
                print(f"stopped: {message.reason}, culprit {message.culprit}", flush=True)
                if "deaf" not in words:
                    sys.exit(1)


def begin(words: list[str], clock: StepClock) -> None:
    if "deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "grandchild" in words:
        # One in our own session, one in a session of its own.
        for new_session in (False, True):
            subprocess.Popen(["sleep", "300"], start_new_session=new_session)
    if "beating" in words:
        for _ in range(5):
            clock.step_took(0.05, 1, 0.0, 0.05, 0.0, 0.0)
        clock.enter(Phase.COMPUTE if "stuck" in words else Phase.PARKED)

        def beat() -> None:
            while True:
                clock.beat()
                time.sleep(0.05)

        threading.Thread(target=beat, daemon=True).start()


def parked(rank: int, generation: int) -> Parked:
    port = 1234 if rank == 0 else 0
    return Parked(rank=rank, generation=generation, version=0, intact=True, in_training=False, store_port=port)


main()
