// The page: which document is shown, what readers chose, and drawing it again when either changes.

const page = { source: null, key: null, doc: null, choices: new Map(), frames: new Map(), other: null, touched: 0, overview: { column: null, falls: false } };

const freshChoices = () => ({ filters: {}, colour: "", x: "", y: "loss", panel: "", logX: null, logY: null, curveLogX: false, curveLogY: false, curveSmooth: true, sort: { column: null, falls: false }, allRows: false, allSlopes: false, compare: "" });
const choices = () => { if (!page.choices.has(page.key)) page.choices.set(page.key, freshChoices()); return page.choices.get(page.key); };

/** The rows of a document's table as objects, by column and by run. */
function tableOf(doc) {
  if (!doc || !doc.table) return null;
  const records = doc.table.rows.map((row) => Object.fromEntries(doc.table.columns.map((name, i) => [name, row[i]])));
  return { ...doc.table, records, byId: new Map(records.filter((row) => row.id).map((row) => [row.id, row])) };
}

const isOfRuns = (table) => Boolean(table && table.columns.includes("state"));
const passes = (row, filters) => Object.entries(filters).every(([name, kept]) => kept.has(row[name]));
const labelOf = (table) => (row) => table.varied.map((name) => (name === "rule" ? shown(row[name]) : `${named(name)} ${shown(row[name])}`)).join(", ") || row.id;

function colourer(table, field) {
  const by = field || (table.varied.includes("rule") ? "rule" : table.varied.find((name) => name !== "seed")), values = by ? [...new Set(table.records.map((row) => row[by]))].sort((a, b) => (a > b) - (a < b)) : [];
  const series = SERIES[theme()], place = (row) => Math.max(0, values.indexOf(row[by]));
  if (values.length > series.length && table.numeric.includes(by)) return (row) => mix(series[0], series[4], place(row) / (values.length - 1)); // from low to high
  return (row) => (by === "rule" && ruleColour(row.rule)) || series[place(row) % series.length];
}

// Parts of the page

function answersOf(doc) {
  if (!doc.answers.length) return null;
  const isWide = window.matchMedia("(min-width: 641px)").matches; // on a phone the charts come before the small print
  return el("div", { class: "answers" }, doc.answers.map((answer) => {
    const address = answer.link ? addressOfLink(page.source.list(), doc.folder, answer.link, page.live) : null;
    const name = answer.name ? el(address ? "a" : "span", { class: "name", href: address }, answer.name) : null;
    const card = el(answer.text ? "details" : "div", { class: "answer", open: Boolean(answer.text) && (isWide || !answer.name) }, el(answer.text ? "summary" : "div", { class: "finding" }, name, " ", el("span", { class: `value ${answer.tone}` }, answer.value)), el("div", { class: "text" }, answer.text));
    const mark = ruleColour(answer.rule) || (answer.tone === "plain" ? null : css(`--${answer.tone}`));
    if (mark) card.style.setProperty("--mark", mark);
    return card;
  }));
}

const workOf = (worker) => (worker.device ? `on ${worker.device}: ` : "") + (worker.runs ? `${worker.runs} run${worker.runs === 1 ? "" : "s"}` : worker.doing || "no run");

/** Progress, workers and command, above the charts or below. Once the runs are done, all are below. Until then, counts are above,
    and so is the command if nothing runs. */
