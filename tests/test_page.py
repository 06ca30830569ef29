"""--html writes one self-contained page. The tests cover its content, the writing, and its views in a real Chromium."""

import base64
import decimal
import gzip
import hashlib
import itertools
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections import Counter

import pytest
from references import H200, ROOT

from tracereader import cli
from tracereader.show.limits import limit_of

TRAINING = ROOT / "tests/traces/models/gpt2_train.json.gz"
MODULES = ROOT / "tests/traces/models/bert_modules.json.gz"
MEMORY = ROOT / "traces/reference/nvidia-h200-x2/06_training/4x1024x1024x16_bf16_warm_eager_active1_memory.json.gz"
CPU_TRACE = ROOT / "tests/traces/cpu/one_worker.json.gz"
SHAPES = H200 / "03_simple_mlp/64x128x768x3072_bf16_warm_eager_shapes.json.gz"
ON_CPU = ROOT / "tests/traces/attention_cpu_naive.json.gz"
RANKS = sorted((ROOT / "tests/traces/ranks").glob("ddp_straggler_rank*.json.gz"))
PIPELINE = sorted((ROOT / "tests/traces/ranks").glob("gloo_pipeline_rank*.json.gz"))

ATTACKS = (
    "</script><script>window.owned=1</script>", "<img src=x onerror=window.owned=1>", "javascript:window.owned=1",
    "]]><!--<script>", "\u2028window.owned=1//\u2029", "&lt;b&gt;&quot;", "'\"><svg onload=window.owned=1>",
    "url(https://evil.example/x)", "__proto__", "constructor", "hasOwnProperty", "{{constructor}}", "expression(1)",
    "https://evil.example/<style>*{display:none}</style>", "\u202e\u0000\u0007", "a" * 5000,
)  # fmt: skip


def page_of(folder, *arguments):
    target = folder / "report.html"
    assert cli.main([*map(str, arguments), "--html", str(target)]) == 0
    return target


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write the page of some arguments once for all tests that only read it."""
    written = {}

    def page(*arguments):
        if arguments not in written:
            written[arguments] = page_of(tmp_path_factory.mktemp("page"), *arguments)
        return written[arguments]

    return page


def block(page, name):
    return re.search(rf'id="{name}">(.*?)</script>', page.read_text(), re.DOTALL)[1]


def unpacked(page):
    """Return the description of the slices, and the columns, by the format's definition."""
    whole = gzip.decompress(base64.b64decode(block(page, "slices")))
    length = int.from_bytes(whole[:8], "little")
    found, at, columns = json.loads(whole[8 : 8 + length]), 8 + length, {}
    for column in found["columns"]:
        width, count = column["bytes"], column["count"]
        planes = whole[at : at + width * count]
        columns[column["name"]] = [
            int.from_bytes(bytes(planes[plane * count + place] for plane in range(width)), "little")
            for place in range(count)
        ]
        at += width * count
    assert at == len(whole)
    return found, columns


def starts_of(found, columns):
    """Return the start (ns) of each slice. On its track, each is stored as the difference to the one before."""
    starts, place = [], 0
    for track in found["tracks"]:
        at = 0
        for _ in range(track["slices"]):
            at += columns["start"][place]
            starts.append(at)
            place += 1
    return starts


@pytest.mark.parametrize(
    "trace",
    [H200 / "05_llm/32x512_bf16_warm_eager_graph.json.gz", TRAINING],  # the first one's launches take a third of a step
    ids=["decode", "training"],
)
def test_the_top_of_the_page_has_the_parts_of_a_step_that_the_report_has(trace, pages, capsys):
    figures = json.loads(block(pages(trace), "figures"))
    head, parts = figures["head"], figures["time"]["parts"]
    assert cli.main([str(trace), "--only", "short,gpu"]) == 0
    report = capsys.readouterr().out
    how, share = re.search(r"The GPU is (busy|idle) (\d+%) of the time", report).groups()
    assert f"{head['busy_share'] if how == 'busy' else 1 - head['busy_share']:.0%}" == share
    times = {one["name"]: one["us"] for one in parts}
    whole = sum(times.values())
    assert re.search(r"^where the step goes: ([\d.]+) ms on the GPU", report, re.M)[1] == f"{whole / 1e3:.2f}"
    idle = {name: us for name, us in times.items() if name.startswith("idle")}
    assert 1 - sum(idle.values()) / whole == pytest.approx(head["busy_share"])
    for name, us in idle.items():
        assert re.search(rf"^{name} +[\d.]+ +{100 * us / whole:.1f}%$", report, re.M)


@pytest.mark.parametrize("trace", [SHAPES, TRAINING, CPU_TRACE], ids=["GPU", "training", "CPU"])
def test_the_page_has_everything_that_the_terminal_says(trace, pages, capsys):
    figures = json.loads(block(pages(trace), "figures"))
    capsys.readouterr()  # what writing the page printed
    assert cli.main([str(trace)]) == 0
    assert figures["report"] == capsys.readouterr().out


def test_the_page_explains_gpu_time_that_is_longer_than_the_step(pages):
    """The copies of a step run beside the work of the step before it."""
    page = pages(ROOT / "traces/reference/nvidia-h200/changes/copies/prefetched.json.gz")
    head = json.loads(block(page, "figures"))["head"]
    assert head["gpu_us"] > 1.4 * head["step_us"]
    assert head["why"].endswith("activities of different steps overlap on the GPU") and ".." not in head["why"]


def test_a_comparisons_page_begins_with_the_pace_and_the_reason(pages, capsys):
    runs = [H200 / f"changes/vit/{name}.json.gz" for name in ("eager", "graph", "compile")]
    figures = json.loads(block(pages(*runs), "figures"))
    assert cli.main([*map(str, runs), "--only", "short"]) == 0
    report = capsys.readouterr().out
    assert "pace" not in figures["runs"][0]
    for run in figures["runs"][1:]:
        assert run["pace"] in report and " as run 1: " in run["pace"]
    assert cli.main([*map(str, runs), "--markdown"]) == 0
    comment = capsys.readouterr().out.splitlines()
    assert [comment[2], comment[4]] == [f"R{run['pace'][1:]}.".replace("&", "\\&") for run in figures["runs"][1:]]


def json_of(capsys, *arguments):
    capsys.readouterr()
    assert cli.main([*map(str, arguments), "--json=all"]) == 0
    return json.loads(capsys.readouterr().out)


def attacked(value, number):
    """Return the document with every string, including the arguments' keys, turned into an attack."""
    if isinstance(value, dict):
        return {
            attacked(key, number + 7): attacked(one, number + place) for place, (key, one) in enumerate(value.items())
        }
    if isinstance(value, list):
        return [attacked(one, number + place) for place, one in enumerate(value)]
    return value + ATTACKS[number % len(ATTACKS)] if isinstance(value, str) else value


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    document = json.loads(gzip.decompress(SHAPES.read_bytes()))
    known = ("External id", "correlation", "device", "stream", "Input Dims", "Input type", "Concrete Inputs")
    for number, event in enumerate(document["traceEvents"]):
        if event.get("ph") != "X":
            continue
        keep = event["name"].startswith("ProfilerStep#")
        event["name"] = event["name"] if keep else event["name"] + ATTACKS[number % len(ATTACKS)]
        args = event.get("args", {})
        event["args"] = {key: args[key] for key in known if key in args}
        event["args"] |= attacked({key: one for key, one in args.items() if key not in known}, number)
    document["deviceProperties"] = attacked(document["deviceProperties"], 1)
    for one in document["deviceProperties"]:
        one["id"] = 0
        one["name"] = "GPU" + ATTACKS[0] + ATTACKS[1]
    document["host_name"] = "host" + "".join(ATTACKS)
    document["lesson"] = {"script": ATTACKS[0], "flags": {ATTACKS[1]: ATTACKS[2]}, "facts": {}, "guesses": []}
    file = tmp_path_factory.mktemp("hostile") / "'\"><img src=x onerror=window.owned=1>&.json"
    file.write_text(json.dumps(document))
    return file


def test_every_slice_that_the_reader_keeps_is_in_the_page(tmp_path):
    """Names, times and the ties between launches and GPU work equal those of the raw events."""
    found, columns = unpacked(page_of(tmp_path, SHAPES))
    events = json.loads(gzip.decompress(SHAPES.read_bytes()), parse_float=decimal.Decimal)["traceEvents"]
    kept = [one for one in events if one.get("ph") == "X" and one["cat"] not in ("python_function", "Trace")]
    first = min(one["ts"] for one in kept)
    expected = sorted((one["name"], round((one["ts"] - first) * 1000), round(one["dur"] * 1000)) for one in kept)
    starts = starts_of(found, columns)
    names = [found["names"][number] for number in columns["name"]]
    assert sorted(zip(names, starts, columns["dur"], strict=True)) == expected
    by_correlation = {one["args"]["correlation"]: one for one in kept if one["cat"] in ("cuda_runtime", "cuda_driver")}
    launches = sorted(
        (one["name"], by_correlation[one["args"]["correlation"]]["name"])
        for one in kept
        if one["cat"] in ("kernel", "gpu_memcpy", "gpu_memset") and one["args"]["correlation"] in by_correlation
    )
    work = range(found["first_work"], found["first_work"] + found["work"])
    tied = [(names[one], number) for one, number in zip(work, columns["launch"], strict=True) if number]
    assert sorted((name, names[number - 1]) for name, number in tied) == launches


