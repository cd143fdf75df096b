// The table: sorted both ways by any column, filtered as the charts are, and saved as CSV.

const MOST_ROWS = 200;
const TONES = { pass: "pass", fail: "fail", "more seeds": "unclear", drift: "unclear", "known exception": "pass" };

/** Slopes that a reader should look at. */
const isNotable = (row) => row.verdict !== "pass" && row.verdict !== "known exception" && row.verdict !== "not judged";

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
  const columns = [...table.columns.filter((name) => name !== "id"), ...table.columns.filter((name) => name === "id")], formats = new Map(columns.map((name) => [name, isNumber.has(name) ? formatOf(name, table.records.map((row) => row[name])) : shown]));
  const head = columns.map((name) => {
    const order = state.sort.column === name ? (state.sort.falls ? "descending" : "ascending") : "none";
    const sort = () => { state.sort = { column: name, falls: state.sort.column === name ? !state.sort.falls : false }; redraw(`sort-${name}`); };
    return el("th", { scope: "col", "aria-sort": order, class: isNumber.has(name) ? "number" : "" }, el("button", { type: "button", id: `sort-${name}`, onclick: sort }, named(name)));
  });
  const isNarrowed = !state.allSlopes && !state.filters.verdict && table.columns[0] === "verdict" && rows.every(isNotable) && rows.length < table.records.length;
  const ordered = sortedRows(rows, state.sort), kept = state.allRows ? ordered : ordered.slice(0, MOST_ROWS);
  const body = kept.map((row) => el("tr", {}, columns.map((name) => el("td", { class: isNumber.has(name) ? "number" : "" }, cellOf(row, name, opens, formats.get(name))))));
  place.replaceChildren(
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": table.title }, el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body))),
    el("div", { class: "below" },
      el("button", { type: "button", class: "quiet", id: "csv", onclick: () => download("smupar-table.csv", csvOf(table.columns, ordered), "text/csv") }, "Download CSV"),
      isNarrowed ? el("button", { type: "button", class: "quiet", id: "all-slopes", onclick: () => { state.allSlopes = true; redraw(); } }, `Show all ${number(table.records.length)} slopes`) : null,
      rows.length > kept.length ? el("button", { type: "button", class: "quiet", onclick: () => { state.allRows = true; redraw(); } }, `Show all ${number(rows.length)} rows`) : null,
      el("span", { class: "note" }, isNarrowed ? `${number(rows.length)} of ${number(table.records.length)} slopes do not pass.` : rows.length < table.records.length ? `${number(rows.length)} of ${number(table.records.length)} rows pass the filter.` : `${number(rows.length)} row${rows.length === 1 ? "" : "s"}.`)));
}

function cellOf(row, name, opens, format) {
  if (name === "id") return el("button", { type: "button", class: "open", onclick: () => opens([row.id]) }, row.id);
  if (name === "state") return el("span", { class: `state ${row.state}` }, row.state);
  if (TONES[row[name]]) return el("span", { class: `state ${TONES[row[name]]}` }, row[name]);
  return format(row[name]);
}

const DIGITS = { loss: 5, valid_loss: 5, tokens_per_second: 3, seconds: 3, slope: 3, half_interval: 2 }; // of what was measured; settings are exact, to four digits

/** One format for all numbers of a column: powers of two as the charts write them, or the same number of decimals. */
function formatOf(name, values) {
  const known = values.filter((value) => typeof value === "number"), sizes = known.filter(Boolean).map(Math.abs).sort((a, b) => a - b);
  const or = (format) => (value) => (typeof value === "number" ? format(value) : "–");
  if (!sizes.length || known.every(Number.isInteger)) return or((value) => value.toLocaleString("en"));
  if (known.every(isPower) && !/^(density|sparsity)/.test(name)) return or((value) => power(Math.log2(value)));
  if (!DIGITS[name] && sizes.at(-1) / sizes[0] > 1e4) return or((value) => (value === 0 ? "0" : value.toExponential(2)));
  const place = (size) => Math.floor(Math.log10(size)), needed = Math.max(...known.map((value) => (String(Number(value.toPrecision(4))).split(".")[1] || "").length));
  const decimals = Math.min(12, Math.max(0, DIGITS[name] ? DIGITS[name] - 1 - place(sizes[Math.floor(sizes.length / 2)]) : Math.min(needed, 3 - place(sizes[0]))));
  return or((value) => (value === 0 ? "0" : Math.abs(value) >= 1e6 ? value.toExponential(2) : value.toLocaleString("en", { minimumFractionDigits: decimals, maximumFractionDigits: decimals })));
}

function csvOf(columns, rows) {
  const cell = (value) => { const text = value === null || value === undefined ? "" : String(value); return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text; };
  return [columns, ...rows.map((row) => columns.map((name) => row[name]))].map((line) => line.map(cell).join(",")).join("\r\n") + "\r\n";
}
