// Words, numbers, elements and colours. Texts of a document only enter the page through el() and plain().

const NAMES = {
  lr: "learning rate", init_std: "init std", valid_loss: "validation loss", steps_done: "steps done", tokens_per_second: "tokens/s",
  seconds: "seconds", loss: "loss", state: "state", id: "run", batch_size: "batch size", weight_decay: "weight decay", base_width: "base width",
};
const UNITS = { loss: "loss (nats per token)", valid_loss: "validation loss (nats per token)" };
const named = (field) => NAMES[field] || field.replaceAll("_", " ");
const titled = (text) => NAMES[text] || (/^[a-z_]+$/.test(text) ? named(text) : text); // a field's name, or a sentence
const axisName = (field) => UNITS[field] || named(field);

/** An element with attributes and children; strings become text nodes. */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

/** Text for plotly, which reads a few tags and entities. */
const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

const SUPER = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
const power = (exponent) => "2" + [...String(exponent)].map((digit) => SUPER[digit]).join("");
const isPower = (value) => value > 0 && Number.isInteger(Math.log2(value));

function number(value, digits = 4) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e6) return value.toLocaleString("en");
  if (Math.abs(value) >= 1e6 || (value !== 0 && Math.abs(value) < 1e-4)) return value.toExponential(digits - 2);
  return String(Number(value.toPrecision(digits + 1)));
}
const short = (value) => (value >= 1e6 ? (value / 1e6).toFixed(2) + "M" : value >= 1e3 ? (value / 1e3).toFixed(1) + "k" : value.toFixed(0));
const shown = (value) => (value === null || value === undefined ? "–" : typeof value === "boolean" ? (value ? "yes" : "no") : number(value));

function span(seconds) {
  if (seconds < 90) return `${Math.max(1, Math.round(seconds))} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${(seconds / 3600).toFixed(1)} h` : `${(seconds / 86400).toFixed(1)} days`;
}

// Colours. Every mark has a contrast of at least 3:1 with the background, in both themes; the tests measure it. RULES is set
// where the page is made, from smupar/output/colours.py.
const SERIES = {
  light: ["#1558c8", "#d9652a", "#5a2078", "#2a97b0", "#a86400", "#a3447a", "#1f7a3d", "#59626e"],
  dark: ["#93dbfb", "#c8701a", "#8f58fb", "#12adc8", "#e0a44e", "#e38abb", "#62cf85", "#aeb8c4"],
};
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "pentagon", "triangle-down", "hexagon", "cross"];
const theme = () => document.documentElement.dataset.theme;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const ofRule = (values, rule) => values[rule] || values[Object.keys(values).find((name) => String(rule).startsWith(name))] || null;
const ruleColour = (rule) => ofRule(RULES[theme()], rule);
const ruleDash = (rule) => ofRule(RULES.dash, rule) || "solid"; // of a loss curve
const SWATCHES = { solid: "━━ ", dash: "╍╍ ", dashdot: "━· ", longdash: "━ ━ " };
const channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
const mix = (one, other, share) => {
  const [a, b] = [channels(one), channels(other)];
  return "#" + a.map((value, i) => Math.round(value * (1 - share) + b[i] * share).toString(16).padStart(2, "0")).join("");
};

// From dense to sparse. The same size has the same colour in every chart.
const SIZES = { light: ["#440154", "#34549e", "#148880", "#469632", "#cd7300"], dark: ["#c4a7ff", "#6fb1f5", "#3fcabd", "#8ed66b", "#ffb454"] };

/** A colour between the first and the last of SIZES, at a place from 0 to 1. */
function sizeColour(place) {
  const stops = SIZES[theme()], at = Math.min(Math.max(place, 0), 1) * (stops.length - 1), index = Math.min(Math.floor(at), stops.length - 2);
  return mix(stops[index], stops[index + 1], at - index);
}

/** The colour of a line. The reference is grey. A line with a rule has the colour of its rule, and further curves of the same rule
 *  are darker or lighter. Lines of one rule have the colours of their sizes, and all others a colour by their number. */
function lineColour(line, chart, index) {
  if (line.is_reference) return css("--muted");
  if (line.rule && line.place !== undefined) return ruleColour(line.rule) || css("--muted");
  if (line.rule) {
    const same = chart.lines.slice(0, index).filter((other) => other.rule === line.rule && other.is_joined && line.is_joined).length;
    return mix(ruleColour(line.rule) || css("--muted"), css("--text"), Math.min(0.35 * same, 0.7));
  }
  return chart.rule || chart.marked ? sizeColour(line.shade) : SERIES[theme()][(line.place ?? index) % SERIES.light.length];
}

function copied(text, button) {
  const say = (words) => { const before = button.textContent; button.textContent = words; setTimeout(() => (button.textContent = before), 1500); };
  const byHand = () => {
    const area = el("textarea", { class: "unseen" });
    area.value = text; document.body.append(area); area.select();
    say(document.execCommand("copy") ? "copied" : "press Ctrl-C"); area.remove();
  };
  if (navigator.clipboard && window.isSecureContext) navigator.clipboard.writeText(text).then(() => say("copied"), byHand);
  else byHand();
}

function download(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: address, download: name });
  document.body.append(link); link.click(); link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
