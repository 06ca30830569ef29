"""Traces behind URLs give the reports of local files, or a refusal in one line."""

import collections
import contextlib
import gzip
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import tracemalloc
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import psutil
import pytest
from references import H200, ROOT
from test_perfetto import watched

from tracereader import cli, progress
from tracereader.command import install_command
from tracereader.figures import reading
from tracereader.figures.rank import NotRead
from tracereader.findings.ranks import why_not_read
from tracereader.show import perfetto
from tracereader.trace import remote
from tracereader.trace.document import located, path_of

SMALL = H200 / "02_linear/1024x32x64_bf16_cold_eager.json.gz"
COMPILED = H200 / "02_linear/1024x32x64_bf16_warm_compile.json.gz"
RANKS = sorted((ROOT / "tests/traces/ranks").glob("fsdp_rank*.json.gz"))
SECRETS = ("hunter2", "somebody", "deadbeef")


class Handler(SimpleHTTPRequestHandler):
    def do_GET(self):
        path = self.path.partition("?")[0]
        self.server.asked[path] += 1
        self.server.last = self.path, self.headers.get("Authorization")
        rule = self.server.rules.get(path)
        if rule is None or not rule(self, self.server.asked[path]):
            with contextlib.suppress(OSError):  # a client that needs no more than the beginning hangs up
                super().do_GET()

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    """Serves a folder. rules: by path, a function that gets the request's number and answers, or returns False."""

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), lambda *about: Handler(*about, directory=str(folder)))
        self.rules, self.asked, self.folder, self.last = {}, collections.Counter(), folder, None
        self.over = threading.Event()  # what a rule may wait for

    def url(self, name="", user=""):
        return f"http://{user}127.0.0.1:{self.server_port}/{name}"

    def handle_error(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "PAUSES_S", (0, 0, 0))
    monkeypatch.setattr(remote, "_gone", set())  # this server may have the port of one that is gone
    folder = tmp_path / "served"
    folder.mkdir()
    for path in (SMALL, COMPILED, *RANKS):
        shutil.copy(path, folder)
    with Server(folder) as one:
        threading.Thread(target=one.serve_forever, args=(0.05,), daemon=True).start()
        yield one
        one.over.set()
        one.shutdown()


@pytest.fixture
def memory():
    """Yield fsspec's file system in memory with the traces. It ends with the test."""
    files = fsspec.filesystem("memory")
    for path in (SMALL, COMPILED, *RANKS):
        files.pipe_file(f"/job/{path.name}", path.read_bytes())
    files.pipe_file("/job/notes.txt", b"no trace")
    yield files
    files.rm("/job", recursive=True)


def status(code, reason="", times=99):
    def rule(handler, asked):
        if asked <= times:
            handler.send_error(code, reason or None)
        return asked <= times

    return rule