function progressOf(doc) {
  const p = doc.progress, counts = [], workers = [], command = [], isDone = !p || !p.total || p.done >= p.total;
  const idle = !isDone && !p.running && !p.stalled && !p.workers.some((worker) => worker.state === "running");
  const boxed = (...parts) => (parts.flat().length ? el("div", { class: "progress" }, parts.flat()) : null);
  if (p && p.total) {
    const segment = (kind, count) => { const part = el("span", { class: kind }); part.style.width = `${(100 * count) / p.total}%`; return part; };
    const count = (n, words, warn) => (n ? el("span", { class: warn ? "warn" : "" }, el("b", {}, number(n)), ` ${words}`) : null);
    const bar = el("div", { class: "bar", role: "img", "aria-label": `${p.done} of ${p.total} runs have ended` }, segment("done", p.done - p.diverged), segment("diverged", p.diverged), segment("running", p.running), segment("stalled", p.stalled));
    counts.push(el("div", { class: "line" }, bar, el("div", { class: "counts" }, el("span", {}, el("b", {}, `${number(p.done)} of ${number(p.total)}`), " runs done"), count(p.running, "running"), p.doing ? el("span", {}, el("b", {}, p.doing)) : null, count(p.waiting, "waiting"), count(p.diverged, "diverged", true), count(p.stalled, "stalled", true),
      p.seconds_left ? el("span", {}, "about ", el("b", {}, span(p.seconds_left)), " left") : null, p.tokens_per_second ? el("span", {}, el("b", {}, short(p.tokens_per_second)), " tokens/s") : null)));
    if (p.workers.length) workers.push(el("ul", { class: "workers" }, p.workers.slice(0, 12).map((worker) => el("li", {}, el("span", { class: `state ${worker.state}` }, worker.state), ` ${workOf(worker)} (${worker.name})${worker.state === "running" ? "" : `, last sign of life ${span(Date.now() / 1000 - worker.seen)} ago`}`))));
  }
  if (doc.command) {
    command.push(el("div", { class: "command" }, el("span", { class: "note" }, idle ? "Nothing is running. Go on with" : doc.kind === "runs" ? "Sample from it" : "Command"), el("code", { tabindex: "0" }, doc.command), el("button", { type: "button", class: "quiet", id: "copy", onclick: (event) => copied(doc.command, event.target) }, "Copy")));
  }
  if (isDone) return { above: null, below: boxed(counts, workers, command) };
  return idle ? { above: boxed(counts, command), below: boxed(workers) } : { above: boxed(counts), below: boxed(workers, command) };
}

function menuOf(field, chosen, redraw) {
  const kept = chosen.filters[field.name], boxes = field.values.map((value) => {
    const box = el("input", { type: "checkbox" });
    box.checked = !kept || kept.has(value);
    box.addEventListener("change", () => {
      const now = new Set(chosen.filters[field.name] || field.values);
      if (box.checked) now.add(value); else now.delete(value);
      if (now.size === field.values.length) delete chosen.filters[field.name]; else chosen.filters[field.name] = now;
      menu.classList.toggle("set", Boolean(chosen.filters[field.name]));
      redraw();
    });
    return el("label", {}, box, ` ${shown(value)}`);
  });
  const only = el("button", { type: "button", class: "quiet", onclick: () => { const none = boxes.every((label) => label.firstChild.checked); boxes.forEach((label) => { label.firstChild.checked = !none; }); if (none) chosen.filters[field.name] = new Set(); else delete chosen.filters[field.name]; menu.classList.toggle("set", none); redraw(); } }, "all / none");
  const menu = el("details", { class: `menu${kept ? " set" : ""}`, "data-field": field.name }, el("summary", {}, named(field.name)), el("div", { class: "choices" }, only, boxes));
  return menu;
}

function selectOf(id, words, options, value, onchange) {
  const made = el("select", { id, onchange: (event) => onchange(event.target.value) }, options.map(([key, text]) => el("option", { value: key }, text)));
  made.value = value;
  return el("label", { for: id }, words, made);
}

function checkOf(id, words, value, onchange) {
  const box = el("input", { type: "checkbox", id, onchange: (event) => onchange(event.target.checked) });
  box.checked = value;
  return el("label", { for: id }, box, words);
}

