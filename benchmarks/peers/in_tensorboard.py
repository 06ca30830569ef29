"""Print the recommendations of torch-tb-profiler's overview for the traces in a folder, as JSON.

    python in_tensorboard.py FOLDER

It runs in an environment with torch-tb-profiler. TensorBoard's server is not needed: the plugin loads runs like this.
"""

import html
import json
import re
import sys

from torch_tb_profiler import io
from torch_tb_profiler.profiler.loader import RunLoader


def main():
    run = RunLoader("run", sys.argv[1], io.Cache()).load()
    if not run.profiles:
        sys.exit("the plugin could not read the trace")
    (profile,) = run.profiles.values()
    items = re.findall(r"<li>(.*?)</li>", profile.overview["recommendations"], re.S)
    advice = [html.unescape(re.sub(r"<[^>]+>", "", item)) for item in items if item != "N/A"]
    parts = profile.overview["performance"][0]["children"]
    shares = ", ".join(f"{part['name']} {part['extra']:.0f}%" for part in parts)
    print(json.dumps({"advice": advice, "figures": [f"step time: {shares}"]}))


if __name__ == "__main__":  # the plugin starts processes of its own
    main()