def test_the_page_is_small(tmp_path):
    for trace in (TRAINING, MODULES, MEMORY):
        assert page_of(tmp_path, trace).stat().st_size <= 2 * trace.stat().st_size + 1_000_000


def test_the_policy_allows_only_the_pages_script_and_style(tmp_path):
    text = page_of(tmp_path, TRAINING).read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in (script, style)]
    assert policy.split("; ")[:3] == [
        "default-src 'none'", f"script-src 'sha256-{hashes[0]}'", f"style-src 'sha256-{hashes[1]}'"
    ]  # fmt: skip
    assert "unsafe" not in policy
    without_data = re.sub(r'(id="(?:figures|slices)">).*?</script>', r"\1</script>", text, flags=re.DOTALL)
    assert not re.findall(r"\b(?:src|href|action|srcset)\s*=", without_data.replace("default-src", ""))
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch(", "XMLHttp"):
        assert word not in script


def test_no_markup_of_a_trace_is_in_the_page(tmp_path, hostile):
    page = page_of(tmp_path, hostile)
    figures, harmless = block(page, "figures"), block(page_of(tmp_path, SHAPES), "figures")
    assert not set("<>&\u2028\u2029") & set(figures) and "window.owned" in figures
    assert json.loads(figures).keys() == json.loads(harmless).keys()
    assert re.fullmatch(r"[A-Za-z0-9+/=]*", block(page, "slices"))


def test_private_content_of_the_page_is_reported(tmp_path, capsys):
    document = json.loads(gzip.decompress(SHAPES.read_bytes()))
    document["host_name"] = "node-17"
    document["traceEvents"][5]["args"] = {"kernel_file": "/home/somebody/torchinductor/abc.py"}
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps(document))
    page = page_of(tmp_path, trace)
    said = capsys.readouterr().out
    assert "the page holds the host name node-17" in said
    assert str(tmp_path) not in page.read_text()  # where the file lay is not in it
    holds = json.loads(block(page, "figures"))["holds"]
    if "/home/somebody" in said:
        assert any("/home/somebody/torchinductor/abc.py" in one for one in holds)


def test_stdout_gets_only_the_page(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tracereader", str(SHAPES), "--html", "-"], cwd=ROOT, capture_output=True, check=True
    )
    assert done.stdout == page_of(tmp_path, SHAPES).read_bytes()
    assert done.stderr.decode().startswith("the page: ")


def test_only_a_report_is_overwritten(tmp_path, capsys):
    target = page_of(tmp_path, SHAPES)
    before = target.read_bytes()
    assert page_of(tmp_path, TRAINING).read_bytes() != before
    target.write_text("mine")
    assert cli.main([str(SHAPES), "--html", str(target)]) == 2
    assert "--force overwrites it" in capsys.readouterr().err
    assert target.read_text() == "mine"
    os.chmod(target, 0o640)
    assert cli.main([str(SHAPES), "--html", str(target), "--force"]) == 0
    assert target.read_bytes() == before
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert [one.name for one in tmp_path.iterdir()] == ["report.html"]


def test_a_page_has_a_name_that_a_browser_opens(tmp_path, capsys):
    target = tmp_path / "notes.txt"
    assert cli.main([str(SHAPES), "--html", str(target)]) == 2
    assert "ends in .html" in capsys.readouterr().err and not target.exists()
    assert cli.main([str(SHAPES), "--html", str(target), "--force"]) == 0
    assert "<html" in target.read_text()[:300]


@pytest.mark.parametrize("other", [[], [str(MODULES)], ["--capture"]])
def test_a_page_does_not_overwrite_a_trace_that_is_read(tmp_path, capsys, other):
    trace, link = tmp_path / "mine.json.gz", tmp_path / "link.json.gz"
    trace.write_bytes(SHAPES.read_bytes())
    link.symlink_to(trace)
    others = [str(SHAPES), "--capture", str(trace)] if other == ["--capture"] else [*other, str(trace)]
    for target in (trace, link):
        assert cli.main([*others, "--html", str(target), "--force"]) == 2
        said = capsys.readouterr().err
        assert "that is the trace itself" in said and said.count("\n") == 1
    assert trace.read_bytes() == SHAPES.read_bytes()


def test_a_page_of_two_runs_shows_gpu_work_before_its_step(tmp_path):
    """The clock of a GPU may be behind that of the CPU, so that its work starts before the step that launches it."""
    early = tmp_path / "early.json"
    document = json.loads(gzip.decompress(SHAPES.read_bytes()))
    for one in document["traceEvents"]:
        if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            one["ts"] -= 1e6
    early.write_text(json.dumps(document))
    found, columns = unpacked(page_of(tmp_path, SHAPES, early))
    step = found["steps"][1]
    events = [one for one in document["traceEvents"] if one.get("ph") == "X"]
    mark = next(one for one in events if one["name"] == "ProfilerStep" + step["name"].partition("step ")[2])
    inside = [one for one in events if mark["ts"] <= one["ts"] < mark["ts"] + mark["dur"]]
    calls = {one["args"]["correlation"] for one in inside if one.get("cat") == "cuda_runtime"}
    work = [one for one in events if "stream" in one["args"] and one["args"]["correlation"] in calls]
    assert step["start"] == pytest.approx((mark["ts"] - min(one["ts"] for one in work)) * 1e3, abs=1)
    assert step["end"] - step["start"] == pytest.approx(mark["dur"] * 1e3, abs=1)
    assert min(starts_of(found, columns)) == 0


def test_a_target_that_cannot_be_written_is_refused_before_reading(tmp_path, capsys):
    for target, why in (
        (tmp_path, "a folder"),
        (tmp_path / "no/r.html", "no such folder"),
        ("/dev/null", "not a plain"),
    ):
        assert cli.main([str(tmp_path / "no trace"), "--html", str(target)]) == 2
        said = capsys.readouterr().err
        assert why in said and said.count("\n") == 1
    for flag in ("--json", "--open", "--all", "--lanes"):
        assert cli.main([str(SHAPES), "--html", str(tmp_path / "r.html"), flag]) == 2
        assert f"leave out {flag}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_page(tmp_path, monkeypatch):
    target = page_of(tmp_path, SHAPES)
    before = target.read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert cli.main([str(TRAINING), "--html", str(target)]) == 2
    assert target.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_modules_add_up_to_the_reports(tmp_path, capsys):
    """The tree's own times by the innermost module are by_module, and its roots hold all of it."""
    tree = json.loads(block(page_of(tmp_path, MODULES), "figures"))["modules"]["tree"]
    own, pending = {}, list(tree)
    while pending:
        node = pending.pop()
        own[node["name"]] = own.get(node["name"], 0) + node["self_us"]
        assert node["total_us"] == pytest.approx(node["self_us"] + sum(one["total_us"] for one in node["children"]))
        pending += node["children"]
    expected = {one["name"]: one["gpu_us"] for one in json_of(capsys, MODULES)["by_module"]}
    assert {name: us for name, us in own.items() if us} == pytest.approx({n: us for n, us in expected.items() if us})


def paths_of(events, inside):
    """Return by path the time (µs) and the number of some slices, from which slices of their thread enclose them."""
    found, around = {}, {}
    for one in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        opened = around.setdefault((one["pid"], one["tid"]), [])
        while opened and opened[-1]["ts"] + opened[-1]["dur"] <= one["ts"]:
            opened.pop()
        opened.append(one)
        path = tuple(each["name"].partition(" at 0x")[0] for each in opened)
        us, count = found.get(path, (0, 0))
        start, end = max(one["ts"], inside[0]), min(one["ts"] + one["dur"], inside[1])
        found[path] = us + end - start, count + 1
    return found


def flames_by_path(flames):
    found, pending = {}, [((), one) for one in flames]
    while pending:
        above, one = pending.pop()
        found[(*above, one["name"])] = one["us"], one["calls"]
        assert [inner["us"] for inner in one["below"]] == sorted((inner["us"] for inner in one["below"]), reverse=True)
        pending += [((*above, one["name"]), inner) for inner in one["below"]]
    return found


