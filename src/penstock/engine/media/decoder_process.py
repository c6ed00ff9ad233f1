"""A decoder: the process of one video. Reads the container, decodes the frames for the model, writes their tensors into
the store, and ends.

`decoder_host` forks a decoder. `video_decoders` in the server talks to the decoder, and kills a decoder that takes too
long. A file that crashes FFmpeg, or makes FFmpeg allocate without end, costs only this process and the file's request.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import resource
import signal
import socket
import traceback
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock import MemoryExhausted, Timeout, standard_streams
from penstock.engine.cluster.logs import event
from penstock.engine.media import video_messages
from penstock.engine.media.media_kind import MediaRefused
from penstock.engine.media.video_file import VideoFile, VideoLimits
from penstock.engine.media.video_messages import TO_DECODER, Decode, Inline, Open, Opened, Rejected, Stored
from penstock.engine.media.video_processor import VideoProcessor
from penstock.engine.media.video_settings import VideoInfo, VideoPlan
from penstock.tensor import Lease, Store, plan
from penstock.tensor.tree import read_to_fill

PR_SET_PDEATHSIG = 1
ROOM_TIMEOUT = 0.1  # seconds to wait for room in the store: as of a Scope
RGB = 3  # bytes of a pixel
COPIES = 3  # of the frames that are processed at a time: as they are decoded, and resized along one side and both
# What a terminal or an init system sends to all processes: the server decides when its processes end.
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OOM_SCORE = "500"  # a decoder is killed before a server or a worker where memory lacks


class DecoderEnd(Exception):
    """The server has closed its end."""


def serve_parent(fd: int, parent: int) -> socket.socket:
    """Returns the socket of a process that serves its parent, and ends with the parent."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    standard_streams.guard()
    end_with(parent)
    return socket.socket(fileno=fd)


def end_with(parent: int) -> None:
    """Makes this process end with its parent: at once if the parent has died already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def run(line: socket.socket, processor: VideoProcessor, limits: VideoLimits, ticket: str | None, nbytes: int) -> None:
    """Decodes one video. `nbytes`: memory that the process may allocate after the fork."""
    _bound_memory(nbytes)
    with contextlib.suppress(DecoderEnd):
        try:
            _Decoder(line, processor, limits, ticket).run()
        except MediaRefused as refused:
            _send(line, Rejected(refused.status, refused.reason))
        except MemoryError:
            _send(line, Rejected(413, f"decoding the video takes more than {nbytes} bytes of memory"))
        except DecoderEnd:
            raise
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            event("video decoder failed", logging.ERROR, error=failure, trace=traceback.format_exc())
            _send(line, Rejected(500, "the decoder of this video has failed; the server's log says how"))


def end_early() -> None:
    """Makes the kernel end this process before others where memory lacks."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(OOM_SCORE)


def _bound_memory(nbytes: int) -> None:
    end_early()
    with open("/proc/self/status") as file:
        fields = dict(entry.split(":", 1) for entry in file if ":" in entry)
    used = int(fields["VmData"].split()[0]) << 10
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = used + nbytes if hard == resource.RLIM_INFINITY else min(used + nbytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash leaves no file of what a client has sent


class _Decoder:
    def __init__(self, line: socket.socket, processor: VideoProcessor, limits: VideoLimits, ticket: str | None) -> None:
        self._line = line
        self._processor = processor
        self._limits = limits
        self._ticket = ticket

    def run(self) -> None:
        message, (fd,) = self._receive()
        assert isinstance(message, Open), "the first message of a server"
        key = message.key
        with open(fd, "rb") as file:
            video = VideoFile(file, self._limits)
            info = VideoInfo(**video.info._asdict())
            planned = self._plan(info)
            frame_count, size = len(planned.indices), (info.width, info.height)
            at_once = min(frame_count, self._processor.frames_at_once(planned, info.height, info.width))
            nbytes = planned.nbytes + COPIES * at_once * RGB * info.width * info.height
            self._send(Opened(info.frames, info.duration, *size, frame_count, planned.tokens, nbytes))
            message, _ = self._receive()
            assert isinstance(message, Decode), "the second message of a server"
            frames: Any = video.frames(planned.indices)
            if self._ticket is None or not self._store(self._ticket, key, frames, planned):
                self._send_inline(frames, planned)

    def _plan(self, info: VideoInfo) -> VideoPlan:
        planned = self._processor.plan(info)
        count, most = len(planned.indices), self._limits.frames
        if count > most:
            raise MediaRefused(
                413, f"of a video the model gets at most {most} frames, of this one it would get {count}"
            )
        return planned

    def _store(self, ticket: str, key: bytes, frames: Any, planned: VideoPlan) -> bool:
        """Makes the tensors in the store. Returns False if it has no room for them."""
        with Store.attach(ticket, peer_name="video decoder") as store:
            try:
                loan = store.loan(key, self._processor.layout(planned), timeout=ROOM_TIMEOUT)
            except (MemoryExhausted, Timeout):  # or another process makes the same tensors, slowly
                return False
            if isinstance(loan, Lease):
                self._send(Stored(is_new=False))
                self._receive_end()
                loan.release()
                return True
            with loan:
                self._processor.process(frames, planned, loan.value())
                lease = loan.commit()
            self._send(Stored(is_new=True))
            self._receive_end()
            lease.release()
        return True

    def _send_inline(self, frames: Any, planned: VideoPlan) -> None:
        """Makes the tensors in a file of memory."""
        tree = plan(self._processor.layout(planned), is_filled_later=True)
        fd = os.memfd_create("video tensors", os.MFD_CLOEXEC)
        os.ftruncate(fd, max(tree.nbytes, 1))
        room = mmap.mmap(fd, 0)
        tree.write(room)
        self._processor.process(frames, planned, read_to_fill(tree.layout, room))
        self._send(Inline(tree.layout, tree.nbytes), (fd,))
        self._receive_end()

    def _receive_end(self) -> None:
        """Waits until the server has taken what was sent, as its socket's end shows."""
        with contextlib.suppress(DecoderEnd):
            self._receive()

    def _receive(self) -> tuple[Open | Decode, list[int]]:
        packet, fds = video_messages.receive(self._line)
        if not packet:
            raise DecoderEnd
        return TO_DECODER.decode(packet), fds

    def _send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        _send(self._line, message, fds)


def _send(line: socket.socket, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
    try:
        video_messages.send(line, message, fds)
    except (BrokenPipeError, ConnectionResetError):
        raise DecoderEnd from None
