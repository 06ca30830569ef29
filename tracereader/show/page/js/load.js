// Reads the two blocks of data: the figures as JSON, and the slices as packed columns of whole numbers.

function figuresOf() {
  return JSON.parse(document.getElementById("figures").textContent);
}

function bytesOf(base64) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(base64);
  const text = atob(base64), found = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place++) found[place] = text.charCodeAt(place);
  return found;
}

// Returns the description of the slices, with the columns as arrays; null if the page has none.
async function slicesOf() {
  const block = document.getElementById("slices"), text = block.textContent;
  if (!text) return null;
  const packed = new Blob([bytesOf(text)]).stream().pipeThrough(new DecompressionStream("gzip"));
  const whole = new Uint8Array(await new Response(packed).arrayBuffer());
  block.textContent = ""; // the text is not needed after unpacking
  const length = new DataView(whole.buffer).getUint32(0, true);
  const found = JSON.parse(new TextDecoder().decode(whole.subarray(8, 8 + length)));
  let at = 8 + length;
  const columns = {};
  for (const {name, bytes: width, count} of found.columns) {
    const planes = whole.subarray(at, at += width * count);
    once(columns, name, () => numbers(planes, width, count));
  }
  return {...found, columns};
}

// Makes a property at its first read, because some columns are read only for a selected slice.
function once(object, name, make) {
  Object.defineProperty(object, name, {configurable: true, get() {
    const value = make();
    Object.defineProperty(object, name, {value});
    return value;
  }});
}

// Reads byte planes, the lowest first. Times may need more than 32 bits, and doubles hold 53.
function numbers(planes, width, count) {
  if (width === 1) return planes;
  const Kind = width === 2 ? Uint16Array : width === 4 ? Uint32Array : Float64Array;
  const found = new Kind(count);
  for (let plane = width - 1; plane >= 0; plane--) {
    const from = plane * count;
    for (let place = 0; place < count; place++) found[place] = found[place] * 256 + planes[from + place];
  }
  return found;
}