@pytest.mark.parametrize("trace", [TRAINING, ROOT / "tests/traces/train_stack.json.gz"], ids=["calls", "stacks"])
def test_the_flames_are_the_calls_of_the_step_by_path(trace, pages):
    figures = json.loads(block(pages(trace), "figures"))
    slices = [one for one in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if one.get("ph") == "X"]
    step = next(
        one for one in slices if one["name"] == figures["head"]["step_name"] and one["cat"] == "user_annotation"
    )
    span = step["ts"], step["ts"] + step["dur"]
    during = [one for one in slices if one["ts"] < span[1] and one["ts"] + one["dur"] > span[0]]
    calls = [one for one in during if one["cat"] in ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")]
    frames = [one for one in during if one["cat"] == "python_function" and not one["name"].startswith("nn.Module")]
    for name, some in (("calls", calls), ("Python functions", frames)):
        flames = flames_by_path(figures["flames"][name])
        raw = paths_of(some, span)
        assert bool(flames) == bool(raw) and len(flames) >= min(len(raw), 20)
        for path, (us, count) in flames.items():
            assert (us, count) == (pytest.approx(raw[path][0], abs=0.01), raw[path][1]), path


def test_ops_by_shape_have_the_gpu_time_that_they_launch(pages):
    figures = json.loads(block(pages(TRAINING), "figures"))
    slices = [one for one in json.loads(gzip.decompress(TRAINING.read_bytes()))["traceEvents"] if one.get("ph") == "X"]
    launches = {one["args"]["correlation"]: one for one in slices if one["cat"] in ("cuda_runtime", "cuda_driver")}
    ops = sorted((one for one in slices if one["cat"] == "cpu_op"), key=lambda one: one["ts"])
    raw = Counter()
    for work in slices:
        if work["cat"] not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        launch = launches[work["args"]["correlation"]]
        *_, op = (one for one in ops if one["tid"] == launch["tid"]
                  and one["ts"] <= launch["ts"] < one["ts"] + one["dur"])  # fmt: skip
        if op["name"] == "aten::mm":
            raw[op["name"], str(op["args"]["Input Dims"][:2])] += work["dur"]
    mine = Counter()
    for one in figures["by_inputs"]:
        shapes = re.findall(r"\[[\d, ]*\]", one["inputs"])[:2]
        mine[one["name"], f"[{', '.join(shapes)}]"] += one["gpu_us"]
    assert len(raw) > 10
    assert {key: us for key, us in mine.items() if key[0] == "aten::mm"} == pytest.approx(dict(raw), abs=0.01)


def test_each_step_has_its_wait_for_the_dataloader(tmp_path):
    trace = ROOT / "tests/traces/cpu/loader_inline.json.gz"
    steps = json.loads(block(page_of(tmp_path, trace), "figures"))["steps"]
    slices = [one for one in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"] if one.get("ph") == "X"]
    for step in steps:
        mark = next(one for one in slices if one["name"] == step["name"] and one["cat"] == "user_annotation")
        waits = [
            one["dur"]
            for one in slices
            if one["name"].startswith("enumerate(DataLoader)") and one["cat"] == "user_annotation"
            if mark["ts"] <= one["ts"] < mark["ts"] + mark["dur"]
        ]
        assert step["loading_us"] == pytest.approx(sum(waits), abs=0.01) and waits


def test_equal_layers_are_one_row(tmp_path):
    """The encoder's twelve layers have one row, which opens to them; no other row has four siblings of its class."""
    tree = json.loads(block(page_of(tmp_path, MODULES), "figures"))["modules"]["tree"]
    pending, folded = list(tree), {}
    while pending:
        node = pending.pop()
        if (found := re.fullmatch(r"(\d+) x (\w+)", node["name"])) is not None:
            folded[node["name"]] = {one["name"] for one in node["children"]}
            assert len(folded[node["name"]]) == int(found[1]) and not node["self_us"]
        else:
            classes = Counter(one["name"].rpartition("_")[0] for one in node["children"])
            assert max(classes.values(), default=0) < 4
        pending += node["children"]
    assert folded["12 x BertLayer"] == {f"BertLayer_{number}" for number in range(12)}


def test_a_busy_machine_is_at_the_top_of_the_page(tmp_path):
    page = page_of(tmp_path, ROOT / "tests/traces/attention_cpu_math.json.gz")
    assert "was probably using the CPU's cores" in json.loads(block(page, "figures"))["head"]["busy"]


# In a browser.


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    from selenium import webdriver

    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("needs Chromium and its driver (Debian: chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1280,900",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={tmp_path_factory.mktemp('browser') / 'profile'}",
    ):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield browser
    browser.quit()


def shown(browser, page, address=""):
    """Open a page and wait for its timeline. Fails if the console has any message or the page sends a request."""
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get("about:blank")
    browser.get_log("performance")
    browser.get(f"{page.as_uri()}{address}")
    WebDriverWait(browser, 30).until(lambda one: one.execute_script("return document.body.dataset.ready"))
    assert browser.execute_script("return document.body.dataset.ready") == "true"
    settled(browser)
    return browser


def settled(browser):
    """Wait until the requested drawing is done."""
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(() => arguments[0]()))")


def is_quiet(browser, page):
    assert browser.get_log("browser") == []
    asked = [json.loads(one["message"])["message"] for one in browser.get_log("performance")]
    urls = {one["params"]["request"]["url"] for one in asked if one["method"] == "Network.requestWillBeSent"}
    assert urls <= {page.as_uri(), "about:blank"}, urls


def text(browser, selector):
    return browser.execute_script("return document.querySelector(arguments[0])?.textContent", selector)


def values(browser, table, key):
    """Return the numbers of a column in all rows, including those that are not shown at first."""
    browser.execute_script(
        "const more = document.querySelector(`#${arguments[0]} > button`);"
        "if (!more.hidden && more.textContent.startsWith('show all')) more.click();",
        table,
    )
    return dict(
        browser.execute_script(
            "return [...document.querySelectorAll(`#${arguments[0]} tbody tr`)].map(row => [row.dataset.name,"
            " Number(row.querySelector(`td[data-key=${arguments[1]}]`)?.dataset.value)])",
            table, key,
        )
    )  # fmt: skip


def press(browser, *keys):
    for key in keys:
        browser.execute_script(
            "const one = document.getElementById('canvas'); one.focus();"
            "one.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: true}));",
            key,
        )
    settled(browser)


def view(browser):
    return tuple(
        float(browser.execute_script(f"return document.getElementById('canvas').dataset.{one}"))
        for one in ("from", "to")
    )


@pytest.mark.parametrize(
    "trace",
    [SHAPES, MODULES, MEMORY, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (TRAINING, ON_CPU))],
    ids=lambda one: one.name[:20],
)
def test_every_view_has_the_figures_of_json(chromium, pages, capsys, trace):
    page = pages(trace)
    measured = json_of(capsys, trace)
    browser = shown(chromium, page)
    assert float(browser.execute_script("return document.getElementById('cpu_us').dataset.value")) == pytest.approx(
        measured["steps"][measured["typical_index"]]["cpu_us"]
    )
    assert text(browser, "#why").lower().startswith(measured["waits_because"].lower())
    ops = {**measured["ops"], **measured["runtime"]}
    for key in ("self_us", "total_us", "calls"):
        assert values(browser, "ops-table", key) == pytest.approx({name: one[key] for name, one in ops.items()})
    if measured["kernels"]:
        for key in ("count", "total_us", "median_us", "share"):
            expected = {one["name"]: one[key] for one in measured["kernels"]}
            assert values(browser, "kernels-table", key) == pytest.approx(expected)
        rated = {}
        for one in measured["gpu_work"]:
            if one["tflops"] is not None:
                rated.setdefault(one["name"], []).append(one)
        found = values(browser, "kernels-table", "tflops")
        for name, some in rated.items():
            mean = sum(one["tflops"] * one["us"] for one in some) / sum(one["us"] for one in some)
            assert found[name] == pytest.approx(mean)
        expected = {one["family"]: one["us"] for one in measured["families"]}
        assert sorted(values(browser, "families", "us").values()) == pytest.approx(sorted(expected.values()))
    if measured["training"]["memory"]:
        peak = browser.execute_script("return document.getElementById('peak').dataset.value")
        assert int(peak) == measured["training"]["memory"]["peak_bytes"]
    if places := measured["by_phase"] or measured["by_label"]:
        assert values(browser, "phases", "gpu_us").keys() == {one["name"] for one in places}
    if measured["by_module_class"]:
        lane = "gpu_us" if measured["gpu_work"] else "cpu_us"
        expected = {one["name"]: one[lane] for one in measured["by_module_class"]}
        assert values(browser, "module-classes", lane) == pytest.approx(expected)
    is_quiet(browser, page)


def test_the_keyboard_zooms_pans_and_selects(chromium, pages):
    page = pages(TRAINING)
    browser = shown(chromium, page)
    whole = view(browser)
    press(browser, "w", "w")
    near = view(browser)
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) * 0.49)
    press(browser, "d")
    assert view(browser)[0] > near[0]
    press(browser, "a")
    assert view(browser) == pytest.approx(near)
    press(browser, "s", "s", "f")
    assert view(browser) == pytest.approx(whole)
    press(browser, "ArrowRight")
    first = text(browser, "#selected-text")
    press(browser, "ArrowDown")
    assert text(browser, "#selected-text") not in (first, "")
    press(browser, "ArrowUp")
    assert text(browser, "#selected-text") == first
    press(browser, "ArrowDown", "ArrowDown", "ArrowDown", "Enter")
    assert view(browser)[1] - view(browser)[0] < 0.5 * (whole[1] - whole[0])
    press(browser, "Escape")
    assert "Select a slice" in text(browser, "#selected-text")
    is_quiet(browser, page)


