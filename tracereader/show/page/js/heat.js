// A heat map with a row for each rank and a column for each step.

const HEAT_HIGH = 420, CELL_HIGH = 18, HEAT_LEFT = 66, HEAT_TOP = 20;

class HeatMap {
  // layers: {name, values (by rank, by step, in µs), low}; pick(step's index): called by Enter and a click.
  constructor({ranks, steps, layers, pick}) {
    Object.assign(this, {ranks, steps, layers, pick, layer: layers[0], cell: null});
    this.canvas = el("canvas", {tabindex: "0", role: "application", id: "heat-canvas",
      "aria-label": `Heat map of ${counted(ranks.length, "rank")} and ${counted(steps.length, "step")}. Arrow keys move between cells, Enter shows the step in the timeline.`,
      "aria-describedby": "heat-cell"});
    this.told = el("p", {class: "told", id: "heat-cell", role: "status"});
    this.scale = el("p", {class: "told", id: "heat-scale"});
    this.chips = layers.map(layer => el("button", {type: "button", "aria-pressed": String(layer === this.layer), onclick: () => this.show(layer)}, layer.name));
    this.node = el("div", {class: "heat"}, layers.length > 1 && el("div", {class: "chips"}, this.chips), this.scale, this.canvas, this.told);
    this.high = Math.max(1, Math.min(CELL_HIGH, HEAT_HIGH / ranks.length));
    this.cells = document.createElement("canvas"); // drawn once, because they are many, and copied under each selection
    new ResizeObserver(() => this.drawCells()).observe(this.node);
    addEventListener("themed", () => this.drawCells());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.drawCells());
    const cellOf = event => this.at(event.offsetX, event.offsetY);
    this.canvas.addEventListener("pointermove", event => this.select(cellOf(event)));
    this.canvas.addEventListener("click", event => { const cell = cellOf(event); if (cell) this.pick(cell.step); });
    this.canvas.addEventListener("keydown", event => this.key(event));
    this.select(null);
  }

  show(layer) {
    this.layer = layer;
    this.chips.forEach((chip, place) => chip.setAttribute("aria-pressed", String(this.layers[place] === layer)));
    this.select(this.cell);
    this.drawCells();
  }

  at(x, y) {
    const rank = Math.floor((y - HEAT_TOP) / this.high), step = Math.floor((x - HEAT_LEFT) / this.wide);
    return rank >= 0 && rank < this.ranks.length && step >= 0 && step < this.steps.length ? {rank, step} : null;
  }

  key(event) {
    const by = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]}[event.key];
    if (event.key === "Enter" && this.cell) this.pick(this.cell.step);
    if (!by) return;
    event.preventDefault();
    const within = (value, count) => Math.max(0, Math.min(count - 1, value));
    this.select(this.cell === null ? {rank: 0, step: 0}
      : {rank: within(this.cell.rank + by[0], this.ranks.length), step: within(this.cell.step + by[1], this.steps.length)});
  }

  select(cell) {
    this.cell = cell;
    const value = cell && this.layer.values[cell.rank][cell.step];
    if (cell) this.told.dataset.value = value ?? "";
    this.told.textContent = cell ? `Rank ${this.ranks[cell.rank]}, ${this.stepName(cell.step)}: ${time(value)}.`
      : "Point at a cell, or use the arrow keys, to read its time. A click or Enter shows the step in the timeline.";
    this.asked ??= requestAnimationFrame(() => this.draw());
  }

  stepName(place) {
    return this.steps[place].replace(/^ProfilerStep/, "step ");
  }

  drawCells() {
    const width = this.node.clientWidth;
    if (!width) return;
    const {cells, canvas, ranks, steps, high, layer} = this, ratio = window.devicePixelRatio || 1;
    const height = HEAT_TOP + Math.ceil(ranks.length * high) + 2;
    this.wide = (width - HEAT_LEFT - 2) / steps.length;
    this.gap = high >= 6 && this.wide >= 6 ? 1 : 0;
    canvas.width = cells.width = Math.round(width * ratio);
    canvas.height = cells.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
    const context = cells.getContext("2d", {alpha: false});
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.fillStyle = color("card");
    context.fillRect(0, 0, width, height);
    const known = layer.values.flat().filter(one => one !== null);
    const most = known.reduce((a, b) => Math.max(a, b), 0), least = layer.low ?? known.reduce((a, b) => Math.min(a, b), most);
    // Times that differ by less than a tenth look alike.
    const pale = Math.min(least, 0.9 * most), alike = `All cells: ${time(least)}${most > least ? ` to ${time(most)}` : ""}.`;
    this.scale.textContent = pale < least ? alike : `From ${time(least)} (pale) to ${time(most)} (full color).`;
    context.fillStyle = color(layer.color);
    layer.values.forEach((row, rank) => row.forEach((value, step) => {
      if (value === null) return;
      context.globalAlpha = 0.08 + 0.92 * (most > pale ? (value - pale) / (most - pale) : 0);
      context.fillRect(...this.box(rank, step, 1));
    }));
    context.globalAlpha = 1;
    this.labels(context, width);
    this.draw();
  }

  draw() {
    this.asked = undefined;
    if (!this.wide) return;
    const context = this.canvas.getContext("2d", {alpha: false}), ratio = window.devicePixelRatio || 1;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.drawImage(this.cells, 0, 0);
    if (!this.cell) return;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.strokeStyle = color("ink");
    context.lineWidth = 2;
    context.strokeRect(...this.box(this.cell.rank, this.cell.step, 3));
  }

  box(rank, step, least) {
    return [HEAT_LEFT + step * this.wide, HEAT_TOP + rank * this.high, Math.max(least, this.wide - this.gap), Math.max(least, this.high - this.gap)];
  }

  // Labels only every nth rank and step, so that the labels have room.
  labels(context, width) {
    const {ranks, steps, high, wide} = this;
    context.font = FONT;
    context.fillStyle = color("muted");
    context.textBaseline = "middle";
    for (let rank = 0, each = Math.ceil(14 / high); rank === 0 || rank + 6 / high < ranks.length; rank += each)
      context.fillText(`rank ${ranks[rank]}`, 2, HEAT_TOP + (rank + 0.5) * high + (high < 14 ? 3 : 0));
    for (let step = 0, each = Math.ceil(60 / wide); step < steps.length; step += each)
      if (HEAT_LEFT + step * wide < width - 40) context.fillText(cut(this.stepName(step), 12), HEAT_LEFT + step * wide + 1, 9);
  }
}

function heatSection(data, goTo) {
  const {heat, steps} = data;
  if (!heat) return null;
  const layers = [{name: "time per step", values: heat.us, color: "accent"}];
  if (heat.waited_us) layers.push({name: "waiting for other ranks", values: heat.waited_us, color: "idle-not-launched", low: 0});
  const map = new HeatMap({ranks: heat.ranks, steps, layers, pick: goTo});
  return section("heat", "Ranks by steps", `${counted(heat.ranks.length, "rank")} and ${counted(steps.length, "step")}. Waiting is summed over the collectives and messages of a step, from a rank's start to that of the last rank.`, map.node);
}
