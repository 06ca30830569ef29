// Draws the timeline on a canvas: an axis with the steps, then the visible rows of every track.

const ROW = 18, HEADER = 20, AXIS = 44, GAP = 6, FONT = "11px system-ui, sans-serif";
const MEMORY_ROW = 44, MARK = 8; // pixels; MARK is a radius
const LEAST_WIDE = 1; // pixels; narrower slices of a row are drawn as one
const LEAST_HIGH = 3, LOOKED_AT = 16; // pixels of such slices; the number of them that are searched for the longest
const ARROWS_DRAWN = 400;
const IDLE = [
  ["not_launched", "idle, waiting for CPU launches"], ["launched", "idle, next activity launched, not started"],
  ["unknown", "idle, next activity's launch not in the trace"], ["elsewhere", "idle while another GPU works"],
];

class Painter {
  constructor(canvas, slices) {
    this.canvas = canvas;
    this.slices = slices;
    this.proposed = [];
    this.context = canvas.getContext("2d", {alpha: false});
    this.repaint();
  }

  // Reads the colors again, because the theme may have changed.
  repaint() {
    const of = name => color(name);
    this.paint = {
      background: of("card"), ink: of("ink"), muted: of("muted"), line: of("line"), accent: of("accent"),
      match: of("match"), header: of("raised"),
      kinds: this.slices.kinds.map(kind => of(`kind-${kind}`)),
      families: this.slices.families.map(one => of(`family-${one.toLowerCase().replace(/[^a-z]+/g, "-")}`)),
      idle: Object.fromEntries(IDLE.map(([cause]) => [cause, of(`idle-${cause.replace("_", "-")}`)])),
    };
    this.textOn = new Map();
    this.context.font = FONT;
    this.character = this.context.measureText("aten::linear_kernel").width / 19;
  }

  // Bands from top to bottom: {kind, y, height, …}.
  layout() {
    const {slices} = this, bands = [];
    let y = 0;
    const add = band => { bands.push({...band, y}); y += band.height; };
    if (this.proposed.length) add({kind: "proposed", height: HEADER + this.proposed.length * ROW + GAP});
    let gpuSeen = false;
    for (const track of slices.tracks) {
      if (track.group === "GPU" && !gpuSeen) {
        gpuSeen = true;
        if (slices.idle) add({kind: "idle", height: HEADER + ROW + GAP});
      }
      const rows = track.folded ? Math.min(1, track.rows.length) : track.rows.length;
      add({kind: "track", track, drawn: rows, height: HEADER + rows * ROW + GAP});
    }
    for (const memory of slices.memory) add({kind: "memory", memory, height: HEADER + MEMORY_ROW + GAP});
    this.bands = bands;
    this.height = y;
    return y;
  }