def truncated(times=99):
    """A server that announces the whole file and sends half of it."""

    def rule(handler, asked):
        if asked > times:
            return False
        content = (handler.server.folder / handler.path.strip("/")).read_bytes()
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content[: len(content) // 2])
        handler.close_connection = True
        return True

    return rule


def printed(capsys, *words):
    assert cli.main([str(word) for word in words]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def refused(capsys, *words):
    assert cli.main([str(word) for word in words]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1, shown.err
    return shown.err


def without_paths(text):
    """Return a text without the names of the traces' folders and servers."""
    return re.sub(r"(https?://[\w.:]+|memory://job|[\w./-]*fsdp|\.?[\w/.-]*/02_linear|\S*/served)/?", "", text)


# Where they lie.


@pytest.mark.parametrize(
    "words",
    [
        (SMALL, "--all"),
        (SMALL, "--json=all"),
        (SMALL, COMPILED),
        (SMALL, COMPILED, "--markdown"),
        pytest.param((*RANKS,), marks=pytest.mark.exhaustive),
        (*RANKS, "--json=all"),
        (*RANKS, "--ranks", "--only", "short"),
    ],
    ids=["one", "json", "comparison", "markdown", "ranks", "json of ranks", "--ranks"],
)
@pytest.mark.parametrize("where", [pytest.param("memory", marks=pytest.mark.exhaustive), "http"])
def test_a_url_is_read_like_the_file(server, memory, capsys, words, where):
    def there(word):
        if not isinstance(word, Path):
            return word
        return f"memory://job/{word.name}" if where == "memory" else server.url(word.name)

    local, ours = printed(capsys, *words), printed(capsys, *map(there, words))
    if "--json=all" in words:
        local, ours = json.loads(local), json.loads(ours)
        for one in (local, ours, *local.get("ranks", ()), *ours.get("ranks", ())):
            if "trace" in one:
                one["trace"] = Path(one["trace"]).name
        assert ours == local
    else:
        assert without_paths(ours) == without_paths(local)


URL_COMMANDS = re.findall(r"^uv run read-trace (.*?\w://.*?)(?: {3}.*)?$", (ROOT / "docs/ranks.md").read_text(), re.M)


def test_the_page_has_commands_with_urls():
    assert len(URL_COMMANDS) >= 5


@pytest.mark.parametrize(
    "command", [URL_COMMANDS[0], *(pytest.param(one, marks=pytest.mark.exhaustive) for one in URL_COMMANDS[1:])]
)
def test_a_pages_command_with_a_url_runs(server, memory, tmp_path, monkeypatch, capsys, command):
    """A store's URL stands for the file system in memory, and a web server's for one of this machine."""
    monkeypatch.chdir(tmp_path)
    there, here = [], []  # the words of the command, and those that name the same files on this machine
    for word in shlex.split(command):
        scheme, is_url, path = word.partition("://")
        if scheme == "https":
            (server.folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(SMALL, server.folder / path)
            there.append(server.url(path))
            here.append(server.folder / path)
        elif is_url:
            for one in RANKS:
                memory.pipe_file(f"/job/{path.rpartition('/')[0]}/{one.name}", one.read_bytes())
            there.append(f"memory://job/{path}")
            here += RANKS
        else:
            there.append(word)
            here.append(word)
            if not word.startswith("--"):
                shutil.copy(COMPILED, word)
    ours, local = printed(capsys, *there), printed(capsys, *here)
    assert without_paths(ours) == without_paths(local)


def test_a_page_of_a_url_is_that_of_the_file(server, tmp_path, capsys):
    for words in ((SMALL,), (SMALL, COMPILED), RANKS):
        pages = []
        for target, some in (("local", words), ("remote", [server.url(one.name) for one in words])):
            printed(capsys, *some, "--html", tmp_path / f"{len(words)}-{target}.html")
            pages.append((tmp_path / f"{len(words)}-{target}.html").read_text())
        assert len(pages[1]) == pytest.approx(len(pages[0]), rel=0.01) and words[0].name[:12] in pages[1]


@pytest.mark.parametrize(
    "pattern",
    [
        "fsdp_rank*.json.gz",
        *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("fsdp_rank[01].json.gz", "ranks")),
        "ranks/",
    ],
)
def test_folders_and_wildcards_name_the_traces_there(server, memory, capsys, pattern):
    expected = printed(capsys, *RANKS, "--only", "short")
    if pattern.startswith("ranks"):
        for path in RANKS:
            memory.pipe_file(f"/job/ranks/{path.name}", path.read_bytes())
        memory.pipe_file("/job/ranks/fsdp_rank0.txt", b"a table")
        (server.folder / "ranks").mkdir()
        for path in (*RANKS, ROOT / "README.md"):
            shutil.copy(path, server.folder / "ranks")
    assert printed(capsys, f"memory://job/{pattern}", "--only", "short") == expected
    if pattern != "ranks":  # a web server's folder ends with a slash
        assert printed(capsys, server.url(pattern), "--only", "short") == expected


def test_a_url_without_a_trace_is_refused(server, memory, capsys):
    memory.pipe_file("/job/empty/notes.txt", b"")
    (server.folder / "empty").mkdir()
    for url, says in (
        ("memory://job/none.json", "no such file"),
        ("memory://job/none*.json", "no file there matches"),
        ("memory://job/empty/", "there is no trace in this folder (.json or .pftrace, or such a file with .gz)"),
        (server.url("none.json"), "no such file"),
        (server.url("none*.json"), "no file there matches"),
        (server.url("empty/"), "there is no trace in this folder (.json or .pftrace, or such a file with .gz)"),
        (server.url("none/"), "no such file"),
    ):
        assert says in refused(capsys, url)


def test_a_file_url_is_the_file(capsys):
    assert located(f"file://{SMALL}") == [SMALL]
    assert "no such file" in refused(capsys, "file:///none/x.json")


def test_perfetto_and_a_reference_take_a_url(server, capsys, monkeypatch):
    (server.folder / "02_linear").mkdir()
    shutil.copy(SMALL, server.folder / "02_linear")
    url = server.url(f"02_linear/{SMALL.name}")
    served = []
    monkeypatch.setattr(perfetto, "_browser", lambda url: True)
    monkeypatch.setattr(perfetto, "Server", watched(served))
    perfetto.hand_over(path_of(url), timeout_s=0.1)
    assert served == [SMALL.read_bytes()]
    capsys.readouterr()
    assert f"{SMALL.parent}\n2" in printed(capsys, url, "--against", "h200")  # run 1 is the reference


# What is missing.


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    "url", ["https://example.org/runs/trace.json.gz", "hf://buckets/me/trace.json", "s3://b/*.json"]
)
def test_without_fsspec_a_url_is_refused_at_once(monkeypatch, capsys, beside, url):
    """A URL is also refused as the second of two traces, before the first is read."""
    for name in ("fsspec", "fsspec.core", "fsspec.registry"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr("tracereader.show.report.opened", lambda *_: pytest.fail("the first trace was read"))
    if not beside:
        monkeypatch.undo()
        for name in ("fsspec", "fsspec.core", "fsspec.registry"):
            monkeypatch.setitem(sys.modules, name, None)
    said = refused(capsys, *[SMALL] * beside, url)
    protocol = url.partition(":")[0]
    package = {"https": "'fsspec[http]'", "hf": "huggingface_hub", "s3": "s3fs"}[protocol]
    missing = f"a package for {protocol}:// is missing; this command installs it: "
    assert said.startswith(f"read-trace: {url}: {missing}") and said.endswith(f" {package}\n")


@pytest.mark.parametrize(
    ("url", "blocked", "says"),
    [
        ("s3://bucket/x.json", "s3fs", install_command("s3fs")),
        ("gs://bucket/x.json", "gcsfs", install_command("gcsfs")),
        ("hf://datasets/me/x/x.json", "huggingface_hub", install_command("huggingface_hub")),
        ("oci://bucket/x.json", "ocifs", install_command("ocifs")),
        ("http://127.0.0.1/x.json", "aiohttp", install_command("fsspec[http]")),
        ("nothing://x.json", "s3fs", "fsspec knows no protocol nothing://"),
    ],
)
def test_a_store_whose_package_is_missing_is_refused(monkeypatch, capsys, url, blocked, says):
    monkeypatch.setitem(sys.modules, blocked, None)
    imported_before = {}
    monkeypatch.setattr(sys.modules["fsspec.registry"], "_registry", imported_before)
    monkeypatch.setattr(sys.modules["fsspec.registry"], "registry", imported_before)
    assert says in refused(capsys, url)


@pytest.mark.parametrize("has_pip", [True, False])
def test_a_refusal_has_the_command_for_this_python(monkeypatch, has_pip):
    """The environments of uv have no pip, and those of venv and conda need no uv."""
    monkeypatch.setattr(sys, "executable", "/home/a user/.cpu/bin/python")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: (name == "pip" and has_pip) or None)
    python = "'/home/a user/.cpu/bin/python'"
    installs = f"{python} -m pip install" if has_pip else f"uv pip install --python {python}"
    assert install_command("fsspec[http]") == f"{installs} 'fsspec[http]'"


def test_the_command_of_a_refusal_can_be_run():
    """It runs as it is in a shell. --dry-run installs nothing, and the package is already there."""
    command = install_command("msgspec")
    if command.startswith("uv") and not shutil.which("uv"):
        pytest.skip("needs uv")
    checks = command.replace(" install ", " install --dry-run --offline " if command.startswith("uv") else " show ")
    ended = subprocess.run(checks, shell=True, capture_output=True, text=True)
    assert not ended.returncode, ended.stderr


def test_the_extras_install_what_refusals_name():
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["remote"][0].startswith(remote.WITH_HTTP)


# Servers that fail.


@pytest.mark.parametrize("rule", [status(500, times=1), status(503, times=2), status(429, times=3), truncated(times=2)])
def test_a_download_that_fails_at_first_is_tried_again(server, capsys, rule):
    server.rules[f"/{SMALL.name}"] = rule
    assert printed(capsys, server.url(SMALL.name), "--only", "short") == printed(capsys, SMALL, "--only", "short")


@pytest.mark.parametrize(
    ("rule", "says", "tries"),
    [
        (status(503), "the server answered 503 Service Unavailable", 4),
        (status(403, "hunter2"), "the server answered 403 Forbidden", 1),
        (status(403, times=1), "the server answered 403 Forbidden", 1),
        (status(404), "no such file", 1),
        (status(404, times=1), "no such file", 1),
        (truncated(), "the server ended its answer too early", 4),
    ],
)
def test_a_download_that_fails_is_named(server, capsys, rule, says, tries):
    server.rules["/x.json"] = rule
    (server.folder / "x.json").write_bytes(gzip.compress(os.urandom(1 << 20)))
    said = refused(capsys, server.url("x.json"))
    assert says in said and server.asked["/x.json"] == tries and "hunter2" not in said


def test_a_server_that_is_silent_or_gone_is_named(server, monkeypatch, capsys):
    monkeypatch.setattr(remote, "SILENT_S", 0.2)
    server.rules["/x.json"] = lambda handler, asked: server.over.wait()
    assert "the server did not answer in time" in refused(capsys, server.url("x.json"))
    monkeypatch.setattr(remote, "SILENT_S", 60)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as closed:
        port = closed.server_port
    assert f"Connect call failed ('127.0.0.1', {port})" in refused(capsys, f"http://127.0.0.1:{port}/x.json")


def test_a_server_that_stops_in_the_middle_is_asked_again(server, monkeypatch, capsys):
    """The second answer is whole. A server that stops each time is named."""
    monkeypatch.setattr(remote, "SILENT_S", 1)
    expected, begun = printed(capsys, SMALL, "--only", "short"), threading.Semaphore(0)
    stops = half(begun, SMALL.stat().st_size, 1000)
    server.rules[f"/{SMALL.name}"] = lambda handler, asked: asked == 1 and stops(handler, asked)
    assert printed(capsys, server.url(SMALL.name), "--only", "short") == expected
    assert begun.acquire(blocking=False) and server.asked[f"/{SMALL.name}"] > 1
    monkeypatch.setattr(remote, "SILENT_S", 0.2)
    server.rules["/x.json"] = half(begun, 1_000_000)
    assert "the server did not answer in time" in refused(capsys, server.url("x.json"))
    assert server.asked["/x.json"] == 4


@pytest.mark.parametrize(("url", "tries"), [("memory://job/x.json", 4), ("s3://b/x.json", 1), ("gs://b/x.json", 1)])
def test_a_request_that_a_stores_package_repeats_is_not_repeated_again(monkeypatch, url, tries):
    """gcsfs takes half a minute for its own attempts."""
    monkeypatch.setattr(remote, "PAUSES_S", (0, 0, 0))
    asked = []

    def fails(address):
        asked.append(address)
        raise RuntimeError(f'Could not connect to the endpoint URL: "https://host/b?token=hunter2" ({address})')

    monkeypatch.setattr(remote, "_opened", fails)
    with pytest.raises(OSError, match=re.escape(f'the endpoint URL: "https://host/b" ({url})')):
        remote.fetched(url, 10**9, whole=True)
    assert asked == [url] * tries


def test_a_server_that_is_gone_is_asked_once_for_each_other_rank(server, monkeypatch):
    """It gets all attempts again as soon as it has answered once."""
    real, asked = remote._opened, []

    def opened(address):
        asked.append(address)
        if "gone" in address:
            raise ConnectionRefusedError("refused")
        return real(address)

    monkeypatch.setattr(remote, "_opened", opened)
    for name, tries in (("gone1", 4), ("gone2", 1), ("gone3", 1), (SMALL.name, 1), ("gone4", 4)):
        asked.clear()
        with contextlib.suppress(OSError):
            remote.fetched(server.url(name), 10**9, whole=True).close()
        assert len(asked) == tries, name


# An object store. The project does not install s3fs and moto.


@pytest.fixture(scope="module")
def bucket():
    """Yield a file system on moto's S3 server, whose bucket holds two ranks. boto3's environment variables name it."""
    pytest.importorskip("s3fs", reason="needs s3fs")
    moto = pytest.importorskip("moto.server", reason="needs moto[server,s3]")
    one = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    one.start()
    host, port = one.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "k")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        files = fsspec.filesystem("s3")
        files.mkdir("bucket")
        for path in RANKS:
            files.put(str(path), f"bucket/run7/{path.name}")
        files.pipe_file("bucket/run7/notes.txt", b"no trace")
        yield files
    one.stop()


@pytest.mark.parametrize("url", ["run7/", "run7", "run7/*.json.gz", "run7/fsdp_rank[01]*", "run7/fsdp_rank?.json.gz"])
def test_a_run_in_a_bucket_is_read(bucket, capsys, url):
    assert printed(capsys, f"s3://bucket/{url}", "--only", "short") == printed(capsys, *RANKS, "--only", "short")


def test_what_a_bucket_does_not_have_is_refused(bucket, capsys):
    for url, says in (
        ("s3://none/run7/", "no such file"), ("s3://none/x.json.gz", "no such file"),
        ("s3://bucket/none/", "no such file"), ("s3://bucket/none*", "no file there matches"),
        ("s3://bucket/run7/notes*", "not JSON"), ("s3://b!/x/", "Invalid bucket name"),
    ):  # fmt: skip
        assert says in refused(capsys, url)


def redirect(to):
    def rule(handler, asked):
        handler.send_response(302)
        handler.send_header("Location", to)
        handler.send_header("Content-Length", "0")
        handler.end_headers()
        return True

    return rule


def test_redirects_are_followed_and_a_loop_is_named(server, capsys):
    server.rules = {"/moved.json": redirect(f"/{SMALL.name}"), "/loop.json": redirect("/loop.json")}
    expected = printed(capsys, SMALL, "--only", "short")
    assert printed(capsys, server.url("moved.json"), "--only", "short") == expected
    assert refused(capsys, server.url("loop.json?token=hunter2")).startswith("read-trace: http://127.0.0.1:")
    server.rules["/gone.json"] = redirect("/none.json")
    assert "no such file" in refused(capsys, server.url("gone.json"))


def packed_answer(chunked):
    """Return a rule that sends the file's JSON compressed, as servers do for application/json."""

    def rule(handler, asked):
        content = (handler.server.folder / handler.path.strip("/")).read_bytes()
        packed = content if content[:2] == b"\x1f\x8b" else gzip.compress(content)
        handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header(*(("Transfer-Encoding", "chunked") if chunked else ("Content-Length", str(len(packed)))))
        handler.end_headers()
        with contextlib.suppress(OSError):
            handler.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(packed), packed) if chunked else packed)
        handler.close_connection = True
        return True

    return rule


