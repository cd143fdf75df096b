// Readers can choose filters and colours by any field, and another x axis. Charts are then made from the rows of the table.

/** Fields by which runs can be told apart, with their values. */
function fieldsOf(table) {
  return table.varied.map((name) => ({ name, values: [...new Set(table.records.map((row) => row[name]))].sort((a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)))) }));
}

/** Groups of rows that are equal in these fields. Rows that no line can join to another row form the last group. */
function alike(rows, fields, x) {
  const groups = new Map();
  for (const row of rows) {
    const key = JSON.stringify(fields.map((name) => row[name]));
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  const isCurve = (group) => new Set(group.map((row) => row[x])).size > 1, all = [...groups.values()];
  const curves = all.filter(isCurve).map((rows) => ({ rows, isJoined: true })), single = all.filter((group) => !isCurve(group)).flat();
  return single.length ? [...curves, { rows: single, isJoined: false }] : curves;
}

/** Charts of all runs over a field: one for each value of ``panel``, one colour for each value of ``colour``. A line joins only runs
 *  that differ in nothing but x and their seed. Of several seeds it shows the best. */
function exploredCharts(rows, fields, { x, y, colour, panel }) {
  const inOrder = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
  const values = colour ? [...new Set(rows.map((row) => row[colour]))].sort(inOrder) : [0]; // values in all charts, so that charts share colours
  const groups = new Map();
  for (const row of rows) {
    const title = panel ? `${panel === "rule" ? "" : named(panel) + " "}${shown(row[panel])}` : named(y);
    if (!groups.has(title)) groups.set(title, { rule: panel === "rule" ? row.rule : "", rows: [] });
    groups.get(title).rows.push(row);
  }
  return [...groups].map(([title, group]) => {
    const lines = new Map();
    for (const row of group.rows) {
      const label = colour ? `${colour === "rule" ? "" : named(colour) + " "}${shown(row[colour])}` : "all runs";
      if (!lines.has(label)) lines.set(label, { value: colour ? row[colour] : 0, rows: [] });
      lines.get(label).rows.push(row);
    }
    const sorted = [...lines].sort(([, a], [, b]) => inOrder(a.value, b.value));
    return {
      title, rule: group.rule, x_label: named(x), y_label: axisName(y), group: axisName(y), log_x: group.rows.every((row) => row[x] > 0), log_y: false,
      lines: sorted.flatMap(([label, line]) => {
        const place = values.indexOf(line.value), same = alike(line.rows, fields.filter((name) => name !== x && name !== "seed"), x);
        const asked = { x, y, place, isAlone: same.length === 1, rule: colour === "rule" ? line.value : undefined, shade: place / Math.max(1, values.length - 1) };
        return same.map(({ rows, isJoined }) => exploredLine(label, rows, { ...asked, isJoined }));
      }),
    };
  });
}

function exploredLine(label, rows, { x, y, place, isAlone, isJoined, rule, shade }) {
  const points = new Map();
  for (const row of rows) {
    const ended = row.state === "finished" || row.state === "diverged", value = ended ? row[y] : null;
    const key = isJoined ? row[x] : row.id, before = points.get(key);
    if (!before || (value !== null && (before.y === null || value < before.y))) points.set(key, { x: row[x], y: value, runs: [row.id] });
  }
  const all = [...points.values()].filter((point) => typeof point.x === "number").sort((a, b) => a.x - b.x);
  const ended = all.filter((point) => point.y !== null);
  const at = ended.reduce((least, point, i) => (point.y < ended[least].y ? i : least), 0);
  const inside = isJoined && at > 0 && at < ended.length - 1;
  const best = ended.length && isAlone ? { x: ended[at].x, y: ended[at].y, smooth: ended[at].x, low: inside ? ended[at - 1].x : null, high: inside ? ended[at + 1].x : null, is_final: ended.length === all.length } : null;
  return { label, points: all, shade, is_reference: false, is_joined: isJoined, best, rule, place };
}
