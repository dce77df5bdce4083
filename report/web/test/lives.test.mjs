// Moments, growth, bands, driver calls and trees, held against plain loops.

import test from 'node:test';
import assert from 'node:assert/strict';
import {Lives, measure, sizeRange} from '../src/lives.js';
import {ColumnLives, groupsOf} from '../src/columnlives.js';
import {callTotals, callsByColumn, columnsOf} from '../src/columns.js';
import {Fold, groupTree, heldAt, heldBetween, noStack, stackTree} from '../src/tree.js';
import {mix, shadeOf} from '../src/color.js';
import {bytes, duration, fixed, signed, timeLabels} from '../src/format.js';
import {Timeline} from '../src/series.js';
import {never} from '../src/decode.js';

/** Numbers that look random and are the same every time. */
function random(seed) {
  let s = seed >>> 0;
  return (n) => {
    s = (Math.imul(s, 1664525) + 1013904223) >>> 0;
    return Math.floor((s / 2 ** 32) * n);
  };
}

const events = 400;

/** A tree of stacks: 1 and 2 below the root, 3 and 4 below 1, 5 below 3. */
const stacks = {n: 6, parent: Uint32Array.of(0, 0, 0, 1, 1, 3), frame: Uint32Array.of(0, 0, 1, 2, 0, 3)};
const frames = ['main a.py:1', 'other b.py:2', 'forward c.py:3', 'linear d.py:4'];

function randomLives(seed, n = 300) {
  const next = random(seed);
  const list = [];
  for (let i = 0; i < n; i++) {
    const from = next(events) - 1;
    const to = next(4) === 0 ? never : Math.min(from + 1 + next(60), never);
    const freed = to === never ? (next(3) ? never : from + next(5)) : to - next(Math.min(3, to - from) + 1);
    list.push({from, to, freed, addr: i * 2 ** 22 + 0x7f0000000000, size: 1 + next(3 << 20), stream: next(2), pool: next(3),
      stack: next(6), tag: next(60), library: next(3), thread: next(2)});
  }
  list.sort((a, b) => a.from - b.from || a.addr - b.addr);
  const blocks = {n};
  for (const [k, type] of [['from', Int32Array], ['to', Int32Array], ['freed', Int32Array], ['addr', Float64Array],
    ['size', Float64Array], ['stream', Uint32Array], ['pool', Uint32Array], ['stack', Uint32Array], ['tag', Uint32Array], ['library', Uint32Array], ['thread', Uint32Array]]) {
    blocks[k] = type.from(list, (b) => b[k]);
  }
  const segments = {n: 2, from: Int32Array.of(-1, 10), to: Int32Array.of(never, 300), addr: Float64Array.of(0x7f0000000000, 0x7f0000000000 + 2 ** 28),
    size: Float64Array.of(2 ** 27, 2 ** 26), stream: Uint32Array.of(0, 1), pool: Uint32Array.of(0, 1), flags: Uint8Array.of(0, 1)};
  const calls = {n: 3, event: Int32Array.of(10, 11, 300), kind: Uint8Array.of(0, 2, 1), addr: Float64Array.of(1, 2, 1),
    size: Float64Array.of(2 ** 26, 5, 2 ** 26), took: Float64Array.of(7, 0, 1e9), stack: new Uint32Array(3)};
  return {list, lives: new Lives(stacks, blocks, segments, calls, events)};
}

const liveAt = (list, e) => list.filter((b) => b.from <= e && b.to > e);
const total = (list) => list.reduce((a, b) => a + b.size, 0);

test('what is live at every moment, by everything that blocks are distinguished by', () => {
  const {list, lives} = randomLives(1);
  for (let e = -1; e < events; e++) {
    const want = liveAt(list, e);
    for (const by of ['stack', 'range', 'size', 'pool', 'stream', 'tag', 'thread']) {
      const sums = new Map();
      for (const b of want) {
        const key = by === 'range' ? sizeRange(b.size) : b[by];
        const at = sums.get(key) || {bytes: 0, blocks: 0};
        sums.set(key, {bytes: at.bytes + b.size, blocks: at.blocks + 1});
      }
      assert.deepEqual(lives.sums(e, by), sums, `after event ${e}, by ${by}`);
    }
  }
});

test('growth is the difference of two moments, most first', () => {
  const {list, lives} = randomLives(2);
  for (const [a, b] of [[-1, 399], [100, 200], [200, 200], [37, 38]]) {
    const rows = lives.growth(a, b, 'stack');
    for (const r of rows) {
      const before = liveAt(list, a).filter((x) => x.stack === r.key);
      const after = liveAt(list, b).filter((x) => x.stack === r.key);
      const kept = after.filter((x) => x.from > a);
      assert.deepEqual([r.before, r.after, r.blocksBefore, r.blocksAfter, r.kept, r.keptBlocks, r.grew], [total(before), total(after),
        before.length, after.length, total(kept), kept.length, total(after) - total(before)]);
    }
    assert.equal(rows.reduce((s, r) => s + r.grew, 0), total(liveAt(list, b)) - total(liveAt(list, a)));
    for (let i = 1; i < rows.length; i++) assert.ok(rows[i - 1].grew >= rows[i].grew);
  }
});

