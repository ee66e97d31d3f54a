// All runs, what they train against, and who trains.

import { Unreachable, all, pages, pause, poll, runPath } from "../api.js";
import { KeyedList, fill, h, setShown, setText } from "../dom.js";
import { duration, integer, measure, percent, plural, rate } from "../format.js";
import { MetricSeries } from "../series.js";
import { Sparkline } from "../sparkline.js";
import { Figure, STATES, badge, empty, notice, setBadge, targetRow, trainerRow } from "./parts.js";

const EVERY = 2000;
const ROWS_AT_FIRST = 50;
const SPARKLINE_RECORDS = 1000;

export function showOverview(main, { signal }) {
  const view = new Overview(main, signal);
  poll(() => view.refresh(), EVERY, signal, (error) => view.fail(error));
  view.drawCurves();
}

class Overview {
  #signal;
  #runs = [];
  #filter = null;
  #limit = ROWS_AT_FIRST;
  #waiting = [];
  #figures = {
    runs: new Figure("Runs"),
    trainers: new Figure("Trainers"),
    targets: new Figure("Targets"),
    pace: new Figure("Training", "tokens per second, all runs together"),
  };
  #problem = h("div", {});
  #chips = h("div", { class: "chips", role: "group", "aria-label": "Show runs by state" });
  #table = h("table", { class: "runs", hidden: true });
  #body = h("tbody", {});
  #more = h("button", { class: "quiet", hidden: true, onclick: () => this.#showMore() });
  #nothing = h("div", {});
  #trainers = h("ul", { class: "rows", id: "trainers" });
  #targets = h("ul", { class: "rows", id: "targets" });
  #list = new KeyedList(this.#body, (run) => `${run.name} ${run.created_at}`, (run) => this.#row(run));

  constructor(main, signal) {
    this.#signal = signal;
    const heads = ["Run", "State", "Progress", "Loss", "", "Accepted length", "Tokens/s", "ETA"];
    fill(this.#table, h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))), this.#body);
    fill(main,
      h("div", { class: "title" }, h("h1", {}, "Runs"), h("a", { class: "button primary", href: "#/new" }, "New run")),
      h("dl", { class: "figures card" }, Object.values(this.#figures).map((one) => one.node)),
      this.#problem,
      h("section", { class: "card flush", "aria-label": "Runs" }, this.#chips, this.#table, this.#nothing, this.#more),
      h("div", { class: "columns" },
        h("section", { class: "card" }, h("h2", {}, "Trainers"), this.#trainers),
        h("section", { class: "card" }, h("h2", {}, "Targets"), this.#targets)));
  }

  async refresh() {
    const [runs, trainers, targets] = await Promise.all([
      all("/v1/runs", "runs", this.#signal),
      all("/v1/trainers", "trainers", this.#signal),
      all("/v1/targets", "targets", this.#signal),
    ]);
    this.#runs = runs.reverse();
    fill(this.#problem);
    this.#showFigures(trainers, targets);
    this.#showTable();
    fill(this.#trainers, trainers.length ? trainers.map(trainerRow)
      : empty("No trainer has registered. Start one on a machine with a free device:",
        `drafter-trainer worker --api ${location.origin}`));
    fill(this.#targets, targets.length ? targets.map(targetRow)
      : empty("No target server is registered. With one running:",
        `curl ${location.origin}/v1/targets --json '{"name": "local", "address": "127.0.0.1:50051"}'`));
  }

  fail(error) {
    fill(this.#problem, notice("bad", error.reason || "Error", error.message, { role: "alert" }));
  }

  #showFigures(trainers, targets) {
    const count = (list, member, value) => list.filter((one) => one[member] === value).length;
    const working = this.#runs.filter((run) => run.state === "RUNNING");
    const lost = count(trainers, "status", "LOST");
    const stopped = count(trainers, "status", "STOPPED");
    this.#figures.runs.show(integer(this.#runs.length), `${integer(working.length)} running`);
    this.#figures.trainers.show(integer(trainers.length - lost - stopped),
      `${count(trainers, "status", "BUSY")} busy, ${count(trainers, "status", "FREE")} free${lost ? `, ${lost} lost` : ""}`);
    this.#figures.targets.show(integer(targets.length), `${count(targets, "status", "REACHABLE")} reachable`);
    const pace = working.reduce((sum, run) => sum + (run.throughput?.trainer_tokens_per_second ?? 0), 0);
    this.#figures.pace.show(working.length ? rate(pace) : "–", "tokens/s");
  }

  #showTable() {
    const states = STATES.filter((state) => this.#runs.some((run) => run.state === state));
    if (this.#filter && !states.includes(this.#filter)) this.#filter = null;
    this.#showChips(states);
    const chosen = this.#runs.filter((run) => !this.#filter || run.state === this.#filter);
    this.#list.update(chosen.slice(0, this.#limit));
    const left = chosen.length - this.#limit;
    setShown(this.#more, left > 0);
    setText(this.#more, `Show ${plural(left, "more run", "more runs")}`);
    setShown(this.#table, chosen.length > 0);
    if (this.#runs.length) fill(this.#nothing);
    else if (!this.#nothing.firstChild) {
      fill(this.#nothing, empty("No run yet. Create one with the button above, or on the command line:",
        "slipstream run create RECIPE.toml"));
    }
  }

  #showChips(states) {
    const key = states.map((state) => `${state}${this.#runs.filter((run) => run.state === state).length}`).join() + this.#filter;
    if (this.#chips.dataset.key === key) return;
    this.#chips.dataset.key = key;
    const focused = document.activeElement?.dataset?.filter;
    const chip = (state, count) =>
      h("button", {
        class: "chip", "data-filter": state ?? "ALL", "aria-pressed": String(this.#filter === state),
        onclick: () => ((this.#filter = state), this.#showTable()),
      }, state ?? "ALL", " ", h("b", {}, integer(count)));
    setShown(this.#chips, states.length > 1);
    fill(this.#chips, chip(null, this.#runs.length),
      states.map((state) => chip(state, this.#runs.filter((run) => run.state === state).length)));
    if (focused) this.#chips.querySelector(`[data-filter="${focused}"]`)?.focus();
  }

  #showMore() {
    this.#limit = Infinity;
    this.#showTable();
  }

  #row(run) {
    return new RunRow(run, (row) => {
      if (!this.#waiting.includes(row)) this.#waiting.push(row);
      this.#wake?.();
    });
  }

  #wake = null;

  /** The losses so far, one run after the other, short ones first; what comes later is added as it is seen. */
  async drawCurves() {
    this.#signal.addEventListener("abort", () => this.#wake?.());
    while (!this.#signal.aborted) {
      const row = this.#waiting.sort((one, other) => other.steps - one.steps).pop();
      if (row) await this.#load(row);
      else await new Promise((resolve) => (this.#wake = resolve));
    }
  }

  async #load(row) {
    try {
      await row.load(this.#signal);
    } catch (error) {
      if (!(error instanceof Unreachable)) return; // the run was deleted, or the view left
      this.#waiting.push(row);
      await pause(EVERY, this.#signal);
    }
  }
}

class RunRow {
  #name;
  #series = new MetricSeries();
  #sparkline = new Sparkline();
  #isLoaded = false;
  #wantsCurve;
  #loadNext = 0;
  #lastState = "";
  #state = badge("PENDING");
  #note = h("span", { class: "detail" });
  #bar = h("progress", { max: "1" });
  #steps = h("span", { class: "detail" });
  #accepted = h("span", {});
  #heldout = h("span", { class: "detail" });
  #cells = { loss: h("td", { class: "number" }), accepted: h("td", { class: "number" }, this.#accepted, this.#heldout),
    pace: h("td", { class: "number pace" }), eta: h("td", { class: "number" }) };

  /** `wantsCurve(row)`: its losses should be read, again if they were. */
  constructor(run, wantsCurve) {
    this.#name = run.name;
    this.#wantsCurve = wantsCurve;
    this.steps = run.progress.step;
    const { loss, accepted, pace, eta } = this.#cells;
    const labels = { loss: "Loss", accepted: "Accepted length", pace: "Tokens/s", eta: "ETA" };
    for (const [name, cell] of Object.entries(this.#cells)) cell.dataset.label = labels[name];
    this.node = h("tr", { "data-run": run.name },
      h("th", { scope: "row" }, h("a", { href: `#/runs/${encodeURIComponent(run.name)}` }, run.name), this.#note),
      h("td", {}, this.#state),
      h("td", { class: "progress" }, this.#bar, this.#steps),
      loss, h("td", { class: "curve" }, this.#sparkline.node), accepted, pace, eta);
  }

  async load(signal) {
    await pages(runPath(this.#name, "/metrics"), "metrics", (page) => page.forEach((one) => this.#series.add(one)),
      signal, SPARKLINE_RECORDS);
    this.#isLoaded = true;
    this.#draw();
  }

  #draw() {
    if (this.#isLoaded) this.#sparkline.draw(this.#series.steps, this.#series.columns.loss);
  }

  update(run) {
    this.steps = run.progress.step;
    // Between two looks many steps pass: read them once they are a visible part of the curve, or the last ones.
    if (this.steps >= this.#loadNext || run.state !== this.#lastState) {
      this.#loadNext = this.steps * 1.25 + 20;
      this.#lastState = run.state;
      this.#wantsCurve(this);
    }
    setBadge(this.#state, run.state);
    const remark = run.reason ? `${run.reason}: ${run.message}` : run.conditions[0]?.message || run.note;
    setText(this.#note, remark.split("\n")[0]);
    this.#note.title = remark;
    const { step, max_steps: total, fraction, eta_seconds: eta } = run.progress;
    this.#bar.value = fraction ?? 0;
    this.#bar.setAttribute("aria-label", `${run.name}: ${percent(fraction)}`);
    setText(this.#steps, `${integer(step)} / ${integer(total)}`);
    const latest = run.latest_metrics;
    if (latest) {
      this.#series.add({ step: latest.step, record: latest });
      this.#draw();
    }
    setText(this.#cells.loss, measure(latest?.loss));
    setText(this.#accepted, measure(latest?.mean_matched_prefix_with_bonus));
    const { latest: heldout, best } = run.heldout ?? {};
    setText(this.#heldout, heldout ? `held out ${measure(heldout.accepted_length)}` : "");
    this.#heldout.title = best ? `best: ${measure(best.accepted_length)} at step ${integer(best.step)}` : "";
    setText(this.#cells.pace, run.state === "RUNNING" ? rate(run.throughput?.trainer_tokens_per_second) : "–");
    setText(this.#cells.eta, duration(eta));
  }
}
