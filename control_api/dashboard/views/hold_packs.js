// Holds a run's packs back at its target, and gives them again: its trainer stays and waits.

import { Refused, Unreachable, send } from "../api.js";
import { h, setShown, setText } from "../dom.js";

const WORKING = ["STARTING", "RUNNING"];

export class HoldPacks {
  #told;
  #run = null;
  #button = h("button", { type: "button", id: "hold-packs", onclick: () => this.#send() });
  #error = h("p", { class: "error", role: "alert", hidden: true });

  /** `told`: called once the target has done it. */
  constructor(told) {
    this.#told = told;
    this.node = h("div", { hidden: true }, this.#button, this.#error);
  }

  show(run) {
    this.#run = run;
    setShown(this.node, run.packs_held_back === true || WORKING.includes(run.state));
    setText(this.#button, run.packs_held_back ? "Give packs again" : "Hold packs back");
  }

  async #send() {
    const verb = this.#run.packs_held_back ? "resume" : "pause";
    this.#button.disabled = true;
    this.#error.hidden = true;
    try {
      await send(`/v1/targets/${encodeURIComponent(this.#run.target)}:${verb}`, { run: this.#run.name });
      this.#told();
    } catch (error) {
      if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
      this.#error.hidden = false;
      setText(this.#error, [error.reason, error.message].filter(Boolean).join(": "));
    } finally {
      this.#button.disabled = false;
    }
  }
}