@pytest.mark.parametrize("chunked", [pytest.param(False, marks=pytest.mark.exhaustive), True])
@pytest.mark.parametrize("name", ["plain.json", pytest.param("packed.json.gz", marks=pytest.mark.exhaustive)])
def test_a_compressed_answer_is_the_file(server, capsys, monkeypatch, name, chunked):
    """Its length is that of the compressed answer, so the progress does not give it as the file's size."""
    content = SMALL.read_bytes()
    (server.folder / name).write_bytes(content if name.endswith(".gz") else gzip.decompress(content))
    server.rules[f"/{name}"] = packed_answer(chunked)
    shown = []
    monkeypatch.setattr(progress, "shown", lambda: contextlib.nullcontext(shown.append))
    assert printed(capsys, server.url(name), "--only", "short") == printed(capsys, SMALL, "--only", "short")
    downloads = [text for text in shown if text.startswith(f"downloading {name}: ")]
    assert downloads and not [text for text in downloads if " of " in text]
    ranks = [server.url(path.name) for path in RANKS]
    server.rules |= {f"/{path.name}": packed_answer(chunked) for path in RANKS}
    assert printed(capsys, *ranks, "--only", "short") == printed(capsys, *RANKS, "--only", "short")


def endless(handler, asked):
    """Send chunks without an end."""
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    with contextlib.suppress(OSError):
        while not handler.server.over.is_set():
            handler.wfile.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
    handler.close_connection = True
    return True


