"""TensorBoard itself, serving a folder of events in this process on a port of this machine alone."""

from __future__ import annotations

import json
import threading
import urllib.parse
import urllib.request
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # what its server brings along is old
    from tensorboard import default, program


class Served:
    """What TensorBoard's page asks it for: `data/plugin/<name>/<route>` with the arguments of a query."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def bytes(self, route: str, **query: Any) -> bytes:
        with self._open(f"{self.address}data/plugin/{route}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
            return answer.read()  # type: ignore[no-any-return]

    def json(self, route: str, **query: Any) -> Any:
        return json.loads(self.bytes(route, **query))


@contextmanager
def served(folder: Path) -> Iterator[Served]:
    """As `tensorboard --logdir FOLDER` does it, but that everything is read before the first answer."""
    servers: list[Any] = []

    def server(app: Any, flags: Any) -> Any:
        servers.append(program.create_port_scanning_werkzeug_server(app, flags))
        return servers[-1]

    board = program.TensorBoard(default.get_plugins(), server_class=server)
    board.configure(
        logdir=str(folder), host="127.0.0.1", port=0, load_fast="false", reload_interval=0, reload_task="blocking"
    )  # fmt: skip
    before = set(threading.enumerate())
    try:
        yield Served(board.launch())
    finally:
        for started in servers:
            started.shutdown()
            started.server_close()
        for thread in set(threading.enumerate()) - before:
            thread.join(10)
