"use strict";
// Tables and text work without this file; figures are drawn by Plotly, which is unpacked at the end of the page.
const { sets, palette } = JSON.parse(document.getElementById("numbers").textContent);
const root = document.documentElement;
const chosen = sets.map((set) => ({
  measure: "AVG",
  method: (set.methods.find((m) => m.name.includes("fedheal")) || set.methods[0] || {}).name,
}));

// Light and dark

const system = matchMedia("(prefers-color-scheme: dark)");
let printing = false;
const dark = () => !printing && (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
const domainColour = (i) => { const p = dark() ? palette.domainsDark : palette.domains; return p[i % p.length]; };
const methodColour = (set, name) => (dark() ? set.looks[name].dark : set.looks[name].colour);
const veil = (hex, share) => `rgba(${[1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)).join(",")},${share})`;
document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = dark() ? "light" : "dark";
  redraw();
});
system.addEventListener("change", () => redraw());

// Tables: sort by a column, best first; copy as text

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  const original = [...table.tBodies[0].rows];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const before = head.getAttribute("aria-sort");
    const first = column === 0 || head.textContent.trim() === "STD" ? "ascending" : "descending";
    const second = first === "ascending" ? "descending" : "ascending";
    const order = !before ? first : before === first ? second : null;
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    const key = (row) => { const cell = row.cells[column]; return cell.dataset.value ? +cell.dataset.value : cell.textContent.trim(); };
    const rows = [...original];
    if (order) {
      head.setAttribute("aria-sort", order);
      rows.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (order === "ascending" ? 1 : -1));
    }
    table.tBodies[0].append(...rows);
  }));
}
// A line above each table that is wider than the screen.
const cues = [...document.querySelectorAll(".scroll")].map((box) => {
  const cue = document.createElement("p");
  cue.className = "note cue";
  cue.textContent = "Scroll the table sideways for more columns. →";
  box.before(cue);
  return () => { cue.hidden = box.scrollWidth <= box.clientWidth; box.tabIndex = cue.hidden ? -1 : 0; };
});
const markWideTables = () => cues.forEach((update) => update());
addEventListener("resize", markWideTables);
markWideTables();
for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const source = document.getElementById(button.dataset.from);
    try {
      await navigator.clipboard.writeText(source.value);
    } catch {  // pages opened as files may not use the clipboard directly
      source.hidden = false;
      source.select();
      document.execCommand("copy");
      source.hidden = true;
    }
    const label = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = label; }, 1200);
  });
}

// Figures

const narrow = () => innerWidth < 768;
function layout(extra) {
  const axis = { gridcolor: colour("--grid"), linecolor: colour("--line"), zeroline: false, automargin: true, ticks: "", fixedrange: narrow() };
  const { xaxis, yaxis, ...rest } = extra;
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", height: 320,
    font: { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: colour("--ink") },
    margin: { l: 46, r: 10, t: 8, b: 40 }, hoverlabel: { font: { size: 12.5 }, namelength: -1 },
    legend: below(0.2), showlegend: true,
    xaxis: { ...axis, ...xaxis, title: title(xaxis) }, yaxis: { ...axis, ...yaxis, title: title(yaxis) }, ...rest,
  };
}
const below = (y) => ({ orientation: "h", y: -y, yanchor: "top", x: 0, font: { size: 12 } });
// Above a figure of rows, as wide as the figure and not only as its axis.
const above = () => ({ orientation: "h", xref: "container", x: 0, xanchor: "left", yref: "container", y: 1, yanchor: "top", traceorder: "normal" });
function linesAbove(names) {
  const each = 46 + 7.5 * Math.max(...names.map((name) => name.length));
  return Math.ceil(names.length / Math.max(1, Math.floor(Math.min(innerWidth - 40, 1000) / each)));
}
// A name that goes on in the next line before one of its parts where there is little room.
function folded(name) {
  if (!narrow() || name.length <= 16) return name;
  const lines = [""];
  for (const part of name.split(/(?=[+:, ])/)) {
    if (lines.at(-1) && (lines.at(-1) + part).length > 18) lines.push(part.trimStart());
    else lines[lines.length - 1] += part;
  }
  return lines.join("<br>");
}
// Figures of rows: as high as the names and what stands beside them, every name shown.
function rowsLayout(names, listed, each, extra) {
  const lines = Math.max(...names.map((name) => name.split("<br>").length)), top = 10 + 20 * linesAbove(listed);
  const height = top + 50 + names.length * Math.max(each, 8 + 16 * lines);
  const yaxis = { type: "category", autorange: "reversed", gridcolor: "rgba(0,0,0,0)", automargin: true, dtick: 1 };
  return layout({ height, legend: above(), margin: { l: 8, r: 12, t: top, b: 40 }, yaxis, ...extra });
}
const title = (axis) => ({ text: (axis || {}).title || "", font: { size: 12.5, color: colour("--soft") }, standoff: 8 });

