// The views below the timeline. Each returns null if the trace has no data for it.

function section(id, title, note, ...children) {
  return el("section", {id}, el("h2", {}, title), note && el("p", {class: "told"}, note), children);
}

function timeSection(data) {
  const {families, by_phase: phases, by_label: labels, idle_in: idle, window_us: wholeUs, overlap, several} = data.time;
  const summed = families.reduce((sum, one) => sum + one.us, 0);
  const places = phases.length ? phases : labels;
  if (!families.length && !places.length) return null;
  const colored = families.map(one => ({...one, color: familyColor(one.family)}));
  const unit = columnUnit(families.map(one => one.us)), idleUnit = columnUnit(idle.map(one => one.us));
  return section("time", "Where the time goes", null,
    families.length > 0 && el("h3", {}, overlap ? "GPU time by family, summed: kernels overlap" : "GPU time by family"),
    families.length > 0 && partsBar(colored, summed, "GPU time by family"),
    families.length > 0 && table({
      id: "families", rows: colored.map(one => ({...one, key: one.family})), sort: "us", columns: [
        {key: "name", title: "family", name: true, node: row => [swatch(row.color), row.name]},
        {key: "us", title: unit.name, number: true, text: row => inUnit(row.us, unit)},
        {key: "share", title: "of GPU time", number: true, text: row => share(row.share, 1), bar: row => row.share},
        {key: "pieces", title: "activities", number: true, text: row => whole(row.pieces)},
      ]}).node,
    el("p", {class: "told"}, data.head.gpu ? `Over ${time(wholeUs)}, the window from the first step to the end of the last${several ? "; the time of the busiest GPU" : ""}.` : null),
    idle.length > 0 && el("h3", {}, `What the launching thread does while the GPU waits for step ${data.head.step}`),
    idle.length > 0 && table({id: "idle-in", rows: idle, sort: "us", columns: [
      {key: "name", title: "innermost op or call", name: true},
      {key: "us", title: idleUnit.name, number: true, text: row => inUnit(row.us, idleUnit), bar: row => row.us / idle[0].us},
    ]}).node,
    places.length > 0 && phaseTable(places, phases.length > 0, data.head));
}

function phaseTable(places, fromAutograd, head) {
  const unit = columnUnit(places.flatMap(one => [one.gpu_us, one.cpu_us]));
  const most = largest(places.map(one => head.gpu ? one.gpu_us : one.cpu_us)) || 1;
  return [
    el("h3", {}, fromAutograd ? `Phases of step ${head.step}, from autograd` : `Phases of step ${head.step}, by annotation`),
    table({id: "phases", rows: places.map((one, place) => ({...one, place})), sort: "place", down: false, columns: [
      {key: "name", title: "phase", name: true},
      ...head.gpu ? [{key: "gpu_us", title: `GPU ${unit.name}`, number: true, text: row => inUnit(row.gpu_us, unit), bar: row => row.gpu_us / most},
        {key: "pieces", title: "activities", number: true, text: row => whole(row.pieces)}] : [],
      {key: "cpu_us", title: `CPU ${unit.name}`, number: true, text: row => inUnit(row.cpu_us, unit)},
    ]}).node,
  ];
}

function stepsSection(data, goTo) {
  const {steps, head} = data;
  if (!head.has_steps) return null;
  const unit = columnUnit(steps.map(one => one.cpu_us)), most = largest(steps.map(one => Math.max(one.cpu_us, one.gpu_busy_us)));
  return section("step-list", "Steps", `The figures of one step on this page are those of step ${head.step}.`,
    table({id: "steps-table", rows: steps.map((one, place) => ({...one, place})), sort: "place", down: false,
      pick: goTo && (row => goTo(row.place)), picked: row => row.name === head.step_name, columns: [
        {key: "place", title: "step", node: row => goTo ? el("button", {type: "button", class: "plain", onclick: () => goTo(row.place)}, row.number) : row.number},
        {key: "cpu_us", title: `CPU ${unit.name}`, number: true, text: row => inUnit(row.cpu_us, unit), bar: row => row.cpu_us / most},
        ...head.gpu ? [
          {key: "gpu_busy_us", title: `GPU busy ${unit.name}`, number: true, text: row => inUnit(row.gpu_busy_us, unit), bar: row => row.gpu_busy_us / most},
          {key: "gpu_idle_share", title: "GPU idle", number: true, text: row => share(row.gpu_idle_share)},
          {key: "launches", title: "launches", number: true, text: row => whole(row.launches)},
        ] : [],
        {key: "loading_us", title: `waiting for the DataLoader ${unit.name}`, number: true, text: row => inUnit(row.loading_us, unit), bar: row => row.loading_us / most},
        {key: "cause", title: "remark", text: row => row.times_the_typical === null ? ""
          : `${digits(row.times_the_typical, 1)} times the typical step${row.cause ? `: ${row.cause}` : ""}`},
      ]}).node);
}

