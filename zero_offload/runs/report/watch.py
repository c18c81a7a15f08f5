"""`zero-offload report RUN --watch`: serves the page of a run that trains, which asks for newer data while it is open.

A browser lets no page from a file read another file, so there is a server, on this machine alone. Another machine's
browser comes through ssh: `ssh -L PORT:127.0.0.1:PORT HOST`. The call: `watch(...)`, until the run or Ctrl-C ends it.
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from zero_offload.base.errors import ConfigError, ZeroOffloadError
from zero_offload.checkpoint.run_dir import METRICS_FILE, RUN_FILE
from zero_offload.runs.reader import read_run
from zero_offload.runs.report.page import page_data, page_of
from zero_offload.runs.settings import PORT

EVERY_S = 2.0
GONE_S = 10.0
"""A run that cannot be read for so long is gone."""
_HOSTS = ("127.0.0.1", "localhost")


class PageData:
    """The page's data, read again where the run's files have changed."""

    def __init__(self, path: Path, tbw: float) -> None:
        self._path = path
        self._tbw = tbw
        self._lock = threading.Lock()
        self._seen: list[object] = []
        self._text = ""
        self.is_running = True
        self.began_at: object = None
        """When the run began, which tells two runs in one place apart."""
        self.has_ended = False
        """True if no process is at work in the run directory any more."""

    def read(self) -> tuple[str, str]:
        """The data as JSON, and a tag that another content would not have. Raises ConfigError before the first step."""
        with self._lock:
            run = None
            seen: list[object] = [(file.stat().st_size, file.stat().st_mtime_ns) for file in self._files()]
            if seen != self._seen[:-1] or not self.has_ended:
                run = read_run(self._path)
                self.is_running = run.is_running
                first = (run.description.get("starts") or [{}])[0]
                # Of very many starts the first ones are forgotten: then the run counts as the known one.
                began_at = self.began_at if first.get("step") else first.get("began_at")
                seen.append((run.is_running, len(run.rows), began_at))
            if run is not None and seen != self._seen:
                self._text = json.dumps(page_data(run, self._tbw), allow_nan=False)
                self._seen, self.has_ended, self.began_at = seen, not run.is_running, began_at
            return self._text, f'"{abs(hash(str(self._seen))):x}"'

    def _files(self) -> list[Path]:
        return [file for name in (METRICS_FILE, RUN_FILE) if (file := self._path / name).is_file()]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Without the standard one's question for this machine's name, which waits where no name server answers."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])


def watch(path: Path, tbw: float, port: int | None, tell: Callable[[str], None]) -> None:
    """Serve the page until the run ends. Raises ConfigError if the port is taken or `path` is not a run directory."""
    source = PageData(path, tbw)
    while not _has_rows(source):
        time.sleep(EVERY_S / 4)
    if source.has_ended:
        return
    with _serve(source, port) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="zero_offload-report")
        thread.start()
        try:
            tell(f"the report follows the run at http://127.0.0.1:{server.server_port} (Ctrl-C ends this, not the run)")
            _follow(source, path, tell)
            time.sleep(1.5 * EVERY_S)  # pages that are open get the end
        finally:
            server.shutdown()
            thread.join()


def _follow(source: PageData, path: Path, tell: Callable[[str], None]) -> None:
    """Follow a run, or another in its place, until it ends. Raises errors of reading that last for `GONE_S` seconds."""
    failing_since: float | None = None
    is_waiting = False
    while not source.has_ended:
        time.sleep(EVERY_S / 4)
        before, problem = source.began_at, "no process is at work there"
        try:
            has_rows = _has_rows(source)
            is_gone = not has_rows and not source.is_running
        except (ZeroOffloadError, OSError) as error:  # files are deleted and made again one by one
            is_gone, has_rows, problem = True, False, str(error)
        failing_since = (failing_since or time.monotonic()) if is_gone else None
        if failing_since is not None and time.monotonic() - failing_since > GONE_S:
            raise ConfigError(f"{path} was deleted or discarded while it was watched: {problem}")
        if not has_rows and not is_gone and not is_waiting:
            tell(f"{path} begins anew: the run that was there is discarded; the page waits for a first step")
        is_waiting = not has_rows and not is_gone
        if has_rows and before not in (None, source.began_at):
            tell(f"another run has taken the place of the one in {path}; the page follows it")


def _has_rows(source: PageData) -> bool:
    """False while the run has not come to a row."""
    try:
        source.read()
    except ConfigError as error:
        if "no finished step yet" not in str(error):
            raise
        return False
    return True


def _serve(source: PageData, port: int | None) -> _Server:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # Another site's page may reach this server by a name of its own: it gets nothing.
            if (self.headers.get("Host") or "").rpartition(":")[0] not in _HOSTS:
                return self.send_error(403)
            try:
                text, tag = source.read()
            except (ZeroOffloadError, OSError):
                return self.send_error(503)
            if self.path == "/data" and self.headers.get("If-None-Match") == tag:
                self.send_response(304)
                self.end_headers()
            elif self.path == "/data":
                self._send("application/json", text, tag)
            elif self.path.partition("?")[0] == "/":
                self._send("text/html; charset=utf-8", page_of(json.loads(text), EVERY_S), tag)
            else:
                self.send_error(404)

        def _send(self, kind: str, text: str, tag: str) -> None:
            content = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", tag)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: Any) -> None:
            pass  # standard error is for what a user has to know

    for each in (PORT, 0) if port is None else (port,):
        try:
            return _Server(("127.0.0.1", each), Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise ConfigError(f"port {port or PORT} is taken, or not for this user; give --watch another --port, or none")
