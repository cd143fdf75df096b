// A run, in a dialog: what it is, how it went, its loss curve, its files.

const HIDDEN = new Set(["id", "state"]);

async function openRun(ids, { doc, table, source, label, colourOf }) {
  const dialog = document.getElementById("run"), rows = ids.map((id) => table.byId.get(id)).filter(Boolean);
  if (!rows.length) return;
  const close = el("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Close");
  const body = el("div");
  const others = rows.length > 1 ? el("p", { class: "note" }, "Runs of this point: ", rows.map((row) => el("button", { type: "button", class: "quiet", onclick: () => fill(row) }, row.seed === undefined ? row.id : `seed ${row.seed}`))) : null;
  const title = el("h2", { id: "run-title" });
  dialog.replaceChildren(el("header", {}, title, close), others || "", body);
  async function fill(row) {
    title.textContent = label(row);
    const facts = table.columns.filter((name) => !HIDDEN.has(name) && row[name] !== null && row[name] !== undefined);
    const frame = frameOf("run", new Map());
    frame.title.textContent = "Loss over steps"; frame.title.className = "plain"; frame.keys.remove();
    frame.plot.setAttribute("aria-label", "Loss over steps of this run");
    body.replaceChildren(
      el("p", { class: "note" }, el("span", { class: `state ${row.state}` }, row.state), `, run ${row.id} `, el("button", { type: "button", class: "quiet", onclick: (event) => copied(row.id, event.target) }, "copy id")),
      el("dl", { class: "facts" }, facts.map((name) => el("div", {}, el("dt", {}, named(name)), el("dd", {}, shown(row[name]))))), frame.node);
    const more = await source.run(doc.key, row.id).catch(() => null);
    const curves = more ? { [row.id]: more.curve } : await source.curves(doc.key, [row.id]);
    if (!drawCurves(frame, [row], curves, { label, colourOf, logX: false, logY: false, opens: () => {} })) frame.node.replaceChildren(el("p", { class: "note" }, row.state === "waiting" ? "It has not begun." : "Its loss curve is not in this page. `smupar watch` shows the curves of all runs."));
    if (more && more.files.length) body.append(el("p", { class: "note" }, "Files: ", more.files.flatMap((file) => [el("a", { href: file.address, download: true }, file.name), " "])));
    if (more && more.config) body.append(el("details", { class: "more" }, el("summary", {}, "Configuration"), el("pre", {}, JSON.stringify(more.config, null, 1))));
  }
  if (!dialog.open) dialog.showModal();
  await fill(rows[0]);
}
