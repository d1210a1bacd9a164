// The token, the tabs, and the requests.

const TABS = [["workers", "Workers", showWorkers], ["calls", "Calls", showCalls], ["waits", "Waits", showWaits],
  ["functions", "Functions", showFunctions], ["servers", "Servers", showServers], ["events", "Events", showEvents],
  ["stacks", "Stacks", () => {}], ["training", "Training", () => {}]];
const INTERVAL = 1000, HISTORY = 300;
let token = null, tab = "workers", group = null, past = new Map(), needHistory = true, paused = false, stacks = [];

class Refused extends Error {}

async function ask(path, limit = 15000) {
  const answer = await fetch(path, { headers: { Authorization: `Bearer ${token}` }, cache: "no-store", signal: AbortSignal.timeout(limit) });
  if (answer.status === 401) throw new Refused();
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error);
  return value;
}

function readAddress() {
  const given = /^#token=([0-9a-f]+)$/i.exec(location.hash);
  if (given) {
    sessionStorage.setItem("token", given[1]);
    history.replaceState(null, "", `#${sessionStorage.getItem("tab") || "workers"}`);
  }
  const named = TABS.find(([name]) => `#${name}` === location.hash);
  tab = named ? named[0] : tab;
  sessionStorage.setItem("tab", tab);
  token = sessionStorage.getItem("token");
}

function showTab() {
  for (const [name] of TABS) {
    byId(name).hidden = !token || name !== tab;
    byId(`tab-${name}`).setAttribute("aria-selected", String(name === tab));
  }
  byId(`tab-${tab}`).scrollIntoView({ block: "nearest", inline: "nearest" });
  byId("token").hidden = Boolean(token);
  if (!token) setConnection("token needed", "down");
}

function setConnection(words, kind) {
  byId("connection").textContent = words;
  byId("connection").className = `pill ${kind}`;
  document.body.classList.toggle("stale", kind === "down" && Boolean(token));
}

function remember() {
  const names = new Set();
  for (const worker of group.workers) {
    names.add(worker.name);
    const points = worker.history || past.get(worker.name) || [];
    if (!worker.history && worker.last && worker.last[0] !== points.at(-1)?.[0]) points.push(worker.last);
    past.set(worker.name, points.slice(-HISTORY));
  }
  for (const name of past.keys()) if (!names.has(name)) past.delete(name);
}

// A line stops where a worker did not answer for a while.
function withGaps(points, place) {
  const line = [];
  points.forEach((point, index) => {
    if (index && point[0] - points[index - 1][0] > 8) line.push([point[0], null]);
    line.push([point[0], point[place]]);
  });
  return line;
}

function showGroup() {
  if (!group) return;
  const count = group.workers.filter((worker) => worker.state === "alive").length;
  const total = group.workers.length;
  const words = `${total === 1 ? "worker" : "workers"} ${count === 1 || total === 1 ? "answers" : "answer"}`;
  byId("summary").textContent = group.group ? `group ${group.group} · ${count} of ${total} ${words} · ${clock(group.time)}` : "waiting for workers";
  byId("notice").hidden = !group.problem;
  byId("notice").textContent = group.problem;
  const marks = { workers: total - count, waits: group.cycles.length };
  for (const [name, words] of TABS) {
    const mark = marks[name] ? node("span", { class: "mark" }, name === "waits" ? " ⟳ cycle" : ` ✕ ${marks[name]}`) : "";
    const label = byId(`tab-${name}`);
    if (label.textContent !== words + (mark ? mark.textContent : "")) label.replaceChildren(words, mark);
  }
  if (tab === "workers") {
    const lines = (place) => group.workers.map((worker) => ({ name: worker.name, points: withGaps(past.get(worker.name) || [], place) }));
    lineChart(byId("chart-rate"), { title: "Calls per second", lines: lines(1), x: clock, y: rate, fromZero: true });
    lineChart(byId("chart-p99"), { title: "p99 of served calls", lines: lines(2), x: clock, y: seconds, fromZero: true });
    lineChart(byId("chart-memory"), { title: "Resident memory", lines: lines(3), x: clock, y: bytes, fromZero: true });
  }
  TABS.find(([name]) => name === tab)[2](group);
}

async function update() {
  if (!token || paused || document.hidden) return;
  try {
    group = await ask(`/api/group${needHistory ? "?history=1" : ""}`);
    needHistory = false;
    remember();
    if (tab === "training") training = await ask("/api/training");
    setConnection("live", "live");
  } catch (error) {
    if (error instanceof Refused) {
      sessionStorage.removeItem("token");
      token = null;
      byId("token-problem").textContent = "The token was refused.";
      showTab();
      return;
    }
    needHistory = true;
    setConnection("no connection to the dashboard, trying again", "down");
    return;
  }
  showGroup();
  if (tab === "training") showTraining();
}

async function keepUpdating() {
  for (;;) {
    await update();
    await new Promise((resolve) => setTimeout(resolve, INTERVAL));
  }
}

async function press(button, words, work) {
  const before = button.textContent;
  button.disabled = true;
  button.textContent = words;
  try { await work(); } catch (error) { byId("notice").hidden = false; byId("notice").textContent = `It failed: ${error.message}`; }
  button.textContent = before;
  button.disabled = false;
}

async function downloadTrace() {
  const trace = await ask("/api/trace?seconds=10", 60000);
  const address = URL.createObjectURL(new Blob([JSON.stringify(trace)], { type: "application/json" }));
  node("a", { href: address, download: "trace.json" }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

function useToken() {
  const given = byId("token-text").value.trim().replace(/^.*#token=/, "");
  if (!given) return;
  byId("token-text").value = "";
  byId("token-problem").textContent = "";
  sessionStorage.setItem("token", given);
  readAddress();
  showTab();
  update();
}

byId("tabs").append(...TABS.map(([name, words]) => node("a", { id: `tab-${name}`, href: `#${name}`, role: "tab", "aria-controls": name }, words)));
byId("pause").addEventListener("click", () => {
  paused = !paused;
  byId("pause").textContent = paused ? "Continue" : "Pause";
  byId("pause").setAttribute("aria-pressed", String(paused));
  if (paused) setConnection("paused", "");
});
byId("trace").addEventListener("click", (event) => press(event.target, "Collecting …", downloadTrace));
byId("take-stacks").addEventListener("click", (event) => press(event.target, "Asking …", async () => {
  stacks = await ask("/api/stacks");
  showStacks(stacks);
}));
byId("idle").addEventListener("change", () => { if (stacks.length) showStacks(stacks); });
byId("axis").addEventListener("change", showTraining);
byId("token-use").addEventListener("click", useToken);
byId("token-text").addEventListener("keydown", (event) => { if (event.key === "Enter") useToken(); });
addEventListener("hashchange", () => { readAddress(); showTab(); showGroup(); update(); });
addEventListener("resize", () => { showGroup(); if (tab === "training") showTraining(); });
document.addEventListener("visibilitychange", update);
readAddress();
showTab();
keepUpdating();
