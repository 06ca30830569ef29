// The ranks of one run: their steps side by side, and who waits for whom in each collective.

const RANK_PARTS = [
  ["compute_us", "compute", "var(--kind-phase)"], ["exposed_communication_us", "exposed communication", "var(--kind-collective)"],
  ["exposed_copy_us", "exposed copies and memsets", "var(--family-copy)"], ["idle_us", "idle", "var(--idle-unknown)"],
];

function ranksPage(data, root) {
  const place = timelinePlace();
  let timeline = null;
  const goTo = row => {
    if (!timeline) return;
    const at = timeline.slices.steps.findIndex(step => step.name === row.step);
    if (at >= 0) timeline.goTo(at);
    const found = nearest(timeline.slices, row.start_us * 1e3, data.ranks.findIndex(one => one.rank === row.last));
    if (found !== null) { timeline.select(found, true); timeline.zoomTo(found); timeline.zoom(3); }
    place.scrollIntoView({behavior: "smooth"});
  };
  const goToStep = number => {
    const at = timeline ? timeline.slices.steps.findIndex(step => step.name === data.steps[number]) : -1;
    if (at < 0) return;
    timeline.goTo(at);
    place.scrollIntoView({behavior: "smooth"});
  };
  const parts = [ranksOverview(data), data.opportunities && opportunities({...data, hasTimeline: false}, () => {}),
    data.hasTimeline && place, heatSection(data, goToStep), rankSteps(data), rankTable(data), collectivesSection(data, goTo), messagesSection(data), about(data)];
  fill(root, [bar(data, parts), el("main", {}, parts)]);
  withTimeline(data, place, {
    note: data.drawn === null ? "All ranks are on one clock."
      : `All ranks are on one clock: computing in ${data.drawn.replace(/^ProfilerStep/, "step ")}, and collectives ${data.collectives_drawn}.`,
    showKernel: () => {},
    ready: made => {
      timeline = made;
      const step = address.get("step");
      const at = made.slices.steps.findIndex(one => one.name === (step === null ? data.drawn : `ProfilerStep#${step}`));
      if (at >= 0) made.goTo(at, step !== null);
    },
  });
}

// Returns the collective that starts at a time on a rank's track.
function nearest(slices, start, place) {
  const wanted = slices.tracks[place]?.rows[1];
  return wanted ? slices.at(wanted, start - (slices.zero ?? 0), Infinity) : null;
}

function ranksOverview(data) {
  return el("section", {class: "comparison", id: "overview"},
    el("p", {class: "device"}, `${data.device} · ${counted(data.ranks.length, "rank")} of ${data.world_size}`),
    el("h1", {id: "regime"}, data.straggler === null ? sentence(data.regime ?? "No straggler").replace(/\.$/, "") : `Rank ${data.straggler} is the straggler`),
    data.in_short.map(text => el("p", {}, sentence(text))),
    data.missing.length > 0 && el("p", {class: "warning"}, `Not read: ${counted(data.missing.length, "rank")}: ${data.missing.slice(0, 12).join(", ")}.`),
    Object.entries(data.not_read).map(([file, why]) => el("p", {class: "warning"}, `${file}: ${why}`)));
}

function rankSteps(data) {
  const parts = rank => RANK_PARTS.map(([key, name, color]) => ({name, color, key}));
  const steps = data.beside;
  if (!steps.length) return null;
  const most = largest(data.ranks.flatMap(rank => rank.steps.map(step => step.us))) || 1;
  return section("step-list", "Steps of all ranks",
    `${data.on_gpu ? "From each step's first kernel to the next step's." : "On the lane that computes."}${data.steps.length > steps.length ? ` The first ${steps.length} of ${data.steps.length} steps.` : ""}`,
    el("ul", {class: "legend small"}, RANK_PARTS.map(([, name, color]) => el("li", {}, swatch(color), name))),
    steps.map(name => [
      el("h3", {}, name.replace(/^ProfilerStep/, "step ")),
      el("div", {class: "beside"}, data.ranks.map(rank => {
        const step = rank.steps.find(one => one.name === name);
        return step ? [
          el("span", {class: rank.rank === data.straggler ? "late" : ""}, `rank ${rank.rank}`),
          el("div", {}, el("div", {width: `${100 * step.us / most}%`}, partsBar(parts(rank).map(one => ({...one, us: step[one.key]})).filter(one => one.us > 0), step.us, `rank ${rank.rank}, ${name}`))),
          el("span", {class: "number", data: {value: step.us}}, time(step.us))] : null;
      })),
    ]));
}

