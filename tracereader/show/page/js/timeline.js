// The timeline: zoom and pan, selection, search, jumps to steps, and a track of the proposed changes.

const TALLEST = 640, TALLEST_ON_PAPER = 900, WIDE_ON_PAPER = 720, LEAST_NS = 40;
const KEYS = "W and S zoom, A and D pan, Shift and a drag sum up a range, arrows move between slices, Enter zooms to the selection, F shows all, N is the next match, / searches.";

class Timeline {
  // select(slice), selectRange({from, to}): called with what the user selects.
  constructor(slices, select, selectRange) {
    this.slices = slices;
    this.onSelect = select;
    this.onRange = selectRange;
    this.whole = {from: -0.01 * slices.end, to: 1.01 * slices.end};
    this.step = slices.steps[0];
    this.state = {view: {...this.whole}, scroll: 0, selected: null, hover: null, searching: false, step: null, origin: 0, marks: [], range: null};
    this.build();
    this.painter = new Painter(this.canvas, slices);
    this.painter.layout();
    this.listen();
  }

  build() {
    const {slices} = this;
    this.canvas = el("canvas", {tabindex: "0", role: "application", id: "canvas",
      "aria-label": `Timeline of ${counted(slices.count, "slice")}. ${KEYS}`, "aria-describedby": "selected-text"});
    this.search = el("input", {type: "search", id: "search", placeholder: "search: text|other text",
      "aria-label": "search slices by name"});
    this.found = el("span", {class: "told", id: "found", role: "status"});
    this.told = el("p", {class: "told", id: "merged"});
    this.tip = el("div", {class: "tip", "aria-hidden": "true"});
    this.steps = el("select", {id: "steps", "aria-label": "jump to a step"},
      el("option", {value: ""}, "whole trace"),
      slices.steps.map((step, place) => el("option", {value: String(place)}, step.name.replace(/^ProfilerStep/, "step "))));
    const button = (text, title, act) => el("button", {type: "button", title, "aria-label": title, onclick: act}, text);
    this.frame = el("div", {class: "frame"}, this.canvas, this.tip);
    this.node = el("div", {class: "timeline"},
      el("div", {class: "tools"},
        this.search,
        button("‹", "previous match", () => this.nextMatch(-1)), button("›", "next match (N)", () => this.nextMatch(1)),
        this.found,
        el("span", {class: "space"}),
        button("‹", "previous step", () => this.moveStep(-1)), this.steps, button("›", "next step", () => this.moveStep(1)),
        button("+", "zoom in (W)", () => this.zoom(0.5)), button("−", "zoom out (S)", () => this.zoom(2)),
        button("all", "show the whole trace (F)", () => this.show(this.whole))),
      this.frame, this.told);
  }

  // Adds a track with a row for each proposed change: the slices of its kernels, or the steps without any.
  // pick(change): called with the change whose row the user selects.
  propose(changes, pick) {
    this.onPick = pick;
    this.painter.proposed = changes.map(change => ({change, spans: this.spansOf(change.kernels)}));
    this.fit();
  }

  // Returns the starts and durations of the GPU work with these names, by start.
  spansOf(names) {
    const {slices} = this, wanted = new Set(names), spans = [];
    if (!names.length) return slices.steps.map(({start, end}) => ({start, dur: end - start}));
    for (let one = slices.first_work; one < slices.first_work + slices.work; one++)
      if (wanted.has(slices.nameOf(one))) spans.push({start: slices.start[one], dur: slices.dur[one]});
    return spans.sort((a, b) => a.start - b.start);
  }

