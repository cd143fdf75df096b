// The table: sorted both ways by any column, filtered as the charts are, and saved as CSV.

const MOST_ROWS = 200;
const TONES = { pass: "pass", fail: "fail", "more seeds": "unclear", drift: "unclear", "known exception": "pass" };

function sortedRows(rows, { column, falls }) {
  if (!column) return rows;
  const key = (row) => row[column];
  const missing = (value) => value === null || value === undefined;
  return [...rows].sort((a, b) => {
    const [one, other] = [key(a), key(b)];
    if (missing(one) || missing(other)) return missing(one) - missing(other);
    const order = typeof one === "number" && typeof other === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true });
    return falls ? -order : order;
  });
}

function drawTable(place, table, rows, state, { opens, redraw }) {
  const isNumber = new Set(table.columns.filter((name) => table.records.every((row) => typeof (row[name] ?? 0) === "number")));
  const head = table.columns.map((name) => {
    const order = state.sort.column === name ? (state.sort.falls ? "descending" : "ascending") : "none";
    const sort = () => { state.sort = { column: name, falls: state.sort.column === name ? !state.sort.falls : false }; redraw(`sort-${name}`); };
    return el("th", { scope: "col", "aria-sort": order, class: isNumber.has(name) ? "number" : "" }, el("button", { type: "button", id: `sort-${name}`, onclick: sort }, named(name)));
  });
  const ordered = sortedRows(rows, state.sort), kept = state.allRows ? ordered : ordered.slice(0, MOST_ROWS);
  const body = kept.map((row) => el("tr", {}, table.columns.map((name) => el("td", { class: isNumber.has(name) ? "number" : "" }, cellOf(row, name, opens)))));
  place.replaceChildren(
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": table.title }, el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body))),
    el("div", { class: "below" },
      el("button", { type: "button", class: "quiet", id: "csv", onclick: () => download("smupar-table.csv", csvOf(table.columns, ordered), "text/csv") }, "Download CSV"),
      rows.length > kept.length ? el("button", { type: "button", class: "quiet", onclick: () => { state.allRows = true; redraw(); } }, `Show all ${number(rows.length)} rows`) : null,
      el("span", { class: "note" }, rows.length < table.records.length ? `${number(rows.length)} of ${number(table.records.length)} rows pass the filter.` : `${number(rows.length)} row${rows.length === 1 ? "" : "s"}.`)));
}

function cellOf(row, name, opens) {
  if (name === "id") return el("button", { type: "button", class: "open", onclick: () => opens([row.id]) }, row.id);
  if (name === "state") return el("span", { class: `state ${row.state}` }, row.state);
  if (TONES[row[name]]) return el("span", { class: `state ${TONES[row[name]]}` }, row[name]);
  return shown(row[name]);
}

function csvOf(columns, rows) {
  const cell = (value) => { const text = value === null || value === undefined ? "" : String(value); return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text; };
  return [columns, ...rows.map((row) => columns.map((name) => row[name]))].map((line) => line.map(cell).join(",")).join("\r\n") + "\r\n";
}