def test_search_finds_as_many_slices_as_the_trace_has(chromium, pages):
    page = pages(TRAINING)
    events = json.loads(gzip.decompress(TRAINING.read_bytes()))["traceEvents"]
    named = [one for one in events if one.get("ph") == "X" and re.search(r"^aten::(mm|addmm)$", one["name"])]
    browser = shown(chromium, page)
    browser.execute_script(
        "const one = document.getElementById('search'); one.value = '^aten::mm$|^ATEN::addmm$';"
        "one.dispatchEvent(new Event('input'));"
    )
    assert text(browser, "#found") == f"{len(named)} matches"
    press(browser, "n")
    assert text(browser, "#selected-text") in ("aten::mm", "aten::addmm")
    assert text(browser, "#found") == f"1 of {len(named)} matches"
    browser.execute_script(
        "const one = document.getElementById('search'); one.value = '(';one.dispatchEvent(new Event('input'));"
    )
    found, columns = unpacked(page)
    shown_names = found["shown"]
    of_one = [1 for one in columns["name"] if "(" in found["names"][one] + shown_names.get(found["names"][one], "")]
    assert text(browser, "#found") == f"{len(of_one):,} matches"
    is_quiet(browser, page)


def test_no_text_in_the_address_makes_the_page_hang(chromium, tmp_path):
    """As regular expressions, these would take longer than the universe exists."""
    op = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "dur": 5}
    events = [op | {"name": name, "ts": 10 * k} for k, name in enumerate(["a" * 60 + "!", "x(a+)+", "aten::mm"], 1)]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    page = page_of(tmp_path, tmp_path / "a.json")
    browser = shown(chromium, page, "#search=(a%2B)%2B%24&mark=(a%2B)%2B%24&mark=(.*)*b")
    assert text(browser, "#found") == "1 match"
    browser.execute_script(
        "const one = document.getElementById('ops-table-filter'); one.value = '(a+)*$|mm$';"
        "one.dispatchEvent(new Event('input'));"
    )
    assert browser.execute_script("return document.querySelectorAll('#ops-table tbody tr').length") == 1
    is_quiet(browser, page)


def spreads(script):
    """Yield the calls whose arguments contain a list of any length: the text around each `...` right in parentheses."""
    script = re.sub(r"//.*|\"[^\"\n]*\"", "", script)
    above = []
    for place, one in enumerate(script):
        if one in "([{":
            above.append(one)
        elif one in ")]}" and above:
            above.pop()
        elif script.startswith("...", place) and above[-1:] == ["("]:
            yield script[max(0, place - 60) : place + 40]


def test_no_list_of_any_length_becomes_the_arguments_of_a_call():
    """Arguments are on the browser's stack, which overflows at about 125,000 of them, and the page stays empty."""
    folder = ROOT / "tracereader/show/page/js"
    found = [one for file in sorted(folder.glob("*.js")) for one in spreads(file.read_text())]
    # Definitions, and the three numbers of a box.
    assert all("...children) {" in one or "...this.box(" in one for one in found), found
    assert not re.search(r"\.apply\(", "".join(one.read_text() for one in folder.glob("*.js")))
    assert list(spreads("push(...a); f(b, ...c); [...d]; ({...e}); g([...h])")) != []


