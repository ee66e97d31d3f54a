// Holds a run's packs back at its target, and gives them again: its trainer stays and waits.

import { Refused, Unreachable, send } from "../api.js";
import { h, setShown, setText } from "../dom.js";

const WORKING = ["STARTING", "RUNNING"];
const AT_REST = ["STOPPED", "FAILED", "SUCCEEDED"];

export class HoldPacks {
  #told;
  #run = null;
  #failedFor = null; // how the run stood when the order was given that the error is about
  #button = h("button", { type: "button", id: "hold-packs", onclick: () => this.#send() });
  #error = h("p", { class: "error", role: "alert", hidden: true });

  /** `told`: called once the target has done it. */
  constructor(told) {
    this.#told = told;
    this.node = h("div", { hidden: true }, this.#button, this.#error);
  }

  show(run) {
    this.#run = run;
    if (standing(run) !== this.#failedFor) setShown(this.#error, false);
    setShown(this.node, WORKING.includes(run.state) || (run.packs_held_back === true && !AT_REST.includes(run.state)));
    setText(this.#button, run.packs_held_back ? "Give packs again" : "Hold packs back");
  }

  async #send() {
    const verb = this.#run.packs_held_back ? "resume" : "pause";
    this.#failedFor = standing(this.#run);
    this.#button.disabled = true;
    setShown(this.#error, false);
    try {
      await send(`/v1/targets/${encodeURIComponent(this.#run.target)}:${verb}`, { run: this.#run.name });
      this.#told();
    } catch (error) {
      if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
      setShown(this.#error, true);
      setText(this.#error, [error.reason, error.message].filter(Boolean).join(": "));
    } finally {
      this.#button.disabled = false;
    }
  }
}

/** What an error about an order speaks of: it is over once this is another. */
function standing(run) {
  return `${run.state} ${run.packs_held_back === true}`;
}
