// One run: where it stands, its curves, what happened, and the three buttons.

import { Refused, Unreachable, all, get, pages, pause, poll, runPath, send } from "../api.js";
import { ChartGroup, SMOOTH_WIDTH } from "../charts.js";
import { fill, h, setShown, setText } from "../dom.js";
import { follow } from "../feed.js";
import { duration, integer, measure, percent, plural, rate, sources } from "../format.js";
import { MetricSeries, trailingMean } from "../series.js";
import { HoldPacks } from "./hold_packs.js";
import { Figure, badge, moment, notice, setBadge, targetRow, trainerRow } from "./parts.js";
import { Checkpoints, Definition, Exports, Logs, Timeline } from "./run_records.js";

const EVERY = 2000;
const SOON = 150;
const TRANSPORTS = { shm: "shared memory (shm)", grpc: "gRPC (grpc)" };
const VERBS = {
  resume: { label: "Resume", icon: "M5 3l9 5.5-9 5.5z", desired: "RUNNING" },
  pause: { label: "Pause", icon: "M4 3h3v11H4zM9 3h3v11H9z", desired: "PAUSED" },
  stop: { label: "Stop", icon: "M3.5 3.5h9.5v9.5h-9.5z", desired: "STOPPED" },
};
const OVER = ["FAILED", "SUCCEEDED"];

export function showRun(main, { name, signal }) {
  new RunView(main, name, signal).start();
}

