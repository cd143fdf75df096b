// Charts: lines over a swept value. Finished points are filled. Points of runs that wait are hollow, at the bottom; points of runs
// that train are hollow, at their loss so far; points of diverged runs are crosses at the top. A star marks the best point, and a
// bar its interval.

const CONFIG = { displaylogo: false, responsive: true, displayModeBar: false, doubleClick: "reset", showTips: false, scrollZoom: false, plotlyServerURL: "" };

/** What is known about a point: "finished", "diverged", "running", "stalled" or "waiting", its value, and what hovering says. */
function pointOf(point, line, chart, runs) {
  const rows = point.runs.map((id) => runs.get(id)).filter(Boolean);
  const has = (state) => rows.some((row) => row.state === state);
  let state = "finished", y = point.y;
  if (y === null) state = has("diverged") ? "diverged" : has("running") ? "running" : has("stalled") ? "stalled" : rows.length || point.runs.length ? "waiting" : "diverged";
  if (state === "running" || state === "stalled") y = rows.map((row) => row.loss).find((loss) => loss !== null && loss !== undefined) ?? null;
  const rule = line.rule || chart.rule;
  const head = [rule, line.label].filter((part, i, all) => part && all.indexOf(part) === i).join(", ");
  const at = `${chart.x_label} ${number(point.x)}${chart.log_x && isPower(point.x) ? ` (${power(Math.log2(point.x))})` : ""}`;
  const what = chart.y_label.replace(/ \(.*/, "");
  const value = { finished: `${what} ${number(y)}`, diverged: "diverged", waiting: "waiting", running: y === null ? "running" : `running, ${what} ${number(y)} so far`, stalled: "stalled" }[state];
  const seeds = new Set(rows.map((row) => row.seed)).size > 1 ? rows.map((row) => row.seed) : [];
  const spread = point.spread && point.spread.length > 1 ? ` (${point.spread.map((each) => number(each)).join(", ")})` : "";
  const many = rows.length > 1 ? `, mean of ${rows.length} seeds${seeds.length ? ` (${seeds.join(", ")})` : ""}${spread}` : spread;
  const ids = point.runs.length ? `run${point.runs.length > 1 ? "s" : ""} ${point.runs.join(", ")}` : "";
  return { state, y, x: point.x, runs: point.runs, text: [head, at, value + many, point.text || "", ids].filter(Boolean).map(plain).join("<br>") };
}

/** The range of y that charts of a group share, from the best value to a bit above the last value of interest. */
function yRange(charts, runs, isVisible, logY) {
  const known = (charts) => charts.flatMap((chart) => chart.lines.flatMap((line) => line.points.filter(isVisible).map((point) => point.y)));
  const soFar = () => [...runs.values()].map((row) => row.loss ?? null);
  const usable = (ys) => ys.filter((y) => y !== null && (!logY || y > 0)).sort((a, b) => a - b);
  const ended = usable(known(charts)), all = ended.length ? ended : usable(soFar());
  if (!all.length) return null;
  const whole = all.length <= 24 || charts.some((chart) => chart.whole_y);
  const low = all[0];
  let high = all[Math.floor((whole ? 1 : 0.9) * (all.length - 1))];
  if (logY) { const room = Math.max(0.04, 0.06 * Math.log10(high / low)); return [low / 10 ** room, high * 10 ** room]; }
  high = Math.max(high, low + Math.max(Math.abs(low) * 0.05, 1e-9));
  return [low - 0.08 * (high - low), high + 0.08 * (high - low)];
}

function ticks(values, isLog, name) {
  const words = name.startsWith("density") ? (x) => (x < 1 && isPower(x) ? `1/${1 / x}` : number(x)) : (x) => power(Math.log2(x));
  const xs = [...new Set(values)].sort((a, b) => a - b);
  if (!isLog) return xs.length <= 8 ? { tickvals: xs, ticktext: xs.map((x) => number(x)) } : {};
  if (xs.length <= 12 && xs.every(isPower)) {
    const every = Math.ceil(xs.length / 8), kept = xs.filter((_, i) => i % every === 0);
    return { tickvals: kept, ticktext: kept.map(words) };
  }
  if (xs.length <= 7) return { tickvals: xs, ticktext: xs.map((x) => number(x, 2)) };
  const [low, high] = [Math.log2(xs[0]), Math.log2(xs.at(-1))], every = Math.max(1, Math.ceil((high - low) / 7));
  const kept = [];
  for (let e = Math.ceil(low); e <= high; e += every) kept.push(2 ** e);
  const areShort = kept.every((x) => Math.abs(Math.log2(x)) <= 4);
  return kept.length > 1 ? { tickvals: kept, ticktext: kept.map(areShort ? (x) => number(x) : words) } : {};
}

/** Ticks of a logarithmic y axis: 1, 2 and 5 times powers of ten, or powers of ten alone if there are many. */
function logTicks(range) {
  if (!range) return {};
  const decades = Math.log10(range[1] / range[0]), steps = decades > 4 ? [1] : decades > 2 ? [1, 3] : decades > 0.3 ? [1, 2, 5] : [1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9], kept = [];
  for (let e = Math.floor(Math.log10(range[0])); e <= Math.log10(range[1]); e++) for (const step of steps) { const value = Number((step * 10 ** e).toPrecision(3)); if (value >= range[0] && value <= range[1]) kept.push(value); }
  return kept.length > 1 ? { tickvals: kept, ticktext: kept.map((value) => number(value, 2)) } : { exponentformat: "none" };
}

function axis(title, extra) {
  return { title: { text: plain(title), font: { size: 12.5 }, standoff: 8 }, gridcolor: css("--line"), linecolor: css("--strong-line"), zeroline: false, tickfont: { size: 12.5, color: css("--muted") }, automargin: true, ...extra };
}

function layout(extra) {
  return { paper_bgcolor: css("--raised"), plot_bgcolor: css("--raised"), font: { family: "system-ui, sans-serif", color: css("--text"), size: 12 }, margin: { l: 52, r: 14, t: 26, b: 44 }, showlegend: false, hovermode: "closest", dragmode: window.matchMedia("(pointer: coarse)").matches ? false : "zoom",
    hoverlabel: { bgcolor: css("--bg"), bordercolor: css("--strong-line"), font: { color: css("--text"), size: 12.5, family: "system-ui, sans-serif" }, align: "left" }, uirevision: "kept", ...extra };
}

function marks(points, y, marker, extra = {}) {
  return { type: "scatter", mode: "markers", x: points.map((p) => p.x), y: points.map(y), customdata: points.map((p) => p.runs), text: points.map((p) => p.text), hovertemplate: "%{text}<extra></extra>", marker, cliponaxis: false, ...extra };
}

/** Traces of one line, for plotly. */
function tracesOf(line, chart, index, context) {
  const { runs, isVisible, range, other } = context;
  const points = line.points.filter(isVisible).map((point) => pointOf(point, line, chart, runs));
  const colour = lineColour(line, chart, index), symbol = SYMBOLS[(line.place ?? index) % SYMBOLS.length], size = context.isDense ? 4.5 : 7;
  const done = points.filter((p) => p.state === "finished"), open = points.filter((p) => ["waiting", "running", "stalled"].includes(p.state));
  const bottom = range ? (context.logY ? range[0] * (range[1] / range[0]) ** 0.03 : range[0] + 0.03 * (range[1] - range[0])) : context.logY ? 1.07 : 0.03;
  const top = range ? range[1] : 1, clipped = (y) => (range && (y === null || y > top || y < range[0]) ? (y === null ? bottom : y > top ? top : bottom) : (y ?? bottom));
  const traces = [{
    ...marks(done, (p) => p.y, { color: colour, size, symbol: other ? `${symbol}-open` : symbol, line: { width: other ? 1.6 : 0 } }),
    mode: line.is_joined ? "lines+markers" : "markers", line: { color: colour, width: line.is_reference ? 1.6 : context.isDense ? 1.2 : 2, dash: line.is_reference ? "dash" : other ? "dot" : "solid" }, cliponaxis: true,
  }];
  const seeds = line.points.filter(isVisible).flatMap((point) => (point.spread || []).map((y) => [point.x, y]));
  if (seeds.length) traces.push({ type: "scatter", mode: "markers", x: seeds.map(([x]) => x), y: seeds.map(([, y]) => y), marker: { color: colour, size: 3.5 }, hoverinfo: "skip" });
  if (open.length) traces.push(marks(open, (p) => clipped(p.state === "waiting" ? null : p.y), { color: colour, size: open.map((p) => (p.state === "waiting" ? 7 : 10)), symbol: open.map((p) => (p.state === "stalled" ? "diamond-open" : "circle-open")), line: { width: open.map((p) => (p.state === "waiting" ? 1.3 : 2.4)) } }));
  const lost = points.filter((p) => p.state === "diverged"), above = done.filter((p) => range && p.y > top);
  if (lost.length) traces.push(marks(lost, () => top, { color: colour, size: 9, symbol: "x-thin", line: { color: colour, width: 2.2 } }));
  if (above.length) traces.push(marks(above, () => top, { color: colour, size: 9, symbol: "triangle-up" }));
  const best = line.best;
  if (best && done.some((p) => p.x === best.x)) {
    const inside = best.low !== null, words = inside ? `lies between ${number(best.low)} and ${number(best.high)}` : line.is_joined ? "is at the edge of what has been run" : "";
    traces.push({ ...marks([{ x: best.x, runs: done.find((p) => p.x === best.x).runs, text: [plain([line.rule || chart.rule, line.label].filter(Boolean).join(", ")), `best ${plain(chart.x_label)} ${number(best.x)}${best.is_final ? "" : ", provisional"}`, words].filter(Boolean).join("<br>") }], () => best.y, { color: colour, size: context.isDense ? 11 : 15, symbol: inside || !line.is_joined ? "star" : "star-open", line: { color: inside || !line.is_joined ? css("--raised") : colour, width: 1.4 } }),
      isStar: true, error_x: inside && !context.isDense && !context.hasRows ? { type: "data", symmetric: false, array: [best.high - best.x], arrayminus: [best.x - best.low], color: colour, thickness: 1.4, width: 4 } : undefined });
  }
  return traces;
}

/** With hundreds of points, all stars are one trace, because plotly needs time for each trace. */
function withJoinedStars(traces) {
  const stars = traces.filter((trace) => trace.isStar), join = (part) => stars.flatMap(part), of = (name) => join((star) => star.marker[name]);
  if (stars.length < 2) return traces;
  const marker = { color: of("color"), size: stars[0].marker.size, symbol: of("symbol"), line: { color: join((star) => star.marker.line.color), width: 1.4 } };
  return [...traces.filter((trace) => !trace.isStar), { ...stars[0], x: join((star) => star.x), y: join((star) => star.y), customdata: join((star) => star.customdata), text: join((star) => star.text), marker }];
}

// Above the curves, each curve has a row: its optimum, the two runs between which the optimum lies, and the optimum's distance
// from the reference in octaves.
const ROW = 21, MOST_OPTIMA = 12;

const hasRows = (chart, logX) => logX && chart.lines.length > 1 && chart.lines.length <= MOST_OPTIMA && chart.lines.every((line) => line.is_joined && !line.rule) && (Boolean(chart.marked) || chart.lines.some((line) => line.best));

function octavesOf(best, reference) {
  if (!reference || best.smooth === reference) return "";
  const move = Math.log2(best.smooth / reference), rounded = Math.abs(move).toFixed(1);
  const sign = rounded === "0.0" ? "" : move > 0 ? "+" : "−";
  return `${sign}${rounded} octaves${best.low === null ? " or more" : ""}`;
}

/** Traces and labels of these rows, on the second y axis. */
function rowsOf(chart, context, xRange) {
  const traces = [], annotations = [], reference = chart.marked && chart.marked[0];
  chart.lines.forEach((line, index) => {
    const points = line.points.filter(context.isVisible), ended = points.filter((point) => point.y !== null), best = line.best;
    if (!best || !ended.some((point) => point.x === best.x)) return;
    const colour = lineColour(line, chart, index), at = ended.findIndex((point) => point.x === best.x), isInside = best.low !== null;
    const low = best.low ?? ended[Math.max(0, at - 1)].x, high = best.high ?? ended[Math.min(ended.length - 1, at + 1)].x, y = chart.lines.length - 1 - index;
    const symbol = isInside ? SYMBOLS[(line.place ?? index) % SYMBOLS.length] + (best.is_final ? "" : "-open") : at === 0 ? "triangle-left-open" : "triangle-right-open";
    const words = isInside || best.is_final ? octavesOf(best, reference) : "", runs = ended[at].runs; // at an end with runs to come, nothing is known
    const text = [plain([line.rule || chart.rule, line.label].filter(Boolean).join(", ")), `optimum at ${plain(chart.x_label)} ${number(best.smooth)}${best.is_final ? "" : ", provisional"}`, isInside ? `between ${number(best.low)} and ${number(best.high)}` : "at the edge of what has been run", plain(words && `${words} from the reference`)].filter(Boolean).join("<br>");
    traces.push({ ...marks([{ x: best.smooth, runs, text }], () => y, { color: colour, size: 9, symbol, line: { color: colour, width: 1.6 } }), yaxis: "y2", error_x: { type: "data", symmetric: false, array: [high - best.smooth], arrayminus: [best.smooth - low], color: colour, thickness: 1.5, width: 0 } });
    const share = (Math.log10(high) - xRange[0]) / (xRange[1] - xRange[0]), isLeft = share > 0.7 || share < 0;
    if (words) annotations.push({ xref: "x", yref: "y2", x: Math.log10(isLeft ? low : high), y, text: words, showarrow: false, xanchor: isLeft ? "right" : "left", xshift: isLeft ? -7 : 7, bgcolor: css("--raised"), borderpad: 0, font: { size: 11.5, color: colour } });
  });
  return { traces, annotations };
}

/** The axis of these rows. ``share`` is the part of the height that they take. */
function axisOfRows(chart, share) {
  const labels = chart.lines.map((line, index) => `<span style="color:${lineColour(line, chart, index)}">${plain(line.label)}</span>`).reverse();
  return { domain: [1 - share, 1], range: [-0.6, labels.length - 0.4], tickvals: labels.map((_, i) => i), ticktext: labels, tickfont: { size: 12 }, showgrid: false, zeroline: false, showline: false, fixedrange: true, automargin: true };
}

/** A dotted line at the reference. */
function lineAt(chart) {
  return chart.marked ? [{ type: "line", xref: "x", yref: "paper", x0: chart.marked[0], x1: chart.marked[0], y0: 0, y1: 1, line: { color: css("--strong-line"), width: 1.2, dash: "dot" } }] : [];
}

function keyOf(line, chart, index, other, isNamedAbove) {
  const colour = lineColour(line, chart, index), ns = "http://www.w3.org/2000/svg", svg = document.createElementNS(ns, "svg");
  svg.setAttribute("viewBox", "0 0 26 12"); svg.setAttribute("aria-hidden", "true");
  const add = (tag, attributes) => { const part = document.createElementNS(ns, tag); for (const [k, v] of Object.entries(attributes)) part.setAttribute(k, v); svg.append(part); };
  if (line.is_joined) add("line", { x1: 0, x2: 26, y1: 6, y2: 6, stroke: colour, "stroke-width": 2, "stroke-dasharray": line.is_reference ? "4 3" : other ? "1.5 3" : "none" });
  const shape = SYMBOLS[(line.place ?? index) % SYMBOLS.length], paint = { fill: other ? css("--raised") : colour, stroke: colour, "stroke-width": 1.4 };
  if (shape === "circle") add("circle", { cx: 13, cy: 6, r: 3.4, ...paint });
  else add("polygon", { points: { square: "10,3 16,3 16,9 10,9", diamond: "13,2 17,6 13,10 9,6", "triangle-up": "13,2 17,9.5 9,9.5", pentagon: "13,2 17,5 15.5,9.5 10.5,9.5 9,5", "triangle-down": "9,2.5 17,2.5 13,10", hexagon: "11,2.5 15,2.5 17,6 15,9.5 11,9.5 9,6", cross: "11.5,2 14.5,2 14.5,4.5 17,4.5 17,7.5 14.5,7.5 14.5,10 11.5,10 11.5,7.5 9,7.5 9,4.5 11.5,4.5" }[shape], ...paint });
  return el("li", { class: isNamedAbove ? "unseen" : "" }, svg, (other ? "compared: " : "") + line.label);
}

/** The frame of a chart: title, downloads, the plot, keys. It is kept when data changes, so that focus and zoom stay. */
function frameOf(key, frames) {
  if (!frames.has(key)) {
    const title = el("h3"), plot = el("div", { class: "plot", tabindex: "0", role: "application" }), keys = el("ul", { class: "keys" });
    const save = (format) => el("button", { type: "button", class: "save", onclick: () => saved(plot, title.textContent, format), "aria-label": `Download this chart as ${format.toUpperCase()}` }, format.toUpperCase());
    const frame = { title, plot, keys, node: el("article", { class: "chart" }, el("header", {}, title, save("png"), save("svg")), plot, keys) };
    plot.addEventListener("keydown", (event) => walked(event, plot));
    frames.set(key, frame);
  }
  return frames.get(key);
}

function saved(plot, title, format) {
  const name = title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "chart";
  Plotly.downloadImage(plot, { format, filename: name, width: 900, height: 560, scale: format === "png" ? 2 : 1 });
}

/** Arrow keys go from point to point, Enter opens the run, Escape leaves. */
function walked(event, plot) {
  const places = (plot.data || []).flatMap((trace, curveNumber) => (trace.text ? trace.x : []).map((_, pointNumber) => ({ curveNumber, pointNumber })));
  if (!places.length) return;
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (step) {
    plot.place = ((plot.place ?? (step > 0 ? -1 : 0)) + step + places.length) % places.length;
    const place = places[plot.place], trace = plot.data[place.curveNumber];
    Plotly.Fx.hover(plot, [place]);
    document.getElementById("said").textContent = String(trace.text ? trace.text[place.pointNumber] : "").replaceAll("<br>", "; ").replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
    event.preventDefault();
  } else if (event.key === "Enter" && plot.place !== undefined) {
    const place = places[plot.place], ids = (plot.data[place.curveNumber].customdata || [])[place.pointNumber];
    if (ids && ids.length) { event.preventDefault(); plot.opens(ids); } // without this, Enter would also press what is focused next
  } else if (event.key === "Escape") { Plotly.Fx.unhover(plot); plot.place = undefined; }
}

function drawn(plot, traces, made, opens) {
  plot.opens = opens;
  const first = !plot.data;
  Plotly.react(plot, traces, made, CONFIG);
  const size = plot._fullLayout;
  if (Math.abs(size.width - plot.clientWidth) > 1 || Math.abs(size.height - plot.clientHeight) > 1) Plotly.Plots.resize(plot); // its frame has changed
  if (first) plot.on("plotly_click", (event) => {
    const ids = event.points[0] && event.points[0].customdata;
    if (ids && ids.length) plot.opens(Array.isArray(ids) ? ids : [ids]);
  });
}

/** Lines with their index. Of lines with a place, which may share a label, only the first of each label. */
function firstOfEach(lines) {
  return lines.map((line, index) => [line, index]).filter(([line, index]) => line.place === undefined || lines.findIndex((other) => other.label === line.label) === index);
}

/** Draws charts into a grid; ``others`` are the charts of a document to compare with. Returns the legend if all charts share one. */
function drawCharts(grid, charts, others, context, frames) {
  // All frames are in place before the first is drawn, so that each has its final width.
  const used = charts.map((chart, number) => frameOf(`${chart.title.split(":")[0]}|${chart.x_label}|${number}`, frames));
  if ([...grid.children].some((node, number) => !used[number] || used[number].node !== node) || grid.children.length !== used.length) grid.replaceChildren(...used.map((frame) => frame.node));
  grid.classList.toggle("single", charts.length === 1);
  grid.classList.toggle("threes", charts.length % 3 === 0);
  grid.classList.toggle("twos", charts.length === 2 || charts.length === 4);
  // Many charts with the same lines have one legend.
  const legends = charts.map((chart) => JSON.stringify([chart.marked, chart.lines.map((line, index) => [line.label, lineColour(line, chart, index)])]));
  const isShared = charts.length > 2 && !others.length && new Set(legends).size === 1 && !charts.some((chart) => hasRows(chart, context.logX ?? chart.log_x));
  used.forEach((frame) => frame.node.classList.toggle("tall", charts.length === 1));
  charts.forEach((chart, number) => {
    const frame = used[number], logX = context.logX ?? chart.log_x, logY = context.logY ?? chart.log_y;
    const beside = others.find((other) => (chart.rule ? other.rule === chart.rule : other.title === chart.title) && other.x_label === chart.x_label);
    const group = charts.concat(others).filter((each) => each.group === chart.group);
    const above = hasRows(chart, logX), heightOf = charts.length === 1 ? 400 : 310;
    const range = yRange(group, context.runs, context.isVisible, logY), own = { ...context, logY, range, hasRows: above, isDense: chart.lines.reduce((sum, line) => sum + line.points.length, 0) > 150 };
    const traces = chart.lines.flatMap((line, index) => tracesOf(line, chart, index, own)).concat(beside ? beside.lines.flatMap((line, index) => tracesOf(line, beside, index, { ...own, runs: context.otherRuns, isVisible: () => true, other: true })) : []);
    const xs = chart.lines.concat(beside ? beside.lines : []).flatMap((line) => line.points.map((point) => point.x)).filter((x) => !logX || x > 0);
    const low = Math.min(...xs), high = Math.max(...xs), room = logX ? Math.max(0.06 * Math.log10(high / low), 0.02) : Math.max(0.06 * (high - low), 1e-9);
    const ends = !xs.length ? undefined : logX ? [Math.log10(low) - room, Math.log10(high) + room] : [low - room, high + room];
    const margin = { l: 52, r: 14, t: above ? 6 : 14, b: 44 }, rowsHeight = above ? ROW * chart.lines.length : 0;
    const share = rowsHeight / (heightOf + rowsHeight - margin.t - margin.b), rows = above ? rowsOf(chart, own, ends) : { traces: [], annotations: [] };
    frame.plot.style.height = above ? `${heightOf + rowsHeight}px` : "";
    const made = layout({
      xaxis: axis(titled(chart.x_label), { type: logX ? "log" : "linear", range: ends && chart.falls ? ends.reverse() : ends, ...ticks(xs, logX, chart.x_label) }),
      yaxis: axis(chart.y_label, { type: logY ? "log" : "linear", range: range ? (logY ? range.map(Math.log10) : range) : [0, 1], showticklabels: Boolean(range), nticks: 6, ...(logY ? logTicks(range) : {}), ...(above ? { domain: [0, 1 - share - 0.03] } : {}) }),
      ...(above ? { yaxis2: axisOfRows(chart, share) } : {}), margin, uirevision: `${logX} ${logY}`, shapes: lineAt(chart), annotations: rows.annotations,
    });
    frame.title.textContent = titled(chart.title);
    const mark = ruleColour(chart.rule);
    frame.title.className = mark ? "" : "plain";
    if (mark) frame.title.style.setProperty("--mark", mark);
    frame.plot.setAttribute("aria-label", `${chart.title}. ${chart.y_label} over ${chart.x_label}, ${chart.lines.length} curves. Arrow keys go from point to point, Enter opens a run.`);
    const keys = firstOfEach(chart.lines).map(([line, index]) => keyOf(line, chart, index, false, above)).concat(beside ? beside.lines.map((line, index) => keyOf(line, beside, index, true)) : []);
    frame.keys.replaceChildren(...keys.slice(0, 24), ...(keys.length > 24 ? [el("li", { class: "more" }, `and ${keys.length - 24} more`)] : []), ...(chart.marked && chart.marked[1] ? [el("li", { class: "more" }, `dotted: ${chart.marked[1]}`)] : []));
    if (isShared) frame.keys.replaceChildren();
    drawn(frame.plot, (own.isDense ? withJoinedStars(traces) : traces).concat(rows.traces), made, context.opens);
  });
  return isShared ? firstOfEach(charts[0].lines).slice(0, 24).map(([line, index]) => keyOf(line, charts[0], index)) : [];
}