def test_an_endless_file_is_read_to_the_limit(server, capsys):
    server.rules["/x.json"] = endless
    said = refused(capsys, server.url("x.json"), "--limit", 1 << 20)
    assert "it has more than 1,048,576 bytes; --limit raises the limit" in said and server.asked["/x.json"] == 1
    (server.folder / "y.json").write_bytes(bytes(1 << 21))
    assert "it has more than 1,048,576 bytes" in refused(capsys, server.url("y.json"), "--limit", 1 << 20)


def test_a_bomb_behind_a_url_is_refused(server, memory, capsys):
    bomb = gzip.compress(b'{"traceEvents": [' + b" " * 10_000_000)
    (server.folder / "x.json.gz").write_bytes(bomb)
    memory.pipe_file("/job/x.json.gz", bomb)
    for url in (server.url("x.json.gz"), "memory://job/x.json.gz"):
        assert "more than 1000000 bytes of JSON" in refused(capsys, url, "--limit", 1_000_000)


def test_hostile_files_among_ranks_are_named(server, capsys):
    """The other ranks are reported."""
    server.rules["/fsdp_rank2.json.gz"] = truncated()
    (server.folder / "fsdp_rank2.json.gz").write_bytes(RANKS[0].read_bytes())
    (server.folder / "fsdp_rank3.json.gz").write_bytes(RANKS[0].read_bytes()[:5000])
    (server.folder / "fsdp_rank4.json.gz").write_bytes(b"<html>not found</html>")
    server.rules["/fsdp_rank5.json.gz"] = status(500)
    (server.folder / "fsdp_rank5.json.gz").write_bytes(b"")
    found = json.loads(printed(capsys, server.url("fsdp_rank*.json.gz"), "--ranks", "--json=all"))
    assert [one["rank"] for one in found["ranks"]] == [0, 1]
    why = {Path(path).name: told for path, told in found["not_read"].items()}
    assert why.keys() == {f"fsdp_rank{number}.json.gz" for number in range(2, 6)}
    assert why["fsdp_rank2.json.gz"] == "cannot be read (the server ended its answer too early)"
    assert why["fsdp_rank3.json.gz"].startswith("broken gzip")
    assert why["fsdp_rank4.json.gz"].startswith("an HTML page")
    assert why["fsdp_rank5.json.gz"] == "cannot be read (the server answered 500 Internal Server Error)"
    said = printed(capsys, server.url("fsdp_rank*.json.gz"), "--ranks", "--only", "short")
    assert f"note left out: {server.url('fsdp_rank4.json.gz')}: an HTML page" in said


