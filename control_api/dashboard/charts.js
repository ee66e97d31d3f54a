// Curves over steps. All charts of a page share the crosshair and the zoom.

import uPlot from "./vendor/uplot/uPlot.esm.js";
import { h, setText } from "./dom.js";
import { compact, integer, measure, percent, rate } from "./format.js";
import { newestSoFar, trailingMean } from "./series.js";

export const SMOOTH_WIDTH = 20;
const HEIGHT = 210;
const FEWEST_STEPS_SHOWN = 10;

const column = (name) => (series) => series.columns[name];
const smooth = (name) => (series) => trailingMean(series.columns[name], SMOOTH_WIDTH);

const SOURCE_COLORS = ["--curve-1", "--curve-3", "--curve-5", "--curve-4"];

/** All sources together, then each; by the newest measurement so far. */
const heldoutCurves = (series) => [
  { label: "all", read: (from) => newestSoFar(from.columns.heldout), color: "--curve-2", axis: "left", show: measure },
  ...[...series.sources.keys()].sort().map((source, index) => ({
    label: source,
    read: (from) => newestSoFar(from.sources.get(source)),
    color: SOURCE_COLORS[index % SOURCE_COLORS.length],
    thin: true,
    axis: "left",
    show: measure,
  })),
];

/**
 * What is drawn: title, remark, and the curves with their axis (`left` or `right`). Where curves depend on what was
 * measured they are a function of the series, and the chart is hidden until `has` says that there is something.
 */
export const CHARTS = [
  {
    id: "loss",
    title: "Loss",
    remark: "weighted mean over the slots of a block",
    curves: [
      { label: "step", read: column("loss"), color: "--curve-1", faint: true, axis: "left", show: measure },
      { label: `mean of ${SMOOTH_WIDTH}`, read: smooth("loss"), color: "--curve-1", axis: "left", show: measure },
    ],
  },
  {
    id: "heldout",
    title: "Accepted length, held out",
    remark: "tokens per target pass, walked on the target's own text",
    curves: heldoutCurves,
    has: (series) => series.sources.size > 0,
  },
  {
    id: "accepted",
    title: "Accepted length",
    remark: "tokens per target pass, on training packs",
    curves: [
      { label: "step", read: column("accepted"), color: "--curve-2", faint: true, axis: "left", show: measure },
      { label: `mean of ${SMOOTH_WIDTH}`, read: smooth("accepted"), color: "--curve-2", axis: "left", show: measure },
    ],
  },
  {
    id: "optimizer",
    title: "Learning rate and gradient norm",
    remark: "the norm before clipping",
    curves: [
      { label: "learning rate", read: column("learningRate"), color: "--curve-3", axis: "left", show: measure },
      { label: "gradient norm", read: column("gradientNorm"), color: "--curve-4", thin: true, axis: "right", show: measure },
    ],
  },
  {
    id: "pace",
    title: "Pace",
    remark: `means of ${SMOOTH_WIDTH} steps; data wait: share of time without packs`,
    curves: [
      { label: "tokens/s", read: column("tokensPerSecond"), color: "--curve-5", faint: true, axis: "left", show: rate },
      { label: "mean", read: smooth("tokensPerSecond"), color: "--curve-5", axis: "left", show: rate, fromZero: true },
      { label: "data wait", read: smooth("dataWait"), color: "--curve-4", axis: "right", show: percent, share: true },
    ],
  },
];

/** All charts of a run, in `container`. */
export class ChartGroup {
  #charts;
  #series;
  #zoom = null;
  #frame = 0;
  #resized = new ResizeObserver((entries) => entries.forEach((one) => this.#charts.forEach((chart) => chart.fit(one))));
  #darkness = matchMedia("(prefers-color-scheme: dark)");
  #recolor = () => this.#charts.forEach((chart) => chart.rebuild(this.#series));

