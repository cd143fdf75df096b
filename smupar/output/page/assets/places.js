// Where readers are: the overview of many sources, and addresses such as #runs/tune?colour=lr, which can be kept and shared.

const OVERVIEW = "", MANY = 3; // from this many sources on, the page begins with an overview
const MOST_TABS = 8;

/** Sources in order: first those that run, then the newest. */
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

const naturally = (a, b) => a.localeCompare(b, "en", { numeric: true });
const above = (each) => each.folder.split("/").slice(0, -1).join("/");

/** Sources by the folder that holds them. Folders with something that runs come first, then the newest. Within a folder, sources
 *  are in the order of their names, after the study that they share. */
function groupsOf(listed) {
  const groups = new Map();
  for (const each of inOrder(listed)) {
    if (!groups.has(above(each))) groups.set(above(each), []);
    groups.get(above(each)).push(each);
  }
  const isShared = (each) => each.folder.endsWith("/study");
  return [...groups].map(([folder, own]) => [folder, own.sort((a, b) => isShared(b) - isShared(a) || naturally(a.folder, b.folder))]);
}
const byPlace = (listed) => groupsOf(listed).flatMap(([, own]) => own);

/** Where many sources do not fit beside each other as tabs. */
function pickerOf(listed) {
  const option = (each) => el("option", { value: each.key }, `${each.is_live ? "● " : ""}${shortName(listed, each).split("~")[0]}`);
  const select = el("select", { id: "source", "aria-label": "Source", onchange: (event) => show(event.target.value, true) }, page.key === OVERVIEW ? el("option", { value: OVERVIEW }, "Choose…") : null, byPlace(listed).map(option));
  select.value = page.key;
  return select;
}

/** The place of a link of a document: its source here, if the page is served; otherwise the file beside it. */
function addressOfLink(listed, folder, link, isServed) {
  if (!isServed) return link;
  const parts = [];
  for (const part of `${folder}/${link}`.split("/").slice(0, -1)) if (part === ".." && parts.length) parts.pop(); else parts.push(part);
  const found = listed.find((each) => each.folder === parts.join("/"));
  return found ? addressOf(listed, found.key, {}) : null;
}

const stateOf = (each) => { const p = each.progress; return each.is_live ? "running" : !each.version ? "waiting" : p && p.total && p.done < p.total ? "stopped" : "finished"; };
const COLUMNS = { name: (each) => each.folder, state: (each) => ["running", "waiting", "stopped", "finished"].indexOf(stateOf(each)), result: (each) => each.headline, "time left": (each) => (each.progress && each.progress.seconds_left) || Infinity, changed: (each) => -(each.changed || 0) };

/** One line for each source: its name, state and result, and the time left. Sorted by place, or by the column that was chosen. */
function drawOverview() {
  const listed = page.source.list(), main = document.getElementById("main"), active = document.activeElement && document.activeElement.id;
  const isTimed = listed.some((each) => each.progress && each.progress.seconds_left), names = ["name", "state", "result", ...(isTimed ? ["time left"] : []), "changed"];
  const { column, falls } = page.overview, sort = (name) => { page.overview = column !== name ? { column: name, falls: false } : falls ? { column: null, falls: false } : { column: name, falls: true }; drawOverview(); };
  const rowOf = (each, name) => {
    const p = each.progress, state = stateOf(each), words = { running: "running", waiting: "being read", stopped: "not finished", finished: "finished" }[state] + (p && p.total && p.done < p.total ? `, ${number(p.done)} of ${number(p.total)} runs` : "");
    const cells = {
      name: el("a", { href: addressOf(listed, each.key, {}), id: `open-${each.key}`, title: each.folder }, name), state: el("span", { class: `state ${state}` }, words), result: [el("div", {}, each.headline), el("div", { class: "note" }, each.title.replace(`${each.folder.split("/").at(-1)}: `, ""))],
      "time left": p && p.seconds_left ? `about ${span(p.seconds_left)}` : "", changed: each.changed ? new Date(1000 * each.changed).toLocaleString([], { dateStyle: "short", timeStyle: "short" }) : "",
    };
    return el("tr", {}, names.map((each) => el("td", { class: each === "result" ? "verdict" : "" }, cells[each])));
  };
  let rows;
  if (column) {
    const key = COLUMNS[column], order = (a, b) => (typeof key(a) === "number" ? key(a) - key(b) : naturally(key(a), key(b)));
    rows = byPlace(listed).sort((a, b) => (falls ? -order(a, b) : order(a, b))).map((each) => rowOf(each, shortName(listed, each).split("~")[0]));
  } else {
    const groups = groupsOf(listed), isGrouped = groups.some(([, own]) => own.length > 1) && groups.length > 1;
    rows = groups.flatMap(([folder, own]) => [isGrouped ? el("tr", { class: "place" }, el("th", { colspan: String(names.length), scope: "rowgroup" }, folder || ".")) : null, ...own.map((each) => rowOf(each, isGrouped ? each.folder.split("/").at(-1) : shortName(listed, each).split("~")[0]))]).filter(Boolean);
  }
  const head = names.map((name) => el("th", { scope: "col", "aria-sort": column !== name ? "none" : falls ? "descending" : "ascending" }, el("button", { type: "button", id: `by-${name}`, onclick: () => sort(name) }, name)));
  const live = listed.filter((each) => each.is_live).length, count = live === 1 ? "One is running." : live ? `${live} are running.` : "Nothing is running.";
  document.title = "Overview · smupar";
  main.replaceChildren(el("h1", {}, `${listed.length} studies, runs and figures`), el("p", { class: "headline" }, count),
    el("div", { class: "scroll" }, el("table", { class: "overview" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows))));
  if (active && document.getElementById(active)) document.getElementById(active).focus();
  drawDocuments();
  pulse();
}