# What is kept from the world.


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://somebody:hunter2@host:8080/a/x.json?sig=deadbeef", "https://host:8080/a/x.json"),
        ("https://hunter2@host/x.json#deadbeef", "https://host/x.json"),
        ("s3://somebody:hunter2@bucket/a b/x.json?versionId=1", "s3://bucket/a b/x.json"),
        ("https://somebody:hun/ter2@host/y.json", "https://host/y.json"),
        ("http://host:8080/x@y.json", "http://host:8080/x@y.json"),
        ("abfs://container@account.net/x.json", "abfs://container@account.net/x.json"),
        ("abfs://somebody:hunter2@account.net/x.json", "abfs://account.net/x.json"),
        ("s3://bucket/2026-11-22T07:02/x@y.json", "s3://bucket/2026-11-22T07:02/x@y.json"),
        ("zip://x.json::https://somebody:hunter2@host/a.zip?deadbeef", "zip://x.json::https://host/a.zip"),
    ],
)
def test_a_name_contains_no_credentials(url, name):
    path = path_of(url)
    assert str(path) == f"{path}" == remote.without_credentials(url) == name
    assert remote.address_of(path) == remote.address_of(Path(str(path))) == url


def test_urls_that_differ_only_in_their_credentials_have_different_names():
    one, other = (path_of(f"https://host/get?file={number}&sig=x") for number in (0, 1))
    assert (str(one), str(other)) == ("https://host/get", "https://host/get#2")
    assert path_of("https://host/get?file=1&sig=x") == other
    assert remote.address_of(other) == "https://host/get?file=1&sig=x"


