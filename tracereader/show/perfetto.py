"""Hands a trace to ui.perfetto.dev in the user's browser, without an upload.

A page on 127.0.0.1 opens Perfetto and passes the bytes by its documented postMessage protocol: PING
until it answers PONG, then {perfetto: {buffer, title, fileName}}. Source: Perfetto's documentation,
"Deep linking to the Perfetto UI".
"""

import getpass
import os
import secrets
import socket
import sys
import threading
import webbrowser
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path

from tracereader.command import DEFAULT_LIMIT
from tracereader.interrupts import raised
from tracereader.show.text import console, paragraph, plain, shown_path
from tracereader.trace.document import opened

ORIGIN = "https://ui.perfetto.dev"
# Seconds to wait for a click on the page, and after it for Perfetto's answer.
TIMEOUT_S = 600
ANSWER_S = 60
LATER_S = 5  # the page gives up before that, and says so
PRIVATE = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


class Handler(BaseHTTPRequestHandler):
    """Serves one page and its trace, and takes the page's message on the hand-over. All other requests are refused."""

    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds that one idle connection may hold a thread

    def do_GET(self):
        if not self._is_ours():
            return
        if self.path == f"/{self.server.token}/":
            self._page()
        elif self.path == f"/{self.server.token}/trace":
            self._answer("application/octet-stream", self.server.content, {})
            self.server.fetched.set()
        else:
            self._refuse(HTTPStatus.NOT_FOUND)

    def do_POST(self):
        if not self._is_ours():
            return
        if self.path != f"/{self.server.token}/done":
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        self._send(HTTPStatus.NO_CONTENT, {"Connection": "close"})
        self.server.handed_over.set()

    def _is_ours(self) -> bool:
        # A foreign page can reach this port through the user's browser, by this or another host name.
        host = f"127.0.0.1:{self.server.server_port}"
        if self.headers.get("Host") == host and self.headers.get("Origin") in (None, f"http://{host}"):
            return True
        self._refuse(HTTPStatus.FORBIDDEN)
        return False

    def _page(self):
        nonce = secrets.token_urlsafe(16)
        page = (resources.files("tracereader.show") / "perfetto.html").read_text("utf-8")
        values = (("TITLE", self.server.title), ("NONCE", nonce), ("ORIGIN", self.server.perfetto))
        for word, value in (*values, ("ANSWER_S", f"{self.server.answer_s:g}")):
            page = page.replace(f"__{word}__", value)
        own = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; connect-src 'self'"
        self._answer("text/html; charset=utf-8", page.encode(), {"Content-Security-Policy": own})

    def _answer(self, kind: str, body: bytes, more: dict[str, str]):
        self._send(HTTPStatus.OK, {"Content-Type": kind, "Content-Length": str(len(body))} | more | PRIVATE)
        self.wfile.write(body)

    def _refuse(self, status: HTTPStatus):
        self._send(status, {"Content-Length": "0", "Connection": "close"})

    def _send(self, status: HTTPStatus, headers: dict[str, str]):
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        self.end_headers()

    def send_error(self, code, message=None, explain=None):
        self._refuse(HTTPStatus(code))  # a wrong method or a broken request gets no error page of Python's

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, trace: Path, content: bytes, perfetto: str = ORIGIN, answer_s: float = ANSWER_S):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content = content
        self.title = "".join(one if one.isalnum() or one in "._-" else "_" for one in trace.name)
        self.perfetto = perfetto
        self.token = secrets.token_urlsafe(24)
        self.answer_s = answer_s
        self.fetched = threading.Event()  # the page has the trace and now asks Perfetto
        self.handed_over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{self.token}/"

    def handle_error(self, request, client_address):
        pass  # the browser closed the connection


def hand_over(
    trace: Path, content: bytes | None = None, timeout_s: float = TIMEOUT_S, answer_s: float = ANSWER_S
) -> bool:
    """Serve the page until Perfetto has the trace, the time is up or Ctrl-C. Return whether Perfetto has the trace.

    content: the bytes to hand over instead of the file's; `trace` is then their name. timeout_s: the seconds to wait
    for a click on the page. answer_s: the seconds to wait after it for Perfetto's answer.
    """
    out = console()
    instead = f"open {plain(shown_path(trace))} at {ORIGIN} yourself" if content is None else "run the command again"
    why = "no longer waiting"
    if content is None:
        with opened(trace, DEFAULT_LIMIT) as file:
            content = file.read()
    with raised(), Server(trace, content, answer_s=answer_s) as server:
        threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True).start()
        try:
            # Inside the try block, because Ctrl-C may come as soon as the last line is printed.
            out.print()
            paragraph(out, f"{plain(shown_path(trace))} is served at {server.url}", "[bold]Perfetto[/bold]   ")
            if not _browser(server.url):
                port = server.server_port
                out.print("no browser here: on the machine with your browser, run")
                out.print(f"  ssh -L {port}:127.0.0.1:{port} {_user()}@{socket.gethostname()}")
                out.print("and open that address. Nothing is uploaded: the trace goes from here to your browser")
            after = f"{_minutes(timeout_s)} without a click, or {_minutes(answer_s)} without an answer from Perfetto"
            paragraph(out, f"Ctrl-C ends it; it ends by itself after the hand-over, {after}")
            if not server.fetched.wait(timeout_s):
                why = f"nobody clicked on its page within {_minutes(timeout_s)}: {instead}"
            else:
                server.handed_over.wait(answer_s + LATER_S)
                why = f"{ORIGIN} did not answer: is it reachable from your browser? If not, {instead} where it is"
        except KeyboardInterrupt:
            pass
        finally:
            server.shutdown()
    paragraph(out, "handed over to Perfetto" if server.handed_over.is_set() else f"not handed over: {why}")
    return server.handed_over.is_set()


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:g} minute{'s' * (seconds != 60)}" if seconds >= 60 else f"{seconds:g} s"


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        return "you"


def _browser(url: str) -> bool:
    """Open the page in a graphical browser. Return whether this session has one."""
    headless = sys.platform.startswith("linux") and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    if "SSH_CONNECTION" in os.environ or headless:
        return False
    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False
