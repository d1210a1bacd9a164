// Elements, texts for numbers, and line charts. All text goes through textContent.

const COLOURS = 7, DASHES = 4, MAX_LINES = 8;

function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const byId = (id) => document.getElementById(id);
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function seconds(value) {
  if (!isNumber(value)) return "";
  if (value === 0) return "0 s";
  const size = Math.abs(value);
  if (size >= 5400) return `${(value / 3600).toFixed(1)} h`;
  if (size >= 90) return `${(value / 60).toFixed(1)} min`;
  if (size >= 1) return `${value.toFixed(1)} s`;
  return size >= 1e-3 ? `${(value * 1e3).toFixed(1)} ms` : `${(value * 1e6).toFixed(0)} µs`;
}

function bytes(value) {
  if (!isNumber(value)) return "";
  for (const unit of ["B", "KB", "MB"]) {
    if (value < 1000) return `${value.toFixed(0)} ${unit}`;
    value /= 1000;
  }
  return `${value.toFixed(1)} GB`;
}

function rate(value) {
  if (!isNumber(value)) return "";
  return value >= 10 || value === 0 ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

function amount(value) {
  if (value === null || value === undefined) return "not finite";
  if (!isNumber(value)) return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
}

const clock = (time) => new Date(time * 1000).toLocaleTimeString("en-GB");

// A colour and a pattern for each name: the same in all charts.
const styleIndex = new Map();
function styleOf(name) {
  if (!styleIndex.has(name)) styleIndex.set(name, styleIndex.size);
  const index = styleIndex.get(name);
  return { colour: index % COLOURS, dash: (index % COLOURS + Math.floor(index / COLOURS)) % DASHES };
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) {
    found.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  }
  return found;
}

function splitAtGaps(points) {
  const parts = [[]];
  for (const point of points) {
    if (isNumber(point[1])) parts[parts.length - 1].push(point);
    else if (parts[parts.length - 1].length) parts.push([]);
  }
  return parts.filter((part) => part.length);
}

// lines: [{name, points: [[x, y or null], ...]}]
function lineChart(host, { title, lines, x, y, fromZero = false }) {
  const last = (line) => { const found = line.points.filter((each) => isNumber(each[1])).at(-1); return found ? found[1] : -Infinity; };
  const filled = lines.filter((line) => line.points.some((point) => isNumber(point[1])));
  let shown = filled;
  if (filled.length > MAX_LINES) {
    const largest = new Set([...filled].sort((a, b) => last(b) - last(a)).slice(0, MAX_LINES));
    shown = filled.filter((line) => largest.has(line));
  }
  shown.forEach((line) => styleOf(line.name));
  const note = filled.length > shown.length ? `${shown.length} of ${filled.length}` : "";
  const heading = node("h3", {}, title, node("span", {}, note));
  if (!shown.length) {
    host.replaceChildren(node("div", { class: "chart" }, heading, node("p", { class: "empty" }, "No values yet.")));
    return;
  }
  const width = Math.max(host.clientWidth - 28, 200), height = 170;
  const all = shown.flatMap((line) => line.points).filter((point) => isNumber(point[1]));
  let [left, right] = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))];
  let [low, high] = [Math.min(...all.map((p) => p[1])), Math.max(...all.map((p) => p[1]))];
  if (fromZero) low = Math.min(low, 0);
  if (low === high) { high += Math.abs(high) || 1; if (!fromZero) low -= Math.abs(low) || 1; }
  if (left === right) { left -= 0.5; right += 0.5; }
  const yTicks = ticks(low, high, 4), labels = yTicks.map(y);
  const margin = { left: Math.max(...labels.map((text) => text.length)) * 6.5 + 8, right: 10, top: 8, bottom: 20 };
  const toX = (value) => margin.left + (value - left) / (right - left) * (width - margin.left - margin.right);
  const toY = (value) => height - margin.bottom - (value - low) / (high - low) * (height - margin.top - margin.bottom);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": title });
  yTicks.forEach((tick, index) => {
    drawing.append(svg("line", { class: "grid", x1: margin.left, x2: width - margin.right, y1: toY(tick), y2: toY(tick) }));
    drawing.append(svg("text", { x: margin.left - 6, y: toY(tick) + 4, "text-anchor": "end" }, labels[index]));
  });
  drawing.append(svg("text", { x: margin.left, y: height - 4 }, x(left)));
  drawing.append(svg("text", { x: width - margin.right, y: height - 4, "text-anchor": "end" }, x(right)));
  for (const line of shown) {
    const style = styleOf(line.name);
    for (const part of splitAtGaps(line.points)) {
      if (part.length === 1) {
        drawing.append(svg("circle", { class: `dot f${style.colour}`, r: 4, cx: toX(part[0][0]), cy: toY(part[0][1]) }));
        continue;
      }
      const path = part.map(([px, py], index) => `${index ? "L" : "M"}${toX(px).toFixed(1)} ${toY(py).toFixed(1)}`).join("");
      drawing.append(svg("path", { class: `curve s${style.colour} d${style.dash}`, d: path }));
    }
  }
  addHover(drawing, shown, { width, height, margin, toX, toY, left, right, x, y });
  const legend = node("ul", { class: "legend" }, ...shown.map((line) => {
    const style = styleOf(line.name);
    const sample = svg("svg", { viewBox: "0 0 26 8" }, svg("line", { class: `curve s${style.colour} d${style.dash}`, x1: 1, x2: 25, y1: 4, y2: 4 }));
    return node("li", {}, sample, line.name);
  }));
  host.replaceChildren(node("div", { class: "chart" }, heading, drawing, legend));
}

function addHover(drawing, lines, { width, height, margin, left, right, toX, toY, x, y }) {
  const tip = byId("tip"), marks = svg("g");
  drawing.append(marks);
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const inside = (event.clientX - box.left) / box.width * width;
    const value = left + (inside - margin.left) / (width - margin.left - margin.right) * (right - left);
    const near = lines.map((line) => {
      const found = line.points.filter((point) => isNumber(point[1]));
      return { line, point: found.reduce((best, point) => Math.abs(point[0] - value) < Math.abs(best[0] - value) ? point : best, found[0]) };
    });
    const at = near.map((each) => each.point[0]).reduce((best, each) => Math.abs(each - value) < Math.abs(best - value) ? each : best);
    marks.replaceChildren(svg("line", { class: "guide", x1: toX(at), x2: toX(at), y1: margin.top, y2: height - margin.bottom }),
      ...near.map(({ line, point }) => svg("circle", { class: `dot f${styleOf(line.name).colour}`, r: 4, cx: toX(point[0]), cy: toY(point[1]) })));
    tip.replaceChildren(node("p", { class: "dim" }, x(at)), ...near.map(({ line, point }) => node("p", {}, `${line.name}: ${y(point[1])}`)));
    tip.hidden = false;
    tip.style.left = `${Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8)}px`;
  });
  drawing.addEventListener("pointerleave", () => { tip.hidden = true; marks.replaceChildren(); });
}
