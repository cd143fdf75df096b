// Loss over steps, one line for each run: those that are running first, then the best.

const MOST_CURVES = 60;

function chosenRuns(rows) {
  const order = { running: 0, stalled: 0, stopped: 1, finished: 2, diverged: 3, waiting: 9 };
  return rows.filter((row) => row.state !== "waiting").sort((a, b) => order[a.state] - order[b.state] || (a.loss ?? Infinity) - (b.loss ?? Infinity)).slice(0, MOST_CURVES);
}

/** Losses without most of the noise of single batches: a running mean with bias correction, as for Adam's moments. */
function smoothed(losses) {
  let sum = 0, weight = 0;
  return losses.map((loss) => { sum = 0.8 * sum + loss; weight = 0.8 * weight + 1; return sum / weight; });
}

function curveTraces(rows, curves, { label, colourOf, isSmooth }) {
  return rows.filter((row) => (curves[row.id] || []).some(([, loss]) => loss !== null)).map((row) => {
    const points = curves[row.id].filter(([, loss]) => loss !== null && loss !== undefined), colour = colourOf(row);
    const text = points.map(([step, loss, valid]) => [label(row), `step ${number(step)}, loss ${number(loss)}`, valid ? `validation loss ${number(valid)}` : "", `run ${row.id}, ${row.state}`].filter(Boolean).map(plain).join("<br>"));
    return { type: "scatter", mode: "lines", x: points.map((point) => point[0]), y: isSmooth ? smoothed(points.map((point) => point[1])) : points.map((point) => point[1]), opacity: rows.length > 12 && row.state !== "running" ? 0.75 : 1, customdata: points.map(() => [row.id]), text, hovertemplate: "%{text}<extra></extra>", line: { color: colour, width: row.state === "running" ? 2.2 : 1.4, dash: row.state === "diverged" ? "dot" : ruleDash(row.rule) } };
  });
}

function drawCurves(frame, rows, curves, { label, colourOf, logX, logY, isSmooth = false, opens }) {
  const traces = curveTraces(rows, curves, { label, colourOf, isSmooth }), ys = traces.flatMap((trace) => trace.y).filter((y) => y > 0).sort((a, b) => a - b);
  let range;
  if (ys.length) {
    const low = ys[0], high = Math.max(ys[Math.floor((traces.length > 3 ? 0.97 : 1) * (ys.length - 1))], low * 1.02);
    range = logY ? [Math.log10(low) - 0.02, Math.log10(high) + 0.02] : [low - 0.04 * (high - low), high + 0.04 * (high - low)];
  }
  drawn(frame.plot, traces, layout({ xaxis: axis("step", { type: logX ? "log" : "linear", rangemode: "tozero", nticks: 8 }), yaxis: axis("loss (nats per token)", { type: logY ? "log" : "linear", range, nticks: 7, ...(logY && range ? logTicks(range.map((end) => 10 ** end)) : {}) }), margin: { l: 52, r: 14, t: 8, b: 44 }, uirevision: `${logX} ${logY}` }), opens);
  return traces.length;
}
