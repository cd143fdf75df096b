// Where documents come from: the page itself, or the server that the page came from. No other server is ever asked.

const EVERY = 2000; // milliseconds between questions to the server
const RELOAD = 10000; // milliseconds after which a page without a server reads itself again, while its study runs

async function asked(path) {
  const answer = await fetch(path, { cache: "no-store" });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

/** The page's own documents. */
class OwnSource {
  constructor(documents) { this.documents = documents.map((each, i) => ({ ...each, key: String(i) })); }
  list() { return this.documents; }
  async document(key) { return this.documents[Number(key)]; }
  async curves(key, ids) { const all = this.documents[Number(key)].curves; return Object.fromEntries(ids.filter((id) => all[id]).map((id) => [id, all[id]])); }
  async run() { return null; }
  add(other) { this.documents.push({ ...other, key: String(this.documents.length) }); return this.documents.at(-1); }
}

/** Documents of `smupar watch`. */
class ServedSource {
  constructor() { this.listed = []; this.waiting = []; this.cache = new Map(); }
  list() { return this.listed; }
  async refresh() { const state = await asked("state.json"); this.listed = state.documents; this.waiting = state.waiting; return this.listed; }
  async document(key) {
    const entry = this.listed.find((each) => each.key === key), cached = this.cache.get(key);
    if (cached && entry && cached.version === entry.version) return cached;
    const read = { ...(await asked(`document.json?key=${encodeURIComponent(key)}`)), key };
    this.cache.set(key, read);
    return read;
  }
  async curves(key, ids) { return ids.length ? asked(`curves.json?key=${encodeURIComponent(key)}&runs=${ids.map(encodeURIComponent).join(",")}`) : {}; }
  async run(key, id) { return asked(`run.json?key=${encodeURIComponent(key)}&run=${encodeURIComponent(id)}`); }
}

/** The document inside another page, which a reader picked from their disk. */
async function documentOfFile(file) {
  const found = new DOMParser().parseFromString(await file.text(), "text/html").getElementById("data");
  if (!found) throw new Error("this file is no page of smupar: choose a report.html");
  return JSON.parse(found.textContent).documents[0];
}

/** plotly, which the page holds compressed. */
async function unpackPlotly() {
  const holder = document.getElementById("plotly"), bytes = Uint8Array.from(atob(holder.textContent), (c) => c.charCodeAt(0));
  const text = await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  holder.remove();
  const script = document.createElement("script");
  script.textContent = text;
  document.head.append(script);
}
