"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const COLOURS = ["#0072b2", "#d55e00", "#00875f", "#b05a8e", "#b98300", "#2f8fc4", "#7a4fb5", "#6a6f78"];

// ---- numbers: 16-bit codes in equal steps; 65535 is none
function codes(text, wide) {
  const raw = atob(text), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return wide ? new Uint32Array(bytes.buffer) : new Uint16Array(bytes.buffer);
}
function unpacked(kept) {
  const values = Float64Array.from(codes(kept.codes), (c) => c === 65535 ? NaN : kept.low + kept.step * c);
  return Object.assign(kept, { values });
}
function shown(kept, value) {
  return Number.isNaN(value) ? "none" : value.toFixed(Math.min(kept.digits, 4)).replace("-", "−");
}
function margin(kept) { // of the code and of the decimals shown, rounded up
  const most = (kept.step + 10 ** -Math.min(kept.digits, 4)) / 2, unit = 10 ** Math.floor(Math.log10(most));
  return "± " + (Math.ceil(most / unit) * unit).toFixed(Math.max(0, -Math.floor(Math.log10(unit))));
}
data.measures.forEach(unpacked);
unpacked(data.near.cosines);
data.near.rows = codes(data.near.rows);
if (data.lens) data.lens.index = codes(data.lens.codes, data.lens.words.length > 65535);

// ---- elements, whose texts are never markup
function make(name, attributes, ...inside) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  made.append(...inside);
  return made;
}
function special(name) { return /^ ?(\[.*\]|<.*>)$/.test(name); }
function continues(row) {
  return row > 0 && !data.tokens[row].startsWith(" ") && !special(data.tokens[row - 1]);
}
function within(row) { return data.unit === "token" ? ", token " + (data.places ? data.places[row] : row - exampleOf(row).first) : ""; }
function label(row) { return (continues(row) ? "##" : "") + data.tokens[row].trim(); }
function exampleOf(row) {
  let low = 0, high = data.examples.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (data.examples[middle][1] > row) high = middle; else low = middle + 1;
  }
  const first = low ? data.examples[low - 1][1] : 0;
  return { example: data.examples[low][0], first, end: data.examples[low][1] };
}