def test_credentials_are_sent_and_never_printed(server, tmp_path, capsys):
    query, user = "?X-Signature=deadbeef%2F%3D", "somebody:hunter2@"
    urls = [server.url(path.name, user) + query for path in (SMALL, COMPILED, *RANKS)]
    page = tmp_path / "page.html"
    server.rules["/failing.json"] = status(500, "hunter2")
    for words in (
        (urls[0], "--all"), (urls[0], "--json"), urls[:2], (*urls[:2], "--markdown"), urls[2:], (*urls[2:], "--json"),
        (urls[0], "--html", page), (*urls[2:], "--html", page, "--force"), (urls[0], "--step", "99"),
        (server.url("none.json", user) + query,), (server.url("failing.json", user) + query,),
        (server.url("fsdp*", user), "--json"), (server.url("none*", user),), ("http://somebody:hunter2@[/x.json",),
        ("http://somebody:hunter2@host:port/x.json",), ("s3://somebody:hunter2@b/x.json?deadbeef",),
        (f"nothing://{user}b/x.json{query}",), (SMALL, "--capture", urls[0]), (urls[0], "--capture", urls[1], "--json"),
        (SMALL, "--capture", server.url("none.json", user) + query), (SMALL, "--export", urls[0]),
        (SMALL, "--html", urls[0]),
    ):  # fmt: skip
        cli.main([str(word) for word in words])
        told = "".join(capsys.readouterr()) + (page.read_text() if page.is_file() else "")
        assert told and not [secret for secret in SECRETS if secret in told], words
    printed(capsys, urls[0], "--only", "short")
    assert server.last == (f"/{SMALL.name}{query}", "Basic c29tZWJvZHk6aHVudGVyMg==")