function toolsOf(doc, table, redraw) {
  const chosen = choices(), tools = [], fields = isOfRuns(table) ? fieldsOf(table) : [];
  if (fields.length) tools.push(el("span", { class: "note" }, "Filter"), ...fields.filter((field) => field.values.length <= 60).map((field) => menuOf(field, chosen, redraw)));
  const set = (name) => (value) => { chosen[name] = value; redraw(); };
  if (fields.length) {
    const names = fields.map((field) => [field.name, named(field.name)]), own = [["", doc.charts.length ? "as the study does" : "automatic"]];
    tools.push(selectOf("colour", "Colour by", [...own, ...names], chosen.colour, set("colour")));
    if (table.numeric.length) tools.push(selectOf("over", "Over", [...own, ...table.numeric.map((name) => [name, named(name)])], chosen.x, set("x")));
    if (chosen.colour || chosen.x || !doc.charts.length) tools.push(selectOf("panels", "A chart for each", [["", "one for all"], ...names], chosen.panel, set("panel")), selectOf("value", "Show", [["loss", "training loss"], ["valid_loss", "validation loss"]], chosen.y, set("y")));
  }
  if (doc.charts.length || fields.length) tools.push(checkOf("log-x", "log x", chosen.logX ?? (!doc.charts.length || doc.charts.some((chart) => chart.log_x)), set("logX")), checkOf("log-y", "log y", chosen.logY ?? doc.charts.some((chart) => chart.log_y), set("logY")));
  const others = page.source.list().filter((each) => each.key !== page.key);
  if (doc.kind !== "check") {
    const file = el("input", { type: "file", accept: ".html", class: "unseen", id: "other-file", tabindex: "-1", onchange: async (event) => { try { page.other = await documentOfFile(event.target.files[0]); chosen.compare = "file"; redraw(); } catch (error) { alert(error.message); } } });
    const pick = async (value) => { if (value === "pick") { file.click(); return; } chosen.compare = value; page.other = value && value !== "file" ? await page.source.document(value) : page.other; redraw(); };
    tools.push(selectOf("compare", "Compare with", [["", "nothing"], ...others.map((each) => [each.key, `${each.title} (${each.folder})`]), ...(chosen.compare === "file" ? [["file", page.other.folder || "a file"]] : []), ["pick", "a report.html…"]], chosen.compare, pick), file);
  }
  return tools;
}

function comparisonOf(doc, other) {
  const names = [...new Set([...doc.answers, ...other.answers].map((answer) => answer.name))], value = (from, name) => (from.answers.find((answer) => answer.name === name) || { value: "–" }).value;
  const table = names.length ? el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ["", "this", "compared"].map((text) => el("th", {}, el("div", {}, text))))), el("tbody", {}, names.map((name) => el("tr", {}, [name, value(doc, name), value(other, name)].map((text) => el("td", {}, text))))))) : null;
  return el("div", { class: "comparison" }, el("p", { class: "sentence" }, el("b", {}, "Compared with "), `${other.title} (${other.folder}): ${other.headline}`, " Its curves are dotted, and its points are hollow squares or similar marks."), table);
}

// Drawing

function build() {
  const main = document.getElementById("main"), parts = {};
  for (const [id, tag] of [["head", "div"], ["answers", "div"], ["above", "div"], ["below", "div"]]) parts[id] = el(tag, { id });
  parts.tools = el("div", { class: "tools", role: "group", "aria-label": "What the charts show" });
  parts.grid = el("div", { class: "charts", id: "charts" });
  parts.chartNote = el("p", { class: "note legend" });
  parts.beside = el("div");
  parts.keys = el("ul", { class: "keys shared" });
  const isChanged = Object.keys(changedChoices()).length > 0;
  parts.explore = el("details", { class: "explore", open: isChanged }, el("summary", {}, "Explore"), parts.tools);
  parts.chartSection = el("section", { "aria-label": "Charts" }, el("div", { class: "heading" }, el("h2", {}, "Charts"), parts.explore), parts.beside, parts.keys, parts.grid, parts.chartNote);
  parts.curveTools = el("div", { class: "tools" });
  parts.curveNote = el("p", { class: "note" });
  parts.curveGrid = el("div", { class: "charts single" });
  parts.curveSection = el("section", { "aria-label": "Loss curves" }, el("div", { class: "heading" }, el("h2", {}, "Loss curves"), parts.curveNote), parts.curveTools, parts.curveGrid);
  parts.table = el("div");
  parts.tableTitle = el("h2");
  parts.tableTools = el("div", { class: "tools", role: "group", "aria-label": "Which rows the table shows" });
  parts.tableSection = el("section", {}, el("div", { class: "heading" }, parts.tableTitle), parts.tableTools, parts.table);
  parts.details = el("section");
  main.replaceChildren(parts.head, parts.answers, parts.above, parts.chartSection, parts.below, parts.curveSection, parts.tableSection, parts.details);
  page.parts = parts; page.toolsMade = ""; page.frames = new Map();
}

