"""Makes the pictures of reports: docs/img/report-*.png, through headless Chromium, from committed traces.

    uv run docs/pictures.py [--reports FOLDER]

Needs Chromium and its driver (Debian: chromium chromium-driver). With --reports the pages stay in that folder.
"""

import argparse
import base64
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from selenium import webdriver

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs/img"
MODELS, RANKS = "tests/traces/models", "tests/traces/ranks"
READY_S = 30


@dataclass(frozen=True)
class Report:
    """A page and its picture. address: what stands behind # in its address; at: the section to show; keys: pressed."""

    name: str
    traces: tuple[str, ...]
    address: str = ""
    at: str = "overview"
    keys: str = ""
    dark: bool = False
    width: int = 1280
    height: int = 900


REPORTS = (
    Report("training", (f"{MODELS}/gpt2_train.json.gz",)),
    Report("timeline", (f"{MODELS}/gpt2_train.json.gz",), "search=cutlass", "timeline", "nwwwwwww"),
    Report("modules", (f"{MODELS}/bert_modules.json.gz",), at="timeline", dark=True, height=760),
    Report("roofline", (f"{MODELS}/qwen3_prefill_logits.json.gz",), at="roofline", height=760),
    Report(
        "comparison", (f"{MODELS}/qwen3_decode_eager.json.gz", f"{MODELS}/qwen3_decode_compiled.json.gz"), height=760
    ),
    Report("ranks", (f"{RANKS}/ddp_straggler_rank0.json.gz", f"{RANKS}/ddp_straggler_rank1.json.gz")),
    Report("phone", (f"{MODELS}/gpt2_train.json.gz",), width=390, height=844),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--reports", type=Path, metavar="FOLDER", help="keep the pages here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (args.reports or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        browser = opened()
        try:
            for one in REPORTS:
                page = folder / f"{one.name}.html"
                command = [sys.executable, "-m", "tracereader", *one.traces, "--html", str(page)]
                subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
                target = PICTURES / f"report-{one.name}.png"
                target.write_bytes(picture(browser, page, one))
                print(f"{target.relative_to(ROOT)}: {target.stat().st_size / 1e3:.0f} kB")
        finally:
            browser.quit()


def opened() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"):
        options.add_argument(flag)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))


def picture(browser: webdriver.Chrome, page: Path, report: Report) -> bytes:
    """The page as a screen shows it, once all of it is drawn."""
    size = {"width": report.width, "height": report.height, "deviceScaleFactor": 1, "mobile": report.width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    theme = [{"name": "prefers-color-scheme", "value": "dark" if report.dark else "light"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": theme})
    browser.get("about:blank")
    browser.get(f"{page.as_uri()}#{report.address}")
    deadline = time.monotonic() + READY_S
    while not browser.execute_script("return document.body?.dataset.ready"):
        if time.monotonic() > deadline:
            raise SystemExit(f"{page} is not drawn after {READY_S} s")
        time.sleep(0.05)
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
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(() => arguments[0]()))")
    time.sleep(0.3)
    return base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"])


if __name__ == "__main__":
    main()
