// Tables that are updated in place, so that a selection and the scroll position stay.

// columns: [{label, cell(row), kind}]; a cell is a text or {text, kind, title}
function table(host, columns, rows, key, empty, more = 0) {
  if (!rows.length) {
    host.replaceChildren(node("p", { class: "empty" }, empty));
    return;
  }
  let body = host.querySelector("tbody");
  const signature = columns.map((column) => column.label).join("|");
  if (!body || host.dataset.signature !== signature) {
    body = node("tbody");
    const head = node("tr", {}, ...columns.map((column) => node("th", { class: column.kind === "num" ? "num" : "", scope: "col" }, column.label)));
    host.replaceChildren(node("div", { class: "table" }, node("table", {}, node("thead", {}, head), body)), node("p", { class: "more" }));
    host.dataset.signature = signature;
  }
  const known = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  rows.forEach((row, index) => {
    const name = String(key(row));
    let line = known.get(name);
    if (line) known.delete(name);
    else {
      line = node("tr", {}, ...columns.map((column) => node("td", { "data-label": column.label })));
      line.dataset.key = name;
    }
    columns.forEach((column, place) => fill(line.cells[place], column, column.cell(row)));
    if (body.rows[index] !== line) body.insertBefore(line, body.rows[index] || null);
  });
  known.forEach((line) => line.remove());
  host.querySelector(".more").textContent = more > 0 ? `and ${more} more` : "";
}

function fill(cell, column, value) {
  const { text = "", kind = "", title = "" } = value !== null && typeof value === "object" ? value : { text: value };
  const shown = String(text ?? "");
  const name = [column.kind || "", kind, shown === "" ? "blank" : ""].join(" ").trim();
  if (cell.textContent !== shown) cell.textContent = shown;
  if (cell.className !== name) cell.className = name;
  if (cell.title !== title) cell.title = title;
}

const text = (label, cell, kind = "") => ({ label, cell, kind });
const number = (label, cell) => ({ label, cell, kind: "num" });
const MARKS = { alive: "● alive", silent: "◐ no answer", dead: "✕ dead", unknown: "○ not asked yet" };

function oldestCall(worker, group) {
  if (worker.state !== "alive") return { text: worker.problem, kind: "problem" };
  const calls = group.calls.filter((call) => call.worker === worker.name);
  if (!calls.length) return { text: "no call in progress", kind: "dim" };
  return `${callText(calls[0])}, ${seconds(calls[0].age)}`;
}

const callText = (call) => `${call.function} ${call.direction === "made" ? "on" : "for"} ${call.peer}`;
const total = (worker, name) => worker.view?.totals.served?.[name] ?? worker.view?.totals.made?.[name];
const alive = (worker, value) => worker.state === "alive" ? value(worker.view) : "";

function showWorkers(group) {
  table(byId("table-workers"), [
    text("Worker", (w) => w.name, "name"),
    text("State", (w) => ({ text: MARKS[w.state] || w.state, kind: `nowrap state-${w.state}` })),
    number("Rank", (w) => w.rank),
    number("Process", (w) => w.view ? w.view.pid : ""),
    text("Host", (w) => w.view ? w.view.host : ""),
    number("Calls/s", (w) => alive(w, () => w.last ? rate(w.last[1]) : "")),
    number("p50", (w) => alive(w, () => seconds(total(w, "p50")))),
    number("p99", (w) => alive(w, () => seconds(total(w, "p99")))),
    number("Made", (w) => alive(w, (v) => v.made)),
    number("Running", (w) => alive(w, (v) => v.running)),
    number("Queued", (w) => alive(w, (v) => v.queued)),
    number("CPU", (w) => alive(w, (v) => isNumber(v.cpu) ? `${Math.round(v.cpu * 100)} %` : "")),
    text("Oldest call", (w) => oldestCall(w, group)),
  ], group.workers, (w) => w.name, "No worker has been found yet.");
  const known = group.workers.filter((w) => w.view);
  table(byId("table-memory"), [
    text("Worker", (w) => w.name, "name"),
    number("Resident", (w) => bytes(w.view.resident)),
    number("Shared segments", (w) => bytes(w.view.shared)),
    number("Blocks in use", (w) => w.view.blocks),
    number("Objects owned", (w) => w.view.owned_objects),
    number("References held", (w) => w.view.held_objects),
    number("Contexts", (w) => w.view.autograd_contexts),
    number("GPU lent", (w) => bytes(w.view.cuda_bytes_lent)),
    number("Up", (w) => seconds(w.view.uptime)),
    text("", (w) => w.state === "alive" ? "" : { text: `as of ${seconds(w.answered)} ago`, kind: "problem" }),
  ], known, (w) => w.name, "No worker has answered yet.");
}

function showCalls(group) {
  const count = group.workers.reduce((sum, w) => sum + (w.state === "alive" ? w.view.call_count : 0), 0);
  table(byId("table-calls"), [
    text("Worker", (c) => c.worker, "name"),
    text("Call", (c) => `${c.direction} ${callText(c)}`),
    text("State", (c) => c.state),
    number("Age", (c) => seconds(c.age)),
    number("Time left", (c) => c.deadline === null ? "" : { text: seconds(c.deadline), kind: c.deadline < 0 ? "failed" : "" }),
    number("Size", (c) => bytes(c.request_bytes)),
    text("Made by", (c) => c.parent ? `${c.parent[2]} for ${c.parent[0]}` : ""),
  ], group.calls, (c) => `${c.worker} ${c.direction} ${c.peer} ${c.call_id}`, "No call is in progress.", count - group.calls.length);
}