@pytest.mark.exhaustive
def test_a_page_of_130_000_different_ops_is_drawn(chromium, tmp_path):
    count = 130_000
    op = {"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, "dur": 8}
    events = [op | {"name": f"o{k}", "ts": 10 * k + 1} for k in range(count)]
    (tmp_path / "a.json").write_text(json.dumps({"traceEvents": events}))
    page = page_of(tmp_path, tmp_path / "a.json")
    browser = shown(chromium, page)
    assert text(browser, "#ops-table > button") == f"show all {count:,}"
    is_quiet(browser, page)


def test_the_details_of_a_kernel_are_those_of_the_trace_and_the_report(chromium, pages, capsys):
    page = pages(SHAPES)
    measured = json_of(capsys, SHAPES)
    one = max((one for one in measured["gpu_work"] if one["product"]), key=lambda one: one["us"])
    from urllib.parse import quote

    browser = shown(chromium, page, f"#kernel={quote(one['name'], safe='')}")
    assert text(browser, "#selected-text") == one["name"]
    said = text(browser, ".selected")
    assert f"M {one['product']['m']} · K {one['product']['k']} · N {one['product']['n']}" in said
    assert one["launched_by"] in said and one["asked_by"] in said
    assert "TFLOP/s" in said and "registers per thread" in said
    assert browser.execute_script("return document.querySelector('#kernels-table .picked').dataset.name") == one["name"]
    is_quiet(browser, page)


def test_a_step_can_be_linked_to(chromium, pages):
    """The whole step is in view, to the end of the GPU work that was launched in it."""
    page = pages(SHAPES)
    events = json.loads(gzip.decompress(SHAPES.read_bytes()))["traceEvents"]
    slices = [one for one in events if one.get("ph") == "X" and one["cat"] not in ("python_function", "Trace")]
    zero = min(one["ts"] for one in slices)
    step = next(one for one in slices if one["name"] == "ProfilerStep#3" and one["cat"] == "user_annotation")
    launched = {
        one["args"]["correlation"]
        for one in slices
        if one["cat"].startswith("cuda_") and step["ts"] <= one["ts"] < step["ts"] + step["dur"]
    }
    work = [one for one in slices if one["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    last = max(one["ts"] + one["dur"] for one in work if one["args"]["correlation"] in launched)
    expected = (step["ts"] - zero) * 1e3, (max(last, step["ts"] + step["dur"]) - zero) * 1e3
    browser = shown(chromium, page, "#step=3")
    start, end = view(browser)
    assert start < expected[0] < expected[1] < end and end - start < 1.1 * (expected[1] - expected[0])
    browser.execute_script("document.querySelector('[aria-label=\"next step\"]').click()")
    assert browser.execute_script("return location.hash") == "#step=4"


def test_an_opportunity_shows_its_kernels(chromium, pages):
    page = pages(TRAINING)
    figures = json.loads(block(page, "figures"))
    one = next(one for one in figures["opportunities"]["found"] if one["kernels"])
    found, columns = unpacked(page)
    expected = sum(found["names"][name] in one["kernels"] for name in columns["name"])
    browser = shown(chromium, page)
    browser.execute_script(f"document.querySelector('[data-change={one['change']}] button').click()")
    assert text(browser, "#found").startswith(f"{expected} slices of ")
    assert f"change={one['change']}" in browser.execute_script("return location.hash")


def test_hostile_names_stay_text(chromium, tmp_path, hostile):
    page = page_of(tmp_path, hostile)
    browser = shown(chromium, page)
    press(browser, "ArrowDown", "ArrowDown", "ArrowDown", "w", "n")
    browser.execute_script("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    browser.execute_script("document.querySelectorAll('.kernel button')[0].click()")
    settled(browser)
    assert browser.execute_script("return window.owned") is None
    strange = "return document.querySelectorAll('img, iframe, object, a, link, form, base, [style*=url]').length"
    assert browser.execute_script(strange) == 0
    assert browser.execute_script("return document.scripts.length") == 3
    assert browser.execute_script("return document.querySelectorAll('style').length") == 1
    assert ATTACKS[0] in text(browser, "main")
    is_quiet(browser, page)


@pytest.mark.parametrize(
    "width, theme",
    [
        (390, "dark"), pytest.param(390, "light", marks=pytest.mark.exhaustive),
        (1280, "light"), pytest.param(1280, "dark", marks=pytest.mark.exhaustive),
    ],
)  # fmt: skip
def test_it_fits_a_screen_in_both_themes(chromium, pages, width, theme):
    page = pages(TRAINING)
    chromium.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500},
    )
    chromium.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": theme}]}
    )
    try:
        browser = shown(chromium, page)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        ground = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        dark = sum(map(int, re.findall(r"\d+", ground)[:3])) < 3 * 128
        assert dark == (theme == "dark")
        is_quiet(browser, page)
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_an_opportunity_zooms_to_its_kernels_and_so_does_its_link(chromium, pages):
    page = pages(TRAINING)
    found = json.loads(block(page, "figures"))["opportunities"]["found"]
    described, columns = unpacked(page)
    starts, first = starts_of(described, columns), described["first_work"]
    whole = None
    for one in found:
        own = [
            place
            for place in range(first, first + described["work"])
            if described["names"][columns["name"][place]] in one["kernels"]
        ]
        browser = shown(chromium, page)
        browser.execute_script(f"document.querySelector('[data-change={one['change']}] button').click()")
        settled(browser)
        start, end = view(browser)
        whole = whole or (start, end)
        if own:
            last = max(starts[place] + columns["dur"][place] for place in own)
            assert start < starts[own[0]] < last < end < 1.05 * last
        else:
            assert end - start >= 0.95 * (whole[1] - whole[0]), "without kernels the whole step is shown"
        assert view(shown(chromium, page, f"#change={one['change']}")) == (start, end)


def test_a_track_shows_what_each_proposed_change_concerns(chromium, pages):
    """Of each row, the last line of pixels is colored where GPU work of these names is, or a step."""
    from selenium.webdriver import ActionChains

    page = pages(TRAINING)
    changes = json.loads(block(page, "figures"))["opportunities"]["found"]
    described, columns = unpacked(page)
    starts, first = starts_of(described, columns), described["first_work"]
    browser = shown(chromium, page)
    start, end = view(browser)
    drawing = (ROOT / "tracereader/show/page/js/draw.js").read_text()
    row, header, axis = map(int, re.search(r"ROW = (\d+), HEADER = (\d+), AXIS = (\d+)", drawing).groups())
    wide = browser.execute_script("return document.getElementById('canvas').width")
    ratio = browser.execute_script("return devicePixelRatio")
    drawn = 0
    for place, change in enumerate(changes):
        y = int((axis + header + place * row + row - 3) * ratio)
        data = browser.execute_script(
            "const [y, wide] = arguments;"
            "const line = new OffscreenCanvas(wide, 1).getContext('2d', {willReadFrequently: true});"
            "line.drawImage(document.getElementById('canvas'), 0, y, wide, 1, 0, 0, wide, 1);"
            "return [...line.getImageData(0, 0, wide, 1).data].filter((_, place) => place % 4 === 2)", y, wide,
        )  # fmt: skip
        spans = [(one["start"], one["end"]) for one in described["steps"]]
        if change["kernels"]:
            spans = [
                (starts[at], starts[at] + columns["dur"][at])
                for at in range(first, first + described["work"])
                if described["names"][columns["name"][at]] in change["kernels"]
            ]
        scale = wide / (end - start)
        pixels = [((one - start) * scale, (other - start) * scale) for one, other in spans]
        inside = {x for one, other in pixels for x in range(int(one) + 1, int(other) - 1)}
        beside = set(range(wide)) - {x for one, other in pixels for x in range(int(one) - 2, int(other) + 3)}
        colors = {data[x] for x in inside if 0 <= x < wide}
        assert not colors & {data[x] for x in beside}
        assert len(colors) <= 2, "the color, and the color where a step begins"
        drawn += len(colors)
    assert drawn and len(changes) > 1

    canvas = browser.find_element("id", "canvas")
    browser.execute_script("document.getElementById('canvas').scrollIntoView({block: 'center'})")
    y = axis + header + row + row / 2 - canvas.size["height"] / 2
    ActionChains(browser).move_to_element_with_offset(canvas, 0, int(y)).click().perform()
    settled(browser)
    assert f"change={changes[1]['change']}" in browser.execute_script("return location.hash")
    is_quiet(browser, page)


def test_a_link_opens_at_its_place(chromium, pages):
    browser = shown(chromium, pages(TRAINING), "#view=20000.00_24000.00&at=kernels")
    assert view(browser) == (20e6, 24e6)
    assert abs(browser.execute_script("return document.getElementById('kernels').getBoundingClientRect().top")) < 100
    press(browser, "w", "d")
    start, end = view(browser)
    address = browser.execute_script("return location.hash")
    assert f"view={start / 1e3:.2f}_{end / 1e3:.2f}" in address
    assert view(shown(chromium, pages(TRAINING), address)) == pytest.approx((start, end), abs=10)


def test_a_range_is_summed_up(chromium, pages):
    """Shift and a drag select a range. A slice counts with its part in the range."""
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    page = pages(TRAINING)
    described, columns = unpacked(page)
    browser = shown(chromium, page)
    canvas = browser.find_element("id", "canvas")
    browser.execute_script("document.getElementById('timeline').scrollIntoView()")
    before = view(browser)
    actions = ActionChains(browser).move_to_element_with_offset(canvas, -100, 0).key_down(Keys.SHIFT).click_and_hold()
    actions.move_by_offset(200, 10).release().key_up(Keys.SHIFT).perform()
    settled(browser)
    assert view(browser) == before, "the drag does not move the view"
    start, end = (
        float(browser.execute_script(f"return document.getElementById('range').dataset.{one}"))
        for one in ("from", "to")
    )
    expected, starts, first = Counter(), starts_of(described, columns), described["first_work"]
    for place in range(first, first + described["work"]):
        us = (min(end, starts[place] + columns["dur"][place]) - max(start, starts[place])) / 1e3
        if us > 0 and described["kinds"][columns["kind"][place]] != "span":
            expected[described["names"][columns["name"][place]]] += us
    assert len(expected) > 5 and values(browser, "range-gpu", "us") == pytest.approx(dict(expected))
    press(browser, "Escape")
    assert text(browser, "#range") is None
    is_quiet(browser, page)


def test_a_box_of_the_flame_graph_widens(chromium, pages):
    page = pages(TRAINING)
    browser = shown(chromium, page)
    widths = (
        "return [...document.querySelectorAll('.flame button')].map(one => [one.title,"
        " one.getBoundingClientRect().width])"
    )
    shares = {title: width for title, width in browser.execute_script(widths)}
    whole = max(shares.values())
    (outer,) = json.loads(block(page, "figures"))["flames"]["calls"][0]["below"][:1]
    (named,) = [title for title in shares if title.startswith(f"{outer['name']} · ")]
    total = sum(one["us"] for one in json.loads(block(page, "figures"))["flames"]["calls"])
    assert shares[named] / whole == pytest.approx(outer["us"] / total, rel=0.01)
    click = "[...document.querySelectorAll('.flame button')].find(one => one.title === arguments[0]).click()"
    browser.execute_script(click, named)
    assert dict(browser.execute_script(widths))[named] == pytest.approx(whole)
    browser.execute_script(click, named)
    assert dict(browser.execute_script(widths)) == shares
    is_quiet(browser, page)


def test_rates_that_no_kernel_has_are_no_columns(chromium, pages):
    for trace, has in ((H200 / "01_matmul_add/64_bf16_cold_eager.json.gz", False), (SHAPES, True)):
        browser = shown(chromium, pages(trace))
        heads = text(browser, "#kernels-table thead")
        assert all((word in heads) == has for word in ("TFLOP/s", "GB/s", "of peak")) and "median" in heads
        assert ("record_shapes=True" in text(browser, "#kernels .told")) is not has


def test_the_labels_of_the_roofline_do_not_overlap(chromium, pages):
    browser = shown(chromium, pages(SHAPES))
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('.roofline text.roof')].map(one => { const {left, right, top, bottom} ="
        " one.getBoundingClientRect(); return [left, right, top + 3, bottom - 3]; })"
    )
    assert len(boxes) == 4
    for one, other in itertools.combinations(boxes, 2):
        assert one[1] <= other[0] or other[1] <= one[0] or one[3] <= other[2] or other[3] <= one[2]


def test_the_details_of_a_slice_are_in_the_window(chromium, pages):
    page = pages(TRAINING)
    chromium.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 1280, "height": 600, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        browser = shown(chromium, page)
        browser.execute_script("document.getElementById('timeline').scrollIntoView()")
        press(browser, "ArrowDown")
        top, bottom = browser.execute_script(
            "const one = document.querySelector('#details h3').getBoundingClientRect(); return [one.top, one.bottom]"
        )
        assert 0 < top < bottom <= 600
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_details_do_not_cover_the_slice_that_a_search_finds(chromium, pages):
    """The GPU's track is the last one of a timeline that is higher than the room above the details."""
    page = pages(TRAINING)
    chromium.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 1280, "height": 600, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        browser = shown(chromium, page, "#search=gemm")
        browser.execute_script("document.getElementById('timeline').scrollIntoView()")
        press(browser, "n")
        assert "kernel" in text(browser, ".selected")
        canvas, details = browser.execute_script(
            "return ['canvas', 'details'].map(one => document.getElementById(one).getBoundingClientRect().toJSON())"
        )
        assert canvas["bottom"] - 20 < details["top"] < details["bottom"] <= 600
    finally:
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_paper_has_no_controls_and_cuts_nothing_off(chromium, pages):
    """A browser announces a print while the page has the width of the screen."""
    browser = shown(chromium, pages(SHAPES))
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script("return document.getElementById('canvas').width / devicePixelRatio") == 720
    chromium.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 720, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    )
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert browser.execute_script("return document.documentElement.scrollWidth") <= 720
        controls = (
            "return [...document.querySelectorAll('button:not(.plain, .sort, .flame *), input, select')]"
            ".filter(one => one.offsetParent)"
        )
        assert browser.execute_script(controls) == []
        canvas = browser.execute_script(
            "const one = document.getElementById('canvas');"
            "return [one.width / one.clientWidth, one.height / one.clientHeight]"
        )
        assert canvas[0] == pytest.approx(canvas[1], rel=0.01)
    finally:
        browser.execute_script("dispatchEvent(new Event('afterprint'))")
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_controls_have_names_and_can_be_reached(chromium, pages):
    browser = shown(chromium, pages(TRAINING))
    nameless = """return [...document.querySelectorAll('button, input, select, canvas')].filter(one =>
        !(one.textContent.trim() || one.getAttribute('aria-label'))).map(one => one.outerHTML.slice(0, 80))"""
    assert browser.execute_script(nameless) == []
    unreachable = (
        "return [...document.querySelectorAll('button, input, select, canvas')].filter(one => one.tabIndex < 0).length"
    )
    assert browser.execute_script(unreachable) == 0


