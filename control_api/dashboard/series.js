// The records of a run as columns, one row a step: what the charts draw.

const FIELDS = {
  loss: (record) => record.loss,
  accepted: (record) => record.mean_matched_prefix_with_bonus ?? plusOne(record.mean_matched_prefix),
  learningRate: (record) => record.learning_rate,
  gradientNorm: (record) => record.gradient_norm,
  tokensPerSecond: (record) => record.tokens_per_second,
  dataWait: (record) => share(record.data_wait_seconds, record.seconds),
  heldout: (record) => record.heldout_accepted_length,
};

const plusOne = (value) => (typeof value === "number" ? value + 1 : null);
const share = (part, whole) => (part >= 0 && whole > 0 ? Math.min(1, part / whole) : null);

/** Rows in the order of steps. A step that was trained again after a resume replaces the one it was before. */
export class MetricSeries {
  /** Steps trained once the row's step was done: 1 for step 0. */
  steps = [];
  columns = Object.fromEntries(Object.keys(FIELDS).map((name) => [name, []]));
  /** Held-out accepted length by source of the prompts: a column for each that has been measured. */
  sources = new Map();
  #rows = new Map();
  #notApplied = new Set();

  get length() {
    return this.steps.length;
  }

  /** Rows whose loss or gradient was not finite: the weights stayed as they were. */
  get notApplied() {
    return this.#notApplied.size;
  }

  add({ step, record }) {
    const place = step + 1;
    let row = this.#rows.get(place);
    if (row === undefined) {
      row = this.#insert(place);
    }
    for (const [name, read] of Object.entries(FIELDS)) {
      const value = read(record);
      this.columns[name][row] = typeof value === "number" ? value : null;
    }
    const measured = record.heldout_sources ?? {};
    for (const source of Object.keys(measured)) {
      if (!this.sources.has(source)) this.sources.set(source, new Array(this.length).fill(null));
    }
    for (const [source, column] of this.sources) column[row] = measured[source]?.accepted_length ?? null;
    if (record.applied === false) this.#notApplied.add(place);
    else this.#notApplied.delete(place);
  }

  #insert(place) {
    let row = this.length;
    while (row > 0 && this.steps[row - 1] > place) row -= 1;
    this.steps.splice(row, 0, place);
    for (const column of [...Object.values(this.columns), ...this.sources.values()]) column.splice(row, 0, null);
    if (row === this.length - 1) this.#rows.set(place, row);
    else this.#rows = new Map(this.steps.map((step, index) => [step, index]));
    return row;
  }
}

/** At each row the last number so far; null before the first. */
export function newestSoFar(column) {
  let newest = null;
  return column.map((value) => (newest = value ?? newest));
}

/** Mean of the last `width` numbers up to each row; null until there are that many. */
export function trailingMean(column, width) {
  const means = new Array(column.length).fill(null);
  const last = [];
  let sum = 0;
  column.forEach((value, row) => {
    if (value === null) return;
    last.push(value);
    sum += value;
    if (last.length > width) sum -= last.shift();
    if (last.length === width) means[row] = sum / width;
  });
  return means;
}