const latencyColumns = [
  number("Calls/s", (r) => rate(r.per_second)),
  number("p50", (r) => seconds(r.p50)),
  number("p99", (r) => seconds(r.p99)),
  number("Longest", (r) => seconds(r.longest)),
  number("Queue p99", (r) => r.direction === "served" ? seconds(r.queued_p99) : ""),
  number("Size", (r) => bytes((r.request_bytes + r.reply_bytes) / r.calls)),
  number("Failed", (r) => r.failed ? { text: r.failed, kind: "failed" } : ""),
];

function showFunctions(group) {
  const count = group.workers.reduce((sum, w) => sum + (w.state === "alive" ? w.view.function_count : 0), 0);
  table(byId("table-functions"), [
    text("Worker", (r) => r.worker, "name"), text("", (r) => r.direction),
    text("Function", (r) => r.function), text("Peer", (r) => r.peer), ...latencyColumns,
  ], group.functions, (r) => `${r.worker} ${r.direction} ${r.peer} ${r.function}`,
  `No call has ended in the last ${group.window} s.`, count - group.functions.length);
  const pairs = new Map();
  for (const row of group.functions.filter((each) => each.direction === "made")) {
    const key = `${row.worker} → ${row.peer}`;
    const sum = pairs.get(key) || { key, per_second: 0, bytes: 0, failed: 0, slowest: row };
    sum.per_second += row.per_second;
    sum.bytes += (row.request_bytes + row.reply_bytes) / row.calls * row.per_second;
    sum.failed += row.failed;
    if (row.p99 > sum.slowest.p99) sum.slowest = row;
    pairs.set(key, sum);
  }
  table(byId("table-peers"), [
    text("Calls", (p) => p.key, "name"),
    number("Calls/s", (p) => rate(p.per_second)),
    number("Per second", (p) => bytes(p.bytes)),
    number("Failed", (p) => p.failed ? { text: p.failed, kind: "failed" } : ""),
    text("Slowest function", (p) => `${p.slowest.function}, p99 ${seconds(p.slowest.p99)}`),
  ], [...pairs.values()], (p) => p.key, `No call has ended in the last ${group.window} s.`);
  const peers = group.workers.filter((w) => w.state === "alive").flatMap((w) => w.view.peers.map((peer) => ({ worker: w.name, ...peer })));
  table(byId("table-connections"), [
    text("Worker", (p) => p.worker, "name"), text("Peer", (p) => p.name),
    text("State", (p) => ({ text: p.state, kind: p.state === "connected" ? "" : "failed" })),
    text("Transport", (p) => p.transport), text("Reason", (p) => p.reason),
  ], peers.slice(0, 200), (p) => `${p.worker} ${p.name}`, "There are no connections.", peers.length - 200);
}

function showServers(group) {
  const rows = (name) => group.workers.filter((w) => w.view).flatMap((w) => w.view[name].map((row) => ({ worker: w, ...row })));
  const who = text("Worker", (r) => r.worker.name, "name");
  const state = text("State", (r) => ({ text: MARKS[r.worker.state] || "", kind: `nowrap state-${r.worker.state}` }));
  table(byId("table-shards"), [
    who, state, text("Shard", (r) => r.shard), number("Version", (r) => amount(r.version)),
    number("Trainers", (r) => r.trainers.length),
    text("Have reported", (r) => r.waiting.join(", ")),
    text("Missing", (r) => r.waiting.length ? { text: r.trainers.filter((each) => !r.waiting.includes(each)).join(", "), kind: "problem" } : ""),
    text("Staleness", (r) => Object.entries(r.staleness).map(([name, value]) => `${name} ${value}`).join(", ")),
  ], rows("shards"), (r) => `${r.worker.name} ${r.shard}`, "This group has no parameter servers.");
  table(byId("table-batches"), [
    who, text("Function", (r) => r.function), number("Calls", (r) => amount(r.calls)), number("Batches", (r) => amount(r.batches)),
    number("Mean size", (r) => r.mean_size.toFixed(1)), number("Waiting", (r) => r.waiting),
    number("Mean queue", (r) => seconds(r.mean_queue_time)), number("Mean run", (r) => seconds(r.mean_batch_time)),
    number("Failed", (r) => r.failed ? { text: r.failed, kind: "failed" } : ""),
  ], rows("batches"), (r) => `${r.worker.name} ${r.function}`, "This group has no batched functions.");
}

const BAD_EVENTS = ["is dead", "does not answer", "lost"];
function showEvents(group) {
  table(byId("table-events"), [
    text("Time", (e) => clock(e.at), "nowrap"),
    text("Seen by", (e) => e.worker),
    text("Worker", (e) => e.peer, "name"),
    text("What", (e) => ({ text: e.kind, kind: BAD_EVENTS.includes(e.kind) ? "failed" : "" })),
    text("Details", (e) => e.text),
  ], [...group.events].sort((a, b) => b.at - a.at || b.id - a.id), (e) => e.id, "Nothing has happened since the dashboard was opened.");
}