  resize(width, height) {
    const ratio = window.devicePixelRatio || 1;
    this.width = width;
    this.viewHeight = height;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.height = `${height}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  x(moment) {
    return (moment - this.view.from) / (this.view.to - this.view.from) * this.width;
  }

  moment(x) {
    return this.view.from + x / this.width * (this.view.to - this.view.from);
  }

  // state: {view, scroll, selected, hover, searching, marks}. Returns the counts of slices in view, narrow and merged.
  draw(state) {
    this.view = state.view;
    const {context, paint} = this;
    this.merged = this.narrow = this.seen = 0;
    context.fillStyle = paint.background;
    context.fillRect(0, 0, this.width, this.viewHeight);
    context.font = FONT;
    context.textBaseline = "middle";
    context.save();
    context.beginPath();
    context.rect(0, AXIS, this.width, this.viewHeight - AXIS);
    context.clip();
    context.translate(0, AXIS - state.scroll);
    this.stepLines(state);
    for (const band of this.bands) {
      if (band.y + band.height < state.scroll || band.y > state.scroll + this.viewHeight) continue;
      if (band.kind === "track") this.track(band, state);
      else if (band.kind === "idle") this.idle(band);
      else if (band.kind === "proposed") this.proposals(band);
      else this.memory(band);
    }
    this.arrows(state);
    if (state.range) {
      const from = this.x(state.range.from);
      context.globalAlpha = 0.2;
      context.fillStyle = paint.accent;
      context.fillRect(from, 0, this.x(state.range.to) - from, this.height);
      context.globalAlpha = 1;
    }
    state.marks.forEach((mark, place) => this.mark(mark, String(place + 1)));
    context.restore();
    this.axis(state);
    return {merged: this.merged, narrow: this.narrow, seen: this.seen};
  }

  stepLines() {
    const {context, paint, slices} = this;
    context.fillStyle = paint.line;
    let last = -9;
    for (const step of slices.steps) {
      const x = Math.round(this.x(step.start));
      if (x < 0 || x > this.width || x - last < 3) continue;
      context.fillRect(last = x, 0, 1, this.height);
    }
  }

  header(band, title) {
    const {context, paint} = this;
    context.globalAlpha = 1;
    context.fillStyle = paint.header;
    context.fillRect(0, band.y, this.width, HEADER - 3);
    context.fillStyle = paint.muted;
    context.fillText(title, 8, band.y + HEADER / 2 - 1);
  }

  track(band, state) {
    const {track} = band, hidden = track.rows.length - band.drawn;
    const folded = hidden > 0 ? `, ${counted(hidden, "row")} folded` : "";
    const mark = track.rows.length > 1 ? (track.folded ? "▸ " : "▾ ") : "";
    this.header(band, `${mark}${track.title} · ${counted(track.slices, "slice")}${folded}`);
    for (let depth = 0; depth < band.drawn; depth++) this.row(track.rows[depth], band.y + HEADER + depth * ROW, state);
  }

  row(row, y, state) {
    const {context, slices, view, paint} = this, {start, dur} = slices;
    const scale = this.width / (view.to - view.from), pixel = LEAST_WIDE / scale;
    let place = slices.firstFrom(row, view.from);
    while (place > 0 && start[row[place - 1]] + dur[row[place - 1]] > view.from) place--;
    while (place < row.length) {
      const one = row[place], from = start[one];
      if (from > view.to) break;
      const x = (from - view.from) * scale, wide = dur[one] * scale;
      let next = place + 1;
      if (wide < LEAST_WIDE) {
        // All slices that start within this pixel are drawn as one. The last of them may end after it.
        next = slices.firstFrom(row, from + pixel, next);
        if (next - 1 > place && dur[row[next - 1]] >= pixel) next--;
      }
      const matching = state.searching && slices.matchesIn(row, place, next) > 0;
      context.globalAlpha = state.searching && !matching ? 0.3 : 1;
      if (wide >= LEAST_WIDE) this.slice(one, x, y, wide, state);
      else {
        this.together(row, place, next, x, y, slices.timeIn(row, place, next) / pixel);
        this.narrow += next - place;
      }
      if (matching) {
        const left = Math.max(-2, x);
        context.fillStyle = paint.match;
        context.fillRect(left, y + ROW - 4, Math.max(2, Math.min(this.width + 2, x + wide) - left), 2);
      }
      if (next - place > 1) this.merged += next - place;
      this.seen += next - place;
      place = next;
    }
    context.globalAlpha = 1;
  }

  // Draws slices narrower than a pixel in the color of a long one, as high as the share of the pixel that they fill.
  together(row, place, next, x, y, filled) {
    const {context, slices} = this, each = Math.max(1, Math.floor((next - place) / LOOKED_AT));
    let longest = row[place];
    for (let at = place + each; at < next; at += each) if (slices.dur[row[at]] > slices.dur[longest]) longest = row[at];
    const high = Math.max(LEAST_HIGH, Math.round((ROW - 2) * Math.min(1, filled)));
    context.fillStyle = this.fillOf(longest);
    context.fillRect(x, y + ROW - 2 - high, LEAST_WIDE, high);
  }

  fillOf(one) {
    const {slices, paint} = this, kind = slices.columns.kind[one];
    if (slices.isWork(one) && slices.kinds[kind] !== "span") {
      return paint.families[slices.columns.family[one - slices.first_work]];
    }
    return paint.kinds[kind];
  }

  slice(one, x, y, wide, state) {
    const {context, paint} = this, left = Math.max(-1, x), right = Math.min(this.width + 1, x + wide);
    const fill = this.fillOf(one), width = Math.max(LEAST_WIDE, right - left - (wide > 3 ? 1 : 0));
    context.fillStyle = fill;
    context.fillRect(left, y, width, ROW - 2);
    if (one === state.hover) {
      context.fillStyle = "rgba(255,255,255,.28)";
      context.fillRect(left, y, width, ROW - 2);
    }
    if (width > 22) this.label(this.slices.shownName(one), left + 4, y, width - 6, fill);
    if (one === state.selected) {
      context.globalAlpha = 1;
      context.strokeStyle = paint.ink;
      context.lineWidth = 2;
      context.strokeRect(left + 1, y, Math.max(1, width - 2), ROW - 2);
    }
  }

  label(name, x, y, room, fill) {
    const {context} = this, length = Math.floor(room / this.character);
    if (length < 2) return;
    context.fillStyle = this.inkOn(fill);
    context.fillText(cut(name, length), x, y + ROW / 2 - 1, room);
  }

  // Returns black or white, whichever has more contrast on a color.
  inkOn(fill) {
    if (!this.textOn.has(fill)) {
      const [red, green, blue] = [1, 3, 5].map(at => parseInt(fill.slice(at, at + 2), 16) / 255);
      this.textOn.set(fill, 0.2126 * red ** 2.2 + 0.7152 * green ** 2.2 + 0.0722 * blue ** 2.2 > 0.25 ? "#101216" : "#fff");
    }
    return this.textOn.get(fill);
  }

  idle(band) {
    const {context, slices, view, paint} = this, {idle} = slices, y = band.y + HEADER;
    const several = slices.tracks.some(one => /^GPU \d+ /.test(one.title)) ? ` of GPU ${idle.device}` : "";
    this.header(band, `idle time${several}, by cause`);
    const scale = this.width / (view.to - view.from);
    // Gaps narrower than a pixel are stacked, each as high as the share of the pixel that it fills.
    const filled = new Float64Array(Math.ceil(this.width) + 1);
    for (const [cause] of IDLE) {
      const gaps = idle[cause], narrow = new Float64Array(filled.length);
      context.fillStyle = paint.idle[cause];
      for (let place = 0; place < gaps.length; place += 2) {
        const x = (gaps[place] - view.from) * scale, wide = gaps[place + 1] * scale;
        if (x > this.width) break;
        if (x + wide < 0) continue;
        if (wide >= 1) context.fillRect(x, y, wide, ROW - 2);
        else narrow[Math.max(0, Math.floor(x))] += wide;
      }
      narrow.forEach((share, x) => {
        const high = Math.min(share, 1 - filled[x]) * (ROW - 2);
        if (high <= 0) return;
        filled[x] += share;
        context.fillRect(x, y + (ROW - 2) * (1 - Math.min(1, filled[x])), 1, high);
      });
    }
  }

  // Draws what each proposed change concerns. Spans that touch within a pixel are drawn as one.
  proposals(band) {
    const {context, paint, view} = this, scale = this.width / (view.to - view.from);
    this.header(band, "what to try first: the work that each change concerns");
    this.proposed.forEach(({change, spans}, place) => {
      const y = band.y + HEADER + place * ROW;
      context.fillStyle = paint.accent;
      context.globalAlpha = 0.4;
      let drawn = 0;
      for (const {start, dur} of spans) {
        const from = Math.max(drawn, (start - view.from) * scale), to = (start + dur - view.from) * scale;
        if (from > this.width) break;
        if (to <= from) continue;
        drawn = Math.max(from + 1, to);
        context.fillRect(from, y, drawn - from, ROW - 2);
      }
      context.globalAlpha = 1;
      context.fillStyle = paint.ink;
      context.fillText(`${place + 1}. ${change.title}`, 8, y + ROW / 2 - 1);
    });
  }

  memory(band) {
    const {context, paint} = this, {points, device, events, each} = band.memory, y = band.y + HEADER;
    const most = largest(points.filter((_, place) => place % 2), 1);
    const merged = each > 1 ? `, the largest of every ${each} of ${whole(events)} events` : "";
    this.header(band, `memory allocated, ${device} · peak ${bytes(most)}${merged}`);
    context.beginPath();
    context.moveTo(this.x(points[0]), y + MEMORY_ROW);
    for (let place = 0; place < points.length; place += 2) {
      const high = y + MEMORY_ROW * (1 - points[place + 1] / most);
      context.lineTo(this.x(points[place]), high);
      context.lineTo(place + 2 < points.length ? this.x(points[place + 2]) : this.width, high);
    }
    context.lineTo(this.width, y + MEMORY_ROW);
    context.fillStyle = paint.accent;
    context.globalAlpha = 0.45;
    context.fill();
    context.globalAlpha = 1;
  }

  // Returns the place of a slice: {x, y, wide}; null if its row is folded.
  boxOf(one) {
    const {slices} = this;
    const band = this.bands.find(found => found.kind === "track" && one >= found.track.first && one < found.track.end);
    const depth = slices.columns.depth[one];
    if (!band || depth >= band.drawn) return null;
    const x = this.x(slices.start[one]);
    return {x, y: band.y + HEADER + depth * ROW, wide: Math.max(1, this.x(slices.start[one] + slices.dur[one]) - x)};
  }

  arrows({selected}) {
    this.arrowsLeft = 0;
    if (selected === null) return;
    const {slices, context, paint} = this, launch = slices.launchOf(selected);
    const pairs = launch !== null ? [[launch, selected]]
      : slices.launchedBy(selected).map(one => [slices.launchOf(one), one]);
    this.arrowsLeft = Math.max(0, pairs.length - ARROWS_DRAWN);
    context.strokeStyle = context.fillStyle = paint.ink;
    context.lineWidth = 1.2;
    for (const [from, to] of pairs.slice(0, ARROWS_DRAWN)) {
      const a = this.boxOf(from), b = this.boxOf(to);
      if (!a || !b) continue;
      const x0 = a.x + Math.min(a.wide, 6) / 2, y0 = a.y + ROW - 2, x1 = b.x, y1 = b.y + ROW / 2;
      context.globalAlpha = pairs.length > 20 ? 0.35 : 0.9;
      context.beginPath();
      context.moveTo(x0, y0);
      context.bezierCurveTo(x0, y0 + 30, x1 - 30, y1, x1 - 5, y1);
      context.stroke();
      context.beginPath();
      context.moveTo(x1, y1);
      context.lineTo(x1 - 6, y1 - 3.5);
      context.lineTo(x1 - 6, y1 + 3.5);
      context.fill();
    }
    context.globalAlpha = 1;
    const box = this.boxOf(selected);
    if (box) {
      const left = Math.max(-2, box.x), right = Math.min(this.width + 2, box.x + box.wide);
      context.strokeStyle = paint.ink;
      context.lineWidth = 2;
      if (right >= left) context.strokeRect(left, box.y - 1, Math.max(3, right - left), ROW);
    }
  }

  // Returns whether so many pixels before a slice are empty in its row.
  isFreeBefore(one, pixels) {
    const {slices} = this, row = slices.trackOf(one).rows[slices.columns.depth[one]];
    const before = row[slices.firstFrom(row, slices.start[one]) - 1];
    return before === undefined || this.x(slices.start[before] + slices.dur[before]) < this.x(slices.start[one]) - pixels;
  }

  // Draws a numbered disc at a slice or an idle gap: at the right end of a wide one, or before it if there is room.
  mark({slice, gap}, text) {
    const {context, paint} = this, band = gap && this.bands.find(one => one.kind === "idle");
    const box = slice !== undefined ? this.boxOf(slice)
      : band ? {x: this.x(gap.start), y: band.y + HEADER, wide: this.x(gap.start + gap.dur) - this.x(gap.start)} : null;
    if (!box || box.x > this.width || box.x + box.wide < 0) return;
    const left = Math.max(0, box.x), right = Math.min(this.width, box.x + box.wide), wide = right - left;
    const inside = wide > 5 * MARK || (wide > 2 * MARK && slice !== undefined && !this.isFreeBefore(slice, 2 * MARK + 2));
    const x = Math.max(MARK + 1, inside ? right - MARK - 2 : left - MARK - 2), y = box.y + ROW / 2 - 1;
    context.beginPath();
    context.arc(x, y, MARK, 0, 2 * Math.PI);
    context.fillStyle = paint.match;
    context.fill();
    context.lineWidth = 1.5;
    context.strokeStyle = paint.background;
    context.stroke();
    context.font = `bold ${FONT}`;
    context.textAlign = "center";
    context.fillStyle = this.inkOn(paint.match);
    context.fillText(text, x, y + 0.5);
    context.textAlign = "start";
    context.font = FONT;
  }

  axis(state) {
    const {context, paint, slices, view} = this, long = view.to - view.from;
    context.fillStyle = paint.header;
    context.fillRect(0, 0, this.width, AXIS);
    context.fillStyle = paint.line;
    context.fillRect(0, AXIS - 1, this.width, 1);
    const least = long * 90 / this.width, power = 10 ** Math.floor(Math.log10(least));
    const tick = [1, 2, 5, 10].map(one => one * power).find(one => one >= least);
    const step = state.origin, largest = Math.max(Math.abs(view.from - step), Math.abs(view.to - step));
    const decimalsIn = scale => Math.max(0, Math.ceil(-Math.log10(tick / 1e3 / scale) - 1e-9));
    const wide = unitOf(largest / 1e3), unit = decimalsIn(wide.scale) > 4 ? unitOf(tick / 1e3) : wide;
    const decimals = decimalsIn(unit.scale);
    for (let number = Math.ceil((view.from - step) / tick); number * tick <= view.to - step; number++) {
      const at = number * tick || 0, x = this.x(at + step);
      context.fillStyle = paint.line;
      context.fillRect(x, 20, 1, AXIS - 20);
      context.fillStyle = paint.muted;
      context.fillText(`${digits(at / 1e3 / unit.scale, decimals)} ${unit.name}`, x + 4, 33);
    }
    let last = -99;
    // The steps of several runs start together. Their names would cover each other, so only the chosen one has its name.
    const together = slices.steps.length > 1 && slices.steps[1].start < slices.steps[0].end;
    for (const one of slices.steps) {
      const x = this.x(one.start), end = this.x(one.end);
      if (end < 0 || x > this.width || end - last < 1) continue;
      const left = Math.max(0, x), wide = Math.min(this.width, end) - left;
      last = end;
      context.fillStyle = one === state.step ? paint.accent : paint.muted;
      context.globalAlpha = one === state.step ? 1 : 0.45;
      context.fillRect(left, 3, Math.max(1, wide - 1), 15);
      context.globalAlpha = 1;
      if (wide > 24 && (!together || one === state.step)) {
        context.fillStyle = one === state.step ? this.inkOn(paint.accent) : paint.ink;
        context.fillText(cut(one.name.replace(/^ProfilerStep/, "step "), Math.floor((wide - 8) / this.character)), left + 5, 11);
      }
    }
  }

  // Returns the object at a point of the canvas: {slice}, {step}, {track} (its header), {gap}, {change} or nothing.
  at(x, y, scroll) {
    const {slices} = this, moment = this.moment(x), near = 3 * (this.view.to - this.view.from) / this.width;
    if (y < AXIS) return {step: slices.stepAt(moment)};
    const inside = y - AXIS + scroll, band = this.bands.find(one => inside >= one.y && inside < one.y + one.height);
    if (!band) return {};
    if (inside < band.y + HEADER) return band.kind === "track" ? {track: band.track} : {};
    if (band.kind === "track") {
      const depth = Math.floor((inside - band.y - HEADER) / ROW);
      return depth < band.drawn ? {slice: slices.at(band.track.rows[depth], moment, near)} : {};
    }
    if (band.kind === "proposed") return {change: this.proposed[Math.floor((inside - band.y - HEADER) / ROW)]?.change};
    return band.kind === "idle" ? {gap: this.gapAt(moment)} : {};
  }

  gapAt(moment) {
    for (const [cause, title] of IDLE) {
      const gaps = this.slices.idle[cause];
      for (let place = 0; place < gaps.length; place += 2)
        if (moment >= gaps[place] && moment < gaps[place] + gaps[place + 1])
          return {cause, title, start: gaps[place], dur: gaps[place + 1]};
    }
    return null;
  }
}