# What a download needs, and leaves.


def test_a_download_is_bounded_in_memory_and_has_no_name(server, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()
    size = 48_000_000
    with open(server.folder / "x.json", "wb") as file:
        file.truncate(size)
    files = []
    real = remote._copied
    monkeypatch.setattr(remote, "_copied", lambda *about: (real(*about), files.extend((tmp_path / "tmp").iterdir())))
    tracemalloc.start()
    with remote.fetched(server.url("x.json"), 10**9, whole=True) as file:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert file.seek(0, os.SEEK_END) == size
    assert peak < 20_000_000 and not files


def listing(pages):
    """Return a rule that sends so many parts of a list of files, each with a thousand names."""

    def rule(handler, asked):
        handler.send_response(200)
        handler.send_header("Content-Type", "text/html")
        handler.end_headers()
        for page in range(pages):
            handler.wfile.write("".join(f'<a href="rank{page}-{name}.json">' for name in range(1000)).encode())
        return True

    return rule


def test_the_list_of_a_folder_is_bounded(server, capsys):
    server.rules["/many/"] = listing(pages=300)
    said = refused(capsys, server.url("many/"))
    assert "it names 300,000 traces, more than 20,000: name fewer with wildcards" in said
    assert sum(server.asked.values()) == 1


def half(begun, size, sent=500_000):
    """Return a rule that announces so many bytes, sends the first ones, signals this, and waits."""

    def rule(handler, asked):
        handler.send_response(200)
        handler.send_header("Content-Length", str(size))
        handler.end_headers()
        handler.wfile.write(b"{" * sent)
        begun.release()
        return handler.server.over.wait()

    return rule


def reading_process(*words, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "tracereader", *words], cwd=ROOT, text=True, stderr=subprocess.PIPE,
        env=os.environ | environment,
    )  # fmt: skip


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (signal.SIGTERM, signal.SIGKILL))],
)
def test_a_download_that_is_ended_leaves_nothing(server, tmp_path, number):
    """It prints one line and exits with the signal's status, after the server has sent half of the file."""
    begun = threading.Semaphore(0)
    server.rules["/x.json"] = half(begun, 1_000_000)
    tmp = tmp_path / "tmp"
    tmp.mkdir()
    process = reading_process(server.url("x.json"), TMPDIR=str(tmp))
    assert begun.acquire(timeout=60)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == (128 + number if number != signal.SIGKILL else -number)
    assert error.count("\n") == (number != signal.SIGKILL) and "Traceback" not in error
    assert not list(tmp.iterdir())


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core reads in one process")
def test_processes_that_download_end_with_the_command(server):
    begun = threading.Semaphore(0)
    server.rules = {f"/{name}.json": half(begun, 42_000_000) for name in "ab"}
    process = reading_process(server.url("a.json"), server.url("b.json"), "--ranks")
    for _ in range(4):  # each is asked for its size, and read
        assert begun.acquire(timeout=60)
    children = psutil.Process(process.pid).children()
    process.terminate()
    assert process.communicate(timeout=60)[1] == "read-trace: ended by SIGTERM\n"
    gone, alive = psutil.wait_procs(children, timeout=30)
    assert len(gone) == 2 and not alive


