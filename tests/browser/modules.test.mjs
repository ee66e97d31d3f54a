// Modules of the dashboard that need no browser.

import assert from "node:assert/strict";
import test from "node:test";

import { MessageParser } from "./dashboard/feed.js";
import { ago, compact, duration, integer, measure, percent } from "./dashboard/format.js";
import { MetricSeries, newestSoFar, trailingMean } from "./dashboard/series.js";

const record = (step, loss, more = {}) => ({
  step,
  record: { loss, mean_matched_prefix: 0.5, learning_rate: 1e-3, gradient_norm: null, tokens_per_second: 100,
    seconds: 2, data_wait_seconds: 0.5, applied: true, ...more },
});

test("a step that was trained again replaces what it was", () => {
  const series = new MetricSeries();
  for (const [step, loss] of [[0, 9], [1, 8], [2, 7], [1, 5], [2, 4], [3, 3]]) series.add(record(step, loss));
  assert.deepEqual(series.steps, [1, 2, 3, 4]);
  assert.deepEqual(series.columns.loss, [9, 5, 4, 3]);
});

test("records may arrive in any order", () => {
  const series = new MetricSeries();
  for (const step of [4, 1, 3, 0, 2, 3]) series.add(record(step, step));
  assert.deepEqual(series.steps, [1, 2, 3, 4, 5]);
  assert.deepEqual(series.columns.loss, [0, 1, 2, 3, 4]);
});

test("a loss that is not finite is a gap, and is counted", () => {
  const series = new MetricSeries();
  series.add(record(0, null, { applied: false }));
  series.add(record(1, 2));
  assert.deepEqual(series.columns.loss, [null, 2]);
  assert.equal(series.notApplied, 1);
  series.add(record(0, 3));
  assert.equal(series.notApplied, 0);
});

test("derived columns", () => {
  const series = new MetricSeries();
  series.add(record(0, 1));
  series.add(record(1, 1, { mean_matched_prefix_with_bonus: 2.25, seconds: 0 }));
  assert.deepEqual(series.columns.accepted, [1.5, 2.25]);
  assert.deepEqual(series.columns.dataWait, [0.25, null]);
});

test("what was held out is known by source, from its measurement on", () => {
  const series = new MetricSeries();
  const measured = (all, news) => ({ heldout_accepted_length: all, heldout_sources: { news: { accepted_length: news } } });
  series.add(record(0, 1));
  series.add(record(2, 1, measured(1.5, 1.25)));
  series.add(record(1, 1));
  series.add(record(3, 1, { heldout_accepted_length: null, heldout_sources: null }));
  assert.deepEqual(series.columns.heldout, [null, null, 1.5, null]);
  assert.deepEqual([...series.sources], [["news", [null, null, 1.25, null]]]);
  assert.deepEqual(newestSoFar(series.sources.get("news")), [null, null, 1.25, 1.25]);
  series.add(record(2, 1)); // trained again, and stopped before it was measured
  assert.deepEqual(newestSoFar(series.columns.heldout), [null, null, null, null]);
});

test("ten thousand steps, each trained twice, take no time", () => {
  const series = new MetricSeries();
  for (let round = 0; round < 2; round += 1) for (let step = 0; step < 10_000; step += 1) series.add(record(step, round));
  assert.equal(series.length, 10_000);
  assert.equal(series.columns.loss.every((loss) => loss === 1), true);
});

test("the trailing mean leaves gaps out", () => {
  assert.deepEqual(trailingMean([1, 2, null, 3, 5], 2), [null, 1.5, null, 2.5, 4]);
  assert.deepEqual(trailingMean([], 2), []);
});

test("messages arrive in pieces, between comments", () => {
  const parser = new MessageParser();
  const text = ": connected\n\nevent: metric\nid: 1-2\ndata: {\"step\": 1}\n\n: nothing new\n\nevent: event\r\nid: 2-2\r\ndata: a\r\ndata: b\r\n\r\n";
  const messages = [...text].flatMap((letter) => parser.push(letter));
  assert.deepEqual(messages, [
    { event: "metric", id: "1-2", data: '{"step": 1}' },
    { event: "event", id: "2-2", data: "a\nb" },
  ]);
  assert.deepEqual(parser.push("id: 3-3\ndata: half"), []);
});

test("numbers as a person reads them", () => {
  assert.deepEqual([0, 59.6, 200, 7500, 100_000, null].map(duration), ["0 s", "1 min 0 s", "3 min 20 s", "2 h 05 min", "1 d 3 h", "–"]);
  assert.deepEqual([0, 3.14159, 31.4159, 314.159, 0.00297, 0.0001, null, Number.NaN].map(measure),
    ["0.000", "3.142", "31.42", "314.2", "0.00297", "1.00e-4", "–", "–"]);
  assert.deepEqual([0, 0.5, 6e-4, 12345, null].map(compact), ["0", "0.5", "6e-4", "12,345", ""]);
  assert.equal(integer(1234567), "1,234,567");
  assert.equal(percent(0.1234, 1), "12.3 %");
  assert.equal(ago(new Date(Date.now() + 5000).toISOString()), "0 s ago");
});
