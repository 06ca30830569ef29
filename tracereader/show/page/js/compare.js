// Several runs side by side, aligned on one axis, and the differences of their kernels and ops.

function comparisonPage(data, root) {
  const place = timelinePlace();
  let timeline = null;
  const pick = row => {
    address.set({kernel: row.name});
    if (!timeline) return;
    timeline.highlightNames([row.name], cut(row.short ?? row.name, 40));
    place.scrollIntoView({behavior: "smooth"});
    timeline.nextMatch(1);
  };
  const parts = [
    runsOverview(data), predictedSection(data), data.hasTimeline && place, comparedKernels(data, pick), comparedFamilies(data),
    comparedOps(data, pick), changesSection(data), about(data),
  ];
  fill(root, [bar(data, parts), el("main", {}, parts)]);
  withTimeline(data, place, {
    note: "The timeline shows the step that each run's report describes. All steps start at zero.",
    showKernel: name => pick({name}),
    ready: made => {
      timeline = made;
      const kernel = address.get("kernel"), search = address.get("search");
      const row = kernel !== null && data.kernels.find(one => one.name === kernel);
      if (row) timeline.highlightNames([row.name], cut(row.short, 40));
      else if (search !== null) { timeline.search.value = search; timeline.searchFor(search); }
    },
  });
}

function runsOverview(data) {
  const {runs} = data, {ratio} = runs[runs.length - 1], word = ratio ? `${ratio} as run 1` : `${runs.length} runs`;
  const plain = value => value === null || value === undefined ? NONE : whole(value);
  const rows = [
    ["step", "step", time], ["step, share of run 1's", "of_first", value => value === null ? NONE : share(value)], ["CPU per step", "cpu", time],
    ["GPU busy per step", "gpu", time], ["GPU busy, of the time", "gpu busy", value => share(value)], ["launches", "launches", plain],
    ["kernels", "kernels", plain], ["copies", "memcpys", plain], ["memsets", "memsets", plain], ["peak memory", "memory", bytes],
    ["tokens/s", "tokens_s", value => value === null ? NONE : digits(value, 0)], ["limited by", "regime", value => value],
  ].filter(([, key]) => runs.some(run => run[key] !== null && run[key] !== undefined));
  return el("section", {class: "comparison", id: "overview"},
    el("p", {class: "device"}, [...new Set(runs.map(run => run.device))].join(" · ")),
    el("h1", {}, word),
    runs.map(run => run.pace && el("p", {class: "pace"}, sentence(run.pace))),
    runs.map((run, place) => el("p", {}, el("b", {}, `Run ${place + 1}, ${run.name}: `), `${run.regime}; ${run.why}.`,
      run.busy && el("span", {class: "warning"}, " ", sentence(run.busy)))),
    el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": "measures"},
      el("table", {class: "measures", id: "measures"},
        el("thead", {}, el("tr", {}, el("th", {scope: "col"}, "of one step"),
          runs.map((run, place) => el("th", {scope: "col", class: "number"}, `run ${place + 1}`)))),
        el("tbody", {}, rows.map(([title, key, text]) => el("tr", {data: {name: key}}, el("td", {}, title),
          runs.map(run => el("td", {class: "number", data: {value: run[key] ?? ""}}, text(run[key])))))))));
}

function predictedSection(data) {
  const {predicted, runs} = data;
  if (!predicted.length) return null;
  const unit = columnUnit([...predicted.map(one => one.step_us), ...runs.map(run => run.step)]);
  return section("predicted", "Predicted and measured",
    "Run 1's report proposes these changes, and predicts the step after each change alone. A run has a measured step in this table if the traces show that it makes the change. If it makes several of them, the measured step includes them all.",
    table({id: "predicted-table", rows: predicted.map((one, place) => ({...one, place, name: one.title})), sort: "place", down: false, columns: [
      {key: "name", title: "change", name: true, node: row => [row.name, row.missed.map(one => el("small", {}, " ", one))]},
      {key: "step_us", title: `run 1 ${unit.name}`, number: true, text: row => inUnit(row.step_us, unit)},
      {key: "step_us_after", title: `predicted ${unit.name}`, number: true, text: row => `${row.basis === "bound" ? "about " : ""}${inUnit(row.step_us_after, unit)}`},
      ...runs.slice(1).map((run, place) => ({key: `run${place}`, title: `run ${place + 2} ${unit.name}`, number: true, text: row => inUnit(row.measured_us[place], unit)})),
    ]}).node);
}

