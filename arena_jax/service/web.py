"""The read-only page and the metrics, over HTTP on the loopback interface alone."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

from arena_jax.errors import ArenaError, UsageError
from arena_jax.service.metrics import metrics_text
from arena_jax.service.page import render
from arena_jax.service.store import Store

if TYPE_CHECKING:
    from arena_jax.service.service import Options

HOST = "127.0.0.1"
_TIMEOUT_S = 10
# Names under which a browser reaches this machine; another one means that a page elsewhere was pointed here.
_OWN_NAMES = {"127.0.0.1", "localhost", "[::1]"}
_MOST_AT_ONCE = 16


class Web:
    """Serves ``/``, ``/metrics`` and ``/status.json`` until :meth:`close`.

    Raises:
        UsageError: the port is taken.
    """

    def __init__(self, store: Store, options: "Options", *, port: int) -> None:
        pages: dict[str, tuple[str, Callable[[], str]]] = {
            "/": ("text/html; charset=utf-8", lambda: render(store, options)),
            "/metrics": ("text/plain; version=0.0.4; charset=utf-8", lambda: metrics_text(store, options)),
            "/status.json": (
                "application/json",
                lambda: json.dumps({"jobs": [job.row() for job in store.jobs(ended=100)]}),
            ),
        }
        slots = threading.BoundedSemaphore(_MOST_AT_ONCE)

        class Handler(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_S
            server_version = "arena-jax"
            sys_version = ""

            def do_GET(self) -> None:
                if (self.headers.get("Host") or "").rpartition(":")[0] not in _OWN_NAMES:
                    self._send(403, "text/plain", "this page is for this machine\n")
                    return
                found = pages.get(self.path.partition("?")[0])
                if found is None:
                    self._send(404, "text/plain", "there are /, /metrics and /status.json\n")
                    return
                if not slots.acquire(timeout=1):
                    self._send(503, "text/plain", "busy\n")
                    return
                try:
                    self._send(200, found[0], found[1]())
                except ArenaError as error:
                    self._send(500, "text/plain", f"{error.message}\n")
                finally:
                    slots.release()
                    store.close()  # this thread's connection

            def _send(self, code: int, kind: str, text: str) -> None:
                body = text.encode()
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
                self.send_header("X-Content-Type-Options", "nosniff")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing: the page is fetched every few seconds."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """A reader that hung up is no news."""

        try:
            self._server = Server((HOST, port), Handler)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"cannot serve the page on {HOST}:{port}: {getattr(error, 'strerror', None) or error}",
                hint="give another --port, or --port 0 for any that is free",
            ) from error
        self.url = f"http://{HOST}:{self._server.server_address[1]}/"
        threading.Thread(target=self._server.serve_forever, name="service-page", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