function band(rounds, [means, sds], name, shade, more = {}) {
  const there = [...means.keys()].filter((i) => means[i] !== null);  // not every domain is evaluated in every round
  const [x, mean, sd] = [rounds, means, sds].map((list) => (list.length ? there.map((i) => list[i]) : list));
  const line = { type: "scatter", mode: "lines", x, y: mean, name, line: { color: shade, width: 2, ...more.line }, legendgroup: name,
                 hovertemplate: "%{y:.1f}<extra>" + name + "</extra>", visible: more.visible };
  if (!sd.length) return [line];
  const around = { type: "scatter", x: x.concat([...x].reverse()), fill: "toself", fillcolor: veil(shade, dark() ? 0.22 : 0.14),
                   y: mean.map((m, i) => m + sd[i]).concat(mean.map((m, i) => m - sd[i]).reverse()), mode: "lines",
                   line: { width: 0 }, legendgroup: name, showlegend: false, hoverinfo: "skip", visible: more.visible };
  return [around, line];
}
// Plotly puts ticks between whole numbers where there are few.
const roundAxis = (rounds) => ({ title: "round", ...(rounds.at(-1) - rounds[0] <= 12 ? { dtick: 1 } : {}) });
const method = (set, pick) => set.methods.find((m) => m.name === pick.method);
const several = (values) => Object.values(values).some((list) => list.some((x) => x !== null));

// With many methods, those to be seen at once: the reference, the best, and the first.
const few = (set) => new Set(set.rows.length <= 12 ? set.rows.map((r) => r.method) : [set.reference, ...set.front, ...set.rows.slice(0, 8).map((r) => r.method)]);

// Rows of dots with whiskers, one colour per method: `points` are {method, row, x, low, high, open}.
function dots(set, rows, points, axis, shapes = []) {
  const listed = [...new Set(points.map((p) => p.method))], shown = listed.filter((name) => few(set).has(name));
  const step = 0.8 / shown.length, place = (name) => (shown.includes(name) ? (shown.indexOf(name) + 0.5) * step - 0.4 : 0);
  const traces = listed.map((name) => {
    const own = points.filter((p) => p.method === name), shade = methodColour(set, name), symbol = set.looks[name].symbol;
    return {
      type: "scatter", mode: "markers", name, x: own.map((p) => p.x), y: own.map((p) => rows.indexOf(p.row) + place(name)),
      visible: shown.includes(name) ? true : "legendonly", customdata: own.map((p) => p.hover),
      marker: { color: shade, size: 9, symbol: own.map((p) => symbol + (p.open ? "-open" : "")), line: { width: 1.5, color: shade } },
      error_x: { type: "data", symmetric: false, array: own.map((p) => p.high - p.x || 0), arrayminus: own.map((p) => p.x - p.low || 0), thickness: 1.2, width: 0, color: shade },
      hovertemplate: "%{customdata}<extra>" + name + "</extra>",
    };
  });
  const top = 14 + 20 * linesAbove(listed), height = top + 50 + rows.length * Math.max(30, 12 * shown.length);
  const between = rows.slice(1).map((_, i) => ({ type: "line", xref: "paper", x0: 0, x1: 1, y0: i + 0.5, y1: i + 0.5, line: { width: 1, color: colour("--grid") } }));
  const yaxis = { tickvals: [...rows.keys()], ticktext: rows.map(folded), range: [rows.length - 0.5, -0.5], showgrid: false };
  return [traces, layout({ height, legend: above(), margin: { l: 8, r: 12, t: top, b: 40 }, xaxis: { title: axis }, yaxis, shapes: [...between, ...shapes], hovermode: "closest" })];
}

