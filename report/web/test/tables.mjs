// Reads what the Go package report embeds in a page, with the page's own code, and holds the moments computed from it
// against those that Go names. Run by the Go test TestTables: node tables.mjs EXPECT.json

import assert from 'node:assert/strict';
import {readFileSync} from 'node:fs';
import {Reader, unpack} from '../src/decode.js';
import {Lives, measure} from '../src/lives.js';
import {callTotals} from '../src/columns.js';
import {heldAt, stackTree} from '../src/tree.js';

const want = JSON.parse(readFileSync(process.argv[2], 'utf8'));
const reader = new Reader(await unpack(want.series));
reader.times();
for (let i = 0; i < want.curves; i++) reader.curve();
const lives = new Lives(reader.stacks(), reader.blocks(), reader.segments(), reader.calls(), want.events);
assert.equal(reader.at, reader.buf.length, 'bytes are left over');
assert.deepEqual(callTotals(lives.calls).map((x) => [x.name, x.calls]), want.calls ?? []);

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
  const tree = stackTree(lives.stacks, heldAt(lives, m.event), want.frames);
  assert.equal(tree.value, m.live, where);
  assert.equal(tree.blocks, m.blocks, where);
}
