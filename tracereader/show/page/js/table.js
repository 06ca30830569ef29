// Tables that can be sorted by each column and filtered by name.

const ROWS_SHOWN = 12;

// Returns a test of names from the user's text: alternatives with | between them, ^ at a name's start, $ at its end.
// It is no regular expression, because one of those can take years, and an address may contain any text. The numbers of
// characters and of alternatives are limited for the same reason.
function matcher(text) {
  const tests = text.slice(0, 4000).toLowerCase().split("|", 100).filter(Boolean).map(one => {
    const first = one.startsWith("^"), last = one.endsWith("$"), plain = one.slice(Number(first), one.length - Number(last));
    return first && last ? name => name === plain : first ? name => name.startsWith(plain)
      : last ? name => name.endsWith(plain) : name => name.includes(plain);
  });
  return name => tests.some(test => test(name.toLowerCase()));
}

// columns: {key, title, text(row), number, bar(row), node(row)}; pick(row): called by a click on a row.
// A column of numbers that no row has is left out.
function table({id, columns: all, rows, sort, down = true, filter, pick, picked, empty = "None of them matches."}) {
  const columns = all.filter(one => !one.number || !rows.length || rows.some(row => row[one.key] !== null));
  const state = {sort, down, all: false, filter: ""};
  const body = el("tbody"), more = el("button", {type: "button", class: "plain"}), told = el("span", {class: "told"});
  const heads = columns.map(column => {
    const button = el("button", {type: "button", class: "sort", onclick: () => order(column.key)}, column.title);
    return el("th", {scope: "col", class: column.number ? "number" : "", data: {key: column.key}}, button);
  });
  const search = filter && el("input", {
    type: "search", placeholder: "filter: text|other text", "aria-label": `filter ${filter}`, id: `${id}-filter`,
    oninput: event => { state.filter = event.target.value; draw(); },
  });
  more.addEventListener("click", () => { state.all = !state.all; draw(); });

  function order(key) {
    const column = columns.find(one => one.key === key);
    state.down = state.sort === key ? !state.down : Boolean(column.number);
    state.sort = key;
    draw();
  }

  function draw() {
    const test = matcher(state.filter), kept = state.filter ? rows.filter(row => test(row.name)) : rows;
    const value = row => row[state.sort] ?? (typeof row[state.sort] === "string" ? "" : -Infinity);
    const sign = state.down ? -1 : 1;
    const sorted = [...kept].sort((a, b) => (value(a) < value(b) ? -sign : value(a) > value(b) ? sign : 0));
    const shown = state.all ? sorted : sorted.slice(0, ROWS_SHOWN);
    heads.forEach((head, place) => {
      const sortedBy = columns[place].key === state.sort;
      head.setAttribute("aria-sort", sortedBy ? (state.down ? "descending" : "ascending") : "none");
    });
    fill(clear(body), shown.map(line));
    if (!shown.length) body.append(el("tr", {}, el("td", {colspan: columns.length, class: "empty"}, empty)));
    more.hidden = sorted.length <= ROWS_SHOWN;
    more.textContent = state.all ? `show ${ROWS_SHOWN}` : `show all ${whole(sorted.length)}`;
    told.textContent = kept.length < rows.length ? `${whole(kept.length)} of ${whole(rows.length)}` : "";
  }

  function line(row) {
    const cells = columns.map(column => {
      const cell = el("td", {class: column.number ? "number" : column.name ? "name" : "", data: {key: column.key}});
      if (column.number && row[column.key] !== null && row[column.key] !== undefined) cell.dataset.value = row[column.key];
      if (column.bar) cell.append(el("span", {class: "bar", width: `${Math.min(100, 100 * column.bar(row))}%`}));
      return fill(cell, [column.node ? column.node(row) : column.text ? column.text(row) : row[column.key] ?? NONE]);
    });
    const chosen = picked && picked(row);
    const node = el("tr", {class: (pick ? "pickable " : "") + (chosen ? "picked" : ""), data: {name: row.name}}, cells);
    if (pick) node.addEventListener("click", event => { if (!event.target.closest("button")) pick(row); });
    return node;
  }

  draw();
  return {
    node: el("div", {class: "table", id},
      search && el("div", {class: "tools"}, search, told),
      el("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": filter || id},
        el("table", {}, el("thead", {}, el("tr", {}, heads)), body)),
      more),
    draw,
  };
}
