// Puts all content of a trace on the page as text, never as markup, an address or a style sheet.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

// el("p", {class: "note", onclick: f}, "text", otherNode)
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "width") node.style.width = value;
    else if (name === "color") node.style.setProperty("--color", value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (/^(id|type|role|tabindex|placeholder|for|title|scope|colspan|open|value|disabled|aria-[a-z]+)$/.test(name))
      node.setAttribute(name, value === true ? "" : value);
  }
  return fill(node, children);
}

function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  return fill(node, children);
}

function clear(node) {
  node.replaceChildren();
  return node;
}

// A custom property of the style sheet, so that canvas and page have one palette.
function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function familyColor(family) {
  return `var(--family-${family.toLowerCase().replace(/[^a-z]+/g, "-")})`;
}