def large(target, events):
    """Write a trace of at least so many events, from consecutive copies of one trace."""
    document = json.loads(gzip.decompress(SHAPES.read_bytes()))
    original = [one for one in document["traceEvents"] if one.get("ph") == "X"]
    length = max(one["ts"] + one["dur"] for one in original) - min(one["ts"] for one in original) + 1
    copies = []
    for copy in range(-(-events // len(original))):
        for event in original:
            args = dict(event.get("args", {}))
            for key in ("correlation", "External id"):
                if key in args:
                    args[key] += copy * 1_000_000
            name = event["name"]
            if name.startswith("ProfilerStep#"):
                name = f"ProfilerStep#{int(name.split('#')[1]) + 10 * copy}"
            copies.append({**event, "name": name, "ts": round(event["ts"] + copy * length, 3), "args": args})
    target.write_text(json.dumps({**document, "traceEvents": copies}))
    return sum(one["cat"] not in ("python_function", "Trace") for one in copies)


@pytest.mark.exhaustive
def test_a_large_trace_is_drawn_quickly(chromium, tmp_path):
    """All slices are in the page. The goal is two seconds; the limit is ten, because the machine may be busy."""
    trace = tmp_path / "large.json"
    count = large(trace, 300_000)
    page = page_of(tmp_path, trace)
    assert page.stat().st_size <= 2 * len(gzip.compress(trace.read_bytes(), 6)) + 1_000_000
    browser = shown(chromium, page)
    assert browser.execute_script("return performance.now()") < 10_000
    press(browser, "f")
    told = text(browser, "#merged")
    seen = re.match(r"([\d,]+) of the ([\d,]+) slices in view are narrower than a pixel and drawn together", told)
    assert int(seen[2].replace(",", "")) == count
    browser.execute_script(
        "const one = document.getElementById('search'); one.value = '^aten::mm$'; one.dispatchEvent(new Event('input'))"
    )
    named = trace.read_text().count('"name": "aten::mm"')
    assert text(browser, "#found") == f"{named:,} matches"
    press(browser, "n", "w", "w", "d", "s", "Escape")
    is_quiet(browser, page)


def test_a_link_can_mark_slices(chromium, pages):
    """Marks are in the step that the link names. A name without a slice has no mark."""
    browser = shown(chromium, pages(SHAPES), "#step=3&mark=%5Eaten::mm%24&mark=%5Eaten::mm%24,3&mark=idle&mark=nothing")
    assert browser.execute_script("return document.getElementById('canvas').dataset.marks") == "3"
    browser = shown(chromium, pages(SHAPES), "#step=3&mark=%5Eaten::mm%24,4&mark=no(such")
    assert browser.execute_script("return document.getElementById('canvas').dataset.marks") == "0"
    is_quiet(browser, pages(SHAPES))


def test_idle_time_is_drawn_in_proportion_to_its_causes(chromium, pages):
    """With thousands of gaps narrower than a pixel, the colored areas are proportional to the times."""
    page = pages(TRAINING)
    idle = unpacked(page)[0]["idle"]
    expected = sum(idle["launched"][1::2]) / sum(idle["launched"][1::2] + idle["not_launched"][1::2])
    browser = shown(chromium, page)
    press(browser, "f")
    areas = browser.execute_script("""
        const style = getComputedStyle(document.documentElement), canvas = document.getElementById('canvas');
        const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        return ['launched', 'not-launched'].map(cause => {
          const value = style.getPropertyValue(`--idle-${cause}`).trim();
          const wanted = [1, 3, 5].map(at => parseInt(value.slice(at, at + 2), 16));
          let count = 0;
          for (let at = 0; at < pixels.length; at += 4)
            if (wanted.every((part, place) => Math.abs(pixels[at + place] - part) < 24)) count++;
          return count;
        });""")
    assert areas[0] / sum(areas) == pytest.approx(expected, abs=0.03)


def test_zooming_by_key_keeps_the_selection_in_view(chromium, pages):
    browser = shown(chromium, pages(TRAINING), "#search=cutlass")
    press(browser, "n", *"wwwwwwww")
    found, columns = unpacked(pages(TRAINING))
    name = text(browser, "#selected-text")
    starts = starts_of(found, columns)
    of_name = [one for one, number in enumerate(columns["name"]) if found["names"][number] == name]
    first = min(of_name, key=starts.__getitem__)
    assert view(browser)[0] < starts[first] + columns["dur"][first] / 2 < view(browser)[1]


def test_two_fingers_zoom_and_one_pans(chromium, pages):
    def touch(kind, *points):
        points = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
        chromium.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    chromium.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})
    try:
        browser = shown(chromium, pages(TRAINING))
        browser.execute_script(
            "document.getElementById('canvas').scrollIntoView({block: 'center', behavior: 'instant'})"
        )
        settled(browser)
        x, y = browser.execute_script(
            "const box = document.getElementById('canvas').getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]"
        )
        whole = view(browser)
        touch("touchStart", (x - 50, y))
        touch("touchStart", (x - 50, y), (x + 50, y))
        touch("touchMove", (x - 100, y), (x + 100, y))
        touch("touchEnd")
        settled(browser)
        near = view(browser)
        assert (near[1] - near[0]) / (whole[1] - whole[0]) == pytest.approx(0.5, abs=0.02)
        touch("touchStart", (x, y))
        for along in range(20, 140, 20):
            touch("touchMove", (x - along, y))
        touch("touchEnd")
        settled(browser)
        assert view(browser)[0] > near[0]
        assert view(browser)[1] - view(browser)[0] == pytest.approx(near[1] - near[0])
    finally:
        chromium.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})


# Several traces, ranks, and what a pull request gets.

EAGER, COMPILED, GRAPH = (
    ROOT / f"tests/traces/models/qwen3_decode_{kind}.json.gz" for kind in ("eager", "compiled", "graph")
)


@pytest.mark.parametrize(
    "runs",
    [(COMPILED, GRAPH), pytest.param((EAGER, COMPILED), marks=pytest.mark.exhaustive)],
    ids=("graph", "compiled"),
)
def test_runs_are_compared_by_the_figures_of_json(chromium, pages, capsys, runs):
    page = pages(*runs)
    measured = [json_of(capsys, one) for one in runs]
    browser = shown(chromium, page)
    cells = (
        "return [...document.querySelectorAll(`#measures tr[data-name=${arguments[0]}] td.number`)]"
        ".map(one => Number(one.dataset.value))"
    )
    for key, name in (("cpu", "cpu_us"), ("gpu", "gpu_busy_us"), ("launches", "launches")):
        expected = [one["steps"][one["typical_index"]][name] for one in measured]
        assert browser.execute_script(cells, key) == pytest.approx(expected)
    ratio = measured[0]["recorded_step_us"] / measured[1]["recorded_step_us"]
    assert ratio > 2 and text(browser, "#overview h1") == f"{ratio:.1f} times as fast as run 1"
    assert f" is {ratio:.1f} times as fast as run 1" in text(browser, "#overview")
    times = [{}, {}]
    for one, found in zip(measured, times, strict=True):
        for work in one["gpu_work"]:
            found[work["name"]] = found.get(work["name"], 0) + work["us"]
    change = {name: times[1].get(name, 0) - times[0].get(name, 0) for name in times[0] | times[1]}
    assert values(browser, "kernels-table", "change_us") == pytest.approx(change)
    gone = (
        "return [...document.querySelectorAll('.chips button')]"
        ".find(one => one.textContent.startsWith('gone')).textContent"
    )
    assert browser.execute_script(gone) == f"gone {len(times[0].keys() - times[1].keys())}"
    found, _ = unpacked(page)
    assert [one["start"] for one in found["steps"]] == [0, 0]
    assert {one["title"].split(" · ")[0] for one in found["tracks"]} == {"run 1", "run 2"}
    is_quiet(browser, page)


def test_ranks_are_side_by_side(chromium, pages, capsys):
    page = pages(*RANKS)
    measured = json_of(capsys, *RANKS)
    browser = shown(chromium, page)
    assert text(browser, "#regime") == f"Rank {measured['straggler']} is the straggler"
    waited = {f"rank {one['rank']}": one["others_waited_us"] for one in measured["ranks"]}
    assert values(browser, "ranks-table", "others_waited_us") == pytest.approx(waited)
    browser.execute_script("document.querySelector('#collectives-table > button').click()")
    waits = browser.execute_script(
        "return [...document.querySelectorAll('#collectives-table td[data-key=wait_us]')]"
        ".map(one => Number(one.dataset.value))"
    )
    assert waits == pytest.approx(sorted((max(one["waits_us"]) for one in measured["matched"]), reverse=True))
    browser.execute_script("document.querySelector('#collectives-table tbody button').click()")
    settled(browser)
    longest = max(measured["matched"], key=lambda one: max(one["waits_us"]))
    assert text(browser, "#selected-text") == longest["kind"]
    assert f"rank {longest['last']}" in text(browser, ".selected")
    is_quiet(browser, page)