  constructor(container, series, signal) {
    this.#series = series;
    this.#charts = CHARTS.map((definition) => new Chart(definition, (range) => this.#zoomTo(range)));
    container.replaceChildren(...this.#charts.map((chart) => chart.node));
    this.#charts.forEach((chart) => {
      chart.rebuild(series);
      this.#resized.observe(chart.plotNode);
    });
    this.#darkness.addEventListener("change", this.#recolor);
    signal.addEventListener("abort", () => this.#destroy(), { once: true });
  }

  /** Draws what the series holds, once in the next frame however often it is asked for. */
  draw() {
    this.#frame ||= requestAnimationFrame(() => {
      this.#frame = 0;
      this.#charts.forEach((chart) => chart.draw(this.#series, this.#zoom));
    });
  }

  #zoomTo(range) {
    this.#zoom = range;
    this.draw();
  }

  #destroy() {
    cancelAnimationFrame(this.#frame);
    this.#resized.disconnect();
    this.#darkness.removeEventListener("change", this.#recolor);
    this.#charts.forEach((chart) => chart.destroy());
  }
}

class Chart {
  #definition;
  #curves = [];
  #onZoom;
  #plot = null;
  #zoom = null;
  #series = null;
  #readout = h("span", { class: "readout-step" });
  #legend = h("p", { class: "readout" });
  #values = [];
  #width = 400; // until the observer has measured it

  constructor(definition, onZoom) {
    this.#definition = definition;
    this.#onZoom = onZoom;
    this.plotNode = h("div", {
      class: "plot", tabindex: "0", role: "img",
      onkeydown: (event) => this.#moveCrosshair(event), onblur: () => this.#showLast(),
    });
    this.node = h("figure", { class: "chart card", id: `chart-${definition.id}` },
      h("figcaption", {}, h("h3", {}, definition.title), h("p", { class: "remark" }, definition.remark),
        this.#legend),
      this.plotNode);
  }

  #curvesOf(series) {
    const { curves } = this.#definition;
    return typeof curves === "function" ? curves(series) : curves;
  }

  #layLegend() {
    this.#values = this.#curves.map(() => h("b", { class: "value" }));
    this.#legend.replaceChildren(this.#readout, ...this.#curves.map((curve, index) =>
      h("span", { class: "legend" }, h("i", { class: `swatch ${curve.color.slice(2)}${curve.faint ? " faint" : ""}` }),
        curve.label, " ", this.#values[index])));
  }

  rebuild(series) {
    this.destroy();
    this.#series = series;
    this.#curves = this.#curvesOf(series);
    this.#layLegend();
    this.plotNode.replaceChildren();
    this.#plot = new uPlot(this.#options(this.#width), this.#data(series), this.plotNode);
    this.draw(series, this.#zoom);
  }

  draw(series, zoom) {
    this.node.hidden = this.#definition.has?.(series) === false;
    this.#zoom = zoom;
    if (this.#curvesOf(series).length !== this.#curves.length) return this.rebuild(series);
    this.#series = series;
    const [first, last] = [series.steps[0] ?? 0, series.steps.at(-1) ?? 0];
    const range = zoom ?? { min: first, max: Math.max(last, first + FEWEST_STEPS_SHOWN) };
    this.#plot.batch(() => {
      this.#plot.setData(this.#data(series), false);
      this.#plot.setScale("x", range);
    });
    this.node.dataset.points = String(series.length);
    this.node.dataset.lastStep = String(last);
    this.#show(this.#plot.cursor.idx);
  }

  fit({ target, contentRect }) {
    const width = Math.floor(contentRect.width);
    if (target !== this.plotNode || width === 0) return;
    this.#width = width;
    this.#plot.setSize({ width, height: HEIGHT });
  }

  destroy() {
    this.#plot?.destroy();
    this.#plot = null;
  }

  #data(series) {
    return [series.steps, ...this.#curves.map((curve) => curve.read(series))];
  }