function kernelsSection(data, pick, isPicked) {
  const rows = data.kernels;
  if (!rows.length) return null;
  const total = columnUnit(rows.map(one => one.total_us)), each = columnUnit(rows.map(one => one.median_us));
  const most = rows.reduce((found, one) => Math.max(found, one.share), 0) || 1;
  const made = table({
    id: "kernels-table", rows, sort: "total_us", filter: "kernels by name", pick, picked: isPicked, columns: [
      {key: "name", title: "GPU activity", name: true, node: row => el("div", {class: "kernel"},
        el("button", {type: "button", class: "plain", title: row.name, onclick: () => pick(row)}, swatch(familyColor(row.family)), row.short),
        el("small", {}, [row.decoded, row.asked_by && `from ${row.asked_by}`].filter(Boolean).join(" · ")))},
      {key: "count", title: "count", number: true, text: row => whole(row.count)},
      {key: "total_us", title: `total ${total.name}`, number: true, text: row => inUnit(row.total_us, total)},
      {key: "median_us", title: `median ${each.name}`, number: true, text: row => inUnit(row.median_us, each)},
      {key: "share", title: "of GPU time", number: true, text: row => share(row.share, 1), bar: row => row.share / most},
      {key: "tflops", title: "TFLOP/s", number: true, text: row => rate(row.tflops, "").trim()},
      {key: "gb_s", title: "GB/s", number: true, text: row => rate(row.gb_s, "").trim()},
      {key: "of_roof", title: "of peak", number: true, text: row => row.of_roof === null ? NONE
        : `${share(row.of_roof)} ${row.roof === "compute" ? "arithmetic" : "bandwidth"}`},
    ]});
  const noted = "Counts and times are of all steps. " + (rows.some(row => row.tflops !== null || row.gb_s !== null)
    ? `Rates are means by time over step ${data.head.step}, of the activities whose sizes the trace has; the peak is the data sheet's.`
    : "With record_shapes=True, the table also has each kernel's rate and its share of the device's peak.");
  return {node: section("kernels", "Kernels", noted, made.node), draw: made.draw};
}

function opsSection(data, pick) {
  if (!data.ops.length) return null;
  const unit = columnUnit(data.ops.map(one => one.total_us)), most = largest(data.ops.map(one => one.self_us)) || 1;
  return section("ops", "CPU ops and runtime calls", `Of step ${data.head.step}. Self time is without the ops that an op calls.`,
    table({id: "ops-table", rows: data.ops, sort: "self_us", filter: "ops by name", pick, columns: [
      {key: "name", title: "name", name: true, node: row => pick
        ? el("button", {type: "button", class: "plain", onclick: () => pick(row)}, swatch(`var(--kind-${row.kind})`), row.name)
        : [swatch(`var(--kind-${row.kind})`), row.name]},
      {key: "calls", title: "calls", number: true, text: row => whole(row.calls)},
      {key: "self_us", title: `self ${unit.name}`, number: true, text: row => inUnit(row.self_us, unit), bar: row => row.self_us / most},
      {key: "total_us", title: `total ${unit.name}`, number: true, text: row => inUnit(row.total_us, unit)},
      ...data.head.gpu ? [{key: "reaches_gpu", title: "launches GPU work", text: row => row.reaches_gpu ? "yes" : "no"}] : [],
    ]}).node);
}

function shapesSection(data) {
  const rows = data.by_inputs, on = data.head.gpu;
  if (!rows.length) return null;
  const unit = columnUnit(rows.map(one => Math.max(one.gpu_us, one.self_us))), most = largest(rows.map(one => on ? one.gpu_us : one.self_us)) || 1;
  return section("shapes", "Ops by the shapes of their inputs",
    `Of step ${data.head.step}. ${on ? "Only ops that launch GPU work themselves are here, with the time of that work. " : ""}Self time on the CPU is without the ops that an op calls.`,
    table({id: "shapes-table", rows, sort: on ? "gpu_us" : "self_us", filter: "ops", columns: [
      {key: "name", title: "op", name: true, node: row => [row.name, el("small", {}, " ", row.inputs)]},
      {key: "calls", title: "calls", number: true, text: row => whole(row.calls)},
      ...on ? [{key: "gpu_us", title: `GPU ${unit.name}`, number: true, text: row => inUnit(row.gpu_us, unit), bar: row => row.gpu_us / most}] : [],
      {key: "self_us", title: `CPU self ${unit.name}`, number: true, text: row => inUnit(row.self_us, unit), bar: row => on ? 0 : row.self_us / most},
    ]}).node);
}