def test_a_terminal_shows_the_progress_of_a_download(server, monkeypatch, capsys):
    monkeypatch.setattr(progress, "AFTER_S", 0)
    monkeypatch.setattr(progress, "EVERY_S", 0)
    assert cli.main([server.url(SMALL.name), "--only", "short"]) == 0
    assert capsys.readouterr().err == "", "no terminal"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert cli.main([server.url(SMALL.name), "--only", "short"]) == 0
    megabytes, said = SMALL.stat().st_size / 1e6, capsys.readouterr().err
    assert f"downloading {SMALL.name}: {megabytes:,.1f} of {megabytes:,.1f} MB" in said
    assert said.endswith(progress.CLEAR_LINE)


# What reads them.


def kept(paths):
    found, why = reading.read_ranks(paths, 10**9, None)
    return [one.rank for one in found], why


def test_several_processes_read_what_one_reads(tmp_path, monkeypatch):
    expected = reading.read_ranks(RANKS, 10**9, None)
    broken = tmp_path / "broken.json"
    broken.write_bytes(b"{")
    monkeypatch.setattr(reading, "_processes", lambda sizes: 2)
    found, why = reading.read_ranks([*RANKS, broken], 10**9, None)
    assert found == expected[0] and why.keys() == {str(broken)}


def test_a_process_that_cannot_start_is_reported_beside_the_other_ranks(monkeypatch):
    """The first rank is read, and the system refuses to start a process for the other one."""
    start, started = reading._Reader._start, []

    def refused_later(reader):
        started.append(reader)
        if len(started) > 1:
            raise OSError(12, "Cannot allocate memory")
        start(reader)

    monkeypatch.setattr(reading._Reader, "_start", refused_later)
    monkeypatch.setattr(reading, "_processes", lambda sizes: 2)
    ranks, why = kept(RANKS)
    (said,) = map(why_not_read, why.values())
    assert len(ranks) == 1 and said == "OSError: [Errno 12] Cannot allocate memory"


def test_a_rank_that_does_not_answer_is_given_up_and_named(server, monkeypatch):
    server.rules["/slow.json"] = lambda handler, asked: server.over.wait()
    # The slow one is given up as soon as it is the last.
    monkeypatch.setattr(reading, "_patience", lambda took, answers: 0 if answers == 2 else 60)
    monkeypatch.setattr(reading, "_processes", lambda sizes: 2)
    monkeypatch.setattr(reading, "_json_bytes", lambda path: 0)
    ranks, why = kept([path_of(server.url("slow.json")), *RANKS])
    assert ranks == [0, 1]
    (said,) = map(why_not_read, why.values())
    assert said.startswith("the process that reads it did not answer: nothing has arrived for ")


def worker_of(port, processes):
    """Return which of some processes has this port open."""
    for one in processes:
        with contextlib.suppress(psutil.Error):
            if any(connection.laddr.port == port for connection in psutil.Process(one).net_connections()):
                return one
    return None


def killing(pids, times):
    """Return a server's rule that kills the requesting process so many times."""

    def rule(handler, asked):
        if asked > times:
            return False
        os.kill(worker_of(handler.client_address[1], pids()), signal.SIGKILL)
        return True

    return rule


@pytest.mark.exhaustive
@pytest.mark.parametrize("kills", [1, 2])
def test_a_process_that_is_killed_is_replaced_once(server, monkeypatch, kills):
    """A rank whose process is killed again is named, and the other ranks are read."""
    children = lambda: [one.pid for one in psutil.Process().children()]  # noqa: E731
    monkeypatch.setattr(reading, "_processes", lambda sizes: 2)
    monkeypatch.setattr(reading, "_json_bytes", lambda path: 0)
    paths = [path_of(server.url(f"fsdp_rank{number}.json.gz")) for number in (0, 1)]
    server.rules["/fsdp_rank0.json.gz"] = killing(children, kills)
    assert kept(paths) == (([0, 1], {}) if kills == 1 else ([1], {str(paths[0]): NotRead("killed")}))


def test_a_trace_that_cannot_be_read_again_is_reported(server, capsys, monkeypatch):
    """The rest of the report needs no second read."""

    def unreachable(*about):
        raise OSError("no route")

    def read_once(*about):
        found = read_ranks(*about)
        monkeypatch.setattr(remote, "fetched", unreachable)
        return found

    read_ranks = reading.read_ranks
    monkeypatch.setattr(reading, "read_ranks", read_once)
    said = printed(capsys, server.url("fsdp*"), "--only", "short,try")
    assert "in short   rank 0 keeps the others waiting" in said
    assert "the trace of a rank cannot be read again on this machine" in said
