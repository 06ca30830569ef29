"""--open and --export: what they hand over and write, the page and its refusals, and one click in a real Chromium."""

import collections
import contextlib
import gzip
import http.client
import json
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from references import H200, ROOT

from tracereader import cli
from tracereader.show import perfetto

TRACE = H200 / "02_linear/1024x32x64_bf16_cold_eager.json.gz"
OVERLAPPING = H200 / "05_llm/1x512_bf16_warm_eager_triton-overlap_graph.json.gz"  # programmatic dependent launch
RANKS = sorted(ROOT.glob("traces/reference/nvidia-h200-x2/06_training/*eager_fsdp_x2_rank?.json.gz"))


def events_of(content):
    return json.loads(content)["traceEvents"]


def test_open_hands_over_the_file(monkeypatch, capsys):
    served = []
    monkeypatch.setattr(perfetto, "_browser", lambda url: True)
    monkeypatch.setattr(perfetto, "Server", watched(served))
    perfetto.hand_over(TRACE, timeout_s=0.1)
    assert served == [TRACE.read_bytes()]


def watched(served):
    real = perfetto.Server

    def server(*args, **more):
        one = real(*args, **more)
        served.append(one.content)
        return one

    return server


@pytest.mark.parametrize("name", ["copy.json", "copy.json.gz"])
def test_export_writes_the_json(name, tmp_path, capsys):
    file = tmp_path / name
    assert cli.main([str(OVERLAPPING), "--export", str(file)]) == 0
    content = file.read_bytes()
    assert (content[:2] == b"\x1f\x8b") == name.endswith(".gz")
    content = gzip.decompress(content) if name.endswith(".gz") else content
    assert content == gzip.decompress(OVERLAPPING.read_bytes())
    assert " ".join(capsys.readouterr().out.split()).endswith(f"{name} is written")
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.exhaustive
def test_export_of_ranks_writes_them_as_one_trace(tmp_path, capsys):
    file = tmp_path / "ranks.json"
    assert cli.main([*map(str, RANKS), "--export", str(file)]) == 0
    kinds = [
        collections.Counter(one["name"] for one in events_of(content) if one["ph"] == "X")
        for content in (file.read_bytes(), *(gzip.decompress(path.read_bytes()) for path in RANKS))
    ]
    assert kinds[0] == kinds[1] + kinds[2] and kinds[0]
    assert " ".join(capsys.readouterr().out.split()).endswith("is written: 2 ranks in one trace")


def test_export_of_perfettos_format_writes_json(tmp_path, capsys):
    source = ROOT / "tests/traces/pftrace/linear.pftrace.gz"
    file = tmp_path / "linear.json"
    assert cli.main([str(source), "--export", str(file)]) == 0
    assert "is written" in capsys.readouterr().out
    screens = []
    for one in (source, file):
        assert cli.main([str(one), "--all"]) == 0
        screens.append(capsys.readouterr().out)
    assert screens[0] == screens[1]


@pytest.mark.parametrize("flag", ["--export", "--html"])
def test_a_target_that_the_system_refuses_is_named(flag, tmp_path, capsys, monkeypatch):
    """Path.resolve() reports a loop of symbolic links as a RuntimeError before Python 3.13."""
    monkeypatch.chdir(tmp_path)
    Path("loop.json").symlink_to("loop.json")
    Path("file").write_text("mine")
    for target in ("loop.json", "loop.json/a.json", "file/a.json", f"{'x' * 300}.json", ""):
        assert cli.main([str(OVERLAPPING), flag, target]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"read-trace: {flag} {target}: ") and said.count("\n") == 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "loop.json"]


def test_export_refuses_what_it_cannot_write(tmp_path, capsys):
    there = tmp_path / "there.json"
    there.write_text("mine")
    trace = tmp_path / "trace.json"
    trace.write_bytes(gzip.decompress(TRACE.read_bytes()))
    before = trace.read_bytes()
    (tmp_path / "folder.json").mkdir()
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    for flags, why in (
        ([trace, "--export", tmp_path / "copy.txt"], "has to end in .json or .json.gz"),
        ([trace, "--export", tmp_path / ".json"], "has to end in .json or .json.gz"),
        ([trace, "--export", tmp_path / "no" / "copy.json"], f"no such folder: {tmp_path / 'no'}"),
        ([trace, "--export", tmp_path / "folder.json"], "a folder; name a file in it"),
        ([trace, "--export", there], "exists; --force overwrites it"),
        ([trace, "--export", trace, "--force"], "that is the trace itself"),
        ([trace, "--export", tmp_path / "copy.json", "--json"], "leave out --json"),
        ([trace, TRACE, "--export", tmp_path / "copy.json"], "--export takes one trace"),
        ([broken, "--export", tmp_path / "copy.json"], "cannot be copied (it is no JSON with events)"),
        ([tmp_path / "none.json", "--export", tmp_path / "copy.json"], "no such file"),
    ):
        assert cli.main([*map(str, flags)]) == 2, why
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and why in err
    assert there.read_text() == "mine" and trace.read_bytes() == before
    assert not (tmp_path / "copy.json").exists()
    assert cli.main([str(trace), "--export", str(there), "--force"]) == 0
    assert json.loads(there.read_bytes())["traceEvents"]


