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
    const rows = steps.map((step, row) => [step, values[row]]).filter(([, value]) => value !== null);
    if (rows.length < 2) return;
    // One point a pixel is all that can be seen.
    const stride = Math.max(1, Math.floor(rows.length / WIDTH));
    const seen = rows.filter((_row, index) => index % stride === 0 || index === rows.length - 1);
    const [low, high] = [Math.min(...seen.map((row) => row[1])), Math.max(...seen.map((row) => row[1]))];
    const [first, last] = [seen[0][0], seen.at(-1)[0]];
    const x = (step) => ((step - first) / (last - first || 1)) * (WIDTH - 2) + 1;
    const y = (value) => HEIGHT - 2 - ((value - low) / (high - low || 1)) * (HEIGHT - 4);
    this.#line.setAttribute("points", seen.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" "));
    this.node.setAttribute("aria-label", `loss from ${seen[0][1].toFixed(2)} to ${seen.at(-1)[1].toFixed(2)}`);
  }
}
