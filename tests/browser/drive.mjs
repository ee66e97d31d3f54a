// A person in front of the dashboard: opens it, creates a run, watches, pauses, resumes, stops, in a real Chromium.
//
// node drive.mjs CONFIG.json; lines on stdout that start with "=>" ask the test around it to do something.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { chromium } from "playwright-core";

const config = JSON.parse(readFileSync(process.argv[2], "utf8"));
const FLAGS = [
  "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
  "--disable-component-update", "--disable-sync",
];
const PATIENCE = 60_000;
const NOTE = config.images ? "the tiny model of the tests, on two CPU cores" : `<img src="x" onerror="document.title = 'broken'"> & <b>text</b>`;

const browser = await chromium.launch({ executablePath: config.chromium, args: FLAGS });
const complaints = [];
let isApiAway = false;
let isOrderRefused = false;

try {
  await tokens();
  const page = await open({ token: config.token });
  await emptyStates(page);
  await create(page);
  await curveMoves(page);
  await logs(page);
  if (config.images) await pictures(page);
  await reload(page);
  await apiIsRestarted(page);
  await packsAreHeldBack(page);
  await pauseAndResume(page);
  await stop(page);
  await exportNewest(page);
  await overview(page);
  assert.deepEqual(complaints, []);
  say("all done");
} finally {
  await browser.close();
}

// ---- what a person does

async function tokens() {
  const page = await open({});
  const dialog = page.locator("#token");
  for (const [text, refused] of [["wrong", false], [config.token, true]]) {
    await dialog.locator("#token-text").waitFor();
    assert.equal(await page.locator("#token-refused").isVisible(), refused);
    await page.keyboard.type(text);
    await page.keyboard.press("Enter");
    if (!refused) await page.locator("#token-refused").waitFor();
  }
  await dialog.waitFor({ state: "hidden" });
  await page.getByText("No run yet").waitFor();
  await page.context().close();
  say("the token is asked for, and asked for again when it was wrong");
}

async function emptyStates(page) {
  assert.equal(new URL(page.url()).hash, "#/");
  assert.equal(await page.evaluate(() => sessionStorage.getItem("slipstream-token")), config.token);
  await page.getByText("slipstream run create").waitFor();
  await page.locator("#trainers").getByText("FREE").waitFor({ timeout: PATIENCE });
  await page.locator("#targets").getByText("REACHABLE", { exact: true }).waitFor({ timeout: PATIENCE });
  say("the token left the address; a page without runs says what to type");
}

async function create(page) {
  await page.getByRole("link", { name: "New run", exact: true }).first().click();
  const recipes = page.locator("#recipe-choice");
  await page.waitForFunction(() => document.getElementById("recipe-choice").options.length > 1);
  assert.match(await page.locator("#recipe").inputValue(), /\[train\]/);
  await page.setViewportSize({ width: 1080, height: 1150 });
  await picture(page, "dashboard-new-run");
  await page.setViewportSize({ width: 1280, height: 860 });
  await recipes.selectOption({ label: "My own" });
  assert.equal(await page.locator("#recipe").inputValue(), "");
  await page.locator("#recipe").fill(config.recipe);
  await page.locator("#name").fill(config.run);
  await page.locator("#note").fill(NOTE);
  await page.locator("#overrides").fill("train.max_steps=many");
  const submit = page.getByRole("button", { name: "Create run" });
  await submit.click();
  const refusal = page.locator("#overrides-error");
  await refusal.getByText("train.max_steps").waitFor();
  assert.equal(await page.locator("#overrides").getAttribute("aria-invalid"), "true");
  await page.locator("#overrides").fill(config.overrides.join("\n"));
  await submit.click();
  await page.waitForURL(`**/#/runs/${config.run}`);
  say("a wrong override is shown at its field; the corrected form makes the run");
}

async function curveMoves(page) {
  await state(page, "RUNNING");
  if (!config.images) await page.locator("#dropped").getByText("1: the line is not valid JSON").waitFor({ timeout: PATIENCE });
  const seen = await pointsAbove(page, 5);
  await pointsAbove(page, seen + 5);
  assert.equal(await page.locator("main .remark").first().textContent(), NOTE);
  assert.equal(await page.locator("main img, main b b").count(), 0);
  await page.waitForFunction(() => document.getElementById("eta").textContent.startsWith("ETA "), null, { timeout: PATIENCE });
  await page.locator("#chart-loss .plot").focus();
  await page.keyboard.press("Home");
  await page.getByText(/^step 1$/).first().waitFor();
  await page.keyboard.press("Escape");
  await page.emulateMedia({ colorScheme: "dark" });
  await chartsFit(page);
  await page.emulateMedia({ colorScheme: "light" });
  await page.setViewportSize({ width: 390, height: 844 });
  await chartsFit(page);
  await page.setViewportSize({ width: 1280, height: 860 });
  await chartsFit(page);
  say("the curve moves, the crosshair follows the keys, and a note is text");
}

