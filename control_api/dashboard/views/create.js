// The form that creates a run.

import { Refused, Unreachable, all, get, newKey, poll, send } from "../api.js";
import { fill, h, setShown, setText } from "../dom.js";
import { empty, notice } from "./parts.js";

const EVERY = 5000;

export function showCreate(main, { signal }) {
  new CreateForm(main, signal).start();
}

class CreateForm {
  #signal;
  #recipes = [];
  #key = null;
  #chooser = h("select", { id: "recipe-choice", onchange: () => this.#choose() }, h("option", { value: "" }, "My own"));
  #summary = h("p", { class: "remark" });
  #target = h("select", { id: "target", required: true });
  #noTarget = h("div", {});
  #name = h("input", { id: "name", placeholder: "as in the recipe", autocomplete: "off", spellcheck: "false", maxlength: "63" });
  #recipe = h("textarea", { id: "recipe", rows: "18", spellcheck: "false", required: true, autocapitalize: "off" });
  #overrides = h("textarea", { id: "overrides", rows: "3", spellcheck: "false", placeholder: "train.max_steps=200", autocapitalize: "off" });
  #note = h("input", { id: "note", maxlength: "4000", autocomplete: "off" });
  #submit = h("button", { class: "primary", type: "submit" }, "Create run");
  #problem = h("div", { role: "alert" });
  #errors = {};

  constructor(main, signal) {
    this.#signal = signal;
    const form = h("form", { class: "create card", novalidate: true,
      onsubmit: (event) => (event.preventDefault(), this.#create()), oninput: () => (this.#key = null) },
      h("div", { class: "pair" },
        this.#field("recipe-choice", "Recipe", this.#chooser, "Shipped with Slipstream, or your own text below."),
        this.#field("target", "Target", this.#target, "The server whose model the drafter learns from.")),
      this.#noTarget, this.#summary,
      this.#field("recipe", "Text of the recipe", this.#recipe, "TOML. Paths are those of the target server."),
      h("div", { class: "pair" },
        this.#field("name", "Name", this.#name, "Lower case letters, digits, dot, dash, underscore."),
        this.#field("note", "Note", this.#note, "For people.")),
      this.#field("overrides", "Overrides", this.#overrides, "One key=value a line; a later one wins."),
      this.#problem, h("div", { class: "actions" }, h("a", { class: "button", href: "#/" }, "Cancel"), this.#submit));
    fill(main, h("div", { class: "title" }, h("h1", {}, "New run")), form);
  }

  start() {
    poll(() => this.#loadTargets(), EVERY, this.#signal, (error) => this.#fail(error));
    this.#loadRecipes().catch((error) => this.#signal.aborted || this.#fail(error));
  }

  #field(id, label, control, hint) {
    this.#errors[id] = h("ul", { class: "error", id: `${id}-error`, hidden: true });
    control.setAttribute("aria-describedby", `${id}-hint ${id}-error`);
    return h("div", { class: "field" }, h("label", { for: id }, label), control,
      h("p", { class: "hint", id: `${id}-hint` }, hint), this.#errors[id]);
  }

  async #loadTargets() {
    const targets = await all("/v1/targets", "targets", this.#signal);
    const shown = targets.map((one) => [one.name, `${one.name} · ${one.status.toLowerCase()}${one.model ? ` · ${one.model}` : ""}`]);
    const key = JSON.stringify(shown);
    if (this.#target.dataset.key === key) return;
    this.#target.dataset.key = key;
    const chosen = this.#target.value;
    fill(this.#target, shown.map(([value, text]) => h("option", { value }, text)));
    if (targets.some((one) => one.name === chosen)) this.#target.value = chosen;
    fill(this.#noTarget, targets.length ? null
      : empty("No target server is registered. With one running:",
        `curl ${location.origin}/v1/targets --json '{"name": "local", "address": "127.0.0.1:50051"}'`));
  }

  async #loadRecipes() {
    this.#recipes = (await get("/v1/recipes", this.#signal)).recipes;
    fill(this.#chooser, this.#recipes.map((one) => h("option", { value: one.name }, one.name)), h("option", { value: "" }, "My own"));
    if (this.#recipe.value === "") this.#choose();
    else this.#chooser.value = "";
  }

  #choose() {
    const recipe = this.#recipes.find((one) => one.name === this.#chooser.value);
    setText(this.#summary, recipe?.summary ?? "");
    setShown(this.#summary, Boolean(recipe?.summary));
    this.#recipe.value = recipe?.text ?? "";
    this.#key = null;
  }

  async #create() {
    this.#clear();
    const name = this.#name.value.trim();
    const overrides = this.#overrides.value.split("\n").map((line) => line.trim()).filter(Boolean);
    if (name) overrides.push(`name="${name.replaceAll("\\", "\\\\").replaceAll('"', '\\"')}"`);
    const body = { recipe: this.#recipe.value, target: this.#target.value, overrides, note: this.#note.value };
    this.#submit.disabled = true;
    // The same content sent twice, by an impatient person too, makes one run.
    this.#key ??= newKey();
    try {
      const run = await send("/v1/runs", body, this.#key);
      if (!this.#signal.aborted) location.hash = `#/runs/${encodeURIComponent(run.name)}`;
    } catch (error) {
      this.#fail(error);
    } finally {
      this.#submit.disabled = false;
    }
  }

  #fail(error) {
    if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
    const places = error.errors?.map((one) => [this.#place(one.location), one]) ?? [];
    for (const [place, { location, detail }] of places) {
      if (place) this.#show(place, location.replace(/^body\.(spec\.?)?/, ""), detail);
    }
    const atFields = places.length > 0 && places.every(([place]) => place);
    const whole = FIELD_OF_REASON[error.reason];
    if (whole && !places.length) this.#show(whole, "", error.message);
    else if (!atFields) fill(this.#problem, notice("bad", error.reason || "No answer", error.message));
    document.querySelector("[aria-invalid]")?.focus();
  }

  /** The field that holds the key which is wrong. */
  #place(location) {
    if (location.startsWith("body.overrides")) return "overrides";
    if (location.startsWith("body.target")) return "target";
    if (location.startsWith("body.note")) return "note";
    if (location.startsWith("body.recipe")) return "recipe";
    if (!location.startsWith("body.spec")) return null;
    const key = location.replace(/^body\.spec\.?/, "");
    if (key === "name" && this.#name.value) return "name";
    const keys = this.#overrides.value.split("\n").map((line) => line.split("=")[0].trim());
    return key && keys.includes(key) ? "overrides" : "recipe";
  }

  #show(id, key, text) {
    setShown(this.#errors[id], true);
    this.#errors[id].append(h("li", {}, key ? [h("code", {}, key), ": "] : null, text));
    document.getElementById(id).setAttribute("aria-invalid", "true");
  }

  #clear() {
    fill(this.#problem);
    for (const [id, list] of Object.entries(this.#errors)) {
      fill(list);
      setShown(list, false);
      document.getElementById(id).removeAttribute("aria-invalid");
    }
  }
}

const FIELD_OF_REASON = { NAME_TAKEN: "name", TARGET_UNKNOWN: "target", PATH_NOT_ALLOWED: "recipe" };
