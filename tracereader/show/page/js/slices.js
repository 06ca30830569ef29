// The slices as rows: their places, the matches of a search, and the ties of launches to GPU work.

class Slices {
  constructor(found) {
    Object.assign(this, found);
    // Maps, because a name in a trace may be the name of a property that every object has.
    this.shown = new Map(Object.entries(found.shown));
    this.decoded = new Map(Object.entries(found.decoded));
    const {start, name} = this.columns;
    this.count = name.length;
    this.timeUpTo = new Map();
    this.start = new Float64Array(this.count);
    this.tracks = this.placedTracks();
    for (const track of this.tracks) {
      let at = 0;
      for (let one = track.first; one < track.end; one++) this.start[one] = at += start[one];
    }
    delete this.columns.start;
    this.dur = this.columns.dur;
    this.search(() => false);
  }

  // Returns the rows of each track: the indices of its slices by depth, and in each by start.
  placedTracks() {
    const {depth} = this.columns;
    let at = 0;
    return this.tracks.map(track => {
      const first = at, end = at += track.slices, counts = [];
      for (let one = first; one < end; one++) counts[depth[one]] = (counts[depth[one]] ?? 0) + 1;
      const rows = Array.from(counts, count => new Uint32Array(count ?? 0)), next = rows.map(() => 0);
      for (let one = first; one < end; one++) rows[depth[one]][next[depth[one]]++] = one;
      return {...track, first, end, rows, folded: false};
    });
  }

  nameOf(one) {
    return this.names[this.columns.name[one]];
  }

  kindOf(one) {
    return this.kinds[this.columns.kind[one]];
  }

  isWork(one) {
    return one >= this.first_work && one < this.first_work + this.work;
  }

  familyOf(one) {
    return this.families[this.columns.family[one - this.first_work]];
  }

  shownName(one) {
    const name = this.nameOf(one);
    return this.shown.get(name) ?? name.replace(/^(aten::|nn\.Module: |autograd::engine::evaluate_function: )/, "");
  }

  trackOf(one) {
    return this.tracks.find(track => one >= track.first && one < track.end);
  }

  // Returns the details of a GPU activity of the reported step; null for other slices.
  pieceOf(one) {
    const number = this.isWork(one) ? this.columns.piece[one - this.first_work] : 0;
    return number ? this.pieces[number - 1] : null;
  }

  launchOf(one) {
    const number = this.isWork(one) ? this.columns.launch[one - this.first_work] : 0;
    return number ? number - 1 : null;
  }

  // Returns the GPU work launched by a call, or inside an op.
  launchedBy(one) {
    if (this.isWork(one)) return [];
    this.byLaunch ??= this.workByLaunch();
    const track = this.trackOf(one), end = this.start[one] + this.dur[one], found = [];
    for (let other = one; other < track.end && (other === one || this.start[other] < end); other++)
      if (other === one || this.columns.depth[other] > this.columns.depth[one])
        for (const work of this.byLaunch.get(other) ?? []) found.push(work);
    return found;
  }

  workByLaunch() {
    const found = new Map();
    this.columns.launch.forEach((number, place) => {
      if (!number) return;
      if (!found.has(number - 1)) found.set(number - 1, []);
      found.get(number - 1).push(place + this.first_work);
    });
    return found;
  }

  // Finds the slices whose names pass a test, and returns their number.
  search(test) {
    const wanted = Uint8Array.from(this.names, name => test(name) || test(this.shown.get(name) ?? "")), {name} = this.columns;
    this.isMatch = one => wanted[name[one]] === 1;
    this.matchesUpTo = new Map();
    once(this, "matches", () => this.foundMatches());
    this.matched = 0;
    for (let one = 0; one < this.count; one++) this.matched += wanted[name[one]];
    return this.matched;
  }

  // Returns the indices of the slices that match, by start.
  foundMatches() {
    const found = new Uint32Array(this.matched);
    let next = 0;
    for (let one = 0; one < this.count; one++) if (this.isMatch(one)) found[next++] = one;
    return found.sort((a, b) => this.start[a] - this.start[b]);
  }

  // Returns the number of a row's slices that match between two indices.
  matchesIn(row, from, to) {
    if (!this.matched) return 0;
    if (!this.matchesUpTo.has(row)) this.matchesUpTo.set(row, summed(row, one => this.isMatch(one), Uint32Array));
    const upTo = this.matchesUpTo.get(row);
    return upTo[to] - upTo[from];
  }

  // Returns the sum of the times of a row's slices between two indices (ns).
  timeIn(row, from, to) {
    if (!this.timeUpTo.has(row)) this.timeUpTo.set(row, summed(row, one => this.dur[one], Float64Array));
    const upTo = this.timeUpTo.get(row);
    return upTo[to] - upTo[from];
  }

  // Returns the first index in a row whose slice starts at or after a time.
  firstFrom(row, at, low = 0) {
    let high = row.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.start[row[middle]] < at) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // Returns the slice of a row at a time, or the nearest one within `near` ns.
  at(row, moment, near) {
    const place = this.firstFrom(row, moment);
    let best = null, apart = near;
    for (const one of [row[place - 2], row[place - 1], row[place]]) {
      if (one === undefined) continue;
      const off = Math.max(0, this.start[one] - moment, moment - this.start[one] - this.dur[one]);
      if (off <= apart) [best, apart] = [one, off];
    }
    return best;
  }

  // Returns a row for each name of the slices between two times: their number, and their time in it (µs).
  totals(from, to) {
    const found = new Map(), {start, dur} = this;
    for (const row of this.tracks.flatMap(track => track.rows)) {
      let place = this.firstFrom(row, from);
      while (place > 0 && start[row[place - 1]] + dur[row[place - 1]] > from) place--;
      for (; place < row.length && start[row[place]] < to; place++) {
        const one = row[place], name = this.nameOf(one), kind = this.kindOf(one), key = `${kind} ${name}`;
        if (!found.has(key)) found.set(key, {name, kind, on_gpu: this.isWork(one) && kind !== "span", count: 0, us: 0});
        found.get(key).count += 1;
        found.get(key).us += (Math.min(to, start[one] + dur[one]) - Math.max(from, start[one])) / 1e3;
      }
    }
    return [...found.values()];
  }

  stepAt(moment) {
    return this.steps.find(step => moment >= step.start && moment < step.end) ?? null;
  }
}

// Returns the running sums of a value over a row, so that the sum over any part is one difference.
function summed(row, value, Kind) {
  const found = new Kind(row.length + 1);
  for (let place = 0; place < row.length; place++) found[place + 1] = found[place] + Number(value(row[place]));
  return found;
}

// Returns a test of whether a small number occurs in a column.
function valuesOf(column) {
  const seen = new Uint8Array(256);
  for (const value of column) seen[value] = 1;
  return {has: value => seen[value] === 1};
}
