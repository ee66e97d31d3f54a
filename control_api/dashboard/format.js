// Numbers, times and words as a person reads them.

const INTEGER = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const DAY = new Intl.DateTimeFormat(undefined, { day: "numeric", month: "short" });
export const NOTHING = "–";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function integer(value) {
  return isNumber(value) ? INTEGER.format(value) : NOTHING;
}

/** Four significant digits, as losses are compared. */
export function measure(value) {
  if (!isNumber(value)) return NOTHING;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2);
  if (size !== 0 && size < 0.1) return value.toPrecision(3);
  return value.toFixed(size >= 100 ? 1 : size >= 10 ? 2 : 3);
}

/** As short as an axis wants it. */
export function compact(value) {
  if (!isNumber(value)) return "";
  const size = Math.abs(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(1).replace(".0e", "e");
  return size >= 1000 ? INTEGER.format(value) : String(Number(value.toPrecision(4)));
}

/** What was measured on held-out answers, by source: "chat 1.300, code 1.315". */
export function sources(heldout) {
  return Object.entries(heldout?.by_source ?? {}).sort().map(([name, length]) => `${name} ${measure(length)}`).join(", ");
}

export function percent(fraction, digits = 0) {
  return isNumber(fraction) ? `${(fraction * 100).toFixed(digits)} %` : NOTHING;
}

export function rate(tokensPerSecond) {
  if (!isNumber(tokensPerSecond)) return NOTHING;
  return tokensPerSecond >= 1e6 ? `${(tokensPerSecond / 1e6).toFixed(2)} M` : INTEGER.format(tokensPerSecond);
}

/** 45 s · 3 min 20 s · 2 h 05 min · 3 d 4 h */
export function duration(seconds) {
  if (!isNumber(seconds)) return NOTHING;
  const whole = Math.max(0, Math.round(seconds));
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${String(minutes).padStart(2, "0")} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

/** Time of day; with the date where it is not today's. */
export function clock(moment) {
  const date = new Date(moment);
  const isToday = date.toDateString() === new Date().toDateString();
  return isToday ? CLOCK.format(date) : `${DAY.format(date)}, ${CLOCK.format(date)}`;
}

export function ago(moment) {
  return `${duration((Date.now() - Date.parse(moment)) / 1000)} ago`;
}

export function plural(count, one, many = `${one}s`) {
  return `${integer(count)} ${count === 1 ? one : many}`;
}

/** CUDA devices by index, as they are named on the host. */
export function devices(list) {
  return list.map((one) => (one.kind === "cpu" ? "CPU" : `${one.name || "GPU"} #${one.index}`)).join(", ");
}
