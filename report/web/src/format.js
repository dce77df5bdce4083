// Text for numbers. Sizes are binary, as in PyTorch's reports.

const units = ['bytes', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB'];

/** A number with so many decimals, as the command writes it: of two that are equally near the even one, where toFixed has the larger. */
export function fixed(v, digits) {
  const text = v.toFixed(digits);
  const halves = v * 2 ** (digits + 1); // only these lie between two decimals
  if (!Number.isInteger(halves) || halves % 2 === 0 || /[02468]$/.test(text)) return text;
  return (v < 0 ? v + 10 ** -digits / 2 : v - 10 ** -digits / 2).toFixed(digits);
}

/** A size with two decimals: "20.05 GiB". */
export function bytes(n) {
  let i = 0;
  let v = n;
  while (v >= 1023.995 && i < units.length - 1) {
    v /= 1024;
    i++;
  }
  return i === 0 ? `${n} ${n === 1 ? 'byte' : 'bytes'}` : `${fixed(v, 2)} ${units[i]}`;
}

/** A difference of sizes: "+1.00 GiB". */
export function signed(n) {
  return n < 0 ? `\u2212${bytes(-n)}` : `+${bytes(n)}`;
}

/** The binary unit that fits a largest value, for an axis. */
export function unitFor(max) {
  let i = 0;
  let scale = 1;
  while (max / scale >= 1024 && i < units.length - 1) {
    scale *= 1024;
    i++;
  }
  return {name: units[i], scale};
}

const grouped = new Intl.NumberFormat('en-US'); // toLocaleString would make one each time

export function count(n) {
  return grouped.format(n);
}

/** Microseconds as people read them. */
export function duration(us) {
  const a = Math.abs(us);
  if (a < 1e3) return `${Math.round(us)} us`;
  if (a < 1e6) return `${fixed(us / 1e3, 2)} ms`;
  if (a < 60e6) return `${fixed(us / 1e6, 2)} s`;
  const m = Math.floor(a / 60e6);
  return `${us < 0 ? '-' : ''}${m} min ${((a - m * 60e6) / 1e6).toFixed(0)} s`;
}

/** From one time to another, where they differ. */
export function durations(least, most) {
  return least === most ? duration(most) : `${duration(least)} to ${duration(most)}`;
}

/** How many of the replays a run survives. */
export function odds(o) {
  return `${count(o.survived)} of ${count(o.replays)}`;
}

/** Whether these are enough to recommend a setting: replay.Odds.Sure. */
export function sure(o) {
  return o.replays > 0 && o.survived * 100 >= o.replays * 95;
}

export function hex(n) {
  return '0x' + n.toString(16);
}

/** Labels of an axis of times in microseconds, all in one unit, with as many decimals as its steps have. */
export function timeLabels(at) {
  const top = Math.max(...at.map(Math.abs));
  const [scale, unit] = top >= 1e6 ? [1e6, 's'] : top >= 1e3 ? [1e3, 'ms'] : [1, 'us'];
  const step = at.length > 1 ? (at[1] - at[0]) / scale : 1;
  let digits = 0;
  while (digits < 6 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6) digits++;
  return at.map((v) => `${(v / scale).toFixed(digits)} ${unit}`);
}