const refill = (place, ...nodes) => place.replaceChildren(...nodes.filter(Boolean));

function draw(focus) {
  const doc = page.doc, parts = page.parts, table = tableOf(doc), chosen = choices();
  document.title = `${doc.headline || doc.title} · smupar`;
  refill(parts.head, el("h1", {}, doc.title, el("span", { class: "folder" }, ` · ${doc.folder}`)), el("p", { class: "headline" }, doc.headline), doc.sentence && doc.sentence !== doc.headline ? el("p", { class: "sentence" }, doc.sentence) : null);
  const answers = JSON.stringify([theme(), doc.answers, page.source.list().length]), progress = progressOf(doc);
  if (parts.answers.dataset.made !== answers) { parts.answers.dataset.made = answers; refill(parts.answers, answersOf(doc)); }
  refill(parts.above, progress.above);
  refill(parts.below, progress.below);
  drawTools(doc, table);
  const rows = table ? table.records.filter((row) => passes(row, chosen.filters)) : [];
  drawDocumentCharts(doc, table, rows);
  drawLossCurves(doc, table, rows);
  parts.tableSection.hidden = !table;
  if (table) {
    parts.tableTitle.textContent = table.title;
    const active = document.activeElement && document.activeElement.id;
    drawTable(parts.table, table, chosen.allSlopes || doc.kind !== "check" || chosen.filters.verdict ? rows : rows.filter(isNotable), chosen, { opens: (ids) => open(ids), redraw: draw });
    const back = focus || (active && active.startsWith("sort-") ? active : null);
    if (back && document.getElementById(back)) document.getElementById(back).focus();
  }
  const details = JSON.stringify(doc.details);
  if (parts.details.dataset.made !== details) { parts.details.dataset.made = details; refill(parts.details, ...doc.details.map(([title, text]) => el("details", { class: "more" }, el("summary", {}, title), el("pre", {}, text)))); }
  drawDocuments();
  keepPlace();
}

/** Tools stay as they are while runs end, so that an open menu stays open; they are made again when the choices change. */
function drawTools(doc, table) {
  const chosen = choices(), made = JSON.stringify([page.key, table ? fieldsOf(table) : 0, chosen.colour, chosen.x, chosen.panel, chosen.y, chosen.logX, chosen.logY, chosen.compare, page.source.list().map((each) => each.key)]);
  if (made === page.toolsMade) return;
  page.toolsMade = made;
  const active = document.activeElement && document.activeElement.id;
  refill(page.parts.tools, ...toolsOf(doc, table, draw));
  refill(page.parts.tableTools, ...(table && !isOfRuns(table) ? [el("span", { class: "note" }, "Filter"), ...fieldsOf(table).map((field) => menuOf(field, chosen, draw))] : []));
  if (active && document.getElementById(active)) document.getElementById(active).focus();
}