@contextlib.contextmanager
def serving(trace=TRACE, **options):
    with perfetto.Server(trace, trace.read_bytes(), **options) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def answer(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers={"Host": f"127.0.0.1:{server.server_port}", **headers})
    response = connection.getresponse()
    return response.status, response.read()


def test_serves_the_page_and_the_trace_and_nothing_else():
    with serving() as server:
        status, page = answer(server, f"/{server.token}/")
        assert status == 200 and b"Open in Perfetto" in page
        assert answer(server, f"/{server.token}/trace") == (200, TRACE.read_bytes())
        token = server.token
        for path in (
            "/", "/trace", f"/{token}", f"/{token}/../trace", f"/{token}/x", "/etc/passwd",
            f"/{token}/%2e%2e/%2e%2e/etc/passwd", f"/{token[:-1]}{'y' if token[-1] == 'x' else 'x'}/trace",
        ):  # fmt: skip
            assert answer(server, path) == (404, b"")
        assert not server.handed_over.is_set()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD", "NONSENSE"])
def test_refuses_other_methods(method):
    with serving() as server:
        status, body = answer(server, f"/{server.token}/trace", method)
        assert status in (404, 501) and body == b""
        assert not server.handed_over.is_set()


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Host": "localhost:80"}, {"Origin": "https://evil.example"}, {"Origin": "null"},
     {"Origin": "https://ui.perfetto.dev"}],
)  # fmt: skip
def test_refuses_foreign_hosts_and_origins(headers):
    with serving() as server:
        for path, method in ((f"/{server.token}/", "GET"), (f"/{server.token}/trace", "GET"),
                             (f"/{server.token}/done", "POST")):  # fmt: skip
            assert answer(server, path, method, **headers) == (403, b"")
        assert not server.handed_over.is_set()


def test_binds_to_loopback_only():
    with serving() as server:
        assert server.server_address[0] == "127.0.0.1"


def test_the_path_cannot_be_guessed():
    with serving() as one, serving() as two:
        assert one.token != two.token and len(one.token) >= 32


def test_no_broken_request_stops_it():
    import socket

    with serving() as server:
        for junk in (b"\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"A" * 70_000):
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=5) as link:
                link.sendall(junk)
                link.shutdown(socket.SHUT_WR)
                with contextlib.suppress(OSError):
                    link.recv(1000)
        assert answer(server, f"/{server.token}/")[0] == 200


def test_a_title_cannot_break_out_of_the_page(tmp_path):
    odd = tmp_path / "a\"><img src=x onerror=alert(1)>'.json"
    odd.write_text("{}")
    with serving(odd) as server:
        assert b"<img" not in answer(server, f"/{server.token}/")[1]


def test_a_large_trace_comes_whole_and_two_readers_at_once_too(tmp_path):
    large = tmp_path / "large.json"
    with open(large, "wb") as file:
        for number in range(64):
            file.write(bytes([number]) * (1 << 20))
    with serving(large) as server:
        got = []
        readers = [
            threading.Thread(target=lambda: got.append(answer(server, f"/{server.token}/trace")[1])) for _ in range(2)
        ]  # fmt: skip
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        whole = large.read_bytes()
        assert [body == whole for body in got] == [True, True]


def test_it_ends_by_itself(monkeypatch, capsys):
    monkeypatch.setattr(perfetto, "_browser", lambda url: True)
    start = time.monotonic()
    assert perfetto.hand_over(TRACE, timeout_s=0.3) is False
    assert time.monotonic() - start < 5
    assert "not handed over: nobody clicked on its page within 0.3 s: open " in capsys.readouterr().out


def test_it_gives_up_if_perfetto_does_not_answer(monkeypatch, capsys):
    """The browser has fetched the trace, and no PONG comes."""

    def browse(url):
        port, token = int(url.split(":")[2].split("/")[0]), url.split("/")[3]

        def page():
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", f"/{token}/trace", headers={"Host": f"127.0.0.1:{port}"})
            connection.getresponse().read()

        threading.Thread(target=page, daemon=True).start()
        return True

    monkeypatch.setattr(perfetto, "_browser", browse)
    monkeypatch.setattr(perfetto, "LATER_S", 0.1)
    assert perfetto.hand_over(TRACE, timeout_s=60, answer_s=0.1) is False
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(
        "not handed over: https://ui.perfetto.dev did not answer: is it reachable from your browser?"
    )
    assert TRACE.name in said


