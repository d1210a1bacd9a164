// Who waits for whom, as a graph: workers on an ellipse, an arrow for each pair.

const MAX_NODES = 24;

function showWaits(group) {
  const onCycle = new Set(group.cycles.flatMap((circle) => circle.map((name, index) => `${name}\n${circle[(index + 1) % circle.length]}`)));
  const states = new Map(group.workers.map((worker) => [worker.name, worker.state]));
  const edges = new Map();
  for (const wait of group.waits) {
    const key = `${wait.waiter}\n${wait.target}`;
    const edge = edges.get(key) || { from: wait.waiter, to: wait.target, what: wait.what, age: wait.age, count: 0, cycle: onCycle.has(key) };
    edge.count += 1;
    edges.set(key, edge);
  }
  drawGraph(byId("graph"), group, [...edges.values()], states);
  byId("cycles").textContent = group.cycles.map((circle) => `Cycle: ${[...circle, circle[0]].join(" → ")}`).join("\n");
  const kinds = new Map();
  for (const wait of group.waits) {
    const key = JSON.stringify([wait.waiter, wait.target, wait.what, wait.parent]);
    const kind = kinds.get(key) || { ...wait, key, count: 0 };
    kind.count += 1;
    kinds.set(key, kind);
  }
  table(byId("table-waits"), [
    text("Waits", (w) => `${w.waiter} → ${w.target}`, "name"),
    text("For", (w) => w.what), number("Oldest", (w) => seconds(w.age)), number("Count", (w) => w.count), text("Made by", (w) => w.parent),
    text("Note", (w) => {
      const notes = onCycle.has(`${w.waiter}\n${w.target}`) ? ["in a cycle"] : [];
      if (states.has(w.target) && states.get(w.target) !== "alive") notes.push(MARKS[states.get(w.target)].slice(2));
      return { text: notes.join(", "), kind: "failed" };
    }),
  ], [...kinds.values()], (w) => w.key, "Nobody waits for another worker.");
}

function drawGraph(host, group, edges, states) {
  const busy = new Set(edges.flatMap((edge) => [edge.from, edge.to]));
  const names = group.workers.map((worker) => worker.name).filter((name) => busy.has(name));
  busy.forEach((name) => { if (!names.includes(name)) names.push(name); });
  host.hidden = !names.length;
  if (!names.length) { host.replaceChildren(); return; }
  const shown = names.slice(0, MAX_NODES);
  const width = Math.max(host.clientWidth - 14, 260), height = Math.min(170 + shown.length * 32, 520);
  const short = (name, length) => name.length > length ? `${name.slice(0, length - 1)}…` : name;
  const half = (name) => short(name, 18).length * 3.9 + 10;
  const margin = Math.max(...shown.map(half)) + 6;
  const places = new Map(shown.map((name, index) => {
    const angle = shown.length === 2 ? index * Math.PI + Math.PI : index / shown.length * 2 * Math.PI - Math.PI / 2;
    return [name, { x: width / 2 + Math.cos(angle) * Math.min(width / 2 - margin, 380), y: height / 2 + Math.sin(angle) * (height / 2 - 34) }];
  }));
  const head = (id, kind) => svg("marker", { id, viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 11, markerHeight: 11, markerUnits: "userSpaceOnUse", orient: "auto" },
    svg("path", { d: "M0 0L10 5L0 10z", class: `head ${kind}` }));
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "Graph of who waits for whom" },
    svg("defs", {}, head("head", ""), head("head-cycle", "cycle")));
  const labels = [];
  for (const edge of edges) {
    const from = places.get(edge.from), to = places.get(edge.to);
    if (!from || !to) continue;
    const kind = edge.cycle ? "cycle" : "";
    if (from === to) {
      drawing.append(svg("path", { class: `edge ${kind}`, d: `M${from.x - 12} ${from.y - 13}c-14 -34 38 -34 24 0`, "marker-end": `url(#head${edge.cycle ? "-cycle" : ""})` }));
      continue;
    }
    const dx = to.x - from.x, dy = to.y - from.y, length = Math.hypot(dx, dy);
    const bend = { x: (from.x + to.x) / 2 - dy / length * 34, y: (from.y + to.y) / 2 + dx / length * 34 };
    const start = border(from, bend, half(edge.from)), end = border(to, bend, half(edge.to));
    drawing.append(svg("path", { class: `edge ${kind}`, d: `M${start.x} ${start.y}Q${bend.x} ${bend.y} ${end.x} ${end.y}`, "marker-end": `url(#head${edge.cycle ? "-cycle" : ""})` }));
    const more = edge.count > 1 ? ` (+${edge.count - 1})` : "", mark = edge.cycle ? "cycle: " : "";
    const middle = { x: (start.x + 2 * bend.x + end.x) / 4, y: (start.y + 2 * bend.y + end.y) / 4 };
    labels.push(svg("text", { class: `edge-text ${kind}`, x: middle.x, y: middle.y + 4 }, `${mark}${short(edge.what, 24)} ${seconds(edge.age)}${more}`));
  }
  for (const name of shown) {
    const { x, y } = places.get(name), state = states.get(name) || "unknown", size = half(name);
    drawing.append(svg("rect", { class: `node ${state}`, x: x - size, y: y - 14, width: 2 * size, height: 28, rx: 8 }, svg("title", {}, name)));
    drawing.append(svg("text", { class: "node-name", x, y: y + 4 }, short(name, 18)));
    if (state !== "alive") drawing.append(svg("text", { x, y: y < height / 2 ? y - 20 : y + 27, "text-anchor": "middle" }, (MARKS[state] || state)));
  }
  drawing.append(...labels);
  host.replaceChildren(drawing);
  if (names.length > shown.length) host.append(node("p", { class: "more" }, `${shown.length} of ${names.length} workers that wait are drawn`));
}

// The point where the line from the middle of a box to another point leaves the box.
function border(middle, other, half) {
  const dx = other.x - middle.x, dy = other.y - middle.y;
  const scale = Math.min(half / (Math.abs(dx) || 1e-9), 15 / (Math.abs(dy) || 1e-9));
  return { x: middle.x + dx * scale, y: middle.y + dy * scale };
}
