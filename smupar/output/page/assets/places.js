// Where readers are: the overview of many sources, and addresses such as #runs/tune?colour=lr, which can be kept and shared.

const OVERVIEW = "", MANY = 3; // from so many sources on, the page begins with an overview

/** Those that run first, then the newest. */
const inOrder = (listed) => [...listed].sort((a, b) => b.is_live - a.is_live || (a.is_live ? a.folder.localeCompare(b.folder) : (b.changed ?? 0) - (a.changed ?? 0)));
const firstShown = (listed) => (listed.length >= MANY ? OVERVIEW : inOrder(listed)[0].key);

/** The last two parts of a folder, more if others end with the same two. */
function shortName(listed, each) {
  const parts = (of) => of.folder.split("/").filter(Boolean), own = parts(each), ends = (of, count) => parts(of).slice(-count).join("/");
  for (let count = 2; count <= own.length; count++) if (listed.filter((other) => ends(other, count) === ends(each, count)).length === 1) return ends(each, count);
  return listed.filter((other) => other.folder === each.folder).length > 1 ? `${ends(each, 2)}~${each.key}` : own.join("/");
}

// Values of choices as text. Texts that look like something else keep their quotes.
const isOther = (text) => text === "" || ["true", "false", "null"].includes(text) || text.startsWith('"') || !Number.isNaN(Number(text));
const written = (value) => encodeURIComponent(typeof value === "string" && !isOther(value) ? value : JSON.stringify(value));
const understood = (text) => { const plainText = decodeURIComponent(text); return isOther(plainText) ? JSON.parse(plainText) : plainText; };

function addressOf(listed, key, changed) {
  const each = listed.find((other) => other.key === key), parts = [];
  for (const [name, value] of Object.entries(changed)) {
    if (name === "filters") for (const [field, kept] of Object.entries(value)) parts.push(`only.${encodeURIComponent(field)}=${[...kept].map(written).join(",")}`);
    else if (name === "sort") parts.push(`sort=${written(value.column)},${value.falls}`);
    else parts.push(`${name}=${written(value)}`);
  }
  return "#" + (each ? shortName(listed, each).split("/").map(encodeURIComponent).join("/") : "") + (parts.length ? "?" + parts.join("&") : "");
}

function placeOf(listed, hash) {
  try {
    const [name, query = ""] = hash.slice(1).split("?"), changed = {}, each = listed.find((other) => shortName(listed, other) === decodeURIComponent(name));
    for (const [field, text] of query.split("&").filter(Boolean).map((part) => part.split("="))) {
      if (field.startsWith("only.")) (changed.filters ??= {})[decodeURIComponent(field.slice(5))] = new Set(text.split(",").filter(Boolean).map(understood));
      else if (field === "sort") { const [column, falls] = text.split(","); changed.sort = { column: understood(column), falls: falls === "true" }; }
      else if (field in freshChoices()) changed[field] = understood(text);
    }
    return { key: each && each.key, changed };
  } catch { return {}; }
}

/** One line for each source: its name, state and verdict, and the time left. */
function drawOverview() {
  const listed = page.source.list(), main = document.getElementById("main"), active = document.activeElement && document.activeElement.id;
  const rows = inOrder(listed).map((each) => {
    const p = each.progress, isShort = Boolean(p && p.total && p.done < p.total), state = each.is_live ? "running" : !each.version ? "waiting" : isShort ? "stopped" : "finished";
    const words = { running: "running", waiting: "being read", stopped: "not finished", finished: "finished" }[state] + (isShort ? `, ${number(p.done)} of ${number(p.total)} runs` : "");
    const link = el("a", { href: addressOf(listed, each.key, {}), id: `open-${each.key}`, title: each.folder }, shortName(listed, each).split("~")[0]);
    return el("tr", {}, el("td", {}, link), el("td", {}, el("span", { class: `state ${state}` }, words)), el("td", { class: "verdict" }, el("div", {}, each.headline), el("div", { class: "note" }, each.title)), el("td", {}, p && p.seconds_left ? `about ${span(p.seconds_left)}` : ""));
  });
  document.title = "Overview · smupar";
  main.replaceChildren(el("h1", {}, "Overview"), el("p", { class: "headline" }, `${listed.length} sources, ${listed.filter((each) => each.is_live).length || "none"} of them running.`),
    el("div", { class: "scroll" }, el("table", { class: "overview" }, el("thead", {}, el("tr", {}, ["name", "state", "verdict", "time left"].map((text) => el("th", { scope: "col" }, el("div", {}, text))))), el("tbody", {}, rows))));
  if (active && document.getElementById(active)) document.getElementById(active).focus();
  drawDocuments();
  pulse();
}
