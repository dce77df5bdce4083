// A step function over events, and the smallest and largest value of any stretch of it in constant time: what lets a
// million events be drawn, zoomed and hovered over at once. Level 0 holds one value for every event (or the extremes of
// every `stride` events of very long traces); each level above holds the extremes of `fan` entries below.

const fan = 8;

/** The index of the last entry of a rising array that is at most x, -1 if none. */
export function lastAtMost(array, x) {
  let low = 0;
  let high = array.length;
  while (low < high) {
    const mid = (low + high) >> 1;
    if (array[mid] <= x) low = mid + 1;
    else high = mid;
  }
  return low - 1;
}

/** The extremes of a step function in every entry of level 0. */
function entries({event, value}, points, stride) {
  const low = new Float64Array(points);
  const high = stride === 1 ? low : new Float64Array(points);
  let k = 0;
  let v = 0;
  // Entry p stands for the state after the events from p*stride on; what was set before the first event counts too.
  while (k < event.length && event[k] < 0) v = value[k++];
  for (let p = 0; p < points; p++) {
    const end = (p + 1) * stride;
    // A value set at the very start of the stretch replaces the one carried in.
    if (k < event.length && event[k] === p * stride) v = value[k++];
    let a = v;
    let b = v;
    for (; k < event.length && event[k] < end; k++) {
      v = value[k];
      if (v < a) a = v;
      if (v > b) b = v;
    }
    low[p] = a;
    high[p] = b;
  }
  return {low, high};
}

/** The level above one. */
function above({low, high}) {
  const n = Math.ceil(low.length / fan);
  const up = {low: new Float64Array(n), high: new Float64Array(n)};
  for (let i = 0; i < n; i++) {
    let a = Infinity;
    let b = -Infinity;
    for (let j = i * fan, end = Math.min(j + fan, low.length); j < end; j++) {
      if (low[j] < a) a = low[j];
      if (high[j] > b) b = high[j];
    }
    up.low[i] = a;
    up.high[i] = b;
  }
  return up;
}

export class Series {
  #levels = null;

  /**
   * @param curve {event, value} as decoded
   * @param points number of entries of level 0
   * @param stride events per entry
   */
  constructor(curve, points, stride) {
    Object.assign(this, {curve, points, stride});
  }

  /** Made when they are first asked for: some lines are never shown. */
  get levels() {
    if (!this.#levels) {
      this.#levels = [entries(this.curve, this.points, this.stride)];
      for (let top = this.#levels[0]; top.low.length > fan; top = this.#levels.at(-1)) this.#levels.push(above(top));
    }
    return this.#levels;
  }

  /** The extremes of entries from to to-1 of level 0, as out.low and out.high. */
  range(from, to, out) {
    const {levels} = this;
    let a = Infinity;
    let b = -Infinity;
    let l = 0;
    while (from < to) {
      const {low, high} = levels[l];
      while (from < to && (from % fan !== 0 || to - from < fan || l === levels.length - 1)) {
        if (low[from] < a) a = low[from];
        if (high[from] > b) b = high[from];
        from++;
      }
      while (from < to && to % fan !== 0) {
        to--;
        if (low[to] < a) a = low[to];
        if (high[to] > b) b = high[to];
      }
      if (from >= to) break;
      from /= fan;
      to /= fan;
      l++;
    }
    out.low = a;
    out.high = b;
  }

  /** The first of the entries from to to-1 of level 0 that is highest. */
  highest(from, to) {
    const {levels} = this;
    const out = {low: 0, high: 0};
    this.range(from, to, out);
    let l = 0;
    let p = from;
    // Up while a whole entry above is too low, and down into the first that is not.
    while (l > 0 || levels[0].high[p] < out.high) {
      if (levels[l].high[p] < out.high) {
        p++;
        while (p % fan === 0 && l < levels.length - 1) {
          p /= fan;
          l++;
        }
      } else if (l > 0) {
        p *= fan;
        l--;
      }
    }
    return p;
  }

  /** The value after an event, exactly. */
  at(event) {
    const i = lastAtMost(this.curve.event, event);
    return i < 0 ? 0 : this.curve.value[i];
  }
}

/** What a chart draws of a range: the x positions and, per series, the values there. */
export class Timeline {
  /**
   * @param times {stride, us} as decoded
   * @param curves step functions
   * @param events number of events
   * @param until per curve, the event at which it ends, null where it does not
   */
  constructor(times, curves, events, until) {
    this.until = until;
    this.events = events;
    this.byEvent = false;
    this.read(times, curves);
  }

