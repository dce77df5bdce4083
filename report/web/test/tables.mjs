// Reads what the Go package report embeds in a page, with the page's own code, and holds the moments computed from it
// against those that Go names. Run by the Go test TestTables: node tables.mjs EXPECT.json

import assert from 'node:assert/strict';
import {readFileSync} from 'node:fs';
import {Reader, unpack} from '../src/decode.js';
import {Timeline, lastAtMost} from '../src/series.js';
import {Lives, measure, sizeRange} from '../src/lives.js';
import {callTotals} from '../src/columns.js';
import {groupTree, heldAt, stackTree} from '../src/tree.js';

const want = JSON.parse(readFileSync(process.argv[2], 'utf8'));
let reader = new Reader(await unpack(want.series));
if (want.changes) {
  twoRuns();
  process.exit(0);
}
const first = timeline();
if (want.all) {
  reader = new Reader(await unpack(want.all));
  near(first, timeline());
}
reader = new Reader(await unpack(want.tables));
const lives = new Lives(reader.stacks(), reader.blocks(), reader.segments(), reader.calls(), want.events, want.frame_libraries);
const called = reader.stackNames(lives.stacks.n);
assert.equal(reader.at, reader.buf.length, 'bytes are left over');
const byName = (list) => [...list].sort((a, b) => (a[0] < b[0] ? -1 : 1));
const totals = callTotals(lives.calls, want.call_kinds);
assert.deepEqual(byName(totals.map((x) => [x.name, x.calls])), byName(want.calls ?? []));
if (want.timed) assert.deepEqual(totals.map((x) => [x.name, x.does, x.bytes, x.took]), want.timed);

/** What a chart is drawn from. */
function timeline() {
  const times = reader.times();
  const all = new Timeline(times, Array.from({length: want.curves}, () => reader.curve()), want.events, Array(want.curves).fill(null));
  assert.equal(reader.at, reader.buf.length, 'bytes are left over');
  return all;
}

/** What a chart is first drawn from is as long and as high as all, and in every one of many columns about as high as somewhere in
 * what the entry there stands for, give or take a column: of its events only the first one's time is known. */
function near(first, all) {
  assert.ok(first.us.length <= 16384 && all.us.length > first.us.length);
  assert.deepEqual(first.extent(), all.extent());
  const [x, ...lines] = first.data(...first.extent(), 500);
  const [, ...wanted] = all.data(...first.extent(), 500);
  lines.forEach((y, s) => {
    const high = Math.max(...wanted[s]);
    assert.equal(Math.max(...y), high);
    const column = (x.at(-1) - x[0]) / 500;
    const outside = (line, other) => x.filter((t, k) => {
      const entry = lastAtMost(first.us, t);
      const [from, to] = [first.us[Math.max(entry, 0)] - column, (first.us[entry + 1] ?? t) + column];
      const around = other.filter((_, j) => x[j] >= from && x[j] <= to);
      return line[k] > Math.max(...around) + high / 100 || line[k] < Math.min(...around) - high / 100;
    }).length;
    const off = Math.max(outside(y, wanted[s]), outside(wanted[s], y));
    assert.ok(off < x.length / 100, `line ${s} is another at ${off} of ${x.length} points`);
  });
}

const byBytes = (a, b) => b[1] - a[1] || b[2] - a[2] || (String(a[0]) < String(b[0]) ? -1 : 1);
for (const m of want.moments) {
  const where = `after event ${m.event}`;
  const map = lives.mapAt(m.event);
  const sum = measure(map);
  for (const k of ['live', 'blocks', 'free', 'pieces', 'largest']) assert.equal(sum[k], m[k], `${where}: ${k}`);
  assert.deepEqual(map.map((s) => [s.addr, s.size, s.stream, s.pool, s.flags, s.blocks.n,
    s.blocks.request.reduce((a, b) => a + b, 0), s.blocks.pending.reduce((a, b) => a + b, 0)]), m.segments, where);
  const ranges = lives.sums(m.event, 'range');
  assert.deepEqual(m.sizes.map((_, k) => [ranges.get(k)?.bytes ?? 0, ranges.get(k)?.blocks ?? 0]), m.sizes, where);
  // Go tells apart stacks whose frames read alike; here such are one.
  const merged = new Map();
  for (const [frames, bytes, blocks] of m.holders) {
    const key = frames.join('\n');
    const [b, n] = merged.get(key)?.slice(1) ?? [0, 0];
    merged.set(key, [frames, b + bytes, n + blocks]);
  }
  const holders = [...lives.sums(m.event, 'stack')].map(([stack, x]) => [lives.framesOf(stack).map((f) => want.frames[f]), x.bytes, x.blocks])
    .sort(byBytes);
  if (m.others[1] === 0) assert.deepEqual(holders, [...merged.values()].sort(byBytes), where);
  else assert.ok(holders.length >= merged.size, where);
  const libraries = Object.fromEntries([...lives.sums(m.event, 'library')].map(([k, x]) => [k === 0 ? 'unknown' : want.libraries[k - 1], x.bytes]));
  assert.deepEqual(libraries, m.libraries, where);
  for (const [by, names, none] of [['tag', want.tags, 'no tag'], ['thread', want.threads, 'no thread']]) {
    const sums = Object.fromEntries([...lives.sums(m.event, by)].map(([k, x]) => [names.length ? names[k] : none, x.bytes]));
    assert.deepEqual(sums, m[`${by}s`], `${where}, by ${by}`);
    const grouped = groupTree(lives.stacks, heldAt(lives, m.event, by), want.frames, (k) => (names.length ? names[k] : none));
    assert.equal(grouped.value, m.live, where);
    assert.equal(grouped.blocks, m.blocks, where);
    assert.deepEqual(Object.fromEntries(grouped.children.map((c) => [c.name, c.value])), m[`${by}s`], `${where}, grouped by ${by}`);
  }
  const tree = stackTree(lives.stacks, heldAt(lives, m.event), want.frames);
  assert.equal(tree.value, m.live, where);
  assert.equal(tree.blocks, m.blocks, where);
}

/** The long data of a page of two runs. */
function twoRuns() {
  const times = reader.times();
  assert.equal(times.us.length, want.points);
  for (let i = 1; i < want.points; i++) assert.ok(times.us[i] >= times.us[i - 1]);
  want.peaks.forEach((peak) => assert.equal(reader.curve().value.reduce((a, b) => Math.max(a, b), 0), peak));
  const stacks = reader.stacks();
  const held = reader.changes();
  assert.equal(reader.at, reader.buf.length, 'bytes are left over');
  const names = (node) => (node === 0 ? [] : [want.frames[stacks.frame[node]], ...names(stacks.parent[node])]);
  assert.deepEqual(held.map((x) => [names(x.stack), x.size, x.before, x.after, x.blocksBefore, x.blocks]), want.changes);
  const tree = stackTree(stacks, held.map((x) => ({...x, range: sizeRange(x.size)})), want.frames);
  for (const k of ['before', 'after']) assert.equal(tree[k], held.reduce((sum, x) => sum + x[k], 0));
}