async function logs(page) {
  await page.locator("#logs summary").click();
  await page.waitForFunction(() => document.querySelector("#logs .log").textContent.includes("\n"), null, { timeout: PATIENCE });
  await page.locator("#logs summary").click();
  say("the log of the training process is there");
}

async function exportNewest(page) {
  await page.locator("#export-format").selectOption("zlab");
  await page.locator("#export").click();
  const row = page.locator('#exports .row[data-state="SUCCEEDED"]');
  await row.waitFor({ timeout: PATIENCE });
  assert.match(await row.locator(".path").textContent(), /-zlab$/);
  say("the newest checkpoint is exported, and where it lies is said");
}

async function reload(page) {
  const before = await points(page);
  await page.reload();
  await pointsAbove(page, before + 3);
  await nothingIsMissing(page);
  say("a reload loads the history and goes on");
}

async function apiIsRestarted(page) {
  const before = await points(page);
  isApiAway = true;
  ask("kill the API");
  await page.locator("#banner").waitFor({ timeout: PATIENCE });
  assert.match(await page.locator("#banner").textContent(), /trying again/);
  ask("start the API");
  await page.locator("#banner").waitFor({ state: "hidden", timeout: PATIENCE });
  isApiAway = false;
  await pointsAbove(page, before + 10);
  await nothingIsMissing(page);
  say("an API that is killed and started again leaves no gap");
}

async function packsAreHeldBack(page) {
  const button = page.locator("#hold-packs");
  const order = "/v1/targets/tiny:pause";
  const error = page.locator("div:has(> #hold-packs) > .error");
  // The page is told that there is no answer; then packs are held back all the same.
  isOrderRefused = true;
  const refused = { status: 409, contentType: "application/problem+json", body: JSON.stringify({ reason: "TARGET_UNREACHABLE", detail: "lost" }) };
  await page.route(`**${order}`, (route) => route.fulfill(refused));
  await button.click();
  await error.waitFor({ timeout: PATIENCE });
  assert.match(await error.textContent(), /TARGET_UNREACHABLE/);
  await page.unroute(`**${order}`);
  const headers = { Authorization: `Bearer ${config.token}` };
  assert.ok((await page.request.post(config.address + order, { headers, data: { run: config.run } })).ok());
  const condition = page.locator(".notice", { hasText: "PACKS_HELD_BACK" });
  await condition.waitFor({ timeout: PATIENCE });
  await error.waitFor({ state: "hidden", timeout: PATIENCE });
  isOrderRefused = false;
  const held = await points(page);
  await page.getByRole("button", { name: "Give packs again" }).click();
  await condition.waitFor({ state: "hidden", timeout: PATIENCE });
  await pointsAbove(page, held);
  say("packs are held back at the target, and given again; an error is gone once the run stands otherwise");
}

async function pauseAndResume(page) {
  await page.locator("[data-verb=pause]").click();
  await state(page, "PAUSED");
  await buttonsAreThoseAllowed(page);
  const held = await points(page);
  await page.locator("[data-verb=resume]").click();
  await state(page, "RUNNING");
  await pointsAbove(page, held + 5);
  await nothingIsMissing(page);
  await buttonsAreThoseAllowed(page);
  say("paused, resumed, and every step is drawn once");
}

async function stop(page) {
  const confirm = page.locator("dialog[open]");
  await page.locator("[data-verb=stop]").click();
  await confirm.getByRole("button", { name: "Keep training" }).click();
  await confirm.waitFor({ state: "hidden" });
  await state(page, "RUNNING");
  await page.locator("[data-verb=stop]").click();
  await confirm.getByRole("button", { name: "Stop run" }).click();
  await state(page, "STOPPED");
  await buttonsAreThoseAllowed(page);
  await page.locator(".timeline [data-state=STOPPED]").first().waitFor();
  const order = await page.locator(".timeline [data-type=STATE_CHANGED] .badge").allTextContents();
  const wanted = ["PENDING", "STARTING", "RUNNING", "PAUSING", "PAUSED", "STARTING", "RUNNING", "STOPPING", "STOPPED"];
  assert.deepEqual(order.reverse(), wanted);
  say("stopped, after a question; the timeline has every state");
}