  listen() {
    const {canvas} = this;
    new ResizeObserver(() => this.fit()).observe(this.frame);
    const again = () => { this.painter.repaint(); this.draw(); };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    addEventListener("themed", () => { this.painter.repaint(); this.drawNow(); });
    for (const kind of ["beforeprint", "afterprint"])
      addEventListener(kind, () => { this.onPaper = kind === "beforeprint"; this.fit(); });
    canvas.addEventListener("keydown", event => this.key(event));
    canvas.addEventListener("wheel", event => this.wheel(event), {passive: false});
    canvas.addEventListener("pointerdown", event => this.grab(event));
    canvas.addEventListener("pointermove", event => this.move(event));
    canvas.addEventListener("pointerup", event => this.drop(event));
    canvas.addEventListener("pointercancel", () => { this.pointers.clear(); });
    canvas.addEventListener("pointerleave", () => { this.hoverOn(null); });
    canvas.addEventListener("dblclick", () => this.zoomTo(this.state.selected));
    this.pointers = new Map();
    this.search.addEventListener("input", () => this.searchFor(this.search.value));
    this.search.addEventListener("keydown", event => {
      if (event.key === "Enter") this.nextMatch(event.shiftKey ? -1 : 1);
      if (event.key === "Escape") { this.search.value = ""; this.searchFor(""); canvas.focus(); }
    });
    this.steps.addEventListener("change", () => this.goTo(this.steps.value === "" ? null : Number(this.steps.value)));
  }

  // Paper does not scroll, so in print the timeline is as high as its tracks, up to a page. The page still has the
  // screen's width when this is drawn.
  fit() {
    const width = this.onPaper ? WIDE_ON_PAPER : this.frame.clientWidth;
    if (!width) return;
    this.fittedTo = width;
    const most = this.onPaper ? TALLEST_ON_PAPER : Math.min(TALLEST, innerHeight * 0.8);
    this.painter.resize(width, Math.max(160, Math.min(most, this.painter.layout() + AXIS)));
    this.scrollTo(this.state.scroll);
    this.drawNow(); // a canvas is empty after its size changes
  }

  // Draws with the next frame. Several calls before it draw once.
  draw() {
    if (this.asked) return;
    this.asked = requestAnimationFrame(() => this.drawNow());
  }

  drawNow() {
    cancelAnimationFrame(this.asked);
    this.asked = null;
    if (!this.fittedTo) return;
    const {merged, narrow, seen} = this.painter.draw(this.state);
    this.view = this.state.view;
    const left = this.painter.arrowsLeft ? ` ${whole(this.painter.arrowsLeft)} more arrows are not drawn.` : "";
    const high = narrow ? " Each bar of them is as high as the share of its pixel that they fill." : "";
    this.told.textContent = (merged
      ? `${whole(merged)} of the ${whole(seen)} slices in view are narrower than a pixel and drawn together with their neighbors. Zoom in to see each one.`
      : `All ${whole(seen)} slices in view are drawn.`) + high + left;
    this.canvas.dataset.from = this.state.view.from;
    this.canvas.dataset.to = this.state.view.to;
  }

  show({from, to}) {
    const long = Math.max(LEAST_NS, Math.min(to - from, this.whole.to - this.whole.from));
    const middle = (from + to) / 2;
    let start = middle - long / 2;
    start = Math.max(this.whole.from, Math.min(start, this.whole.to - long));
    this.state.view = {from: start, to: start + long};
    this.draw();
  }

  // Shows the highlighted slices of a step, or the whole step without any.
  showMatches(place) {
    this.goTo(place, false);
    const {start, dur} = this.slices, {from, to} = this.state.view;
    const seen = [...this.slices.matches].filter(one => start[one] >= from && start[one] + dur[one] <= to);
    if (!seen.length) return;
    const end = seen.reduce((last, one) => Math.max(last, start[one] + dur[one]), 0), room = 0.02 * (end - start[seen[0]]);
    this.show({from: start[seen[0]] - room, to: end + room});
  }

  // The address keeps the part of the timeline that the user has chosen, in µs.
  remember() {
    const {from, to} = this.state.view;
    address.set({view: [from, to].map(one => (one / 1e3).toFixed(2)).join("_")});
  }

  showAddressed() {
    const [from, to] = (address.get("view") ?? "").split("_").map(one => 1e3 * Number(one));
    if (to > from) this.show({from, to});
  }

  // Zooms around a point of the canvas. Without a point, around the selection if it is in view, or the middle.
  zoom(factor, x = this.middle()) {
    const {from, to} = this.state.view, at = from + x / this.painter.width * (to - from);
    const long = Math.max(LEAST_NS, Math.min((to - from) * factor, this.whole.to - this.whole.from));
    const start = at - x / this.painter.width * long;
    this.show({from: start, to: start + long});
    this.remember();
  }

