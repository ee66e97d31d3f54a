// What a run leaves behind: events, checkpoints, log lines, and the definition it was made from.

import { Refused, Unreachable, all, get, pause, poll, runPath, send } from "../api.js";
import { fill, h } from "../dom.js";
import { integer, measure, plural, sources } from "../format.js";
import { badge, command, empty, moment } from "./parts.js";

const NEWEST = 40;
const LOG_LINES = 200;
const LOG_EVERY = 2000;
const EXPORT_EVERY = 2000;
const FORMATS = { vllm: "vLLM", sglang: "SGLang", zlab: "transformers (z-lab)" };

/** Newest first. An event is shown once however often it arrives. */
export class Timeline {
  #events = new Map();
  #list = h("ol", { class: "timeline" });
  #more = h("button", { class: "quiet", hidden: true, onclick: () => this.#showAll() });
  #limit = NEWEST;
  #frame = 0;
  node = h("div", {}, this.#list, this.#more);

  add(event) {
    if (this.#events.has(event.id)) return;
    this.#events.set(event.id, event);
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.#frame = 0;
    const newest = folded([...this.#events.values()].sort((one, other) => other.id - one.id));
    fill(this.#list, newest.slice(0, this.#limit).map(eventRow));
    this.#more.hidden = newest.length <= this.#limit;
    this.#more.textContent = `Show ${plural(newest.length - this.#limit, "earlier event")}`;
  }

  #showAll() {
    this.#limit = Infinity;
    this.#draw();
  }
}

const WORDS = {
  STATE_CHANGED: ({ data }) => [badge(data.state), h("span", { class: "detail" }, `by ${words(data.cause)}`)],
  TRAINER_ASSIGNED: ({ data }) => [`Trainer ${data.trainer} took the run`, detail(`attempt ${data.attempt}`)],
  TRAINER_ENDED: ({ data }) => [`Trainer ${data.trainer} left the run`, detail(words(data.reason))],
  CHECKPOINT_SAVED: ({ data, earlier }) => [
    `Checkpoint at step ${integer(data.step)}`, earlier ? detail(`and ${plural(earlier, "earlier one")}`) : null,
  ],
  CONDITION_CHANGED: ({ data }) => [`${sentence(data.condition)}${data.holds ? "" : ": over"}`],
  CHILD_DIED: () => ["Training process died"],
};

const words = (code) => String(code ?? "").toLowerCase().replaceAll("_", " ");
const sentence = (code) => words(code).replace(/^./, (first) => first.toUpperCase());
const detail = (text) => h("span", { class: "detail" }, text);

/** Checkpoints with nothing between them are one line: a long run has hundreds. `newest` is ordered. */
function folded(newest) {
  const rows = [];
  for (const event of newest) {
    const above = rows.at(-1);
    if (event.type === "CHECKPOINT_SAVED" && above?.type === event.type) above.earlier += 1;
    else rows.push({ ...event, earlier: 0 });
  }
  return rows;
}

function eventRow(event) {
  const what = WORDS[event.type]?.(event) ?? [sentence(event.type)];
  return h("li", { "data-type": event.type, "data-state": event.data.state },
    moment(event.time),
    h("div", {}, h("div", { class: "what" }, what), event.message ? h("p", { class: "message" }, event.message) : null,
      event.source === "control-api" ? null : detail(`said by ${event.source}`)));
}

function heldoutWords(heldout) {
  const bySource = sources(heldout);
  return `accepted length, held out ${measure(heldout.accepted_length)}${bySource ? ` (${bySource})` : ""}`;
}

/** Complete checkpoints on the trainer's disk, newest first. */
export class Checkpoints {
  node = h("div", {}, h("p", { class: "detail" }, "None yet."));

  show(list) {
    const newest = [...list].sort((one, other) => other.step - one.step);
    fill(this.node, newest.length
      ? h("ul", { class: "rows" }, newest.map((one, place) => h("li", { class: "row", title: one.path },
        h("span", { class: "name" }, `step ${integer(one.step)}`), one.is_best ? h("strong", { class: "best" }, "best") : null,
        one.heldout ? h("span", { class: "detail" }, heldoutWords(one.heldout)) : null,
        h("span", { class: "detail end" }, moment(one.saved_at)),
        place === 0 ? h("code", { class: "path" }, one.path) : null)))
      : h("p", { class: "detail" }, "None yet."));
  }
}

/** Writes the newest checkpoint as an engine reads it, and says how far that is. */
export class Exports {
  #name;
  #signal;
  #step = null;
  #isFollowing = false;
  #format = h("select", { id: "export-format", "aria-label": "Format" },
    Object.entries(FORMATS).map(([value, label]) => h("option", { value }, label)));
  #button = h("button", { type: "button", id: "export", onclick: () => this.#export() }, "Export");
  #error = h("p", { class: "error", role: "alert", hidden: true });
  #list = h("ul", { class: "rows", id: "exports" });
  #form = h("div", { class: "row" }, h("span", { class: "name" }, "Export the newest for"), this.#format, this.#button);
  node = h("div", { hidden: true }, this.#form, this.#error, this.#list);

  constructor(name, signal) {
    this.#name = name;
    this.#signal = signal;
  }

  /** `step` of the newest checkpoint; null while there is none. */
  show(step) {
    if (this.#step === null && step !== null) this.#follow();
    this.#step = step;
    this.node.hidden = step === null;
  }

  async #export() {
    this.#error.hidden = true;
    this.#button.disabled = true;
    try {
      await send(runPath(this.#name, `/checkpoints/${this.#step}:export`), { to: this.#format.value });
      this.#follow();
    } catch (error) {
      if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
      this.#error.textContent = error.message;
      this.#error.hidden = false;
    } finally {
      this.#button.disabled = false;
    }
  }

  /** Until none is at work any more. */
  async #follow() {
    if (this.#isFollowing) return;
    this.#isFollowing = true;
    let exports = [];
    do {
      try {
        exports = await all(runPath(this.#name, "/exports"), "exports", this.#signal);
        fill(this.#list, exports.map(exportRow).reverse());
      } catch (error) {
        if (this.#signal.aborted || error instanceof Refused) break;
        if (!(error instanceof Unreachable)) throw error;
      }
      await pause(EXPORT_EVERY, this.#signal);
    } while (!this.#signal.aborted && exports.some((one) => one.ended_at === null));
    this.#isFollowing = false;
  }
}

function exportRow(one) {
  const said = one.state === "FAILED" ? one.lines.slice(-3).join("\n") : one.output;
  return h("li", { class: "row", "data-state": one.state },
    h("span", { class: "name" }, `step ${integer(one.step)}`), h("span", {}, FORMATS[one.format] ?? one.format),
    h("span", { class: "detail end" }, sentence(one.state)), h("code", { class: "path" }, said));
}

/** The last lines of the training process; read only while somebody has opened them. */
export class Logs {
  #lines = h("pre", { class: "log", tabindex: "0", "aria-label": "Last log lines" });
  #path;

  constructor(name, signal) {
    this.#path = runPath(name, `/logs?tail=${LOG_LINES}&page_size=${LOG_LINES}`);
    this.node = h("details", { class: "card", id: "logs" }, h("summary", {}, h("h2", {}, "Log of the training process")),
      this.#lines, h("p", { class: "detail" }, `The last ${LOG_LINES} lines. All of them: `, command(`slipstream run logs ${name}`)));
    let opened = new AbortController();
    this.node.addEventListener("toggle", () => {
      opened.abort();
      opened = new AbortController();
      if (this.node.open) poll(() => this.#read(signal), LOG_EVERY, AbortSignal.any([opened.signal, signal]), (error) => this.#fail(error));
    });
  }

  async #read(signal) {
    const { logs } = await get(this.#path, signal);
    const isAtEnd = this.#lines.scrollTop + this.#lines.clientHeight >= this.#lines.scrollHeight - 8;
    const text = logs.map((one) => one.text).join("\n");
    if (text === this.#lines.textContent) return;
    this.#lines.textContent = text || "Nothing was written yet.";
    if (isAtEnd) this.#lines.scrollTop = this.#lines.scrollHeight;
  }

  #fail(error) {
    if (!(error instanceof Refused)) throw error;
    this.#lines.textContent = `${error.reason}: ${error.message}`;
  }
}

/** What the run was created with, complete. */
export class Definition {
  #text = h("pre", { class: "log", tabindex: "0", "aria-label": "Definition of the run" });
  #facts = h("p", { class: "detail" });
  node = h("details", { class: "card", id: "definition" }, h("summary", {}, h("h2", {}, "Definition")), this.#facts, this.#text);

  show(run) {
    fill(this.#facts, "Created ", moment(run.created_at), ". Directory of the run on the trainer: ", h("code", {}, run.directory));
    this.#text.textContent = JSON.stringify(run.spec, null, 2);
  }
}