class RunView {
  #main;
  #name;
  #signal;
  #end = new AbortController();
  #run = null;
  #series = new MetricSeries();
  #charts = null;
  #refreshing = null;
  #isStale = false;
  #isRefreshPending = false;
  #checkpointStep = null;
  #state = badge("PENDING");
  #data = h("section", { class: "card", id: "dropped", hidden: true });
  #note = h("p", { class: "remark" });
  #notices = h("div", {});
  #bar = h("progress", { max: "1", id: "progress", "aria-label": "Progress" });
  #steps = h("span", { id: "steps" });
  #eta = h("span", { class: "end", id: "eta" });
  #figures = {
    loss: new Figure("Loss"),
    accepted: new Figure("Accepted length", "tokens per target pass, bonus token included; estimated on training packs"),
    heldout: new Figure("Accepted length, held out", "tokens per target pass on held-out answers, as the newest weights measured"),
    pace: new Figure("Tokens/s"),
    wait: new Figure("Data wait", "share of time in which the trainer waited for packs"),
    checkpoint: new Figure("Checkpoint", "newest one on disk"),
  };
  #chartArea = h("div", { class: "charts" });
  #points = h("p", { class: "remark", id: "points" });
  #workers = h("ul", { class: "rows" });
  #verbs = new VerbButtons((verb) => this.#apply(verb));
  #holdPacks = new HoldPacks(() => this.#refreshSoon());
  #timeline = new Timeline();
  #checkpoints = new Checkpoints();
  #exports;
  #logs;
  #definition = new Definition();

  constructor(main, name, signal) {
    this.#main = main;
    this.#name = name;
    this.#signal = AbortSignal.any([signal, this.#end.signal]);
    this.#exports = new Exports(name, this.#signal);
    this.#logs = new Logs(name, this.#signal);
  }

  async start() {
    fill(this.#main, h("p", { class: "remark" }, "Loading …"));
    await this.#untilAnswered(async () => (this.#run = await get(runPath(this.#name), this.#signal)));
    if (!this.#run || this.#signal.aborted) return;
    const start = this.#run.event_cursor;
    this.#lay();
    this.#show(this.#run);
    poll(() => this.#refresh(), EVERY, this.#signal, (error) => this.#fail(error));
    await this.#untilAnswered(() => this.#loadHistory());
    if (this.#signal.aborted) return;
    // What came while the history was read is sent again, and changes nothing.
    await follow(runPath(this.#name, "/events:stream"), start, {
      receive: (kind, data) => this.#receive(kind, data),
      gone: () => this.#gone(),
      signal: this.#signal,
    });
  }

  #lay() {
    fill(this.#main,
      h("p", { class: "crumb" }, h("a", { href: "#/" }, "Runs"), " /"),
      h("div", { class: "title" }, h("h1", {}, this.#name), this.#state, this.#verbs.node),
      this.#note, this.#notices,
      h("section", { class: "card", "aria-label": "Progress" },
        h("div", { class: "progress-line" }, this.#steps, this.#eta), this.#bar,
        h("dl", { class: "figures" }, Object.values(this.#figures).map((one) => one.node))),
      h("section", { "aria-label": "Curves" },
        h("div", { class: "section-line" }, h("h2", {}, "Curves"), this.#points), this.#chartArea),
      h("div", { class: "columns wide-left" },
        h("section", { class: "card" }, h("h2", {}, "Events"), this.#timeline.node),
        h("div", { class: "stack" },
          h("section", { class: "card" }, h("h2", {}, "Trainer and target"), this.#workers, this.#holdPacks.node),
          h("section", { class: "card" }, h("h2", {}, "Checkpoints"), this.#checkpoints.node, this.#exports.node))),
      this.#data, this.#logs.node, this.#definition.node);
    this.#charts = new ChartGroup(this.#chartArea, this.#series, this.#signal);
    this.#definition.show(this.#run);
  }

  async #loadHistory() {
    const take = (kind) => (page) => page.forEach((one) => this.#take(kind, one));
    await Promise.all([
      pages(runPath(this.#name, "/metrics"), "metrics", take("metric"), this.#signal),
      pages(runPath(this.#name, "/events"), "events", take("event"), this.#signal),
    ]);
  }

  /** Tries until there is an answer; a refusal is shown instead. */
  async #untilAnswered(task) {
    while (!this.#signal.aborted) {
      try {
        return await task();
      } catch (error) {
        if (this.#signal.aborted) return null;
        if (error instanceof Refused && error.status === 404) return this.#gone();
        if (!(error instanceof Unreachable)) this.#fail(error);
        await pause(EVERY, this.#signal);
      }
    }
    return null;
  }

  // ---- what comes in

  #receive(kind, data) {
    this.#take(kind, data);
    this.#refreshSoon();
  }

  #take(kind, data) {
    if (kind === "event") this.#timeline.add(data);
    if (kind === "metric") {
      this.#series.add(data);
      this.#charts.draw();
      const left = this.#series.notApplied;
      setText(this.#points, `${plural(this.#series.length, "step")} recorded`
        + (left ? `, ${plural(left, "step")} not applied: loss or gradient was not finite` : ""));
      this.#points.dataset.count = String(this.#series.length);
    }
  }

  /** Once for all that arrives together: metrics come in batches. */
  async #refreshSoon() {
    if (this.#isRefreshPending) return;
    this.#isRefreshPending = true;
    await pause(SOON, this.#signal);
    this.#isRefreshPending = false;
    if (!this.#signal.aborted) await this.#refresh().catch((error) => this.#fail(error));
  }

  /** One request at a time; one more when something happened in the meantime. */
  async #refresh() {
    this.#isStale = true;
    this.#refreshing ??= this.#refreshWhileStale().finally(() => (this.#refreshing = null));
    return this.#refreshing;
  }

  async #refreshWhileStale() {
    while (this.#isStale && !this.#signal.aborted) {
      this.#isStale = false;
      this.#show(await get(runPath(this.#name), this.#signal));
      await this.#showWorkers();
    }
  }

  async #showWorkers() {
    const [trainers, targets] = await Promise.all([
      all("/v1/trainers", "trainers", this.#signal), all("/v1/targets", "targets", this.#signal),
    ]);
    const own = trainers.filter((one) => this.#run.trainers.includes(one.name));
    fill(this.#workers,
      own.length > 0 ? own.map((one) => trainerRow(one, { withRun: false })) : h("li", { class: "row" }, h("span", { class: "detail" }, "No trainer works on it now.")),
      targets.filter((one) => one.name === this.#run.target).map(targetRow),
      this.#run.transport === null ? null : h("li", { class: "row", id: "transport" },
        h("span", { class: "detail" }, `Packs are read over ${TRANSPORTS[this.#run.transport] ?? this.#run.transport}.`)));
    if (this.#run.latest_checkpoint_step !== this.#checkpointStep) {
      const list = await all(runPath(this.#name, "/checkpoints"), "checkpoints", this.#signal);
      this.#checkpoints.show(list);
      this.#exports.show(this.#run.latest_checkpoint_step);
      this.#checkpointStep = this.#run.latest_checkpoint_step;
    }
  }

  // ---- what is shown

  #show(run) {
    this.#run = run;
    setBadge(this.#state, run.state);
    setText(this.#note, run.note);
    setShown(this.#note, run.note !== "");
    this.#verbs.show(run);
    this.#holdPacks.show(run);
    this.#showNotices(run);
    this.#showProgress(run);
    this.#showDropped(run.data);
    const latest = run.latest_metrics;
    this.#figures.loss.show(measure(latest?.loss), this.#mean("loss"));
    this.#figures.accepted.show(measure(latest?.mean_matched_prefix_with_bonus), this.#mean("accepted"));
    this.#showHeldout(run.heldout);
    const pace = run.throughput;
    const target = pace?.target_tokens_per_second;
    this.#figures.pace.show(rate(pace?.trainer_tokens_per_second), typeof target === "number" ? `target ${rate(target)}` : "");
    this.#figures.wait.show(percent(pace?.data_wait_ratio), pace?.bottleneck ? `bottleneck: ${pace.bottleneck.toLowerCase()}` : "");
    this.#figures.checkpoint.show(integer(run.latest_checkpoint_step), run.latest_checkpoint_step === null ? "" : "newest step on disk");
    document.title = `${run.state} ${percent(run.progress.fraction)} · ${run.name}`;
  }

  #showHeldout(heldout) {
    setShown(this.#figures.heldout.node, heldout !== null);
    const best = heldout?.best;
    this.#figures.heldout.show(measure(heldout?.latest?.accepted_length),
      best ? `best ${measure(best.accepted_length)} at step ${integer(best.step)}` : "");
    this.#figures.heldout.node.title = sources(heldout?.latest);
  }

  /** Records that gave nothing to learn from; nobody needs to be told that there are none. */
  #showDropped(data) {
    setShown(this.#data, data !== null && data.num_dropped > 0);
    const key = JSON.stringify(data);
    if (this.#data.hidden || this.#data.dataset.key === key) return;
    this.#data.dataset.key = key;
    fill(this.#data,
      h("h2", {}, `${integer(data.num_dropped)} of ${plural(data.read, "record")} dropped`),
      h("ul", { class: "rows" }, data.dropped.map((one) => h("li", { class: "row" },
        h("span", {}, `${integer(one.count)}: ${one.words}`),
        h("span", { class: "detail" }, one.examples.join(", "), one.count > one.examples.length ? ", …" : "")))));
  }

  /** One step is noise; what the last ones say together. */
  #mean(name) {
    const mean = trailingMean(this.#series.columns[name].slice(-SMOOTH_WIDTH), SMOOTH_WIDTH).at(-1) ?? null;
    return mean === null ? "" : `mean of ${SMOOTH_WIDTH}: ${measure(mean)}`;
  }

  #showNotices(run) {
    const failure = run.reason ? [notice("bad", run.reason, run.message, { role: "alert" })] : [];
    const conditions = run.conditions.map((one) =>
      notice("warn", one.type, h("span", {}, one.message, " ", h("span", { class: "detail" }, "since ", moment(one.since)))));
    const key = JSON.stringify([run.reason, run.message, run.conditions]);
    if (this.#notices.dataset.key === key) return;
    this.#notices.dataset.key = key;
    fill(this.#notices, failure, conditions);
  }

  #showProgress({ state, progress }) {
    const { step, max_steps: total, fraction, eta_seconds: eta } = progress;
    this.#bar.value = fraction ?? 0;
    this.#bar.dataset.state = state;
    setText(this.#steps, `${integer(step)} of ${total === null ? "a number of steps not known yet" : plural(total, "step")}`
      + (fraction === null ? "" : ` · ${percent(fraction, 1)}`));
    const ends = eta === null ? null : new Date(Date.now() + eta * 1000);
    const when = ends?.toLocaleTimeString(undefined, { hour: "2-digit", minute: "2-digit", hour12: false });
    setText(this.#eta, eta === null ? "" : `ETA ${duration(eta)}, at ${when}`);
  }

  async #apply(verb) {
    this.#show(await send(runPath(this.#name, `:${verb}`)));
    this.#refreshSoon();
  }

  #fail(error) {
    if (this.#signal.aborted || error instanceof Unreachable) return;
    if (error instanceof Refused && error.status === 404) return void this.#gone();
    if (!(error instanceof Refused)) throw error;
    fill(this.#notices, notice("bad", error.reason, error.message, { role: "alert" }));
    this.#notices.dataset.key = "";
  }

  #gone() {
    if (this.#signal.aborted) return null;
    const text = this.#run ? "This run was deleted. Its files stay on the trainer's disk." : "There is no run of this name.";
    fill(this.#main, h("h1", {}, this.#name), h("p", {}, text), h("p", {}, h("a", { href: "#/" }, "All runs")));
    this.#end.abort();
    return null;
  }
}

/** Enabled by what the run allows, pressed where it is wanted already; never by knowledge of our own. */
class VerbButtons {
  #apply;
  #buttons = {};
  #error = h("p", { class: "error", role: "alert", hidden: true });
  #confirm = h("dialog", { "aria-labelledby": "stop-title" });
  #run = null;
  #isBusy = false;

  constructor(apply) {
    this.#apply = apply;
    for (const [verb, { label, icon }] of Object.entries(VERBS)) {
      this.#buttons[verb] = h("button", { type: "button", "data-verb": verb, disabled: true, onclick: () => this.#click(verb) },
        symbol(icon), label);
    }
    this.#confirm.append(
      h("form", { method: "dialog" },
        h("h2", { id: "stop-title" }, "Stop this run?"),
        h("p", {}, "The trainer saves a checkpoint and is free for other runs. Resume goes on from there."),
        h("div", { class: "actions" },
          h("button", { value: "" }, "Keep training"), h("button", { class: "danger", value: "stop", id: "confirm-stop" }, "Stop run"))));
    this.#confirm.addEventListener("close", () => this.#confirm.returnValue === "stop" && this.#send("stop"));
    this.node = h("div", { class: "verbs" },
      h("div", { role: "group", "aria-label": "Control the run" }, Object.values(this.#buttons)), this.#error, this.#confirm);
  }

  show(run) {
    this.#run = run;
    for (const [verb, button] of Object.entries(this.#buttons)) {
      const isAllowed = run.allowed_verbs.includes(verb);
      button.disabled = this.#isBusy || !isAllowed;
      // What a run that is not over has been told; saying it again would change nothing.
      const isFollowed = !isAllowed && !OVER.includes(run.state) && run.desired_state === VERBS[verb].desired;
      button.setAttribute("aria-pressed", String(isFollowed));
    }
  }

  #click(verb) {
    if (verb !== "stop") return this.#send(verb);
    this.#confirm.returnValue = "";
    this.#confirm.showModal();
  }

  async #send(verb) {
    this.#isBusy = true;
    this.#error.hidden = true;
    this.show(this.#run);
    try {
      await this.#apply(verb);
    } catch (error) {
      if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
      this.#error.hidden = false;
      setText(this.#error, [error.reason, error.message].filter(Boolean).join(": "));
    } finally {
      this.#isBusy = false;
      this.show(this.#run);
    }
  }
}

function symbol(path) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 16 17");
  svg.setAttribute("aria-hidden", "true");
  const drawn = document.createElementNS("http://www.w3.org/2000/svg", "path");
  drawn.setAttribute("d", path);
  svg.append(drawn);
  return svg;
}