  middle() {
    const {state: {selected, view}, slices, painter} = this;
    const at = selected === null ? NaN : slices.start[selected] + slices.dur[selected] / 2;
    return at > view.from && at < view.to ? (at - view.from) / (view.to - view.from) * painter.width : painter.width / 2;
  }

  pan(shares) {
    const {from, to} = this.state.view, by = shares * (to - from);
    this.show({from: from + by, to: to + by});
    this.remember();
  }

  scrollTo(y) {
    this.state.scroll = Math.max(0, Math.min(y, this.painter.height + AXIS - this.painter.viewHeight));
    this.draw();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const {selected} = this.state, far = event.shiftKey ? 4 : 1;
    const acts = {
      w: () => this.zoom(0.7 ** far), s: () => this.zoom(1 / 0.7 ** far), a: () => this.pan(-0.15 * far),
      d: () => this.pan(0.15 * far), f: () => this.show(this.whole), n: () => this.nextMatch(event.shiftKey ? -1 : 1),
      "/": () => this.search.focus(), enter: () => this.zoomTo(selected), escape: () => { this.state.range = null; this.select(null); },
      arrowleft: () => this.moveBy(-1), arrowright: () => this.moveBy(1), arrowup: () => this.moveUp(),
      arrowdown: () => this.moveDown(), pageup: () => this.scrollTo(this.state.scroll - 200),
      pagedown: () => this.scrollTo(this.state.scroll + 200), "[": () => this.moveStep(-1), "]": () => this.moveStep(1),
    };
    const act = acts[event.key.toLowerCase()];
    if (!act) return;
    event.preventDefault();
    act();
  }

