// Assembles the page. The timeline follows as soon as the slices are unpacked.

const SECTIONS = [
  ["overview", "Overview"], ["measured", "Measured"], ["try", "Try first"], ["timeline", "Timeline"], ["guesses", "Predictions"], ["time", "Time"],
  ["step-list", "Steps"], ["kernels", "Kernels"], ["roofline", "Roofline"], ["ops", "CPU ops"], ["shapes", "Shapes"], ["flame", "Flame graph"], ["modules", "Modules"],
  ["memory", "Memory"], ["patterns", "Patterns"], ["report", "As text"], ["predicted", "Predicted"], ["heat", "Ranks by steps"], ["rank-list", "Ranks"],
  ["collectives", "Collectives"], ["messages", "Messages"], ["changes", "What changed"],
];

function tracePage(data, root) {
  let timeline = null, kernels = null;
  const place = timelinePlace();

  const toTimeline = () => place.scrollIntoView({behavior: "smooth", block: "start"});
  function pickKernel(row, scroll = true) {
    address.set({kernel: row.name, search: null, change: null});
    kernels?.draw();
    if (!timeline) return;
    timeline.highlightNames([row.name], cut(row.short ?? row.name, 40));
    if (scroll) toTimeline();
    timeline.nextMatch(1);
  }
  function pickChange(one, scroll = true) {
    address.set({change: one.change, kernel: null, search: null});
    timeline?.highlightNames(one.kernels, `“${one.title}”`);
    timeline?.showMatches(data.head.step_index);
    if (scroll) toTimeline();
  }
  function goTo(number) {
    timeline?.goTo(number);
    toTimeline();
  }
  function showKernel(name) {
    address.set({kernel: name});
    const filter = document.getElementById("kernels-table-filter");
    filter.value = `^${name.replace(/[\\^$.*+?()[\]{}|]/g, "\\$&")}$`;
    filter.dispatchEvent(new Event("input"));
    document.getElementById("kernels").scrollIntoView({behavior: "smooth"});
  }

  kernels = kernelsSection(data, pickKernel, row => row.name === address.get("kernel"));
  const parts = [
    overview(data), measuredSection(data), opportunities(data, pickChange), data.hasTimeline && place, guessesSection(data), timeSection(data),
    stepsSection(data, data.hasTimeline && goTo), kernels?.node, rooflineSection(data, pickKernel), opsSection(data, pickKernel), shapesSection(data), flameSection(data),
    modulesSection(data), memorySection(data), patternsSection(data), reportSection(data), about(data),
  ];
  fill(root, [bar(data, parts), el("main", {}, parts)]);

  withTimeline(data, place, {
    note: "These are all slices that the reader keeps, without the frames of Python functions. Idle gaps are colored by cause, GPU activities by family.",
    showKernel, ready: made => {
      timeline = made;
      if (data.head.gpu) timeline.propose(data.opportunities.found, one => pickChange(one, false));
      applyAddress();
    },
  });

  function applyAddress() {
    const step = address.get("step"), kernel = address.get("kernel"), search = address.get("search"), change = address.get("change");
    const number = timeline.slices.steps.findIndex(one => one.name === `ProfilerStep#${step}`);
    if (step !== null && number >= 0) timeline.goTo(number);
    else if (data.head.has_steps && timeline.slices.steps.length > 1) timeline.goTo(data.head.step_index, false);
    const row = kernel !== null && data.kernels.find(one => one.name === kernel);
    const one = change !== null && data.opportunities.found.find(found => found.change === change);
    if (row) pickKernel(row, false);
    else if (one) pickChange(one, false);
    else if (search !== null) {
      timeline.search.value = search;
      timeline.searchFor(search);
    }
    timeline.showAddressed();
    kernels?.draw();
  }
  addEventListener("hashchange", () => { if (timeline) applyAddress(); });
}

// All that read-trace prints, also what has no section of its own on the page.
function reportSection(data) {
  return el("section", {id: "report"}, el("h2", {}, "The report as text"),
    el("details", {}, el("summary", {}, "What read-trace prints of this trace"), el("pre", {tabindex: "0"}, data.report)));
}

function timelinePlace() {
  return el("section", {id: "timeline"}, el("h2", {}, "Timeline"), el("p", {class: "told"}, "Unpacking the slices."));
}

