// Figures as people read them.

const units = ["bytes", "kB", "MB", "GB", "TB"];

export const none = "none yet";

export function size(bytes) {
  let value = bytes, unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export const count = (n) => (n === null || n === undefined ? none : Math.round(n).toLocaleString("en"));

export const counted = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

export const share = (x) => (x === null || x === undefined ? "no request" : `${(100 * x).toFixed(1)} %`);

export const rate = (x) => (x === null || x === undefined ? none : x.toFixed(1));

export function seconds(s) {
  if (s === null || s === undefined) return none;
  if (s < 1) return `${Math.round(1000 * s)} ms`;
  if (s < 100) return `${s.toFixed(1)} s`;
  if (s < 6000) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86400)} days`;
}

export const ago = (then, now) => `${seconds(Math.max(0, now - then))} ago`;

export const clock = (then) => new Date(1000 * then).toLocaleTimeString();