function drawDocumentCharts(doc, table, rows) {
  const chosen = choices(), parts = page.parts, visible = new Set(rows.map((row) => row.id)), other = chosen.compare ? page.other : null;
  let charts = doc.charts;
  const hasOwnViews = doc.answers.some((answer) => answer.link); // each with charts of its own
  if (isOfRuns(table) && table.numeric.length && (chosen.colour || chosen.x || !(doc.charts.length || hasOwnViews))) {
    const x = chosen.x || (table.numeric.includes("lr") ? "lr" : table.numeric.find((name) => name !== "seed") || table.numeric[0]);
    const left = table.varied.filter((name) => name !== x && name !== "seed");
    const panel = chosen.panel || (!chosen.colour && left.includes("rule") && left.length > 1 ? "rule" : "");
    charts = exploredCharts(rows, table.varied, { x, y: chosen.y, panel, colour: chosen.colour || left.find((name) => name !== panel) || "" });
  }
  refill(parts.beside, other ? comparisonOf(doc, other) : null);
  const words = (doc.kind === "check" ? "Outputs, gradients and updates should keep their size over width, density and depth: lines should be flat. The verdict is about the slopes of log2(size) against log2(width, density or depth). " : "") + (["study", "reproduction"].includes(doc.kind) && doc.progress ? "● finished: training loss, mean of the last 5 % of the steps   ○ waiting (at the bottom) or running (at its loss so far)   ✕ diverged   ▲ above the range. Click a point to see its run. " : "") + (charts.some((chart) => chart.lines.some((line) => line.best)) ? "★ best run; hollow at the edge of what was run. " : "") + (charts.some((chart) => chart.marked && hasRows(chart, chart.log_x)) ? "Rows above the curves: the optimum of each curve, the bar in which the optimum lies, and its distance from the dotted line in octaves (factors of two). " : "") + "Drag to zoom, double-click to go back; arrow keys walk through the points of a chart.";
  parts.chartNote.textContent = charts.length ? words : "";
  parts.chartSection.hidden = !charts.length && doc.kind !== "study";
  if (!charts.length) { refill(parts.grid, parts.chartSection.hidden ? null : el("p", { class: "empty" }, hasOwnViews ? "Each figure has charts of its own: follow its card. To draw runs of all figures, choose a field under Explore." : "There is nothing to draw yet. Points appear here as runs end; if nothing is running, start the command that this page shows.")); return; }
  if (parts.grid.querySelector(".empty")) parts.grid.replaceChildren();
  const context = { runs: table && isOfRuns(table) ? table.byId : new Map(), otherRuns: (tableOf(other) || { byId: new Map() }).byId, isVisible: (point) => !point.runs.length || point.runs.some((id) => visible.has(id)), logX: chosen.logX, logY: chosen.logY, opens: open };
  const shared = drawCharts(parts.grid, charts, other ? other.charts : [], context, page.frames);
  refill(parts.keys, ...shared);
}

async function drawLossCurves(doc, table, rows) {
  const parts = page.parts, chosen = choices(), wanted = isOfRuns(table) ? chosenRuns(rows) : [];
  parts.curveSection.hidden = !isOfRuns(table) || doc.kind === "reproduction";
  if (parts.curveSection.hidden) return;
  if (!parts.curveTools.children.length) refill(parts.curveTools, checkOf("curve-log-x", "log steps", chosen.curveLogX, (value) => { chosen.curveLogX = value; draw(); }), checkOf("curve-log-y", "log loss", chosen.curveLogY, (value) => { chosen.curveLogY = value; draw(); }), checkOf("curve-smooth", "smooth", chosen.curveSmooth, (value) => { chosen.curveSmooth = value; draw(); }));
  const key = page.key, curves = await page.source.curves(key, wanted.map((row) => row.id)).catch(() => ({}));
  if (key !== page.key) return;
  const frame = frameOf("curves", page.frames), by = chosen.colour || (table.varied.includes("rule") ? "rule" : table.varied.find((name) => name !== "seed"));
  frame.title.textContent = by ? `Loss over steps, coloured by ${named(by)}` : "Loss over steps"; frame.title.className = "plain"; frame.node.classList.add("tall");
  frame.plot.setAttribute("aria-label", "Loss over steps, a line for each run. Arrow keys go from point to point, Enter opens a run.");
  if (!Object.keys(curves).length) { refill(parts.curveGrid, el("p", { class: "empty" }, "No run has a loss to show yet. Curves appear with the first steps.")); return; }
  if (frame.node.parentNode !== parts.curveGrid) parts.curveGrid.replaceChildren(frame.node);
  const colourOf = colourer(table, chosen.colour), count = drawCurves(frame, wanted, curves, { label: labelOf(table), colourOf, logX: chosen.curveLogX, logY: chosen.curveLogY, isSmooth: chosen.curveSmooth, opens: open });
  const format = by && formatOf(by, wanted.map((row) => row[by])), written = (value) => (typeof value === "number" ? format(value) : shown(value)); // as in the table
  const seen = new Map(wanted.map((row) => [by ? written(row[by]) : "runs", [colourOf(row), SWATCHES[by === "rule" ? ruleDash(row.rule) : "solid"]]]));
  frame.keys.replaceChildren(...[...seen].slice(0, 16).map(([text, [colour, dash]]) => { const swatch = el("span", {}, dash); swatch.style.color = colour; return el("li", {}, swatch, text); }));
  const total = rows.filter((row) => row.state !== "waiting").length;
  parts.curveNote.textContent = count < total ? `${count} of ${number(total)} runs: those that are running, then the best. Filter to choose others.` : "Training loss of each run; click a line to see its run.";
}