def test_the_messages_of_ranks_are_in_a_table(chromium, pages, capsys):
    measured = json_of(capsys, *PIPELINE)
    browser = shown(chromium, pages(*PIPELINE))
    pairs = {f"rank {one['source']} to {one['destination']} ": one for one in measured["pairs"]}
    assert len(pairs) == 2
    for key in ("receiver_waited_us", "sender_waited_us", "transfer_us"):
        expected = {name: one[key] / len(measured["steps"]) for name, one in pairs.items()}
        assert values(browser, "messages-table", key) == pytest.approx(expected)
    assert values(browser, "messages-table", "messages") == {name: one["messages"] for name, one in pairs.items()}
    assert "12 messages matched between 2 pairs of ranks." in text(browser, "#messages")
    assert "Messages" in text(browser, "nav")
    is_quiet(browser, pages(*PIPELINE))


def test_a_page_of_many_hosts_names_the_first_ones_in_one_line():
    from tracereader.show.page import data

    empty = {"names": [], "arguments": []}
    assert data.holds(["a", None, "a"], empty) == ["the host name a"]
    assert data.holds([f"n{at}" for at in range(1200)], empty) == ["1,200 host names: n0, n1, n2 and 1,197 more"]


@pytest.mark.exhaustive
def test_the_page_of_ranks_has_the_changes_of_json(pages, capsys):
    figures = json.loads(block(pages(*RANKS), "figures"))
    expected = json_of(capsys, *RANKS)["opportunities"]
    keys = ("change", "step_us", "step_us_after", "saves_us", "try")
    assert expected and [{key: one[key] for key in keys} for one in figures["opportunities"]["found"]] == [
        {key: one[key] for key in keys} for one in expected
    ]


def test_a_pipelines_page_begins_with_its_regime_and_has_the_waits_for_messages(chromium, pages, capsys):
    stages = sorted((ROOT / "tests/traces/h200-x4/pipeline_few").glob("*.json.gz"))
    measured = json_of(capsys, *stages)
    browser = shown(chromium, pages(*stages))
    assert measured["straggler"] is None and text(browser, "#regime") == "Communication-bound"
    assert text(browser, "#heat-scale") == "All cells: 60.1 ms to 60.2 ms.", "steps that are alike look alike"
    heat = json.loads(block(pages(*stages), "figures"))["heat"]
    for rank, waited in zip(heat["ranks"], heat["waited_us"], strict=True):
        for step, us in zip(measured["steps"], waited, strict=True):
            mine = [one for one in measured["messages"] if rank in one["ranks"] and one["step"] == step]
            assert us == pytest.approx(sum(one["waits_us"][one["ranks"].index(rank)] for one in mine), abs=0.01)
            assert us > 0


def test_the_heat_map_has_each_ranks_steps_and_waits(chromium, pages, capsys):
    measured = json_of(capsys, *RANKS)
    browser = shown(chromium, pages(*RANKS))

    def cell(*keys):
        browser.execute_script(
            "const one = document.getElementById('heat-canvas');"
            "for (const key of arguments) one.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));",
            *keys,
        )
        return float(browser.execute_script("return document.getElementById('heat-cell').dataset.value"))

    one = measured["ranks"][1]
    times = {step["name"]: step["us"] for step in one["steps"]}
    assert cell("ArrowRight", "ArrowDown", "ArrowRight") == pytest.approx(times[measured["steps"][1]], abs=1e-3)
    assert text(browser, "#heat-cell").startswith(f"Rank {one['rank']}, step #3: ")
    browser.execute_script("document.querySelectorAll('.heat .chips button')[1].click()")
    waited = sum(
        us
        for collective in measured["matched"]
        for rank, us in zip(collective["ranks"], collective["waits_us"], strict=True)
        if rank == 0 and collective["step"] == measured["steps"][1]
    )
    assert waited > 0 and cell("ArrowUp") == pytest.approx(waited, abs=1e-2)
    cell("Enter")
    assert browser.execute_script("return location.hash") == "#step=3"
    is_quiet(browser, pages(*RANKS))


@pytest.mark.exhaustive
def test_a_thousand_ranks_have_a_page(chromium, tmp_path):
    from tracereader.figures.rank import Call, Group, Lane, Part, RankStep, RankTrace, Times
    from tracereader.figures.ranks import joined
    from tracereader.show import page as pages

    count, names = 1024, [f"ProfilerStep#{number}" for number in range(60)]
    everyone, lane = tuple(range(count)), Lane(names[5], ((5 * 10**7, 6 * 10**7, "forward"),))

    def taken(name, us):
        return dict.fromkeys(Times.__struct_fields__, 0.0) | {"name": name, "us": us, "compute_us": us}

    def rank(number):
        parts = [
            Part(place, place * 4 + one, start + number, start + 10**5)
            for place in range(len(names))
            for one in range(4)
            for start in (place * 10**7 + one * 10**6,)
        ]
        steps = tuple(RankStep(**taken(name, 10_000.0 + number + place)) for place, name in enumerate(names))
        return RankTrace(
            path=f"rank{number}.json", rank=number, world_size=count, host=None, device="NVIDIA H200", on_gpu=False,
            start=0, end=len(names) * 10**7, total=Times(**taken("all", 6e5)), steps=steps, left_out=(),
            groups=(Group("all", "", count, everyone),),
            calls=tuple(Call(0, "all-reduce", 1_000_000, name) for name in names), parts=tuple(parts), exposed=(),
            hidden=0, unnamed=0, unprofiled_step_us=None, lane=lane,
        )  # fmt: skip

    traces = [rank(number) for number in range(count)]
    page = tmp_path / "ranks.html"
    page.write_text(pages.of_ranks(joined(traces), traces, 10**9)[0])
    assert page.stat().st_size < 5_000_000
    browser = shown(chromium, page)
    assert "collectives of that step alone" in text(browser, "#timeline .told")
    browser.execute_script(
        "const one = document.getElementById('heat-canvas');"
        "for (let at = 0; at < 1100; at++) one.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowDown'}));"
    )
    assert float(browser.execute_script("return document.getElementById('heat-cell').dataset.value")) == 10_000 + 1023
    is_quiet(browser, page)


# What is committed: the gallery and the pictures.

GALLERY = {
    "training": (TRAINING,), "roofline": (ROOT / "tests/traces/models/qwen3_prefill_logits.json.gz",),
    "comparison": (EAGER, COMPILED), "ranks": tuple(RANKS),
}  # fmt: skip


def test_the_gallery_is_what_the_command_makes():
    import ast

    source = (ROOT / "docs/pictures.py").read_text()
    kept = [one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.Call) and "kept=True" in ast.unparse(one)]
    named = {one.args[0].value for one in kept if getattr(one.func, "id", "") == "Report"}
    assert named == GALLERY.keys() == {one.stem for one in (ROOT / "docs/gallery").iterdir()}
    assert sum(one.stat().st_size for one in (ROOT / "docs/gallery").iterdir()) < 1_500_000


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in ("roofline", "comparison") else ())
        for name in GALLERY
    ],
)
def test_a_report_of_the_gallery_has_the_figures_of_its_traces(capsys, name):
    page, traces = ROOT / f"docs/gallery/{name}.html", GALLERY[name]
    figures = json.loads(block(page, "figures"))
    found, columns = unpacked(page)
    assert sum(track["slices"] for track in found["tracks"]) == len(columns["name"])
    if name == "ranks":
        measured = json_of(capsys, *traces)
        for one, expected in zip(figures["ranks"], measured["ranks"], strict=True):
            assert one["others_waited_us"] == pytest.approx(expected["others_waited_us"])
            assert one["compute_us"] == pytest.approx(expected["compute_us"])
        assert len(figures["matched"]) == len(measured["matched"])
        return
    measured = [json_of(capsys, one) for one in traces]
    for place, one in enumerate(measured):
        step = one["steps"][one["typical_index"]]
        run = figures["runs"][place] if name == "comparison" else figures["head"]
        keys = {"cpu": "cpu_us", "gpu": "gpu_busy_us", "launches": "launches"}
        keys = keys if name == "comparison" else {"cpu_us": "cpu_us", "gpu_us": "gpu_busy_us", "launches": "launches"}
        assert {key: run[key] for key in keys} == pytest.approx({key: step[other] for key, other in keys.items()})
    if name != "comparison":
        expected = {one["name"]: one["total_us"] for one in measured[0]["kernels"]}
        assert {one["name"]: one["total_us"] for one in figures["kernels"]} == pytest.approx(expected)