const STATUSES = ["longer", "shorter", "new", "gone", "alike"];

function timesOf(runs, rows) {
  const unit = columnUnit(rows.flatMap(row => row.us));
  return [
    ...runs.map((run, place) => ({key: `us${place}`, title: `run ${place + 1} ${unit.name}`, number: true, text: row => inUnit(row.us[place], unit)})),
    {key: "change_us", title: `change ${unit.name}`, number: true, text: row => `${row.change_us > 0 ? "+" : ""}${inUnit(row.change_us, unit)}`},
    {key: "status", title: "", node: row => el("span", {class: `status status-${row.status}`}, row.status)},
  ];
}

function byRun(rows) {
  return rows.map((row, order) => ({...row, order, ...Object.fromEntries(row.us.map((value, place) => [`us${place}`, value]))}));
}

function comparedKernels(data, pick) {
  if (!data.kernels.length) return null;
  const all = byRun(data.kernels), holder = el("div");
  const draw = wanted => fill(clear(holder), [table({
    id: "kernels-table", rows: wanted ? all.filter(row => row.status === wanted) : all, sort: "order", down: false, filter: "kernels by name", pick,
    columns: [
      {key: "name", title: "GPU activity", name: true, node: row => el("div", {class: "kernel"},
        el("button", {type: "button", class: "plain", title: row.name, onclick: () => pick(row)}, swatch(familyColor(row.family)), row.short),
        el("small", {}, row.decoded))},
      {key: "counts", title: "count", number: true, text: row => row.counts.map(whole).join(" → ")},
      ...timesOf(data.runs, all),
    ]}).node]);
  const chips = [null, ...STATUSES].map(status => el("button", {type: "button", "aria-pressed": String(status === null), onclick: event => {
    chips.forEach(one => one.setAttribute("aria-pressed", String(one === event.currentTarget)));
    draw(status);
  }}, status === null ? `all ${all.length}` : `${status} ${all.filter(row => row.status === status).length}`));
  draw(null);
  return section("kernels", "Kernels", "GPU time of one step by name, the largest differences first. Two times are alike if they differ by up to 9%, as two recordings of one program do.",
    el("div", {class: "chips"}, chips), holder);
}

function comparedFamilies(data) {
  if (!data.families.length) return null;
  const rows = byRun(data.families);
  return section("time", "GPU time by family", "Of one step.", table({id: "families", rows, sort: "order", down: false,
    columns: [{key: "name", title: "family", name: true}, ...timesOf(data.runs, rows)]}).node);
}

function comparedOps(data, pick) {
  if (!data.ops.length) return null;
  const rows = byRun(data.ops);
  return section("ops", "CPU ops by self time", "Of one step.", table({id: "ops-table", rows, sort: "order", down: false, filter: "ops by name", pick,
    columns: [{key: "name", title: "op", name: true, node: row => el("button", {type: "button", class: "plain", onclick: () => pick(row)}, row.name)},
      ...timesOf(data.runs, rows)]}).node);
}

function changesSection(data) {
  return section("changes", "What changed", "Each run against the first.", data.changes.map(one => [
    el("h3", {}, one.name),
    el("div", {class: "changes"},
      el("div", {}, el("b", {}, "changed"), el("ul", {}, (one.changed.length ? one.changed : ["nothing"]).map(text => el("li", {}, text)))),
      el("div", {}, el("b", {}, "the same"), el("ul", {}, (one.same.length ? one.same : ["nothing"]).map(text => el("li", {}, text)))))]));
}
