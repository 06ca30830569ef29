"""Makes the pictures of reports and steps, and the gallery, from committed traces through headless Chromium.

    uv run docs/pictures.py [--reports FOLDER]

docs/img/report-*.png are screenshots of report pages. docs/img/step-*.png are each rung's step as the page's timeline
draws it, light and dark, with numbered marks at what the rung's page speaks of. docs/gallery holds four reports.

Needs Chromium and its driver (Debian: chromium chromium-driver). With --reports all pages stay in that folder.
"""

import argparse
import base64
import io
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy
from PIL import Image
from selenium import webdriver

ROOT = Path(__file__).resolve().parent.parent
PICTURES, GALLERY = ROOT / "docs/img", ROOT / "docs/gallery"
MODELS, RANKS = "tests/traces/models", "tests/traces/ranks"
H200, H200_X2 = "traces/reference/nvidia-h200", "traces/reference/nvidia-h200-x2"
READY_S = 30
COLORS = 256  # of a picture's palette: what one byte holds


@dataclass(frozen=True)
class Report:
    """A page and its picture. address: what stands behind # in its address; at: the section to show; keys: pressed.

    kept: whether the page is in the gallery.
    """

    name: str
    traces: tuple[str, ...]
    address: str = ""
    at: str = "overview"
    keys: str = ""
    dark: bool = False
    width: int = 1280
    height: int = 900
    kept: bool = False


@dataclass(frozen=True)
class Step:
    """A step of a rung as the timeline draws it. marks: as the page's address has them, see docs/report-page.md."""

    rung: str
    trace: str
    step: int
    marks: tuple[str, ...]


