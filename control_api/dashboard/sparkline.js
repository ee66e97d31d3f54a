// The loss of a run, as small as a word.

const NAMESPACE = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [112, 26];

const element = (tag, attributes) => {
  const node = document.createElementNS(NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
};

/** An SVG; `draw(steps, values)` shows a curve in it. */
export class Sparkline {
  node = element("svg", { class: "sparkline", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": "no loss yet" });
  #line = element("polyline", { fill: "none" });

  constructor() {
    this.node.append(this.#line);
  }

  draw(steps, values) {
    const [first, last] = [steps[0] ?? 0, steps.at(-1) ?? 0];
    const x = (step) => ((step - first) / (last - first || 1)) * (WIDTH - 2) + 1;
    // One point a pixel is all that can be seen.
    const seen = new Map();
    steps.forEach((step, row) => values[row] === null || seen.set(Math.round(x(step)), values[row]));
    if (seen.size < 2) return;
    const losses = [...seen.values()];
    const [low, high] = [Math.min(...losses), Math.max(...losses)];
    const y = (value) => HEIGHT - 2 - ((value - low) / (high - low || 1)) * (HEIGHT - 4);
    this.#line.setAttribute("points", [...seen].map(([pixel, value]) => `${pixel},${y(value).toFixed(1)}`).join(" "));
    this.node.setAttribute("aria-label", `loss from ${losses[0].toFixed(2)} to ${losses.at(-1).toFixed(2)}`);
  }
}
