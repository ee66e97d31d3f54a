// The page: which view the address names, the banner, the token prompt.

import { askForTokenWith, connection, get, keepToken } from "./api.js";
import { h, fill } from "./dom.js";
import { showCreate } from "./views/create.js";
import { showOverview } from "./views/overview.js";
import { showRun } from "./views/run.js";

const main = document.getElementById("main");
const banner = document.getElementById("banner");

const VIEWS = [
  { page: "overview", address: /^(#\/?)?$/, show: showOverview },
  { page: "create", address: /^#\/new$/, show: showCreate },
  { page: "run", address: /^#\/runs\/([^/]+)$/, show: showRun },
];

let leave = new AbortController();
let isFirst = true;

function route() {
  if (takeToken()) return;
  // The link that skips to the content names no view.
  if (location.hash === "#main") return;
  leave.abort();
  leave = new AbortController();
  const view = VIEWS.find((one) => one.address.test(location.hash));
  for (const link of document.querySelectorAll("nav [data-page]")) {
    if (link.dataset.page === view?.page) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const name = (view && decode(location.hash.match(view.address)[1])) ?? "";
  document.title = [name, "Slipstream"].filter(Boolean).join(" · ");
  if (view) view.show(main, { name, signal: leave.signal });
  else fill(main, h("h1", {}, "Nothing is here"), h("p", {}, h("a", { href: "#/" }, "All runs")));
  if (!isFirst) {
    scrollTo(0, 0);
    main.focus({ preventScroll: true });
  }
  isFirst = false;
}

function decode(text) {
  try {
    return decodeURIComponent(text ?? "");
  } catch {
    return text;
  }
}

/** `#token=…` is taken once, and does not stay in the address or the history. */
function takeToken() {
  const given = location.hash.match(/^#token=(.+)$/);
  if (!given) return false;
  keepToken(decode(given[1]));
  history.replaceState(null, "", `${location.pathname}#/`);
  route();
  return true;
}

function askForToken(wasRefused) {
  const dialog = document.getElementById("token");
  const field = document.getElementById("token-text");
  document.getElementById("token-refused").hidden = !wasRefused;
  field.value = "";
  if (!dialog.open) dialog.showModal();
  field.focus();
  return new Promise((resolve) => {
    const answered = (event) => {
      // Escape leaves nothing behind that could work: ask again.
      if (event.type === "cancel") return event.preventDefault();
      dialog.removeEventListener("cancel", answered);
      dialog.removeEventListener("close", answered);
      resolve(field.value);
    };
    dialog.addEventListener("cancel", answered);
    dialog.addEventListener("close", answered);
  });
}

askForTokenWith(askForToken);
connection.addEventListener("lost", () => {
  banner.hidden = false;
  fill(banner, h("span", { class: "pulse", "aria-hidden": "true" }),
    "Connection lost, trying again. Training goes on without the control API, and nothing will be missing here.");
});
connection.addEventListener("back", () => (banner.hidden = true));
addEventListener("hashchange", route);
route();
get("/healthz").then((health) => (document.getElementById("version").textContent = `v${health.version}`), () => {});
