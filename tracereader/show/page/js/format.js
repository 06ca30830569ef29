// Numbers as text. Units adapt to the size; a table's column has one unit.

const NONE = "–";

function digits(value, count) {
  return value.toLocaleString("en-US", {minimumFractionDigits: count, maximumFractionDigits: count});
}

// Returns the largest of the values; `least` if all are smaller or missing. A call with a list as its arguments
// (Math.max, push, append) fails for long lists, because arguments are on the stack.
function largest(values, least = 0) {
  return values.reduce((most, one) => one > most ? one : most, least);
}

function smallest(values, most) {
  return values.reduce((least, one) => one < least ? one : least, most);
}

function unitOf(us) {
  if (us >= 1e6) return {name: "s", scale: 1e6};
  if (us >= 1e3) return {name: "ms", scale: 1e3};
  return us >= 1 || us === 0 ? {name: "µs", scale: 1} : {name: "ns", scale: 1e-3};
}

function time(us) {
  if (us === null || us === undefined) return NONE;
  const {name, scale} = unitOf(Math.abs(us));
  const value = us / scale;
  return `${digits(value, name === "ns" ? 0 : Math.abs(value) < 10 ? 2 : 1)} ${name}`;
}

// Returns a column's unit, in which its largest time has at most five digits before the point.
function columnUnit(values) {
  const most = largest(values);
  return most >= 1e7 ? {name: "s", scale: 1e6, digits: 2} : most >= 1e4 ? {name: "ms", scale: 1e3, digits: 2}
    : {name: "µs", scale: 1, digits: 1};
}

function inUnit(us, unit) {
  return us === null || us === undefined ? NONE : digits(us / unit.scale, unit.digits);
}

function share(value, count = 0) {
  if (value === null || value === undefined) return NONE;
  return value > 0 && value < 0.5 * 10 ** (-2 - count) ? `<${10 ** -count}%` : `${digits(100 * value, count)}%`;
}

function bytes(count) {
  if (count === null || count === undefined) return NONE;
  for (const [name, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]])
    if (Math.abs(count) >= scale) return `${digits(count / scale, Math.abs(count) < 10 * scale ? 2 : 1)} ${name}`;
  return `${count} B`;
}

function whole(count) {
  return count.toLocaleString("en-US");
}

// Returns a clause as a sentence.
function sentence(text) {
  return `${text.replace(/^./, letter => letter.toUpperCase())}${/[.!?]$/.test(text) ? "" : "."}`;
}

function counted(count, what, several = `${what}s`) {
  return `${whole(count)} ${count === 1 ? what : several}`;
}

function rate(value, unit) {
  if (value === null || value === undefined) return NONE;
  return `${value < 100 ? digits(value, value < 10 ? 2 : 1) : digits(value, 0)} ${unit}`;
}

function cut(text, length) {
  return text.length <= length ? text : `${text.slice(0, length - 1)}…`;
}