REPORTS = (
    Report("training", (f"{MODELS}/gpt2_train.json.gz",), kept=True),
    Report("timeline", (f"{MODELS}/gpt2_train.json.gz",), "search=cutlass", "timeline", "nwwwwwww", height=1200),
    Report("modules", (f"{MODELS}/bert_modules.json.gz",), at="timeline", dark=True, height=760),
    Report("roofline", (f"{MODELS}/qwen3_prefill_logits.json.gz",), at="roofline", height=760, kept=True),
    Report(
        "comparison",
        (f"{MODELS}/qwen3_decode_eager.json.gz", f"{MODELS}/qwen3_decode_compiled.json.gz"),
        height=760,
        kept=True,
    ),
    Report("ranks", (f"{RANKS}/ddp_straggler_rank0.json.gz", f"{RANKS}/ddp_straggler_rank1.json.gz"), kept=True),
    Report("phone", (f"{MODELS}/gpt2_train.json.gz",), width=390, height=844),
)
STEPS = (
    Step("01_matmul_add", f"{H200}/01_matmul_add/64_bf16_warm_eager", 3, ("^cuLaunch", "^nvjet", "idle")),
    Step("02_linear", f"{H200}/02_linear/1024x32x64_bf16_warm_eager", 3, ("^aten::t$", "^aten::addmm", "^nvjet")),
    Step(
        "03_mlp", f"{H200}/03_simple_mlp/64x128x768x3072_bf16_warm_eager", 3,
        ("^aten::gelu$", "GeluCUDAKernelImpl", "BinaryFunctor"),
    ),
    Step(
        "04_attention", f"{H200}/04_a_naive_attention/8x16x1024x64_bf16_warm_eager", 3,
        ("^Memcpy DtoD", "native::elementwise_kernel", "softmax_warp"),
    ),
    Step(
        "05_llm", f"{H200}/05_llm/1x512_bf16_warm_eager_active2_shapes", 2,
        ("^decode$", "idle", "^nvjet_sm90_tst_384x8"),
    ),
    Step(
        "06_training", f"{H200_X2}/06_training/4x1024x1024x16_bf16_warm_eager", 3,
        ("^forward$", "^backward$", "^optimizer$"),
    ),
)  # fmt: skip
STEP_WIDE, SHARP = 1000, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reports", type=Path, metavar="FOLDER", help="keep the pages here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (args.reports or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        GALLERY.mkdir(exist_ok=True)
        browser = opened()
        try:
            for one in REPORTS:
                page = written(folder / f"{one.name}.html", one.traces)
                keep(PICTURES / f"report-{one.name}.png", picture(browser, page, one))
                if one.kept:
                    keep(GALLERY / page.name, page.read_bytes())
            for one in STEPS:
                page = written(folder / f"step-{one.rung}.html", (f"{one.trace}.json.gz",))
                for dark in (False, True):
                    theme = "dark" if dark else "light"
                    keep(PICTURES / f"step-{one.rung}-{theme}.png", picture_of_step(browser, page, one, dark))
        finally:
            browser.quit()


def keep(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    print(f"{file.relative_to(ROOT)}: {len(data) / 1e3:.0f} kB")


def written(page: Path, traces: tuple[str, ...]) -> Path:
    """The page of some traces, as `read-trace` writes it."""
    command = [sys.executable, "-m", "tracereader", *traces, "--html", str(page)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return page


def opened() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def show(
    browser: webdriver.Chrome, page: Path, address: str, width: int, height: int, dark: bool, sharp: float = 1
) -> None:
    """Opens a page on a screen of this size and waits until all of it is drawn."""
    size = {"width": width, "height": height, "deviceScaleFactor": sharp, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": theme})
    browser.get("about:blank")
    browser.get(f"{page.as_uri()}#{address}")
    deadline = time.monotonic() + READY_S
    while not browser.execute_script("return document.body?.dataset.ready"):
        if time.monotonic() > deadline:
            raise SystemExit(f"{page} is not drawn after {READY_S} s")
        time.sleep(0.05)


def screenshot(browser: webdriver.Chrome, **where: object) -> bytes:
    """A PNG of few colors."""
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(() => arguments[0]()))")
    time.sleep(0.3)
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", **where})["data"]
    image = numpy.asarray(Image.open(io.BytesIO(base64.b64decode(shot))).convert("RGB"))
    # Colors of whole areas stay exact; the rare shades at the edges of letters become the nearest of the others.
    shades, shade, counts = numpy.unique(image.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    kept = shades[numpy.argsort(-counts, kind="stable")[:COLORS]].astype(int)
    nearest = numpy.array([((kept - one) ** 2).sum(axis=1).argmin() for one in shades], numpy.uint8)
    small, indexed = io.BytesIO(), Image.fromarray(nearest[shade.reshape(image.shape[:2])])
    indexed.putpalette(kept.astype(numpy.uint8).tobytes())
    indexed.save(small, "PNG", optimize=True)
    return small.getvalue()


def picture(browser: webdriver.Chrome, page: Path, report: Report) -> bytes:
    """The page as a screen shows it."""
    show(browser, page, report.address, report.width, report.height, report.dark)
    for key in report.keys:
        browser.execute_script(
            "const one = document.getElementById('canvas'); one.focus({preventScroll: true});"
            "one.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: true}));",
            key,
        )
    browser.execute_script(
        "document.documentElement.style.scrollBehavior = 'auto'; document.activeElement.blur();"
        "document.getElementById(arguments[0]).scrollIntoView();",
        report.at,
    )
    return screenshot(browser)


def picture_of_step(browser: webdriver.Chrome, page: Path, one: Step, dark: bool) -> bytes:
    """The timeline of one step with its legend and marks, without the controls."""
    address = "&".join([f"step={one.step}", *(f"mark={quote(mark, safe='')}" for mark in one.marks)])
    show(browser, page, address, STEP_WIDE, 1200, dark, SHARP)
    drawn = int(browser.execute_script("return document.getElementById('canvas').dataset.marks"))
    if drawn != len(one.marks):
        raise SystemExit(f"{one.rung}: {drawn} of {len(one.marks)} marks are in the trace")
    box = browser.execute_script(
        "for (const one of document.querySelectorAll('#timeline > :not(.legend, .panes), .timeline > :not(.frame),"
        " #details, header')) one.hidden = true;"
        "document.getElementById('timeline').scrollIntoView();"
        "const top = document.querySelector('#timeline .legend').getBoundingClientRect(),"
        " frame = document.querySelector('.frame').getBoundingClientRect();"
        "return {x: frame.x - 8, y: top.y + scrollY - 8, width: frame.width + 16, height: frame.bottom - top.y + 16};"
    )
    return screenshot(browser, clip={**box, "scale": 1}, captureBeyondViewport=True)


if __name__ == "__main__":
    main()