// Equal paths are one box, as wide as its share of the time; the longest is on the left. A click on a box widens it.
function flameSection(data) {
  const kinds = Object.entries(data.flames).filter(([, flames]) => flames.length);
  if (!kinds.length) return null;
  const box = (one, wholeUs, widen) => el("div", {width: `${100 * one.us / wholeUs}%`},
    el("button", {type: "button", title: `${one.name} · ${time(one.us)} in ${counted(one.calls, "call")}`, onclick: () => widen(one)},
      one.name.replace(/^(aten::|autograd::engine::evaluate_function: )/, "")),
    one.below.length > 0 && el("div", {class: "below"}, one.below.filter(inner => inner.us > 0.003 * widen.shown.us).map(inner => box(inner, one.us, widen))));
  const graph = ([what, flames]) => {
    const whole = {name: `all ${what}`, us: sumOf(flames), calls: flames.length, below: flames}, node = el("div", {class: "flame", "aria-label": `flame graph of ${what}`});
    const widen = one => {
      widen.shown = one === widen.shown ? whole : one;
      fill(clear(node), [box(widen.shown, widen.shown.us, widen)]);
    };
    widen(whole);
    return [kinds.length > 1 && el("h3", {}, what.replace(/^./, letter => letter.toUpperCase())), node];
  };
  return section("flame", "Flame graph",
    `The CPU time of step ${data.head.step} by what calls what, of all threads. Calls of one path are one box, and the longest is on the left. A click widens a box, and a second click shows all again.`,
    kinds.map(graph));
}

function modulesSection(data) {
  const {tree, classes, on_gpu: onGpu} = data.modules;
  if (!tree.length) return null;
  const wholeUs = tree.reduce((sum, one) => sum + one.total_us, 0) || 1, lane = onGpu ? "GPU" : "CPU";
  const unit = columnUnit([wholeUs]);
  return section("modules", "Modules", `${lane} time of step ${data.head.step} by the nn.Module that launched it; backward counts for the module of its forward op.`,
    el("div", {class: "tree", role: "tree", "aria-label": "modules"}, tree.map(one => branch(one, wholeUs, unit, 0))),
    classes.length > 0 && el("h3", {}, "By class of module"),
    classes.length > 0 && table({id: "module-classes", rows: classes, sort: onGpu ? "gpu_us" : "cpu_us", columns: [
      {key: "name", title: "class", name: true},
      {key: onGpu ? "gpu_us" : "cpu_us", title: `${lane} ${unit.name}`, number: true,
        text: row => inUnit(onGpu ? row.gpu_us : row.cpu_us, unit), bar: row => (onGpu ? row.gpu_us : row.cpu_us) / wholeUs},
      {key: "pieces", title: onGpu ? "activities" : "ops", number: true, text: row => whole(row.pieces)},
    ]}).node);
}

// A row's children are made when it is opened, because a large model has thousands of modules.
function branch(one, wholeUs, unit, depth) {
  const text = [el("span", {class: "bar", width: `${100 * one.total_us / wholeUs}%`}), el("span", {class: "label"}, one.name),
    el("span", {class: "number", data: {value: one.total_us}}, `${inUnit(one.total_us, unit)} ${unit.name}`),
    el("span", {class: "number"}, share(one.total_us / wholeUs, 1))];
  if (!one.children.length) return el("div", {class: "leaf", role: "treeitem", data: {name: one.name}}, text);
  const below = el("div", {role: "group"});
  const open = depth < 2 && one.total_us > 0.02 * wholeUs;
  const draw = () => { if (!below.firstChild) fill(below, [one.children.map(child => branch(child, wholeUs, unit, depth + 1))]); };
  const node = el("details", {open, role: "treeitem", data: {name: one.name}}, el("summary", {}, text), below);
  if (open) draw();
  node.addEventListener("toggle", draw);
  return node;
}

function memorySection(data) {
  const {memory, peak_bytes: peak} = data;
  if (!memory) return null;
  const at = [memory.op && `in ${memory.op}`, memory.module && `in ${memory.module}`, memory.phase && `during ${memory.phase}`].filter(Boolean).join(", ");
  return section("memory", "Memory over time", `${memory.on_gpu ? "On the GPU" : "On the CPU"}, over step ${data.head.step}.`,
    el("p", {}, "The peak is ", el("b", {id: "peak", data: {value: memory.peak_bytes}}, bytes(memory.peak_bytes)),
      ` at ${share(memory.peak_at)} of the step${at ? `, allocated ${at}` : ""}. The step starts with ${bytes(memory.start_bytes)} and ends with ${bytes(memory.end_bytes)}.`,
      peak !== null && ` The peak of the whole recording is ${bytes(peak)}.`),
    curve({points: memory.points, title: "memory allocated over the step", marks: [{at: memory.peak_at, text: bytes(memory.peak_bytes)}]}));
}

function guessesSection(data) {
  if (!data.guesses.length) return null;
  const words = {true: "yes", false: "no", null: "cannot decide"};
  return section("guesses", "Predictions, and what was seen", null,
    el("ul", {class: "guesses"}, data.guesses.map(one => el("li", {class: `holds-${one.holds}`},
      el("b", {}, words[one.holds]), el("div", {}, one.text, one.evidence && el("small", {}, one.evidence))))));
}

function patternsSection(data) {
  if (!data.patterns.length) return null;
  return section("patterns", "Patterns from the cheatsheet", null,
    data.patterns.map(one => el("details", {class: "pattern"},
      el("summary", {}, el("span", {class: "where"}, one.where), " ", one.see, one.figure && el("small", {}, one.figure)),
      el("p", {}, one.means))));
}