test('the address map has every live block once, and adds up', () => {
  const {list, lives} = randomLives(3);
  for (const e of [-1, 0, 9, 10, 299, 300, 399]) {
    const map = lives.mapAt(e);
    const seen = map.flatMap((s) => [...s.blocks.addr]);
    assert.deepEqual(seen, liveAt(list, e).map((b) => b.addr).sort((a, b) => a - b));
    for (const s of map) {
      for (let i = 0; i < s.blocks.n; i++) {
        const b = list.find((x) => x.addr === s.blocks.addr[i]);
        assert.ok(b.addr >= s.addr && (s.flags & 2) === 0 || b.addr + s.blocks.size[i] <= s.addr + s.size);
        assert.equal(s.blocks.pending[i], b.freed <= e ? 1 : 0);
        assert.equal(s.blocks.since[i], b.from);
        assert.equal(s.blocks.size[i], Math.max(512, Math.ceil(b.size / 512) * 512));
      }
    }
    const m = measure(map);
    assert.equal(m.live, total(liveAt(list, e)));
    assert.equal(m.segments, e >= 10 && e < 300 ? 2 : 1);
    assert.equal(m.reserved, e >= 10 && e < 300 ? 2 ** 27 + 2 ** 26 : 2 ** 27);
  }
});

test('bands add up to what is live, each to its own', () => {
  const {list, lives} = randomLives(4);
  const columns = new ColumnLives(lives.blocks, events);
  columns.group(groupsOf(lives.keys('pool'), [2, 0]), 3);
  for (const at of [[0, 5, 5, 17, 100, 399], [...Array(events).keys()], [200], [7, 7], [-1], []]) {
    const out = columns.bands(Int32Array.from(at));
    at.forEach((e, k) => {
      const of = (f) => total(liveAt(list, e).filter(f));
      assert.deepEqual(out.map((band) => band[k]), [of((b) => b.pool === 2), of((b) => b.pool === 0), of((b) => b.pool === 1)], `event ${e}`);
    });
  }
});

test('columns meet every event once and keep the highest of each', () => {
  const next = random(5);
  const us = new Float64Array(events);
  for (let i = 1; i < events; i++) us[i] = us[i - 1] + next(4);
  const event = Int32Array.from({length: events}, (_, i) => i);
  const value = Float64Array.from({length: events}, () => next(1e9));
  const timeline = new Timeline({stride: 1, us}, [{event, value}], events, [null]);
  for (const byEvent of [false, true]) {
    timeline.byEvent = byEvent;
    for (const n of [1, 7, 100, 1000]) {
      const {edges, peaks} = columnsOf(timeline, ...timeline.extent(), n);
      assert.equal(edges[0], 0);
      assert.equal(edges[n], events);
      for (let k = 0; k < n; k++) {
        assert.ok(edges[k] <= edges[k + 1]);
        if (edges[k] === edges[k + 1]) {
          assert.equal(peaks[k], Math.max(0, edges[k] - 1));
          continue;
        }
        const all = value.subarray(edges[k], edges[k + 1]);
        assert.ok(peaks[k] >= edges[k] && peaks[k] < edges[k + 1]);
        assert.equal(value[peaks[k]], Math.max(...all));
      }
    }
  }
});

test('driver calls by column, and in all', () => {
  const {lives} = randomLives(6);
  const kinds = [{name: 'segment_alloc', does: 1}, {name: 'segment_free', does: -1}, {name: 'cuMemSetAccess', does: 0}];
  const c = callsByColumn(lives.calls, kinds, Int32Array.of(0, 11, 12, 350), 1);
  assert.deepEqual([...c.got], [2 ** 26, 0, 0]);
  assert.deepEqual([...c.took], [7, 0, 1e9]);
  assert.deepEqual([...c.gave], [0, 0, 2 ** 26]);
  assert.deepEqual([...c.number], [1, 1, 1]);
  assert.deepEqual([...c.first], [0, 1, 2]);
  assert.deepEqual(callTotals(lives.calls, kinds).map((x) => [x.name, x.calls, x.bytes, x.took]),
    [['segment_alloc', 1, 2 ** 26, 7], ['segment_free', 1, 2 ** 26, 1e9], ['cuMemSetAccess', 1, 5, 0]]);
  // What came before the first event is in the first column.
  lives.calls.event[0] = -1;
  assert.deepEqual([...callsByColumn(lives.calls, kinds, Int32Array.of(0, 11, 12, 350), 1).number], [1, 1, 1]);
});

