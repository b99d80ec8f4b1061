"""The process that shares extents. It runs as a file and imports nothing of shardkit.

It reads batches from the socket on its standard input. A batch is the number of ranges and then, for each
range, the source, the source's first byte, the number of bytes and the target's first byte. The source is an
index into the descriptors that came along; the first of them is the target. The answer to a batch is one
error number for each range, 0 where the range is now shared. The process ends when the other end of the
socket closes.
"""

import array
import fcntl
import os
import socket
import struct

_FICLONERANGE = 0x4020940D
MAX_DESCRIPTORS = 250  # the kernel sends at most 253 at a time


def _receive(connection: socket.socket, num_bytes: int, descriptors: "array.array[int]") -> bytes:
    """Return exactly `num_bytes`, or nothing at the end. Descriptors that come along are appended."""
    parts = bytearray()
    while len(parts) < num_bytes:
        space = socket.CMSG_SPACE(MAX_DESCRIPTORS * descriptors.itemsize)
        data, extra, _, _ = connection.recvmsg(num_bytes - len(parts), space)
        for level, kind, content in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(content[: len(content) // descriptors.itemsize * descriptors.itemsize])
        if not data:
            return b""
        parts += data
    return bytes(parts)


def main() -> None:
    """Serve batches until the other side is gone."""
    connection = socket.socket(fileno=0)
    while True:
        descriptors = array.array("i")
        head = _receive(connection, 4, descriptors)
        if not head:
            return
        ranges = _receive(connection, struct.unpack("=I", head)[0] * 32, descriptors)
        errors = array.array("i")
        for source, start, num_bytes, target_start in struct.iter_unpack("=QQQQ", ranges):
            argument = struct.pack("=qQQQ", descriptors[source], start, num_bytes, target_start)
            try:
                fcntl.ioctl(descriptors[0], _FICLONERANGE, argument)
                errors.append(0)
            except OSError as error:
                errors.append(error.errno or 1)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(errors.tobytes())


if __name__ == "__main__":
    try:
        main()
    except OSError:  # the other side is gone, or abandoned the batch
        pass