function rankTable(data) {
  const rows = data.ranks.map(rank => ({...rank, name: `rank ${rank.rank}`}));
  const keys = [["compute_us", "compute"], ["exposed_communication_us", "exposed communication"], ["idle_us", "idle"],
    ["waited_for_others_us", "waited for others"], ["others_waited_us", "others waited for it"]];
  const unit = columnUnit(rows.flatMap(row => keys.map(([key]) => row[key])));
  return section("rank-list", "Ranks", `Over the window of each rank, in ${unit.name}.`, table({id: "ranks-table", rows, sort: "rank", down: false, columns: [
    {key: "rank", title: "rank", node: row => `${row.rank}${row.rank === data.straggler ? " (straggler)" : ""}`},
    {key: "host", title: "host"},
    ...keys.map(([key, title]) => ({key, title, number: true, text: row => inUnit(row[key], unit)})),
    {key: "arrived_last", title: "arrived last", number: true, text: row => whole(row.arrived_last)},
  ]}).node);
}

function collectivesSection(data, goTo) {
  if (!data.matched.length) return null;
  const rows = data.matched.map((one, order) => ({...one, order, name: `${one.kind} ${one.step} rank ${one.last}`}));
  const unit = columnUnit(rows.map(row => row.wait_us));
  return section("collectives", "Collectives", `${counted(rows.length, "collective")} matched over the ranks${data.unmatched ? `; ${whole(data.unmatched)} not matched` : ""}. `
    + "The wait is the longest of any rank, until the last one arrived.",
    table({id: "collectives-table", rows, sort: "wait_us", filter: "collectives by kind, step or last rank", pick: goTo, columns: [
      {key: "kind", title: "collective", name: true, node: row => el("button", {type: "button", class: "plain", onclick: () => goTo(row)}, row.kind)},
      {key: "step", title: "step", text: row => row.step.replace(/^ProfilerStep/, "")},
      {key: "bytes", title: "size", number: true, text: row => bytes(row.bytes)},
      {key: "last", title: "last to arrive", number: true, text: row => `rank ${row.last}`},
      {key: "wait_us", title: `longest wait ${unit.name}`, number: true, text: row => inUnit(row.wait_us, unit)},
      {key: "lead_us", title: `behind the one before ${unit.name}`, number: true, text: row => inUnit(row.lead_us, unit)},
      {key: "transfer_us", title: `transfer ${unit.name}`, number: true, text: row => inUnit(row.transfer_us, unit)},
      {key: "bus_gb_s", title: "bus GB/s", number: true, text: row => rate(row.bus_gb_s, "").trim()},
    ]}).node);
}

function messagesSection(data) {
  if (!data.pairs.length) return null;
  const steps = Math.max(1, data.steps.length);
  const keys = [["receiver_waited_us", "receiver waits"], ["sender_waited_us", "sender waits"], ["transfer_us", "transfer"]];
  const rows = data.pairs.map(one => ({...one, ...Object.fromEntries(keys.map(([key]) => [key, one[key] / steps])),
    name: `rank ${one.source} to ${one.destination} ${one.description}`}));
  const unit = columnUnit(rows.flatMap(row => keys.map(([key]) => row[key])));
  const count = rows.reduce((sum, row) => sum + row.messages, 0);
  return section("messages", "Messages", `${counted(count, "message")} matched between ${counted(rows.length, "pair")} of ranks`
    + `${data.unmatched_messages ? `; ${whole(data.unmatched_messages)} sends and receives not matched` : ""}. `
    + "Waits count while the rank computes nothing. Times are per step.",
    table({id: "messages-table", rows, sort: "receiver_waited_us", filter: "pairs by their ranks or group", columns: [
      {key: "source", title: "from", number: true, text: row => `rank ${row.source}`},
      {key: "destination", title: "to", number: true, text: row => `rank ${row.destination}`},
      {key: "description", title: "group", text: row => row.description || NONE},
      {key: "bytes", title: "size", number: true, text: row => bytes(row.bytes)},
      {key: "messages", title: "count", number: true, text: row => whole(row.messages)},
      ...keys.map(([key, title]) => ({key, title: `${title} ${unit.name}`, number: true, text: row => inUnit(row[key], unit)})),
    ]}).node);
}
