// The roofline: kernels by arithmetic intensity and achieved rate. A circle's area is the kernel's time.

function rooflineSection(data, pick) {
  const found = data.roofline;
  if (!found || !found.points.length) return null;
  const {peaks, points} = found, width = 860, height = 420, left = 64, right = 16, top = 16, bottom = 46;
  const roofs = [["BF16 and FP16", peaks.bf16], ["TF32", peaks.tf32], ["FP32", peaks.fp32]]
    .filter(([, value], place, all) => all.findIndex(([, other]) => other === value) === place);
  const log = Math.log10, slope = peaks.gb_s / 1e3; // TFLOP/s at an intensity of one FLOP per byte
  const ridge = peaks.bf16 / slope;
  const low = smallest(points.map(one => one.intensity), 0.5) / 1.5, high = largest(points.map(one => one.intensity), ridge * 8) * 1.5;
  const least = smallest(points.map(one => one.tflops), low * slope) / 1.6, most = peaks.bf16 * 1.6;
  const x = value => left + (width - left - right) * log(value / low) / log(high / low);
  const y = value => height - bottom - (height - bottom - top) * log(value / least) / log(most / least);
  const powers = (from, to) => {
    const all = [];
    for (let power = Math.ceil(log(from)); power <= log(to); power++) all.push(10 ** power);
    return all;
  };
  const plain = value => value >= 1000 ? whole(value) : String(Number(value.toPrecision(2)));
  const area = largest(points.map(one => one.us));
  const chart = svg("svg", {viewBox: `0 0 ${width} ${height}`, class: "chart roofline", role: "img",
    "aria-label": `Roofline of ${found.device}: the kernels are in the table below`},
    powers(low, high).map(value => [svg("line", {x1: x(value), x2: x(value), y1: top, y2: height - bottom, class: "grid"}),
      svg("text", {x: x(value), y: height - bottom + 16, "text-anchor": "middle"}, plain(value))]),
    powers(least, most).map(value => [svg("line", {x1: left, x2: width - right, y1: y(value), y2: y(value), class: "grid"}),
      svg("text", {x: left - 8, y: y(value) + 4, "text-anchor": "end"}, plain(value))]),
    svg("text", {x: (left + width) / 2, y: height - 8, "text-anchor": "middle", class: "strong"}, "arithmetic intensity, FLOP per byte"),
    svg("text", {x: 14, y: height / 2, "text-anchor": "middle", class: "strong", transform: `rotate(-90 14 ${height / 2})`}, "achieved TFLOP/s"),
    svg("line", {x1: x(low), y1: y(Math.max(least, low * slope)), x2: x(ridge), y2: y(peaks.bf16), class: "roof"}),
    roofs.map(([, value]) => svg("line", {x1: x(value / slope), x2: width - right, y1: y(value), y2: y(value), class: "roof"})),
    points.map(one => {
      const mark = svg("circle", {cx: x(one.intensity), cy: y(one.tflops), r: Math.max(3, 26 * Math.sqrt(one.us / area)), class: "point",
        onclick: () => pick(one)}, svg("title", {}, `${one.short}\n${counted(one.count, "activity", "activities")}, ${time(one.us)}, ${rate(one.tflops, "TFLOP/s")}`));
      mark.style.setProperty("--color", familyColor(one.family));
      return mark;
    }),
    // The labels are above the circles, and below their line if the label of the line above is near.
    svg("text", {x: x(ridge / 6), y: y(ridge / 6 * slope) - 8, "text-anchor": "end", class: "roof"}, `${whole(peaks.gb_s)} GB/s`),
    roofs.map(([name, value], place) => svg("text", {x: width - right - 4, y: place && y(value) - y(roofs[place - 1][1]) < 18 ? y(value) + 14 : y(value) - 5,
      "text-anchor": "end", class: "roof"}, `${name}: ${whole(value)} TFLOP/s`)));
  const unit = columnUnit(points.map(one => one.us));
  return section("roofline", "Roofline",
    `The chart has ${whole(found.placed)} of the ${whole(found.of)} kernels of step ${data.head.step}, ${share(found.placed_us / found.summed_us)} of its GPU time. `
    + "The trace does not have the FLOPs and bytes of the others. Bytes are counted once for each input and output, so the effect of caches is not included. Equal kernels are one circle, whose area is their time.",
    el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": "roofline"}, chart),
    table({id: "roofline-table", rows: points, sort: "us", pick, columns: [
      {key: "name", title: "kernel", name: true, node: row => el("div", {class: "kernel"},
        el("button", {type: "button", class: "plain", title: row.name, onclick: () => pick(row)}, swatch(familyColor(row.family)), row.short),
        el("small", {}, row.says))},
      {key: "count", title: "count", number: true, text: row => whole(row.count)},
      {key: "us", title: unit.name, number: true, text: row => inUnit(row.us, unit)},
      {key: "intensity", title: "FLOP/byte", number: true, text: row => digits(row.intensity, row.intensity < 10 ? 2 : 0)},
      {key: "tflops", title: "TFLOP/s", number: true, text: row => rate(row.tflops, "").trim()},
      {key: "of_roof", title: "of peak", number: true, text: row => row.of_roof === null ? NONE : share(row.of_roof)},
    ]}).node);
}
