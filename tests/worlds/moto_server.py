"""moto's server, without what it does besides for each request: it looks through its own folder for the names of all
services, and logs a line. It ends when its standard input does, so with the process that started it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading

from moto import backends
from moto.server import main


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


if __name__ == "__main__":
    services = tuple(backends.list_of_moto_modules())
    backends.list_of_moto_modules = lambda: services
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    threading.Thread(target=_end_with_input, daemon=True).start()
    main()