const draw = {
  domains(set) {
    const points = set.rows.flatMap((row) => set.domains.map((d) => ({
      method: row.method, row: d, x: row.mean[d], low: row.mean[d] - row.error[d], high: row.mean[d] + row.error[d],
      hover: `${d}: ${row.mean[d].toFixed(1)} ± ${row.error[d].toFixed(1)}` })));
    return dots(set, set.domains, points, "accuracy, %");
  },
  differences(set) {
    const points = set.differences.map((d) => ({ ...d, x: d.mean, open: !d.supported,
      hover: `${d.row}: ${d.mean.toFixed(1)}` + (d.low === undefined ? "" : ` (${d.low.toFixed(1)} to ${d.high.toFixed(1)})`) }));
    const zero = { type: "line", yref: "paper", y0: 0, y1: 1, x0: 0, x1: 0, line: { width: 1, color: colour("--soft"), dash: "dot" } };
    return dots(set, ["AVG", "STD", ...set.domains], points, `points${narrow() ? "" : ` above ${set.reference}`} (STD: below 0 is more even)`, [zero]);
  },
  scatter(set) {
    const rows = set.rows.filter((row) => set.methods.some((m) => m.name === row.method));
    const front = set.front.map((name) => rows.find((row) => row.method === name));
    const traces = [{
      type: "scatter", mode: "lines", x: front.map((r) => r.mean.STD), y: front.map((r) => r.mean.AVG), hoverinfo: "skip",
      line: { color: colour("--soft"), width: 1.5, dash: "dot" }, showlegend: false,
    }].concat(rows.map((row) => {
      const shade = methodColour(set, row.method), bar = (value) => ({ type: "data", array: [value], thickness: 1, width: 0, color: shade });
      return {
        type: "scatter", mode: "markers", name: row.method, x: [row.mean.STD], y: [row.mean.AVG], cliponaxis: false, error_x: bar(row.sd.STD), error_y: bar(row.sd.AVG),
        marker: { size: 11, color: shade, symbol: set.looks[row.method].symbol + (set.front.includes(row.method) ? "" : "-open"), line: { width: 2, color: shade } },
        hovertemplate: "AVG %{y:.2f}, STD %{x:.2f}<extra>" + row.method + "</extra>",
      };
    }));
    return [traces, layout({ xaxis: { title: "STD over domains (lower is more even)" }, yaxis: { title: "AVG, %" }, showlegend: rows.length <= 12, legend: below(0.24) })];
  },
  measure(set, pick) {
    const traces = set.methods.flatMap((m) => (m.curves[pick.measure] ? band(m.rounds, m.curves[pick.measure], m.name, methodColour(set, m.name), {
      visible: few(set).has(m.name) ? true : "legendonly", line: { dash: set.looks[m.name].dash },
    }) : []));
    return traces.length ? [traces, layout({ xaxis: roundAxis(set.methods.flatMap((m) => m.rounds).sort((a, b) => a - b)), yaxis: { title: pick.measure + (pick.measure === "STD" ? ", points" : ", %") }, hovermode: "x", ...(set.methods.length > 10 ? { height: 440, legend: { ...below(0.15), maxheight: 0.4 } } : {}) })] : null;
  },
  curves(set, pick) {
    const m = method(set, pick);
    if (!m || !several(m.rounds.length ? { m: m.rounds } : {})) return null;
    return [set.domains.flatMap((d, i) => (m.curves[d] ? band(m.rounds, m.curves[d], d, domainColour(i)) : [])), layout({ xaxis: roundAxis(m.rounds), yaxis: { title: "accuracy, %" }, hovermode: "x" })];
  },
  weights(set, pick) {
    const m = method(set, pick);
    if (!m || !several(m.weights)) return null;
    const traces = set.domains.flatMap((d, i) => (m.weights[d] ? [{ type: "scatter", mode: "lines", x: m.every, y: m.weights[d], name: d, stackgroup: "one",
      line: { width: 0.8, color: domainColour(i) }, fillcolor: veil(domainColour(i), 0.55), hovertemplate: "%{y:.1%}<extra>" + d + "</extra>" }] : []));
    return [traces, layout({ xaxis: roundAxis(m.every), yaxis: { title: "share of weight", range: [0, 1], tickformat: ".0%" }, hovermode: "x", legend: { ...below(0.2), traceorder: "normal" } })];
  },
  classes(set, pick) {
    const m = method(set, pick);
    if (!m || !Object.keys(m.classes).length) return null;
    const rows = set.domains.filter((d) => m.classes[d]), most = Math.max(...rows.map((d) => m.classes[d].length));
    const cell = (d, c) => (m.classes[d][c] || [0, 0]), share = ([right, every]) => (every ? (100 * right) / every : null);
    const names = [...Array(most).keys()].map((c) => set.classes[c] || String(c));
    const z = rows.map((d) => names.map((_, c) => share(cell(d, c))));
    return [[{ type: "heatmap", x: [...names.keys()], y: rows, z, zmin: Math.min(50, ...z.flat().filter((x) => x !== null)), zmax: 100, colorscale: "Cividis",
      colorbar: { thickness: 10, outlinewidth: 0, len: 1 }, customdata: rows.map((d) => names.map((name, c) => `${name}: ${cell(d, c)[0]} of ${cell(d, c)[1]}`)),
      ...(most <= 12 ? { texttemplate: "%{z:.0f}", textfont: { size: narrow() ? 10 : 12 } } : {}), hovertemplate: "%{y}, %{customdata} (%{z:.1f} %)<extra></extra>" }],
    layout({ showlegend: false, xaxis: { title: "class", tickvals: [...names.keys()], ticktext: names, showgrid: false }, yaxis: { autorange: "reversed", showgrid: false } })];
  },
  layers(set, pick) {
    const m = method(set, pick);
    if (!m || !m.layers.names.length) return null;
    const least = Math.min(...m.layers.kept.flat().filter((x) => x !== null));
    const names = m.layers.names.map((name) => (name.length > 22 ? "…" + name.slice(-21) : name));
    return [[{ type: "heatmap", x: m.layers.rounds, y: m.layers.names, z: m.layers.kept, zmin: Math.min(0.8, Math.floor(least * 10) / 10), zmax: 1,
      colorscale: "Viridis", colorbar: { thickness: 10, tickformat: ".0%", outlinewidth: 0, len: 1 },
      hovertemplate: "%{y}, round %{x}: %{z:.1%}<extra></extra>" }],
    layout({ height: Math.max(300, 60 + 15 * names.length), xaxis: { ...roundAxis(m.layers.rounds), gridcolor: "rgba(0,0,0,0)" }, showlegend: false,
      yaxis: { autorange: "reversed", tickvals: m.layers.names, ticktext: names, tickfont: { size: 10.5 } } })];
  },
  consistency(set, pick) {
    const m = method(set, pick);
    if (!m || !Object.keys(m.consistency).length) return null;
    const bins = Object.values(m.consistency)[0].length;
    const label = [...Array(bins).keys()].map((i) => `${50 + (50 / bins) * i}–${50 + (50 / bins) * (i + 1)}`);
    const traces = set.domains.flatMap((d, i) => (m.consistency[d] ? [{ type: "bar", name: d, x: label, y: m.consistency[d], marker: { color: domainColour(i) },
      hovertemplate: "%{y:.1%}<extra>" + d + "</extra>" }] : []));
    return [traces, layout({ barmode: "group", bargap: 0.2, xaxis: { title: "same direction in % of the rounds", type: "category", tickangle: narrow() || printing ? -60 : "auto", tickfont: { size: 11 } }, yaxis: { title: "share of parameters", tickformat: ".0%" }, hovermode: "x", legend: below(narrow() || printing ? 0.42 : 0.26) })];
  },
  seconds(set) {
    if (!set.methods.length) return null;
    const shades = dark() ? palette.phasesDark : palette.phases;
    const names = set.methods.map((m) => folded(m.name)), phases = ["train", "aggregate", "evaluate"];
    const traces = phases.map((phase, i) => ({ type: "bar", orientation: "h", name: phase, y: names,
      x: set.methods.map((m) => m.seconds[phase]), marker: { color: shades[i] }, hovertemplate: "%{x:.1f} s<extra>" + phase + "</extra>" }));
    return [traces, rowsLayout(names, phases, Math.max(90 / names.length, 24), { barmode: "stack", bargap: 0.35, xaxis: { title: "seconds" } })];
  },
};

