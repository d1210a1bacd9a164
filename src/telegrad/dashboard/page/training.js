// The values that workers report, and the stacks.

const FIRST_NAMES = ["loss", "accuracy", "AUC", "reward", "samples/s", "version", "staleness"];
const MAX_CHARTS = 24;
let training = null;

function showTraining() {
  if (!training) return;
  const byTime = document.querySelector("#axis input:checked").value === "time";
  const order = (name) => { const place = FIRST_NAMES.indexOf(name); return place < 0 ? FIRST_NAMES.length : place; };
  const names = [...new Set(training.workers.flatMap((worker) => Object.keys(worker.series)))]
    .sort((a, b) => order(a) - order(b) || a.localeCompare(b)).slice(0, MAX_CHARTS);
  const host = byId("training-charts");
  while (host.children.length > Math.max(names.length, 1)) host.lastChild.remove();
  while (host.children.length < names.length) host.append(node("div"));
  if (!names.length) {
    host.replaceChildren(node("p", { class: "empty" }, "No worker has reported values. telegrad.report(loss=...) does it; telegrad train and telegrad.ps.Optimizer do it by themselves."));
  }
  names.forEach((name, index) => {
    if (host.children[index].className === "empty") host.replaceChildren(...names.map(() => node("div")));
    const lines = training.workers.filter((worker) => worker.series[name]).map((worker) => ({
      name: worker.name, points: worker.series[name].map(([step, time, value]) => [byTime ? time : step, value]),
    }));
    lineChart(host.children[index], { title: name, lines, x: byTime ? clock : (step) => `step ${Math.round(step).toLocaleString("en")}`, y: amount, fromZero: name !== "loss" });
  });
  table(byId("table-training"), [
    text("Worker", (w) => w.name, "name"),
    text("State", (w) => ({ text: MARKS[w.state] || w.state, kind: `nowrap state-${w.state}` })),
    ...names.map((name) => number(name, (w) => {
      const point = w.series[name]?.at(-1);
      return point ? { text: amount(point[2]), kind: point[2] === null ? "failed" : "", title: `step ${point[0]}, ${clock(point[1])}` } : "";
    })),
  ], training.workers, (w) => w.name, "No values.");
}

function showStacks(replies) {
  const all = byId("idle").checked;
  byId("stack-list").replaceChildren(...replies.map((reply) => {
    const box = node("div", { class: "stack" }, node("h3", {}, reply.name));
    if (reply.problem) box.append(node("p", { class: "problem" }, reply.problem));
    const threads = reply.threads.filter((thread) => all || !thread.idle);
    for (const thread of threads) {
      const serves = thread.serves ? `, serves ${thread.serves.function} for ${thread.serves.caller}, ${seconds(thread.serves.age)}` : "";
      const lines = thread.frames.filter((frame) => !/^Thread\.(_bootstrap|run)/.test(frame.function)).map((frame) => `File "${frame.file}", line ${frame.line}, in ${frame.function}\n    ${frame.text}`);
      const details = node("details", {}, node("summary", {}, `${thread.thread}${serves}`), node("pre", {}, lines.join("\n")));
      details.open = Boolean(thread.serves) || thread.main;
      box.append(details);
    }
    const hidden = reply.threads.length - threads.length;
    if (hidden) box.append(node("p", { class: "more" }, `${hidden} waiting threads of Telegrad`));
    return box;
  }));
}