// Unpacks the slices and draws them; ready(timeline) is called once they are there.
function withTimeline(data, place, {note, showKernel, ready}) {
  if (!data.hasTimeline) {
    document.body.dataset.ready = "true";
    return;
  }
  const details = el("div", {id: "details", "aria-live": "polite"});
  slicesOf().then(found => {
    const slices = new Slices(found);
    const timeline = new Timeline(slices, one => fill(clear(details), [describe(slices, one, timeline, showKernel)]),
      range => fill(clear(details), [describeRange(slices, range)]));
    const held = `The timeline holds ${counted(slices.count, "slice")} on ${counted(slices.tracks.length, "track")}. ${note}`;
    fill(clear(place), [el("h2", {}, "Timeline"), el("p", {class: "told"}, held), timelineLegend(slices),
      el("div", {class: "panes"}, timeline.node, details)]);
    timeline.fit();
    fill(details, [describe(slices, null, timeline, showKernel)]);
    ready(timeline);
    timeline.mark(address.all("mark"));
    document.body.dataset.ready = "true";
  }).catch(problem => {
    fill(place, [el("p", {class: "warning"}, `The timeline cannot be drawn here: ${problem.message}`)]);
    document.body.dataset.ready = "failed";
  });
}

const KIND_WORDS = {label: "annotation", op: "CPU op", runtime: "runtime call", module: "module",
  span: "annotation on the GPU's side", phase: "computing", wait: "waiting for another rank",
  inside: "phase inside a kernel", inside_wait: "waiting inside a kernel"};

const FAMILY_WORDS = {GEMM: "matrix products", unknown: "kernels of unknown names"}; // as in the tables

function timelineLegend(slices) {
  const used = valuesOf(slices.columns.family), kinds = valuesOf(slices.columns.kind);
  const idle = slices.idle ? IDLE.filter(([cause]) => slices.idle[cause].length) : [];
  const item = (value, text) => el("li", {}, swatch(value), text);
  return el("ul", {class: "legend small"},
    idle.map(([cause, text]) => item(`var(--idle-${cause.replace("_", "-")})`, text)),
    slices.families.map((family, place) => used.has(place) && slices.work > 0 && item(familyColor(family), FAMILY_WORDS[family] ?? family)),
    slices.kinds.map((kind, place) => kinds.has(place) && !["kernel", "memcpy", "memset"].includes(kind)
      && item(`var(--kind-${kind})`, KIND_WORDS[kind] ?? kind)));
}

// The bar at the top: file, sections, theme.
function bar(data, parts) {
  const here = new Set(parts.filter(Boolean).map(one => one.id));
  const go = id => {
    address.set({at: id});
    document.getElementById(id).scrollIntoView({behavior: "smooth"});
  };
  const root = document.documentElement;
  const theme = el("button", {type: "button", class: "theme", id: "theme", "aria-label": "light or dark", onclick: () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    dispatchEvent(new Event("themed"));
  }}, "◐");
  // Paper is white in every theme.
  let onScreen;
  addEventListener("beforeprint", () => { onScreen = root.dataset.theme; root.dataset.theme = "light"; dispatchEvent(new Event("themed")); });
  addEventListener("afterprint", () => {
    if (onScreen) root.dataset.theme = onScreen;
    else delete root.dataset.theme;
    dispatchEvent(new Event("themed"));
  });
  return el("header", {}, el("b", {class: "file"}, data.file ?? data.title),
    el("nav", {"aria-label": "sections"}, SECTIONS.filter(([id]) => here.has(id)).map(([id, title]) =>
      el("button", {type: "button", class: "plain", onclick: () => go(id)}, title))), theme);
}

function about(data) {
  return el("footer", {id: "about"},
    el("p", {}, `Written by read-trace ${data.version}. Every figure on this page is one of its report and of --json. The page makes no network request.`),
    data.holds.length > 0 && el("p", {id: "holds"}, "Before you share this page: it holds ", data.holds.join("; "), "."));
}

const data = figuresOf(), root = document.getElementById("page");
data.hasTimeline = Boolean(document.getElementById("slices").textContent);
document.title = `${data.file} · read-trace`;
({trace: tracePage, comparison: comparisonPage, ranks: ranksPage})[data.page](data, root);
if (SECTIONS.some(([id]) => id === address.get("at"))) document.getElementById(address.get("at"))?.scrollIntoView();
