"""The process that forks a decoder for each video of a server process.

The host imports FFmpeg once, and forks in milliseconds: the fewer pages a process has, the faster. Killing a
decoder is therefore cheap; a decoder keeps nothing of a video for the next video, and decoders share the memory of the
imports. The server starts the host at the first video. The host has one thread and decodes nothing.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
from typing import NoReturn

import msgspec

from penstock import standard_streams
from penstock.engine.cluster import logs
from penstock.engine.media import decoder_process, video_messages
from penstock.engine.media.video_file import VideoLimits
from penstock.engine.media.video_messages import SETUP, HostReady
from penstock.engine.media.video_processor import VideoProcessor
from penstock.engine.media.video_settings import VideoSettings


def main(fd: int, parent: int) -> NoReturn:
    """Serves the process at the other end of the socket `fd`, until that is closed."""
    line = decoder_process.serve_parent(fd, parent)
    setup = SETUP.decode(video_messages.receive(line)[0])
    logs.configure("video decoder", setup.log_format, setup.log_level)
    processor = VideoProcessor(msgspec.msgpack.decode(setup.settings, type=VideoSettings))
    limits = msgspec.msgpack.decode(setup.limits, type=VideoLimits)
    _import_all()
    gc.freeze()  # a collection in a decoder would copy the pages of all objects
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps decoders
    video_messages.send(line, HostReady())
    me = os.getpid()
    while True:
        _, fds = video_messages.receive(line)
        if not fds:
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            try:
                line.close()
                decoder_process.end_with(me)
                decoder_line = socket.socket(fileno=fds[0])
                decoder_process.run(decoder_line, processor, limits, setup.store, setup.memory_nbytes)
            finally:
                standard_streams.flush()
                os._exit(0)
        os.close(fds[0])
        pidfds = []
        with contextlib.suppress(ProcessLookupError):  # it has ended already, as its socket says
            pidfds.append(os.pidfd_open(pid))
        video_messages.send(line, HostReady(), pidfds)
        for pidfd in pidfds:
            os.close(pidfd)


def _import_all() -> None:
    """Imports FFmpeg, and what PyAV imports at the first video."""
    import av
    import av.subtitles.stream
    import av.video.reformatter  # noqa: F401
