// What the chart is drawn from, held against plain loops.

import test from 'node:test';
import assert from 'node:assert/strict';
import {Series, Timeline, lastAtMost} from '../src/series.js';
import {Reader} from '../src/decode.js';
import {bytes, duration} from '../src/format.js';

/** Numbers that look random and are the same every time. */
function random(seed) {
  let s = seed >>> 0;
  return () => {
    s = (Math.imul(s, 1664525) + 1013904223) >>> 0;
    return s / 2 ** 32;
  };
}

function randomCurve(seed, events) {
  const next = random(seed);
  const event = [-1];
  const value = [Math.floor(next() * 1000)];
  for (let e = 0; e < events; e++) {
    if (next() < 0.6) {
      event.push(e);
      value.push(Math.floor(next() * 1e12));
    }
  }
  return {event: Int32Array.from(event), value: Float64Array.from(value)};
}

/** The value after an event, by going through all of them. */
function plainAt(curve, event) {
  let v = 0;
  for (let i = 0; i < curve.event.length && curve.event[i] <= event; i++) v = curve.value[i];
  return v;
}

/** The values after every event. */
function plain(curve, events) {
  const all = [];
  let i = 0;
  let v = 0;
  for (let e = 0; e < events; e++) {
    while (i < curve.event.length && curve.event[i] <= e) v = curve.value[i++];
    all.push(v);
  }
  return all;
}

test('the extremes of any range', () => {
  const curve = randomCurve(1, 3000);
  const s = new Series(curve, 3000, 1);
  const want = plain(curve, 3000);
  const next = random(2);
  const out = {};
  for (let k = 0; k < 300; k++) {
    const from = Math.floor(next() * 3000);
    const to = from + 1 + Math.floor(next() * (3000 - from));
    s.range(from, to, out);
    let low = Infinity;
    let high = -Infinity;
    for (let e = from; e < to; e++) {
      low = Math.min(low, want[e]);
      high = Math.max(high, want[e]);
    }
    assert.deepEqual({low: out.low, high: out.high}, {low, high}, `events ${from} to ${to}`);
    assert.equal(s.highest(from, to), want.indexOf(high, from), `events ${from} to ${to}`);
  }
});

test('entries of several events hold the extremes of all of them', () => {
  const events = 1000;
  const stride = 7;
  const curve = randomCurve(3, events);
  const s = new Series(curve, Math.ceil(events / stride), stride);
  for (let p = 0; p < Math.ceil(events / stride); p++) {
    let low = Infinity;
    let high = -Infinity;
    for (let e = p * stride; e < Math.min(events, (p + 1) * stride); e++) {
      low = Math.min(low, plainAt(curve, e));
      high = Math.max(high, plainAt(curve, e));
    }
    assert.ok(s.levels[0].low[p] <= low && s.levels[0].high[p] >= high, `entry ${p}`);
    assert.equal(s.at(p * stride), plainAt(curve, p * stride));
  }
});

test('no peak is lost at any zoom', () => {
  const events = 50_000;
  const curve = randomCurve(4, events);
  const us = Float64Array.from({length: events}, (_, i) => i * 10 + (i % 3));
  const timeline = new Timeline({stride: 1, us}, [curve], events, [null]);
  const next = random(5);
  const want = plain(curve, events);
  for (let k = 0; k < 60; k++) {
    timeline.byEvent = k % 2 === 0;
    const [from, to] = timeline.extent();
    const width = (to - from) * next() ** 3;
    const min = from + (to - from - width) * next();
    const [x, y] = timeline.data(min, min + width, 300);
    assert.equal(x.length, y.length);
    assert.ok(x.length <= 602, `${x.length} points`);
    for (let i = 1; i < x.length; i++) assert.ok(x[i] >= x[i - 1], 'x falls');
    let high = 0;
    for (let e = timeline.entry(min); e <= timeline.entry(min + width); e++) high = Math.max(high, want[e]);
    assert.ok(Math.max(...y) >= high, `the peak of ${min} to ${min + width} is ${Math.max(...y)}, want ${high}`);
  }
});

test('a policy that died has no line and no value behind that', () => {
  const events = 5000;
  const curve = randomCurve(6, events);
  const us = Float64Array.from({length: events}, (_, i) => i);
  const timeline = new Timeline({stride: 1, us}, [curve, curve], events, [2000, null]);
  for (const [min, max] of [[0, 4999], [1990, 2010]]) {
    const [x, dead, alive] = timeline.data(min, max, 300);
    for (let i = 0; i < x.length; i++) {
      assert.equal(dead[i] === null, x[i] > 2000, `at ${x[i]}`);
      assert.notEqual(alive[i], null);
    }
  }
  assert.deepEqual(timeline.under(2000, 0.1).values, [plainAt(curve, 2000), plainAt(curve, 2000)]);
  assert.deepEqual(timeline.under(2001, 0.1).values, [null, plainAt(curve, 2001)]);
});

test('a search among rising numbers', () => {
  assert.equal(lastAtMost([], 1), -1);
  assert.equal(lastAtMost([2, 4, 4, 6], 1), -1);
  assert.equal(lastAtMost([2, 4, 4, 6], 4), 2);
  assert.equal(lastAtMost([2, 4, 4, 6], 9), 3);
});

test('integers, also above 2^32', () => {
  // As encoding/binary's AppendUvarint and AppendVarint write them.
  const r = new Reader(Uint8Array.from([0x00, 0x7f, 0x80, 0x01, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x08, 0x03, 0x04]));
  assert.deepEqual([r.uint(), r.uint(), r.uint(), r.uint(), r.int(), r.int()], [0, 127, 128, 2 ** 52, -2, 2]);
  assert.throws(() => new Reader(Uint8Array.from([0x80])).uint(), /cut short/);
});

test('text of numbers', () => {
  assert.deepEqual([0, 1, 1023, 1024, 20.05 * 2 ** 30].map(bytes),
    ['0 bytes', '1 byte', '1023 bytes', '1.00 KiB', '20.05 GiB']);
  assert.deepEqual([5, 1500, 2.5e6, 200e6].map(duration), ['5 us', '1.50 ms', '2.50 s', '3 min 20 s']);
});