def test_without_a_browser_it_prints_the_command(monkeypatch, capsys):
    monkeypatch.setenv("SSH_CONNECTION", "1 2 3 4")
    perfetto.hand_over(TRACE, timeout_s=0.1)
    screen = capsys.readouterr().out
    port = screen.split("ssh -L ")[1].split(":")[0]
    assert f"ssh -L {port}:127.0.0.1:{port} " in screen
    assert f"http://127.0.0.1:{port}/" in screen


def test_ctrl_c_ends_it_quietly():
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "tracereader", str(TRACE), "--open"], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("Ctrl-C ends it"):
            process.send_signal(signal.SIGINT)
            break
    out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    assert "not handed over" in out


STAND_IN = b"""<!doctype html><title>stand-in</title><script>
window.addEventListener("message", event => {
  if (event.data === "PING") { event.source.postMessage("PONG", event.origin); return; }
  if (event.data.perfetto) {
    const {buffer, title, fileName} = event.data.perfetto;
    fetch("/arrived?title=" + title + "&name=" + fileName + "&from=" + event.origin, {method: "POST", body: buffer});
  }
});
</script>"""


@contextlib.contextmanager
def stand_in(folder):
    """A page that speaks Perfetto's side of the protocol, over TLS as the real one does."""
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=ui.perfetto.dev",
         "-keyout", folder / "key.pem", "-out", folder / "cert.pem"], check=True, capture_output=True,
    )  # fmt: skip
    arrived = {}

    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            # Slow to listen, as a real page is: the first PINGs must be able to get lost.
            time.sleep(0.3)
            self.wfile.write(STAND_IN)

        def do_POST(self):
            arrived["query"] = self.path
            arrived["bytes"] = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, arrived
        server.shutdown()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    from selenium import webdriver

    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("needs Chromium and its driver (Debian: chromium chromium-driver)")
    folder = tmp_path_factory.mktemp("browser")
    with stand_in(folder) as (port, arrived):
        options = webdriver.ChromeOptions()
        options.binary_location = binary
        for flag in (
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={folder / 'profile'}", "--ignore-certificate-errors",
            f"--host-resolver-rules=MAP ui.perfetto.dev 127.0.0.1:{port}",
        ):  # fmt: skip
            options.add_argument(flag)
        browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
        yield browser, arrived
        browser.quit()


@pytest.mark.parametrize("packed", [True, False])
def test_one_click_in_a_real_browser_hands_the_bytes_over(chromium, tmp_path, packed):
    from selenium.webdriver.common.by import By

    browser, arrived = chromium
    arrived.clear()
    trace = TRACE
    if not packed:
        trace = tmp_path / "plain.json"
        trace.write_bytes(gzip.decompress(TRACE.read_bytes()))
    with serving(trace) as server:
        browser.get(server.url)
        browser.find_element(By.ID, "open").click()
        assert server.handed_over.wait(20), browser.find_element(By.ID, "state").text
        deadline = time.monotonic() + 10
        while "bytes" not in arrived and time.monotonic() < deadline:
            time.sleep(0.05)
        assert arrived["bytes"] == trace.read_bytes()
        assert f"title={trace.name}&name={trace.name}&from=http://127.0.0.1:{server.server_port}" in arrived["query"]
        assert not [one for one in browser.get_log("browser") if one["level"] == "SEVERE" and "favicon" not in str(one)]
    if not packed:
        assert json.loads(arrived["bytes"])["traceEvents"]


def test_the_page_gives_up_if_perfetto_does_not_answer(chromium):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    browser, _ = chromium
    with serving(answer_s=0.5, perfetto="https://localhost:9") as server:
        browser.get(server.url)
        browser.find_element(By.ID, "open").click()
        WebDriverWait(browser, 20).until(
            lambda browser: "Perfetto did not answer within 0.5 s" in browser.find_element(By.ID, "state").text
        )
        assert not server.handed_over.is_set()


def test_a_foreign_page_learns_nothing(chromium):
    """A page of another origin in the same browser cannot fetch the trace, even if it knew the path."""
    browser, _ = chromium
    with serving() as server:
        browser.get("https://ui.perfetto.dev/")
        got = browser.execute_async_script(
            "const done = arguments[1];"
            "fetch(arguments[0]).then(r => r.text()).then(t => done('read ' + t.length)).catch(e => done('refused'));",
            server.url + "trace",
        )
        assert got == "refused"