// ---- the heat map
let group = 0, measure = 0, active = [0, 0], chosen = null;
const cache = new Map();
function range(m, column) {
  const kept = data.measures[m], width = kept.columns.length, key = m + ":" + column;
  if (!cache.has(key)) {
    const values = [];
    for (let i = column < 0 ? 0 : column; i < kept.values.length; i += column < 0 ? 1 : width)
      if (!Number.isNaN(kept.values[i])) values.push(kept.values[i]);
    values.sort((a, b) => a - b);
    const at = (share) => values.length ? values[Math.round(share * (values.length - 1))] : 0;
    let [low, high] = [at(0.01), at(0.99)];
    if (kept.ends) [low, high] = kept.ends;
    else if (kept.signed) { high = Math.max(Math.abs(low), Math.abs(high)); low = -high; }
    cache.set(key, [low, high]);
  }
  return cache.get(key);
}
function paint(cell, kept, value, [low, high]) {
  if (Number.isNaN(value)) { cell.className = "none"; return; }
  let t = high > low ? (value - low) / (high - low) : 0.5;
  if (kept.signed) {
    t = high ? value / high : 0;
    if (t < 0) cell.classList.add("below");
    t = Math.abs(t);
  }
  t = 0.04 + 0.91 * Math.min(1, Math.max(0, t));
  if (t > 0.58) cell.classList.add(t > 0.78 ? "deep" : "half"); // where words need the other colour
  cell.style.setProperty("--t", t.toFixed(3));
}
function draw() {
  const [, first, count] = data.groups[group], kept = data.measures[measure];
  const width = kept.columns.length, own = $("scale").value === "column";
  const ranges = kept.columns.map((_, i) => range(measure, own ? i : -1));
  const words = data.lens && data.lens.measure === measure;
  const head = make("tr", {}, make("th", { scope: "col" }, data.groups.length > 1 || count > 1 ? kept.over : ""));
  kept.columns.forEach((name) => head.append(make("th", { scope: "col" }, name)));
  const body = make("tbody");
  for (let r = 0; r < count; r++) {
    const row = first + r, line = make("tr");
    const name = make("th", { scope: "row", tabindex: -1, "data-c": 0 }, label(row));
    line.dataset.r = r;
    if (row === chosen) line.className = "chosen";
    line.append(name);
    for (let c = 0; c < width; c++) {
      const cell = make("td", { tabindex: -1, "data-c": c + 1 }), i = row * width + c;
      paint(cell, kept, kept.values[i], ranges[c]);
      if (words) cell.textContent = data.lens.words[data.lens.index[i]];
      line.append(cell);
    }
    body.append(line);
  }
  $("grid").replaceChildren(make("thead", {}, head), body);
  active = [Math.min(active[0], count - 1), Math.min(active[1], width)];
  cellAt(...active).tabIndex = 0;
  $("meaning").textContent = kept.meaning + " Kept in steps of " + (kept.step ? kept.step.toPrecision(1) : "0")
    + (kept.ends ? "." : "; colours from the 1st to the 99th percentile of all " + data.unit + "s shown.");
  const [low, high] = range(measure, -1);
  $("low").textContent = own ? "low" : shown(kept, low);
  $("high").textContent = own ? "high" : shown(kept, high);
  $("ramp").className = kept.signed ? "signed" : "";
  $("before").disabled = group === 0;
  $("after").disabled = group === data.groups.length - 1;
}
function cellAt(r, c) { return $("grid").tBodies[0].rows[r].cells[c]; }
function rowOf(cell) { return data.groups[group][1] + Number(cell.parentNode.dataset.r); }
function told(cell) {
  const row = rowOf(cell), c = Number(cell.dataset.c), kept = data.measures[measure];
  const place = "“" + label(row) + "”" + within(row);
  if (c === 0) return place;
  const i = row * kept.columns.length + c - 1;
  const word = data.lens && data.lens.measure === measure ? " “" + data.lens.words[data.lens.index[i]] + "”" : "";
  const number = Number.isNaN(kept.values[i]) ? "no number" : shown(kept, kept.values[i]) + " (" + margin(kept) + ")";
  return place + ", " + kept.over + " " + kept.columns[c - 1] + ": " + kept.name + word + " " + number;
}
function tip(cell) {
  const at = cell.getBoundingClientRect(), note = $("tip");
  note.textContent = told(cell);
  note.hidden = false;
  note.style.left = "8px"; // its width depends on where it stands
  const size = note.getBoundingClientRect();
  const above = at.top - size.height - 6;
  note.style.left = Math.max(8, Math.min(at.left, document.documentElement.clientWidth - size.width - 8)) + "px";
  note.style.top = (above > 4 ? above : at.bottom + 6) + "px";
}
function go(r, c) {
  const rows = $("grid").tBodies[0].rows, width = data.measures[measure].columns.length;
  cellAt(...active).tabIndex = -1;
  active = [Math.max(0, Math.min(rows.length - 1, r)), Math.max(0, Math.min(width, c))];
  const cell = cellAt(...active);
  cell.tabIndex = 0;
  cell.setAttribute("aria-label", told(cell));
  cell.focus();
}
$("grid").addEventListener("keydown", (event) => {
  const cell = event.target.closest("tbody [data-c]");
  if (!cell || event.altKey || event.metaKey) return;
  const [r, c] = [Number(cell.parentNode.dataset.r), Number(cell.dataset.c)];
  const far = event.ctrlKey, end = data.measures[measure].columns.length;
  const moves = {
    ArrowUp: [r - 1, c], ArrowDown: [r + 1, c], ArrowLeft: [r, c - 1], ArrowRight: [r, c + 1],
    PageUp: [r - 10, c], PageDown: [r + 10, c], Home: [far ? 0 : r, 0], End: [far ? 1e9 : r, end],
  };
  if (moves[event.key]) { event.preventDefault(); go(...moves[event.key]); }
  else if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(rowOf(cell)); }
  else if (event.key === "Escape") $("tip").hidden = true;
});
$("grid").addEventListener("click", (event) => {
  const cell = event.target.closest("tbody [data-c]");
  if (!cell) return;
  go(Number(cell.parentNode.dataset.r), Number(cell.dataset.c));
  choose(rowOf(cell));
});
for (const [on, off] of [["mouseover", "mouseout"], ["focusin", "focusout"]]) {
  $("grid").addEventListener(on, (event) => {
    const cell = event.target.closest("tbody [data-c]");
    if (cell) tip(cell);
  });
  $("grid").addEventListener(off, () => { $("tip").hidden = true; });
}
for (const moved of ["scroll", "resize"])
  addEventListener(moved, () => { $("tip").hidden = true; }, { capture: true, passive: true });