function open(ids) {
  const table = tableOf(page.doc);
  openRun(ids, { doc: page.doc, table, source: page.source, label: labelOf(table), colourOf: colourer(table, choices().colour) });
}

function drawDocuments() {
  const listed = page.source.list(), nav = document.getElementById("documents"), missing = (page.source.waiting || []).map((words) => el("span", { class: "note" }, words));
  if (listed.length < 2) { nav.replaceChildren(...missing); nav.dataset.made = ""; return; }
  const made = JSON.stringify([page.key, missing.length, listed.map((each) => [each.key, each.is_live, each.title, each.folder])]);
  if (nav.dataset.made === made) return; // so that focus stays
  nav.dataset.made = made;
  const overview = listed.length < MANY ? [] : [el("button", { type: "button", "aria-current": String(page.key === OVERVIEW), onclick: () => show(OVERVIEW, true) }, "Overview")];
  if (listed.length > MOST_TABS) { nav.replaceChildren(...overview, pickerOf(listed)); return; }
  nav.replaceChildren(...overview, ...byPlace(listed).map((each) => el("button", { type: "button", "aria-current": String(each.key === page.key), title: `${each.title}, ${each.folder}`, onclick: () => show(each.key, true) }, el("span", { class: `dot${each.is_live ? " live" : ""}` }), each.folder.split("/").filter(Boolean).slice(-2).join("/") || each.title)), ...missing);
  const current = nav.querySelector("[aria-current=true]");
  if (current) nav.scrollLeft = current.offsetLeft - nav.offsetLeft - 40;
}

async function show(key, isPushed = false) {
  const isNew = key !== page.key || !page.parts;
  page.key = key;
  if (key === OVERVIEW) { page.doc = page.parts = null; drawOverview(); if (isNew) keepPlace(isPushed); return; }
  page.doc = await page.source.document(key);
  if (key !== page.key) return; // another has been chosen meanwhile
  if (isNew) { page.other = null; choices().compare = ""; build(); keepPlace(isPushed); }
  draw();
  pulse();
}

function pulse(lost) {
  const place = document.getElementById("pulse"), doc = page.doc;
  place.className = lost ? "lost" : doc && doc.is_live ? "live" : "";
  if (page.key === OVERVIEW) { place.textContent = lost ? "the server does not answer" : "live"; place.className = lost ? "lost" : "live"; return; }
  place.textContent = lost ? "the server does not answer; this is what it said last" : !doc ? "" : doc.is_live ? (page.live ? "live" : `running; page of ${new Date(doc.made * 1000).toLocaleTimeString()}`) : `as of ${new Date(doc.made * 1000).toLocaleString([], { dateStyle: "short", timeStyle: "short" })}`;
}

// Themes, and what survives a reload

