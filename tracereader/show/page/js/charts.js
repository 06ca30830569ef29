// Small charts: a bar of parts, and a curve. They can be read without their colors.

// parts: {name, us, color}. They add up to the whole.
function partsBar(parts, wholeUs, title) {
  return el("div", {class: "parts", role: "img", "aria-label": `${title}: ${parts.map(one =>
    `${one.name} ${share(one.us / wholeUs, 1)}`).join(", ")}`},
    parts.map(one => el("span", {width: `${100 * one.us / wholeUs}%`, color: one.color, title:
      `${one.name}: ${time(one.us)}, ${share(one.us / wholeUs, 1)}`})));
}

function swatch(value) {
  return el("i", {class: "swatch", color: value, "aria-hidden": "true"});
}

// points: numbers over equal stretches; marks: {at (a share of the width), text}.
function curve({points, title, marks = []}) {
  const width = 720, height = 150, left = 62, bottom = 20, most = largest(points, 1);
  const x = place => left + (width - left - 8) * place / Math.max(1, points.length);
  const y = value => (height - bottom) * (1 - value / most) + 6 * value / most;
  let path = `M${x(0)},${height - bottom}`;
  points.forEach((value, place) => { path += `L${x(place)},${y(value)}L${x(place + 1)},${y(value)}`; });
  path += `L${x(points.length)},${height - bottom}Z`;
  return svg("svg", {viewBox: `0 0 ${width} ${height}`, class: "chart curve", role: "img", "aria-label": title},
    [0, 0.5, 1].map(part => [
      svg("line", {x1: left, x2: width - 8, y1: y(part * most), y2: y(part * most), class: "grid"}),
      svg("text", {x: left - 6, y: y(part * most) + 4, "text-anchor": "end"}, bytes(Math.round(part * most))),
    ]),
    svg("path", {d: path, class: "area"}),
    marks.map(mark => [
      svg("circle", {cx: x(mark.at * points.length), cy: y(most), r: 4, class: "mark"}),
      svg("text", {x: x(mark.at * points.length) + (mark.at > 0.6 ? -8 : 8), y: 16, "text-anchor":
        mark.at > 0.6 ? "end" : "start", class: "strong"}, mark.text),
    ]),
    svg("text", {x: left, y: height - 5}, "start of the step"),
    svg("text", {x: width - 8, y: height - 5, "text-anchor": "end"}, "end"));
}