def test_each_rungs_page_shows_its_step():
    """The pictures exist in light and dark, have less than 2 MB together, and the page has a line for each mark."""
    pictures = sorted((ROOT / "docs/img").glob("step-*.png"))
    assert sum(one.stat().st_size for one in pictures) < 2_000_000
    source = (ROOT / "docs/pictures.py").read_text()
    shown = set()
    for rung in sorted((ROOT / "docs").glob("0[1-6]_*.md")):
        found = re.search(
            r'<picture>\n<source media="\(prefers-color-scheme: dark\)" srcset="img/(step-\S+-dark\.png)">\n'
            r'<img alt="[^"]+" src="img/(step-\S+-light\.png)">\n</picture>\n\n((?:\d\. .*\n(?:   .*\n)*)+)',
            rung.read_text(),
        )
        assert found and found[1] == f"step-{rung.stem}-dark.png" and found[2] == f"step-{rung.stem}-light.png"
        marks = re.search(rf'"{rung.stem}", f"[^"]+", \d,\s*\(([^)]*?),?\),?\s*\)', source)[1]
        assert len(re.findall(r"(?m)^\d\. ", found[3])) == marks.count('"') // 2
        shown |= {found[1], found[2]}
    assert shown == {one.name for one in pictures}


def test_markdown_has_a_comparisons_figures(capsys):
    measured = [json_of(capsys, one) for one in (COMPILED, GRAPH)]
    assert cli.main([str(COMPILED), str(GRAPH), "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    launches = [one["steps"][one["typical_index"]]["launches"] for one in measured]
    row = next(line for line in lines if line.startswith("| launches "))
    assert row == f"| launches | {launches[0]:,} | {launches[1]:,} | {launches[1] / launches[0] - 1:+.1%} |"
    tables = [line for line in lines if line.startswith("|")]
    assert all(len(re.findall(r"(?<!\\)\|", line)) in (5,) for line in tables)


@pytest.mark.parametrize("number", range(0, len(ATTACKS), 2))
def test_markdown_of_hostile_names_is_text(tmp_path, capsys, number):
    attack = ATTACKS[number] + "|`x`|@someone #1 [a](https://evil.example) <b>"
    document = json.loads(gzip.decompress(SHAPES.read_bytes()))
    for event in document["traceEvents"]:
        if event.get("cat") in ("kernel", "cpu_op"):
            event["name"] = attack[:300] + event["name"]
    strange = tmp_path / "strange.json"
    strange.write_text(json.dumps(document))
    assert cli.main([str(SHAPES), str(strange), "--markdown"]) == 0
    out = capsys.readouterr().out
    outside = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", out.replace("\\`", ""))
    outside = re.sub(r"</?(?:details|summary)>", "", outside)
    assert not re.search(r"(?<!\\)[<>]|(?<!\\)\]\(|@someone|https://", outside)
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 5 for line in out.splitlines() if line.startswith("|"))


@pytest.mark.parametrize(
    "limit, before, after, crosses",
    [
        ("launches > 0", COMPILED, EAGER, True), ("launches > 0", EAGER, COMPILED, False),
        ("launches>0", EAGER, EAGER, False), ("launches >= 0", EAGER, EAGER, True),
        ("kernels < -10%", EAGER, COMPILED, True), ("kernels < -90%", EAGER, COMPILED, False),
        ("step > 5%", COMPILED, EAGER, True), ("step > 60 s", COMPILED, EAGER, False),
        ("cpu > 1 ms", COMPILED, EAGER, True),
        ("gpu busy < -5%", COMPILED, EAGER, True), ("gpu busy < -50%", COMPILED, EAGER, False),
        ("GPU busy > 5 %", EAGER, COMPILED, True), ("gpu > 10%", COMPILED, EAGER, True),
    ],
)  # fmt: skip
def test_a_limit_is_crossed_or_not(capsys, limit, before, after, crosses):
    assert cli.main([str(before), str(after), "--fail-if", limit]) == int(crosses)
    said = capsys.readouterr().err
    assert (said.count("\n") == 1 and said.strip().endswith(f"({limit})")) if crosses else not said


def test_the_greek_letter_of_a_microsecond_is_accepted():
    assert limit_of("step > 5 \u03bcs")[1:] == limit_of("step > 5 \u00b5s")[1:]


def test_limits_that_cannot_be_judged_are_refused(capsys):
    pair = [str(EAGER), str(COMPILED)]
    for arguments, why in (
        ([*pair, "--fail-if", "steps > 5%"], "write for example"),
        ([*pair, "--fail-if", "step > 5 MB"], "step takes % or us"),
        ([*pair, "--fail-if", "launches > 5 ms"], "launches takes %"),
        ([*pair, "--fail-if", "gpu busy > 5"], "takes %"),
        ([*pair, "--fail-if", "memory > 1 MB"], "do not show memory"),
        ([*pair, "--fail-if", "step > nan%"], "write for"),
        ([pair[0], "--fail-if", "step > 5%"], "name two traces"), ([pair[0], "--markdown"], "name two traces"),
        ([*pair, "--markdown", "--html", "-"], "both print"), ([*pair, "--markdown", "--previous"], "leave out"),
        ([*pair, pair[0], "--markdown", "--json"], "leave out"),
    ):  # fmt: skip
        assert cli.main(arguments) == 2, arguments
        said = capsys.readouterr().err
        assert why in said and said.count("\n") == 1, said


def test_memory_is_judged_if_the_traces_record_it(capsys):
    assert cli.main([str(MEMORY), str(MEMORY), "--fail-if", "memory > 0 MB"]) == 0
    assert cli.main([str(MEMORY), str(MEMORY), "--fail-if", "memory <= 0%"]) == 1
    assert "(memory <= 0%)" in capsys.readouterr().err


def test_an_opportunitys_kernels_are_those_that_it_changes():
    """The named kernels of the change are exactly the casts of the raw events."""
    from tracereader.changes.catalogue import opportunities
    from tracereader.figures import summarize
    from tracereader.trace import read

    trace = read(TRAINING)
    found = {one.change: one for one in opportunities(trace, summarize(trace))}
    events = json.loads(gzip.decompress(TRAINING.read_bytes()))["traceEvents"]
    recorded = {one["name"] for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")}
    assert all(set(one.kernels) <= recorded for one in found.values())
    assert any("multi_tensor_apply" in name for name in found["fused_optimizer"].kernels)
    assert not any("gemm" in name for name in found["fused_optimizer"].kernels)


def test_deeply_nested_arguments_do_not_stop_the_page(tmp_path):
    document = json.loads(gzip.decompress(SHAPES.read_bytes()))
    ops = [one for one in document["traceEvents"] if one.get("cat") == "cpu_op"]
    for depth, op in zip((10, 300, 700), ops, strict=False):
        op["args"] = {"nested": "@", "depth": depth}
    text = json.dumps(document)
    for depth in (10, 300, 700):
        text = text.replace(f'"@", "depth": {depth}', f'{"[" * depth}{"]" * depth}, "depth": {depth}')
    trace = tmp_path / "deep.json"
    trace.write_text(text)
    found, _ = unpacked(page_of(tmp_path, trace))
    assert [one["depth"] for one in found["arguments"] if "depth" in one] == [10]
    assert found["arguments_left_out"] >= 1


def test_arguments_beyond_the_limit_are_left_out_and_counted(chromium, tmp_path, monkeypatch):
    from tracereader.show.page import timeline

    monkeypatch.setattr(timeline, "ARGUMENTS_HELD", 2_000)
    page = page_of(tmp_path, SHAPES)
    found, columns = unpacked(page)
    assert len(json.dumps(found["arguments"])) < 4_000 and found["arguments_left_out"] > 0
    assert columns["arguments"].count(0) >= found["arguments_left_out"]
    browser = shown(chromium, page)
    press(browser, *["ArrowDown"] * 4)
    for _ in range(30):
        if "are left out" in (text(browser, ".selected") or ""):
            break
        press(browser, "ArrowRight")
    assert f"Arguments of {found['arguments_left_out']:,} slices are left out" in text(browser, ".selected")


def test_the_requested_step_is_shown(chromium, tmp_path, capsys):
    page = page_of(tmp_path, SHAPES, "--step", "3")
    measured = json_of(capsys, SHAPES, "--step", "3")
    figures = json.loads(block(page, "figures"))
    assert figures["head"]["step_name"] == "ProfilerStep#3" == measured["typical_step"]
    browser = shown(chromium, page)
    found, _ = unpacked(page)
    step = next(one for one in found["steps"] if one["name"] == "ProfilerStep#3")
    assert view(browser)[0] < step["start"] < step["end"] < view(browser)[1]
    ops = {**measured["ops"], **measured["runtime"]}
    assert values(browser, "ops-table", "calls") == {name: one["calls"] for name, one in ops.items()}


def test_paper_is_white_in_every_theme(chromium, pages):
    screen = {"width": 1280, "height": 400, "deviceScaleFactor": 1, "mobile": False}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    browser = shown(chromium, pages(TRAINING))
    browser.execute_script("document.getElementById('theme').click()")
    assert browser.execute_script("return document.documentElement.dataset.theme") in ("light", "dark")
    high = "return document.getElementById('canvas').clientHeight"
    browser.execute_script("document.documentElement.dataset.theme = 'dark'")
    on_screen = browser.execute_script(high)
    browser.execute_script("dispatchEvent(new Event('beforeprint'))")
    assert browser.execute_script("return document.documentElement.dataset.theme") == "light"
    assert browser.execute_script(high) > on_screen  # all tracks: paper does not scroll
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script("return document.documentElement.dataset.theme") == "dark"
    chromium.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    printed = base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert printed.startswith(b"%PDF") and len(printed) > 20_000