const NOTHING = { layers: "This method does not mask updates.", consistency: "This method does not record the consistency of directions.", classes: "These runs do not count results by class." };
const drawn = new Set();
const number = (node) => +node.closest(".figures").dataset.set;
function show(node) {
  if (typeof Plotly === "undefined") return;
  const made = draw[node.dataset.plot](sets[number(node)], chosen[number(node)]);
  node.classList.toggle("none", !made);
  node.nextElementSibling.hidden = !made;
  node.style.height = made ? `${made[1].height}px` : "";  // the page does not move while a figure is being drawn
  if (!made) {
    Plotly.purge(node);
    node.textContent = NOTHING[node.dataset.plot] || "Not recorded by these runs.";
    return;
  }
  if (!node.classList.contains("js-plotly-plot")) node.textContent = "";
  Plotly.react(node, made[0], made[1], { responsive: true, displaylogo: false, displayModeBar: false });
}
function redraw(only) {
  for (const node of drawn) if (!only || (only.set === number(node) && only.plots.includes(node.dataset.plot))) show(node);
}
// One figure at a time, so that the page stays usable meanwhile.
function drawNext() {
  const node = [...document.querySelectorAll(".plot")].find((plot) => !drawn.has(plot));
  if (!node) { root.dataset.drawn = "true"; return; }
  drawn.add(node);
  show(node);
  setTimeout(drawNext);
}