  // Over the canvas the wheel zooms if the canvas has the focus, or with Ctrl. Otherwise the page scrolls.
  wheel(event) {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (sideways || event.shiftKey) {
      event.preventDefault();
      this.pan((sideways ? event.deltaX : event.deltaY) / this.painter.width);
    } else if (document.activeElement === this.canvas || event.ctrlKey || event.metaKey) {
      event.preventDefault();
      this.zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))), event.offsetX);
    }
  }

  grab(event) {
    this.canvas.focus({preventScroll: true});
    this.canvas.setPointerCapture(event.pointerId);
    this.pointers.set(event.pointerId, {x: event.offsetX, y: event.offsetY});
    this.moved = 0;
    this.state.range = null;
    this.rangeFrom = event.shiftKey ? this.painter.moment(event.offsetX) : null;
  }

  move(event) {
    const held = this.pointers.get(event.pointerId), x = event.offsetX, y = event.offsetY;
    if (!held) {
      this.hoverOn(this.painter.at(x, y, this.state.scroll), x, y);
      return;
    }
    const others = [...this.pointers].filter(([id]) => id !== event.pointerId).map(([, one]) => one);
    if (others.length) { // the distance between two fingers zooms
      const before = Math.hypot(held.x - others[0].x, held.y - others[0].y), after = Math.hypot(x - others[0].x, y - others[0].y);
      if (before > 10 && after > 10) this.zoom(before / after, (x + others[0].x) / 2);
      this.moved = 99;
    } else {
      this.moved += Math.abs(x - held.x) + Math.abs(y - held.y);
      if (this.moved > 4 && this.rangeFrom !== null) {
        const at = this.painter.moment(x);
        this.state.range = {from: Math.min(at, this.rangeFrom), to: Math.max(at, this.rangeFrom)};
        this.draw();
      } else if (this.moved > 4) {
        this.pan((held.x - x) / this.painter.width);
        if (event.pointerType === "mouse") this.scrollTo(this.state.scroll + held.y - y);
      }
    }
    this.pointers.set(event.pointerId, {x, y});
  }

  drop(event) {
    this.pointers.delete(event.pointerId);
    if (this.state.range) this.onRange(this.state.range);
    if (this.moved > 4) return;
    const {slice, step, track, change} = this.painter.at(event.offsetX, event.offsetY, this.state.scroll);
    if (change) this.onPick(change);
    else if (track) {
      track.folded = !track.folded && track.rows.length > 1;
      this.fit();
    } else if (step) this.goTo(this.slices.steps.indexOf(step));
    else this.select(slice ?? null);
  }

  hoverOn(found, x, y) {
    const {slices, tip} = this, one = found?.slice ?? null, gap = found?.gap, change = found?.change;
    if (one !== this.state.hover) {
      this.state.hover = one;
      this.draw();
    }
    tip.hidden = one === null && !gap && !change;
    if (tip.hidden) return;
    tip.textContent = change ? `${change.title}: click to show ${change.kernels.length ? "its kernels" : "the step"}`
      : gap ? `${gap.title} · ${time(gap.dur / 1e3)}`
      : `${cut(slices.shownName(one), 90)} · ${time(slices.dur[one] / 1e3)}`;
    tip.style.left = `${Math.max(0, Math.min(x + 12, this.painter.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${y + 18}px`;
  }

  select(one, show = false) {
    this.state.selected = one;
    if (one !== null) {
      const {view} = this.state, {slices} = this, start = slices.start[one], end = start + slices.dur[one];
      const track = slices.trackOf(one);
      if (slices.columns.depth[one] && track.folded) {
        track.folded = false;
        this.fit();
      }
      if (show && (end < view.from || start > view.to)) {
        const half = (view.to - view.from) / 2;
        this.show({from: (start + end) / 2 - half, to: (start + end) / 2 + half});
      }
      if (show) this.scrollInto(one);
    }
    this.onSelect(one);
    this.draw();
    if (one !== null) this.uncover(one);
  }

  // The details stand before the lower part of a high timeline: the page scrolls if the slice is behind them.
  uncover(one) {
    const box = this.painter.boxOf(one), details = document.getElementById("details");
    if (!box || !details) return;
    const bottom = this.canvas.getBoundingClientRect().top + AXIS + box.y - this.state.scroll + 2 * ROW;
    scrollBy(0, Math.max(0, bottom - details.getBoundingClientRect().top));
  }

  scrollInto(one) {
    this.painter.view = this.state.view;
    const box = this.painter.boxOf(one), high = this.painter.viewHeight - AXIS;
    if (!box) return;
    if (box.y < this.state.scroll || box.y + ROW > this.state.scroll + high) this.scrollTo(box.y - high / 2);
  }

  zoomTo(one) {
    if (one === null) return;
    const {start, dur} = this.slices, room = Math.max(dur[one], LEAST_NS);
    this.show({from: start[one] - 0.25 * room, to: start[one] + 1.25 * room});
    this.remember();
    this.scrollInto(one);
  }

  // Selects the slice beside the selected one in its row.
  moveBy(places) {
    const {slices, state} = this;
    if (state.selected === null) return this.selectFirst();
    const row = slices.trackOf(state.selected).rows[slices.columns.depth[state.selected]];
    const place = slices.firstFrom(row, slices.start[state.selected]);
    const next = row[row.indexOf(state.selected, place) + places];
    if (next !== undefined) this.select(next, true);
  }

  selectFirst() {
    for (const {rows} of this.slices.tracks) {
      const place = rows[0] ? this.slices.firstFrom(rows[0], this.state.view.from) : 0;
      if (rows[0]?.[place] !== undefined) return this.select(rows[0][place], true);
    }
  }

  // Selects the slice that encloses the selection, or a slice of the track above if nothing encloses it.
  moveUp() {
    const {slices, state} = this;
    if (state.selected === null) return this.selectFirst();
    const track = slices.trackOf(state.selected), depth = slices.columns.depth[state.selected];
    if (depth) return this.selectNear(track.rows[depth - 1]);
    const above = slices.tracks[slices.tracks.indexOf(track) - 1];
    if (above) this.selectNear(above.rows[above.folded ? 0 : above.rows.length - 1]);
  }

  moveDown() {
    const {slices, state} = this;
    if (state.selected === null) return this.selectFirst();
    const track = slices.trackOf(state.selected), row = track.rows[slices.columns.depth[state.selected] + 1];
    const inside = row && slices.at(row, slices.start[state.selected], slices.dur[state.selected]);
    if (inside !== null && inside !== undefined) return this.select(inside, true);
    const below = slices.tracks[slices.tracks.indexOf(track) + 1];
    if (below) this.selectNear(below.rows[0]);
  }

  selectNear(row) {
    const found = row && this.slices.at(row, this.slices.start[this.state.selected], Infinity);
    if (found !== null && found !== undefined) this.select(found, true);
  }

  // Sets numbered marks: at the first slice whose name matches, `TEXT,3` at the third, `idle` at the longest gap.
  mark(texts) {
    this.state.marks = texts.slice(0, 100).map(text => text === "idle" ? {gap: this.longestGap()} : {slice: this.inView(text)})
      .filter(one => one.gap || one.slice !== undefined);
    this.canvas.dataset.marks = this.state.marks.length;
    this.draw();
  }

  // Returns the slice of a mark. The GPU work of the shown step is the work that was launched in it.
  inView(text) {
    const [, name, number] = /^(.*?)(?:,(\d+))?$/s.exec(text), test = matcher(name), {slices, state: {view, step}} = this;
    const wanted = slices.names.map(one => test(one)), found = [], from = step?.start ?? view.from, to = step?.end ?? view.to;
    for (let one = 0; one < slices.count; one++) {
      if (!wanted[slices.columns.name[one]]) continue;
      const moment = slices.start[(step && slices.launchOf(one)) ?? one];
      if (moment >= from && moment < to) found.push(one);
    }
    return found.sort((a, b) => slices.start[a] - slices.start[b])[Number(number ?? 1) - 1];
  }

  longestGap() {
    const {slices: {idle}, state: {view}} = this;
    let longest = null;
    for (const [cause] of idle ? IDLE : [])
      for (let place = 0; place < idle[cause].length; place += 2) {
        const [start, dur] = idle[cause].slice(place, place + 2);
        if (start >= view.from && start + dur <= view.to && dur > (longest?.dur ?? 0)) longest = {start, dur};
      }
    return longest;
  }

  // Highlights the matches. The text is kept in the address.
  searchFor(text) {
    this.highlight(matcher(text), Boolean(text));
    this.found.textContent = text ? counted(this.slices.matched, "match", "matches") : "";
    address.set({search: text || null});
  }

  highlight(test, on = true) {
    this.slices.search(test);
    this.state.searching = on;
    this.draw();
  }

  // Highlights the slices with exactly these names, as a table or an opportunity has them.
  highlightNames(names, told) {
    const wanted = new Set(names);
    this.search.value = "";
    this.highlight(name => wanted.has(name), wanted.size > 0);
    this.found.textContent = wanted.size ? `${counted(this.slices.matched, "slice")} of ${told}` : "";
  }

  nextMatch(places) {
    const {matches, start} = this.slices;
    if (!matches.length) return;
    const at = matches.indexOf(this.state.selected);
    let next = at + places;
    if (at < 0) {
      next = matches.findIndex(one => start[one] >= this.state.view.from);
      if (places < 0) next -= 1;
    }
    next = (next + matches.length) % matches.length;
    this.select(matches[next], true);
    this.found.textContent = `${whole(next + 1)} of ${counted(matches.length, "match", "matches")}`;
  }

  goTo(place, remember = true) {
    const step = place === null ? null : this.slices.steps[place];
    this.state.step = step;
    this.state.origin = step ? step.start : 0;
    this.steps.value = place === null ? "" : String(place);
    if (remember) address.set({step: step ? step.name.replace(/^ProfilerStep#/, "") : null, view: null});
    if (!step) return this.show(this.whole);
    // A step's GPU work may end after the CPU has left the step.
    const end = Math.max(step.end, step.work_end ?? step.end), room = 0.02 * (end - step.start);
    this.show({from: step.start - room, to: end + room});
  }

  moveStep(places) {
    const at = this.slices.steps.indexOf(this.state.step);
    const next = Math.max(0, Math.min(this.slices.steps.length - 1, at < 0 ? 0 : at + places));
    this.goTo(next);
  }
}
