// The page of two runs: what grew from the first, A, to the second, B.

import {bytes, count, duration, signed} from './format.js';
import {fill, h} from './dom.js';
import {Timeline} from './series.js';
import {memoryChart} from './chart.js';
import {flame} from './flame.js';
import {changeTable} from './growth.js';
import {section} from './sections.js';
import {sizeRange} from './lives.js';
import {grouping} from './grouping.js';

const lists = [['by_stack', 'stack', 'Stack', 'stack'], ['by_tag', 'tag', 'Tag', 'tag'], ['by_library', 'library', 'Library', 'library'], ['by_size', 'size', 'Size', 'size'], ['by_exact_size', 'exact size', 'Exact size', 'exact'],
  ['by_pool', 'pool', 'Pool', 'pool'], ['by_stream', 'stream', 'Stream', 'stream']];

/** @param reader of the long data */
export function differences(view, reader, body) {
  const d = view.difference;
  const moment = d.at === 'end' ? 'after the last event' : 'at the peak';
  body.append(cards(d, moment));

  const charts = h('div', {class: 'panel', id: 'chart'});
  const stage = h('div', {class: 'stage'}, section('time', 'Live bytes over time', 'Both runs from their beginnings. Drag to zoom, double-click for all.', charts));
  body.append(stage);
  const times = reader.times();
  const timeline = new Timeline(times, [reader.curve(), reader.curve()], view.points, view.ends);
  if (view.points > 0) {
    memoryChart(charts, timeline, [{name: `A: ${view.names[0]}`, shown: true, color: '--recorded', dash: [6, 4]},
      {name: `B: ${view.names[1]}`, shown: true, color: '--live', fill: '--live-fill'}], [], null, {timeOnly: true, over: 'over'});
  }

  const stacks = reader.stacks();
  const held = reader.changes();
  for (const x of held) x.range = sizeRange(x.size);
  const picture = h('div', {class: 'panel', id: 'flame'});
  stage.append(section('stacks', 'Growth, by stack', `Each ${moment}. A frame is as wide as its bytes in the run where it has more; `
    + 'colour says what became of it.', picture));
  const grouped = grouping(stacks, view.frames, [], 'flame', () => draw());
  const graph = flame(picture, 'Growth from A to B, by stack', {before: 'in A', after: 'in B'}, grouped.tools);
  const draw = () => graph.show(grouped.tree(() => held));
  draw();

  const rows = h('div', {id: 'growth-table'});
  const chosen = h('select', {'aria-label': 'Growth by', onchange: table}, lists.filter(([key]) => d[key]).map(([key, name]) => h('option', {value: key}, `by ${name}`)));
  if (!d.a.stacks && !d.b.stacks) chosen.value = 'by_exact_size';
  function table() {
    const [key, , title, left] = lists.find(([k]) => k === chosen.value);
    fill(rows, changeTable(title, d[key].map((c) => ({name: c.name, through: c.through, from: c.from, more: c.frames && c.frames.length > 1 ? c.frames : [], grew: c.grew_bytes,
      before: c.bytes_a, after: c.bytes_b, blocksBefore: c.blocks_a, blocksAfter: c.blocks_b})), view.left[left]));
  }
  table();
  body.append(section('growth', 'What changed most', '', h('div', {class: 'bar'}, h('div', {class: 'tools'}, chosen)), rows),
    section('facts', 'The two runs', '', facts(d)));
}

function cards(d, moment) {
  const card = (name, a, b, text = bytes) => {
    const grew = b - a;
    const change = text === bytes ? signed(grew) : `${grew > 0 ? '+' : grew < 0 ? '\u2212' : ''}${text(Math.abs(grew))}`;
    return h('div', {class: 'card'}, h('div', {class: 'muted'}, name), h('b', {'data-grew': grew}, change),
      h('div', {class: 'muted'}, `${text(a)} \u2192 ${text(b)}`));
  };
  return h('div', {class: 'cards'}, card('Peak live', d.a.peak_live_bytes, d.b.peak_live_bytes),
    d.at === 'end' ? card('Live at the end', d.a.live_bytes, d.b.live_bytes) : null,
    d.a.peak_reserved_bytes || d.b.peak_reserved_bytes
      ? card('Peak reserved', d.a.peak_reserved_bytes, d.b.peak_reserved_bytes) : null,
    card(`Blocks ${moment}`, d.a.blocks, d.b.blocks, count),
    d.a.driver_calls || d.b.driver_calls ? card('Driver calls', d.a.driver_calls, d.b.driver_calls, count) : null,
    d.a.driver_ns || d.b.driver_ns ? card('Time in the driver', d.a.driver_ns, d.b.driver_ns, (ns) => duration(ns / 1e3)) : null);
}

function facts(d) {
  const row = (name, f) => h('tr', {}, h('td', {class: 'key'}, name), h('td', {class: 'value'}, f(d.a)), h('td', {class: 'value'}, f(d.b)));
  return h('div', {class: 'two'},
    h('div', {}, h('table', {class: 'grid'}, h('thead', {}, h('tr', {}, h('td', {}), h('th', {scope: 'col'}, 'A'), h('th', {scope: 'col'}, 'B'))), h('tbody', {},
      row('file', (s) => s.path), row('device', (s) => String(s.device)),
      d.a.process || d.b.process ? row('process', (s) => (s.process ? `${s.process.pid} ${s.process.program}` : '')) : null, row('run', (s) => duration(s.duration_us)),
      row('events', (s) => count(s.events)), row('allocations', (s) => count(s.allocs)),
      row('requested in all', (s) => bytes(s.requested_bytes)), row('out of memory', (s) => count(s.ooms)),
      row('compared after event', (s) => count(s.event))))),
    h('div', {}, h('h3', {}, 'Notes'), d.notes.length ? h('ul', {}, d.notes.map((n) => h('li', {}, n)))
      : h('p', {class: 'muted'}, 'Nothing is missing from these records.')));
}