  #options(width) {
    const style = getComputedStyle(this.plotNode);
    const color = (name) => style.getPropertyValue(name).trim();
    const grid = { stroke: color("--chart-grid"), width: 1 };
    const axis = { stroke: color("--text-quiet"), font: `11px ${style.fontFamily}`, grid, ticks: { show: false } };
    const numbers = (curve) => (_plot, splits) => splits.map(curve.share ? (value) => percent(value) : compact);
    const sides = ["left", "right"].flatMap((side) => {
      const curve = this.#curves.find((one) => one.axis === side);
      if (!curve) return [];
      const own = { ...axis, scale: side, size: 52, gap: 4, values: numbers(curve) };
      return [side === "left" ? own : { ...own, side: 1, grid: { show: false } }];
    });
    return {
      width,
      height: HEIGHT,
      padding: [8, this.#curves.some((one) => one.axis === "right") ? 0 : 22, 0, 0],
      legend: { show: false },
      scales: { x: { time: false }, ...this.#scales() },
      axes: [{ ...axis, size: 26, gap: 4, values: (_plot, splits) => splits.map(wholeStep) }, ...sides],
      series: [{}, ...this.#curves.map((curve) => ({
        label: curve.label,
        scale: curve.axis,
        stroke: color(curve.faint ? `${curve.color}-faint` : curve.color),
        width: curve.faint || curve.thin ? 1 : 1.75,
        // A single point has no line.
        points: { show: (plot) => plot.data[0].length <= FEWEST_STEPS_SHOWN },
      }))],
      cursor: {
        sync: { key: "steps", setSeries: false },
        drag: { x: true, y: false, setScale: false },
        points: { size: 7 },
        bind: { dblclick: () => () => (this.#onZoom(null), null) },
      },
      hooks: {
        setCursor: [(plot) => this.#show(plot.cursor.idx)],
        setSelect: [(plot) => this.#zoomToSelection(plot)],
      },
    };
  }

  #scales() {
    const scales = {};
    for (const curve of this.#curves) {
      if (curve.share) scales[curve.axis] = { range: [0, 1] };
      else if (curve.fromZero) scales[curve.axis] = { range: (_plot, _low, high) => [0, (high || 1) * 1.1] };
      else scales[curve.axis] = { range: (_plot, low, high) => padded(low, high) };
    }
    return scales;
  }

  #zoomToSelection(plot) {
    const { left, width } = plot.select;
    if (width < 4) return;
    this.#onZoom({ min: plot.posToVal(left, "x"), max: plot.posToVal(left + width, "x") });
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  #moveCrosshair(event) {
    const last = this.#series.length - 1;
    const at = this.#plot.cursor.idx ?? last + 1;
    const leap = Math.max(1, Math.round(last / 20));
    const moved = {
      ArrowLeft: at - 1, ArrowRight: at + 1, PageDown: at - leap, PageUp: at + leap, Home: 0, End: last,
    }[event.key];
    if (event.key === "Escape") {
      this.#onZoom(null);
      this.#showLast();
    }
    if (moved === undefined || last < 0) return;
    event.preventDefault();
    const left = this.#plot.valToPos(this.#series.steps[Math.max(0, Math.min(last, moved))], "x");
    this.#plot.setCursor({ left, top: HEIGHT / 2 });
  }

  #showLast() {
    this.#plot?.setCursor({ left: -10, top: -10 });
  }

  /** Values at the crosshair; without one, the newest. */
  #show(index) {
    if (!this.#plot || !this.#series) return;
    const row = index ?? this.#series.length - 1;
    setText(this.#readout, row >= 0 ? `step ${integer(this.#series.steps[row])}` : "");
    const shown = this.#curves.map((curve, number) => curve.show(this.#plot.data[number + 1][row]));
    shown.forEach((text, number) => setText(this.#values[number], text));
    const spoken = this.#curves.map((curve, number) => `${curve.label} ${shown[number]}`).join(", ");
    this.plotNode.setAttribute("aria-label", row >= 0
      ? `${this.#definition.title} over steps. At step ${this.#series.steps[row]}: ${spoken}. Arrow keys move the crosshair.`
      : `${this.#definition.title} over steps: no step yet.`);
  }
}

const wholeStep = (value) => (Number.isInteger(value) ? integer(value) : "");

function padded(low, high) {
  if (low === null || low === undefined) return [0, 1];
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low < 0 ? low - room : Math.max(0, low - room), high + room];
}
