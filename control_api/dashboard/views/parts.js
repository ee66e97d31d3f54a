// Pieces that more than one view shows.

import { h, setText } from "../dom.js";
import { ago, clock, devices } from "../format.js";

/** What a person should see first in a list of states. */
export const STATES = ["RUNNING", "STARTING", "PENDING", "PAUSING", "PAUSED", "STOPPING", "FAILED", "STOPPED", "SUCCEEDED"];

export function badge(state) {
  const node = h("span", { class: "badge" });
  setBadge(node, state);
  return node;
}

export function setBadge(node, state) {
  setText(node, state);
  node.dataset.state = state;
}

export function moment(iso, { relative = false } = {}) {
  return h("time", { datetime: iso, title: iso }, relative ? ago(iso) : clock(iso));
}

/** A number that is looked at, with its name. */
export class Figure {
  #value = h("dd", {});
  #detail = h("span", { class: "detail" });

  constructor(label, title) {
    this.node = h("div", { class: "figure", title }, h("dt", {}, label), this.#value, this.#detail);
  }

  show(value, detail = "") {
    setText(this.#value, value);
    setText(this.#detail, detail);
  }
}

/** A refusal or a condition, in words. */
export function notice(kind, title, text, attributes = {}) {
  return h("div", { class: `notice ${kind}`, ...attributes }, h("strong", {}, title), " ", text);
}

export function command(text) {
  return h("code", { class: "command" }, text);
}

/** A list that may be empty says what to type next. */
export function empty(text, ...commands) {
  return h("div", { class: "empty" }, h("p", {}, text), commands.map((one) => command(one)));
}

export function trainerRow(trainer, { withRun = true } = {}) {
  return h("li", { class: "row" },
    h("span", { class: "name" }, trainer.name), badge(trainer.status),
    h("span", { class: "detail" }, devices(trainer.devices), trainer.host ? ` on ${trainer.host}` : ""),
    h("span", { class: "detail end" },
      withRun ? [trainer.run ? h("a", { href: `#/runs/${encodeURIComponent(trainer.run)}` }, trainer.run) : "no run", " · "] : null,
      "heard ", moment(trainer.last_seen_at, { relative: true })));
}

export function targetRow(target) {
  return h("li", { class: "row" },
    h("span", { class: "name" }, target.name), badge(target.status),
    h("span", { class: "detail" }, target.model ?? "model not known yet", " at ", h("code", {}, target.address)),
    target.detail ? h("span", { class: "detail" }, target.detail) : null);
}