test('a tree of stacks has every byte below the frames that it was allocated by', () => {
  const {list, lives} = randomLives(7);
  const e = 150;
  const tree = stackTree(lives.stacks, heldAt(lives, e), frames);
  const live = liveAt(list, e);
  const of = (...s) => total(live.filter((b) => s.includes(b.stack)));
  assert.equal(tree.value, total(live));
  assert.equal(tree.blocks, live.length);
  const child = (n, name) => n.children.find((c) => c.name === name);
  const main = child(tree, 'main a.py:1');
  assert.equal(main.value, of(1, 3, 4, 5));
  assert.equal(child(main, 'forward c.py:3').value, of(3, 5));
  assert.equal(child(child(main, 'forward c.py:3'), 'linear d.py:4').value, of(5));
  assert.equal(child(main, 'main a.py:1').value, of(4)); // a function that calls itself
  assert.equal(child(tree, 'other b.py:2').value, of(2));
  assert.equal(child(tree, noStack).value, of(0));
  const check = (n) => {
    assert.ok(n.value >= n.children.reduce((a, c) => a + c.value, 0));
    for (let i = 1; i < n.children.length; i++) assert.ok(n.children[i - 1].value >= n.children[i].value);
    n.children.forEach(check);
  };
  check(tree);
});

test('a tree of two moments is as wide as the larger of them, stack by stack', () => {
  const {list, lives} = randomLives(8);
  const tree = stackTree(lives.stacks, heldBetween(lives, 50, 250), frames);
  assert.equal(tree.before, total(liveAt(list, 50)));
  assert.equal(tree.after, total(liveAt(list, 250)));
  const of = (e, s) => total(liveAt(list, e).filter((b) => b.stack === s));
  const other = tree.children.find((c) => c.name === 'other b.py:2');
  assert.equal(other.value, Math.max(of(50, 2), of(250, 2)));
  assert.deepEqual([other.before, other.after], [of(50, 2), of(250, 2)]);
});

test('a library is the one that was recorded, else that of the stack', () => {
  const {list, lives} = randomLives(10);
  lives.libraryOfFrame = [-1, 4, -1, 2];
  const ofStack = [0, 0, 5, 0, 0, 3]; // node 5 is linear below forward below main; 2 is other
  assert.deepEqual([...lives.keys('library')], list.map((b) => b.library || ofStack[b.stack]));
});

test('a tree of groups has each group\'s tree below its name, and what are too many in one', () => {
  const {list, lives} = randomLives(11);
  const tree = groupTree(lives.stacks, heldBetween(lives, 50, 250, 'tag'), frames, (k) => `tag ${k}`);
  assert.equal(tree.before, total(liveAt(list, 50)));
  assert.equal(tree.after, total(liveAt(list, 250)));
  const of = (e, k) => liveAt(list, e).filter((b) => b.tag === k);
  const widths = [...Array(60).keys()].map((k) => {
    const stacksOf = new Map(); // as wide as the larger of both, stack by stack, and without one size by size
    for (const e of [50, 250]) {
      for (const b of of(e, k)) {
        const key = b.stack || -b.size;
        const at = stacksOf.get(key) || {50: 0, 250: 0};
        at[e] += b.size;
        stacksOf.set(key, at);
      }
    }
    return [`tag ${k}`, [...stacksOf.values()].reduce((a, x) => a + Math.max(x[50], x[250]), 0)];
  }).filter(([, n]) => n > 0).sort((a, b) => b[1] - a[1]);
  assert.ok(widths.length > 40);
  const got = new Map(tree.children.map((c) => [c.name, c]));
  assert.equal(got.size, 41);
  for (const [name, width] of widths.slice(0, 40)) {
    assert.equal(got.get(name).value, width, name);
    assert.equal(got.get(name).after, total(of(250, Number(name.slice(4)))), name);
  }
  assert.equal(got.get('all others').after, widths.slice(40).reduce((sum, [name]) => sum + total(of(250, Number(name.slice(4)))), 0));
  assert.equal(tree.children[0].children.reduce((a, c) => a + c.after, 0), tree.children[0].after);
});

test('without any stack the tree is by size', () => {
  const {lives} = randomLives(9);
  lives.blocks.stack.fill(0);
  const tree = stackTree(lives.stacks, heldAt(lives, 399), frames);
  assert.ok(tree.children.length > 0 && tree.children.every((c) => /^(up to|over) /.test(c.name)));
  assert.ok(tree.children[0].children.every((c) => c.name.endsWith(' each')));
});