function setTheme(chosen) {
  const dark = chosen === "dark" || (chosen === "auto" && window.matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  const button = document.getElementById("theme");
  button.textContent = { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" }[chosen];
  page.theme = chosen;
  try { localStorage.setItem("smupar-theme", chosen); } catch { /* a page from a file may have no storage */ }
  if (page.doc && window.Plotly) draw();
}

function changedChoices() {
  const fresh = freshChoices(), kept = { ...choices(), compare: "" };
  return Object.fromEntries(Object.entries(kept).filter(([name, value]) => (name === "filters" ? Object.keys(value).length : JSON.stringify(value) !== JSON.stringify(fresh[name]))));
}

/** The address of what is shown, such as #runs/tune?colour=lr. Going back leads to what was shown before. */
function keepPlace(isPushed = false) {
  const address = page.key === OVERVIEW ? "#" : addressOf(page.source.list(), page.key, changedChoices());
  if (location.hash === address || (address === "#" && !location.hash)) return;
  try { history[isPushed ? "pushState" : "replaceState"](null, "", address); } catch { /* the page still works */ }
}

/** The key that the address names, whose choices are set, or undefined. */
function keptPlace() {
  const { key, changed } = placeOf(page.source.list(), location.hash);
  if (key !== undefined) page.choices.set(key, { ...freshChoices(), ...changed });
  return key;
}

function wentBack() {
  const listed = page.source.list(), key = keptPlace() ?? (location.hash.length > 1 || !listed.length ? undefined : firstShown(listed));
  if (key === undefined) return;
  if (key === page.key) { page.parts = null; page.toolsMade = ""; } // the same document with other choices
  show(key).catch(() => pulse(true));
}

/** What there is to see as long as no folder holds anything. */
function emptyPage(missing) {
  return [el("p", { class: "headline" }, "Nothing to show yet."), el("p", { class: "sentence" }, "Start a study, a check or a run with this folder as its --out, in another terminal. It appears here a few seconds later, without a reload."), ...missing.map((folder) => el("p", { class: "empty" }, folder))];
}

async function ask() {
  try {
    const listed = await page.source.refresh();
    if (!listed.length) document.getElementById("main").replaceChildren(...emptyPage(page.source.waiting));
    else {
      const entry = listed.find((each) => each.key === page.key), isOverview = page.key === OVERVIEW;
      if (isOverview || !entry) await show(isOverview ? OVERVIEW : keptPlace() ?? firstShown(listed));
      else if (!page.doc || entry.key !== page.key || entry.version !== page.doc.version) await show(entry.key); else { drawDocuments(); pulse(); }
    }
  } catch (error) { if (window.smuparDebug) console.error(error); pulse(true); }
  setTimeout(ask, EVERY);
}

async function begin() {
  const data = JSON.parse(document.getElementById("data").textContent);
  page.live = data.live;
  let chosen = "auto";
  try { chosen = localStorage.getItem("smupar-theme") || "auto"; } catch { /* no storage */ }
  setTheme(chosen);
  document.getElementById("theme").addEventListener("click", () => setTheme({ auto: "light", light: "dark", dark: "auto" }[page.theme]));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(page.theme));
  for (const kind of ["pointerdown", "keydown", "wheel"]) window.addEventListener(kind, () => { page.touched = Date.now(); }, { passive: true });
  document.addEventListener("click", (event) => { for (const menu of document.querySelectorAll(".menu[open]")) if (!menu.contains(event.target)) menu.open = false; });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") for (const menu of document.querySelectorAll(".menu[open]")) { menu.open = false; menu.firstChild.focus(); } });
  if (data.live) document.getElementById("main").replaceChildren(el("p", { class: "empty" }, "Reading the folders…"));
  try { await unpackPlotly(); } catch { document.getElementById("main").replaceChildren(el("p", { class: "empty" }, "This browser is too old for this page: it cannot unpack gzip (DecompressionStream).")); return; }
  if (data.live) { page.source = new ServedSource(); window.addEventListener("popstate", wentBack); await ask(); return; }
  page.source = new OwnSource(data.documents);
  window.addEventListener("popstate", wentBack);
  await show(keptPlace() ?? "0");
  if (page.doc.is_live) setInterval(() => { if (document.visibilityState === "visible" && !document.getElementById("run").open && Date.now() - page.touched > 4000) { keepPlace(); location.reload(); } }, RELOAD);
}

begin();