  /** Takes other times and curves of the same run, with more points. */
  read(times, curves) {
    this.stride = times.stride;
    this.us = times.us;
    this.series = curves.map((c) => new Series(c, times.us.length, times.stride));
  }

  /** The whole range of x. */
  extent() {
    const n = this.us.length;
    if (n === 0) return [0, 1];
    const end = this.byEvent ? Math.max(this.events - 1, 1) : this.us[n - 1];
    return [0, end > 0 ? end : 1];
  }

  x(p) {
    return this.byEvent ? p * this.stride : this.us[p];
  }

  /** The entry that holds at x: the last one not after it. */
  entry(x) {
    const p = this.byEvent ? Math.floor(x / this.stride) : lastAtMost(this.us, x);
    return Math.max(0, Math.min(this.us.length - 1, p));
  }

  /** The entry of an event. */
  entryOf(event) {
    return Math.max(0, Math.min(this.us.length - 1, Math.floor(event / this.stride)));
  }

  /** The event that holds at x, exactly where stride is 1. */
  eventAt(x) {
    return this.byEvent ? Math.max(0, Math.min(this.events - 1, Math.round(x))) : this.entry(x) * this.stride;
  }

  /** Values with nothing behind the end of series s. */
  ended(s, x, y) {
    if (this.until[s] === null) return y;
    const end = this.x(this.entryOf(this.until[s]));
    return x[x.length - 1] <= end ? y : Array.from(y, (v, i) => (x[i] <= end ? v : null));
  }

  /**
   * Data for uPlot: every event of [min, max] where they are few, else the extremes of every one of `columns` columns,
   * so that no peak is lost at any zoom.
   * @param shown of each series whether it is wanted; the others have no values
   */
  data(min, max, columns, shown = this.series.map(() => true)) {
    const from = this.entry(min);
    const to = Math.min(this.us.length, this.entry(max) + 2); // one beyond on each side, so that lines run off the edge
    if (to - from <= columns * 2) {
      const n = to - from;
      const x = new Float64Array(n);
      for (let i = 0; i < n; i++) x[i] = this.x(from + i);
      return [x, ...this.series.map((s, k) => (shown[k] ? this.ended(k, x, s.levels[0].high.subarray(from, to)) : []))];
    }
    const step = (max - min) / columns;
    const edges = new Int32Array(columns + 1);
    for (let k = 0; k <= columns; k++) {
      edges[k] = k === 0 ? from : Math.max(edges[k - 1], this.entry(min + k * step) + 1);
    }
    const x = new Float64Array(columns * 2);
    for (let k = 0; k < columns; k++) {
      x[2 * k] = min + k * step;
      x[2 * k + 1] = min + (k + 0.5) * step;
    }
    const out = {low: 0, high: 0};
    return [x, ...this.series.map((s, series) => {
      if (!shown[series]) return [];
      const y = new Float64Array(columns * 2);
      const first = s.levels[0];
      for (let k = 0; k < columns; k++) {
        const a = edges[k];
        const b = edges[k + 1];
        if (a >= b) {
          const carried = first.high[Math.max(0, a - 1)];
          y[2 * k] = y[2 * k + 1] = carried;
          continue;
        }
        s.range(a, b, out);
        // The extreme nearer to where the line comes from goes first.
        const before = a > 0 ? first.high[a - 1] : out.low;
        const up = Math.abs(before - out.low) <= Math.abs(before - out.high);
        y[2 * k] = up ? out.low : out.high;
        y[2 * k + 1] = up ? out.high : out.low;
      }
      return this.ended(series, x, y);
    })];
  }

  /**
   * Values under the cursor: of the event there, or the highest of the events that share its column of width dx; null
   * for a series that has ended, and for one that is not shown.
   */
  under(x, dx, shown = this.series.map(() => true)) {
    const a = this.entry(x - dx / 2);
    const b = this.entry(x + dx / 2);
    const event = this.eventAt(x);
    const over = (k) => !shown[k] || (this.until[k] !== null && event > this.until[k]);
    const us = this.us[this.entry(x)];
    if (b - a <= 1) return {event, events: 1, us, values: this.series.map((s, k) => (over(k) ? null : s.at(event)))};
    const out = {low: 0, high: 0};
    return {
      event, events: (b - a) * this.stride, us,
      values: this.series.map((s, k) => {
        if (over(k)) return null;
        s.range(a, b + 1, out);
        return out.high;
      }),
    };
  }
}