async function overview(page) {
  await page.getByRole("link", { name: "Runs", exact: true }).first().click();
  const row = page.locator(`[data-run="${config.run}"]`);
  await row.getByText("STOPPED").waitFor();
  await page.waitForFunction(() => document.querySelector(".sparkline polyline").getAttribute("points"));
  // For pictures another run waits: it has the trainer now.
  if (!config.images) await page.locator("#trainers").getByText("FREE").waitFor({ timeout: PATIENCE });
  say("the list knows the run, and its trainer is free again");
}

// ---- looking

async function open({ token, ...options }) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 860 }, locale: "en-GB", ...options });
  context.setDefaultTimeout(PATIENCE / 2);
  const page = await context.newPage();
  page.on("pageerror", (error) => complaints.push(`error: ${error.stack}`));
  page.on("dialog", (dialog) => complaints.push(`dialog: ${dialog.message()}`));
  page.on("request", (request) => request.url().startsWith(config.address) || complaints.push(`elsewhere: ${request.url()}`));
  page.on("console", (message) => {
    const isExpected = isApiAway || (isOrderRefused && message.text().includes("409")) || message.text().includes("401") || message.text().includes("422");
    if (["error", "warning"].includes(message.type()) && !isExpected) complaints.push(`console: ${message.text()}`);
  });
  await page.goto(`${config.address}/${token ? `#token=${token}` : ""}`);
  return page;
}

async function points(page) {
  return Number(await page.locator("#chart-loss").getAttribute("data-points"));
}

async function pointsAbove(page, least) {
  const reached = (wanted) => Number(document.getElementById("chart-loss")?.dataset.points) > wanted;
  await page.waitForFunction(reached, least, { timeout: PATIENCE });
  return points(page);
}

/** Every step from the first to the last one is drawn, once. */
async function nothingIsMissing(page) {
  const { points: count, lastStep } = await page.locator("#chart-loss").evaluate((node) => ({ ...node.dataset }));
  assert.equal(count, lastStep);
}

/** Each as wide as its place, and nothing is wider than the window. */
async function chartsFit(page) {
  await page.waitForFunction(() => {
    const plots = [...document.querySelectorAll(".plot")];
    const fits = (plot) => Math.abs(plot.clientWidth - plot.querySelector(".uplot").clientWidth) <= 1;
    return plots.every(fits) && document.documentElement.scrollWidth <= innerWidth;
  });
}

async function state(page, wanted) {
  await page.locator(`.title .badge[data-state=${wanted}]`).waitFor({ timeout: PATIENCE });
}

async function buttonsAreThoseAllowed(page) {
  const headers = { Authorization: `Bearer ${config.token}` };
  const answer = await (await page.request.get(`${config.address}/v1/runs/${config.run}`, { headers })).json();
  const enabled = await page.locator("[data-verb]:enabled").evaluateAll((all) => all.map((one) => one.dataset.verb));
  assert.deepEqual(enabled.sort(), [...answer.allowed_verbs].sort());
}

// ---- pictures for the documents

async function picture(page, name) {
  if (config.images) await page.screenshot({ path: join(config.images, `${name}.png`) });
}

async function pictures(page) {
  ask("more runs");
  await pointsAbove(page, config.picture_points);
  for (const [name, colorScheme, width, height] of [
    ["dashboard-run-light", "light", 1200, 970], ["dashboard-run-dark", "dark", 1200, 970], ["dashboard-phone", "light", 390, 844],
  ]) {
    await page.emulateMedia({ colorScheme });
    await page.setViewportSize({ width, height });
    await page.evaluate(() => scrollTo(0, 0));
    await chartsFit(page);
    // The resource is read a moment after the feed has brought a step.
    await page.waitForFunction(() => {
      const steps = document.getElementById("steps").textContent.split(" ")[0].replaceAll(",", "");
      return Number(steps) >= Number(document.getElementById("points").dataset.count);
    });
    await picture(page, name);
  }
  await page.setViewportSize({ width: 1280, height: 860 });
  await page.goto(`${config.address}/dashboard/#/`);
  await page.locator("[data-run=two-layers]").getByText("PENDING").waitFor({ timeout: 3 * PATIENCE });
  await page.locator("[data-run=block-8]").getByText("PAUSED").waitFor();
  await page.waitForFunction((rows) => document.querySelectorAll(".sparkline polyline[points]").length >= rows, config.picture_rows);
  await picture(page, "dashboard-overview");
  await page.goto(`${config.address}/dashboard/#/runs/${config.run}`);
  await pointsAbove(page, 0);
}

function say(text) {
  console.log(`ok ${performance.now().toFixed(0)} ms: ${text}`);
}

function ask(text) {
  console.log(`=> ${text}`);
}
