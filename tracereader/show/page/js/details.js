// The details of the selected slice.

function describe(slices, one, timeline, showKernel) {
  if (one === null) {
    return el("p", {class: "empty", id: "selected-text"},
      "Select a slice to see its arguments, shapes and rates. ", el("span", {class: "keys"}, KEYS));
  }
  const name = slices.nameOf(one), track = slices.trackOf(one), kind = slices.kindOf(one);
  const step = slices.stepAt(slices.start[one]), piece = slices.pieceOf(one), launch = slices.launchOf(one);
  const launched = slices.launchedBy(one), row = (title, value, key) =>
    value === null || value === undefined || value === "" ? null : [el("dt", {}, title), el("dd", {data: {key: key ?? title}}, value)];
  const jump = (other, text) => el("button", {type: "button", class: "plain", onclick: () => timeline.select(other, true)}, text);
  const number = slices.columns.arguments[one];
  return el("div", {class: "selected"},
    el("h3", {id: "selected-text", data: {name}}, name),
    el("p", {class: "acts"},
      el("button", {type: "button", onclick: () => timeline.zoomTo(one)}, "zoom to it"),
      slices.isWork(one) && kind !== "span" && el("button", {type: "button", onclick: () => showKernel(name)}, "show in the table"),
      el("button", {type: "button", onclick: () => timeline.highlightNames([name], "this name")}, "highlight its name")),
    el("dl", {},
      row("duration", time(slices.dur[one] / 1e3)),
      row("start", step ? `${time((slices.start[one] - step.start) / 1e3)} after ${step.name.replace(/^ProfilerStep/, "step ")} began`
        : `${time(slices.start[one] / 1e3)} after the trace began`),
      row("kind", KIND_WORDS[kind] ?? kind),
      row("track", track.title),
      row("decoded", slices.isWork(one) ? slices.decoded.get(name) : null),
      row("launched by", launch === null ? (piece?.asked_by || null)
        : el("span", {}, jump(launch, slices.nameOf(launch)), piece?.asked_by ? ` in ${piece.asked_by}` : "",
          ` · ${time((slices.start[one] - slices.start[launch]) / 1e3)} from the launch to the start`)),
      row("launches", launched.length ? el("span", {}, jump(launched[0], counted(launched.length, "GPU activity", "GPU activities"))) : null),
      row("layer", piece?.layer),
      row("size", piece?.size),
      row("rate", piece && (piece.tflops || piece.gb_s)
        ? [piece.tflops && rate(piece.tflops, "TFLOP/s"), piece.gb_s && rate(piece.gb_s, "GB/s")].filter(Boolean).join(", ")
          + (piece.of_roof ? `, ${share(piece.of_roof)} of the ${piece.roof === "compute" ? "arithmetic" : "bandwidth"} peak` : "")
          + (step && step.name.endsWith(slices.step) ? "" : ` (in step ${slices.step})`) : null),
      row("occupancy limit", piece?.occupancy ? share(piece.occupancy) : null)),
    number ? args(slices.arguments[number - 1]) : slices.arguments_left_out
      ? el("p", {class: "told"}, `Arguments of ${counted(slices.arguments_left_out, "slice")} are left out: the page holds 2 MB of them.`) : null);
}

// The totals of a range. A slice counts with the part of it that lies in the range.
function describeRange(slices, {from, to}) {
  const rows = slices.totals(from, to), us = (to - from) / 1e3;
  const part = (id, title, some) => some.length > 0 && [el("h3", {}, title), table({id, rows: some, sort: "us", columns: [
    {key: "name", title: "name", name: true, text: row => cut(slices.shown.get(row.name) ?? row.name, 90)},
    {key: "count", title: "count", number: true, text: row => whole(row.count)},
    {key: "us", title: "time", number: true, text: row => time(row.us), bar: row => row.us / us},
    {key: "part", title: "of the range", text: row => share(row.us / us, 1)},
  ]}).node];
  return el("div", {id: "range", data: {from, to}}, el("p", {id: "selected-text"}, `The range takes ${time(us)}.`),
    part("range-gpu", "GPU activities, summed over all streams", rows.filter(row => row.on_gpu)),
    part("range-cpu", "Calls with what they call, summed over all threads", rows.filter(row => !row.on_gpu && row.kind !== "span")));
}

function args(found) {
  return el("details", {open: true},
    el("summary", {}, "arguments"),
    el("dl", {class: "arguments"}, Object.entries(found).map(([name, value]) =>
      [el("dt", {}, name), el("dd", {}, typeof value === "string" ? value : JSON.stringify(value))])));
}
