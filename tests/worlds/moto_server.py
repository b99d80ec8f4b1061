"""moto's server, without what it does besides for each request: it looks through its own folder for the names of all
services, and logs a line. It prints its port, which it has from the system: one that was merely free a moment before may
be somebody else's by now. It ends when its standard input does, so with the process that started it.
"""

from __future__ import annotations

import logging
import os
import sys

from moto import backends
from moto.server import ThreadedMotoServer

if __name__ == "__main__":
    services = tuple(backends.list_of_moto_modules())
    backends.list_of_moto_modules = lambda: services
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    print(server.get_host_and_port()[1], flush=True)
    sys.stdin.buffer.read()
    os._exit(0)