test('labels of an axis are where they say', () => {
  assert.deepEqual(timeLabels([0, 2.5e6, 5e6, 7.5e6]), ['0.0 s', '2.5 s', '5.0 s', '7.5 s']);
  assert.deepEqual(timeLabels([0, 2e6, 4e6]), ['0 s', '2 s', '4 s']);
  assert.deepEqual(timeLabels([1000, 1250, 1500]), ['1.00 ms', '1.25 ms', '1.50 ms']);
  assert.deepEqual(timeLabels([0, 0.1e6, 0.2e6, 1e6]), ['0.0 s', '0.1 s', '0.2 s', '1.0 s']);
  assert.deepEqual(timeLabels([3]), ['3 us']);
});

test('colours and signs', () => {
  assert.equal(mix('#000000', '#ffffff', 0), '#000000');
  assert.equal(mix('#000000', '#ff8000', 1), '#ff8000');
  assert.equal(mix('#000000', '#ffffff', 0.5), '#808080');
  assert.equal(shadeOf('f /x/a.py:1', 7), shadeOf('g /x/a.py:99', 7)); // by file
  const native = '/opt/lib/libtorch.so'; // the names of C++ have spaces
  assert.equal(shadeOf(`(anonymous namespace)::f(int, long) ${native}`, 7), shadeOf(`operator new(unsigned long) ${native}`, 7));
  assert.equal(signed(1024), '+1.00 KiB');
  assert.equal(signed(-1024), '\u22121.00 KiB');
  assert.equal(signed(0), '+0 bytes');
});

test('numbers are written as the command writes them: of two that are equally near the even one', () => {
  const gib = 1024 ** 3;
  assert.deepEqual([1.125, 1.375, 1.625, 1.875, 2.375, 2.625, 0.005 * 1024, 1000.125].map((n) => bytes(n * gib)),
    ['1.12 GiB', '1.38 GiB', '1.62 GiB', '1.88 GiB', '2.38 GiB', '2.62 GiB', '5.12 GiB', '1000.12 GiB']);
  assert.deepEqual([1125, 1375, 1005, 999_995_000, 2_625_000].map(duration), ['1.12 ms', '1.38 ms', '1.00 ms', '16 min 40 s', '2.62 s']);
  assert.deepEqual([fixed(6.25, 1), fixed(6.75, 1), fixed(-6.25, 1), fixed(0.0625, 3), fixed(1.0625, 3), fixed(2.5, 0), fixed(0.25, 1), fixed(9.995, 2)],
    ['6.2', '6.8', '-6.2', '0.062', '1.062', '2', '0.2', '9.99']);
});

test('large blocks of columns, oldest first', () => {
  const {lives} = randomLives(11);
  const columns = new ColumnLives(lives.blocks, events);
  const even = (from, n) => Int32Array.from({length: n}, (_, k) => from + Math.floor((k * (399 - from)) / Math.max(1, n - 1)));
  for (const [at, least] of [[even(0, 60), 0], [even(0, 60), 1 << 19], [even(0, 60), 2 ** 40], [even(250, 7), 0], [even(390, 5), 1 << 19], [even(0, 0), 0]]) {
    const {start, block} = columns.large(at, least);
    at.forEach((e, k) => {
      const want = [];
      for (let i = 0; i < lives.blocks.n; i++) if (lives.blocks.size[i] >= least && lives.blocks.from[i] <= e && lives.blocks.to[i] > e) want.push(i);
      assert.deepEqual(block.slice(start[k], start[k + 1]), want, `at event ${e}, of ${least} bytes`);
    });
  }
});

test('a fold leaves out hidden frames but for the innermost, and turns stacks over', () => {
  const stacks = {n: 7, parent: [0, 0, 1, 2, 2, 1, 4], frame: [0, 0, 1, 2, 3, 3, 1]}; // 0>1>2, 0>1>3>1 and 0>3
  const names = ['main', '_call_impl', 'forward', 'empty'];
  const held = [[3, 10], [4, 20], [5, 30], [6, 5]].map(([stack, size]) => ({stack, size, range: 0, after: size, before: 0, blocks: 1}));
  const shape = (n) => [n.name, n.value, n.children.map(shape)];
  const folded = (fold) => {
    const list = held.map((x) => ({...x, stack: fold.node(x.stack)}));
    return shape(stackTree(fold.stacks(), list, names));
  };
  const glue = [false, true, false, false];
  assert.deepEqual(folded(new Fold(stacks, glue, false)), ['all', 65, [['main', 65, [['empty', 55, [['_call_impl', 5, []]]], ['forward', 10, []]]]]]);
  assert.deepEqual(folded(new Fold(stacks, glue, true)), ['all', 65, [['empty', 50, [['main', 50, []]]], ['forward', 10, [['main', 10, []]]],
    ['_call_impl', 5, [['empty', 5, [['main', 5, []]]]]]]]);
  assert.deepEqual(folded(new Fold(stacks, glue.map(() => false), false)), shape(stackTree(stacks, held, names)));
});