// ---- one token: its numbers in all layers, and its nearest tokens
function passage(row) {
  const { example, first, end } = exampleOf(row), from = Math.max(first, row - 8), to = Math.min(end, row + 9);
  const text = (a, b) => {
    let joined = "";
    for (let i = a; i < b; i++) joined += data.tokens[i];
    return joined;
  };
  const name = data.tokens[row];
  return [
    make("span", { class: "dim" }, (from > first ? "… " : "") + text(from, row).trimStart() + (name.startsWith(" ") ? " " : "")),
    make("mark", {}, name.trim()),
    make("span", { class: "dim" }, text(row + 1, to) + (to < end ? " …" : "")),
    make("small", {}, " example " + example + within(row)),
  ];
}
function choose(row) {
  chosen = row;
  for (const line of $("grid").tBodies[0].rows)
    line.className = data.groups[group][1] + Number(line.dataset.r) === row ? "chosen" : "";
  const inside = [make("h3", {}, "“" + label(row) + "”"), make("p", { class: "in" }, ...passage(row))];
  const byColumns = new Map();
  data.measures.forEach((kept, m) => {
    const key = kept.columns.join("\n") + kept.over;
    if (!byColumns.has(key)) byColumns.set(key, []);
    byColumns.get(key).push([kept, m]);
  });
  for (const kinds of byColumns.values()) {
    const head = make("tr", {}, make("th", { scope: "col" }, kinds[0][0].over));
    kinds[0][0].columns.forEach((name) => head.append(make("th", { scope: "col", class: "n" }, name)));
    const body = make("tbody");
    for (const [kept, m] of kinds) {
      const line = make("tr", {}, make("th", { scope: "row" }, kept.name));
      kept.columns.forEach((_, c) => {
        const i = row * kept.columns.length + c;
        const word = data.lens && data.lens.measure === m ? data.lens.words[data.lens.index[i]] + " " : "";
        line.append(make("td", { class: "n" }, word + shown(kept, kept.values[i])));
      });
      body.append(line);
    }
    const table = make("table", {}, make("thead", {}, head), body);
    inside.push(make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Numbers by " + kinds[0][0].over }, table));
  }
  if (data.near.most) {
    const list = make("ol", { class: "near" });
    for (let k = 0; k < data.near.most; k++) {
      const i = row * data.near.most + k, other = data.near.rows[i];
      const button = make("button", { type: "button" }, ...passage(other));
      button.addEventListener("click", () => visit(other));
      list.append(make("li", {}, make("span", { class: "n" }, shown(data.near.cosines, data.near.cosines.values[i])), button));
    }
    inside.push(make("p", { class: "caption" }, "Nearest of the " + data.unit + "s shown, by cosine in layer " + data.layer), list);
  }
  $("detail").replaceChildren(...inside);
}
function visit(row) {
  group = data.groups.findIndex(([, first, count]) => row >= first && row < first + count);
  $("group").value = group;
  draw();
  go(row - data.groups[group][1], active[1]);
  choose(row);
}
function turn(to) { group = to; active = [0, active[1]]; $("group").value = group; draw(); }
data.groups.forEach(([title], i) => $("group").append(new Option(title, i)));
data.measures.forEach(({ name }, i) => $("measure").append(new Option(name, i)));
$("group").addEventListener("change", (event) => turn(Number(event.target.value)));
$("before").addEventListener("click", () => turn(group - 1));
$("after").addEventListener("click", () => turn(group + 1));
$("measure").addEventListener("change", (event) => { measure = Number(event.target.value); draw(); });
$("scale").addEventListener("change", draw);

// ---- the projection
const NS = "http://www.w3.org/2000/svg";
let point = -1;
function colourOf(i) {
  if (!data.labels) return COLOURS[0];
  if (data.labels.classes) return COLOURS[Math.min(data.labels.codes[i], COLOURS.length - 1)];
  const scores = data.labels.scores, low = Math.min(...scores), high = Math.max(...scores);
  return "hsl(" + (220 - 200 * (high > low ? (scores[i] - low) / (high - low) : 0.5)) + " 70% 50%)";
}
function labelOf(i) {
  if (!data.labels) return "";
  return data.labels.classes ? data.labels.classes[data.labels.codes[i]] : String(data.labels.scores[i]);
}
function scatter() {
  const kept = data.projections[Number($("method").value)], layer = Number($("slider").value);
  const n = data.points.length, at = (i, axis) => kept.values[(layer * n + i) * 2 + axis];
  const ends = [0, 1].map((axis) => {
    let low = Infinity, high = -Infinity;
    for (let i = 0; i < n; i++) { low = Math.min(low, at(i, axis)); high = Math.max(high, at(i, axis)); }
    return [low, high > low ? high - low : 1];
  });
  const place = (i, axis, size) => 14 + (at(i, axis) - ends[axis][0]) / ends[axis][1] * (size - 28);
  $("plot").replaceChildren(...data.points.map((_, i) => {
    const dot = document.createElementNS(NS, "circle");
    dot.setAttribute("cx", place(i, 0, 640).toFixed(1));
    dot.setAttribute("cy", (420 - place(i, 1, 420)).toFixed(1));
    dot.setAttribute("r", 4.5);
    dot.setAttribute("fill", colourOf(i));
    dot.dataset.i = i;
    return dot;
  }));
  ring.setAttribute("r", 0);
  $("plot").append(ring); // above all
  mark(point);
  $("of-layer").textContent = data.layers[layer];
  $("remark").textContent = n + " examples. " + kept.remarks[layer];
}
const ring = document.createElementNS(NS, "circle");
ring.setAttribute("class", "on");
function mark(i) {
  point = i;
  if (!data.points[i]) return;
  for (const name of ["cx", "cy"]) ring.setAttribute(name, $("plot").children[i].getAttribute(name));
  ring.setAttribute("r", 8);
  const [example, title] = data.points[i], name = labelOf(i);
  $("point").textContent = "Example " + example + (name ? " (" + name + ")" : "") + ": " + title;
}
data.projections.forEach(({ name }, i) => { unpacked(data.projections[i]); $("method").append(new Option(name, i)); });
$("slider").max = data.layers.length - 1;
$("slider").value = Math.max(0, data.layers.indexOf(data.layer));
$("method").addEventListener("change", scatter);
$("slider").addEventListener("input", scatter);
$("plot").addEventListener("mouseover", (event) => { if (event.target.dataset.i) mark(Number(event.target.dataset.i)); });
$("plot").addEventListener("keydown", (event) => {
  const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key], n = data.points.length;
  if (by) { event.preventDefault(); mark((Math.max(point, by < 0 ? 0 : -1) + by + n) % n); }
});
if (data.labels && data.labels.classes)
  data.labels.classes.slice(0, COLOURS.length).forEach((name, i) => { // the commonest come first
    const dot = make("i"), others = i === COLOURS.length - 1 && data.labels.classes.length > COLOURS.length;
    dot.style.background = COLOURS[i];
    $("series").append(make("li", {}, dot, others ? "others" : name));
  });
else if (data.labels) $("series").append(make("li", {}, "from the lowest label (blue) to the highest (red)"));

draw();
scatter();