// Choices

for (const area of document.querySelectorAll(".figures")) {
  const s = +area.dataset.set, set = sets[s], pick = chosen[s];
  const fill = (select, names) => { for (const name of names) select.append(new Option(name, name, false, name === pick[select.dataset.choice])); };
  for (const select of area.querySelectorAll("select")) {
    const measure = select.dataset.choice === "measure";
    fill(select, measure ? ["AVG", "STD", "worst", ...set.domains] : set.methods.map((m) => m.name));
    select.addEventListener("change", () => {
      pick[select.dataset.choice] = select.value;
      redraw({ set: s, plots: measure ? ["measure"] : ["curves", "classes", "weights", "layers", "consistency"] });
    });
  }
}

async function unpackPlotly() {
  try {
    const letters = atob(document.getElementById("plotly").textContent);
    const packed = new Uint8Array(letters.length);
    for (let i = 0; i < letters.length; i++) packed[i] = letters.charCodeAt(i);
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const code = document.createElement("script");
    code.textContent = await new Response(stream).text();
    document.head.append(code);
  } catch (error) {
    for (const node of document.querySelectorAll(".plot")) { node.classList.add("none"); node.textContent = "Figures need a browser of 2023 or later."; }
    return;
  }
  root.dataset.ready = "true";
  drawNext();
}

// Paper is light and shows everything
let unfolded = [];
addEventListener("beforeprint", () => {
  printing = true;
  unfolded = [...document.querySelectorAll("details:not([open])")];
  unfolded.forEach((node) => { node.open = true; });
  for (const node of document.querySelectorAll(".plot")) { drawn.add(node); show(node); }
});
addEventListener("afterprint", () => { printing = false; unfolded.forEach((node) => { node.open = false; }); redraw(); });
