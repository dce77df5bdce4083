// Growth between two moments: what is live at the second and was not at the first, by stack, size, pool or stream.
// What a program leaks shows here: handed out in between, and kept.

import {bytes, count, signed} from './format.js';
import {fill, h, who} from './dom.js';
import {flame} from './flame.js';
import {grouping} from './grouping.js';
import {eventSlider, when} from './moment.js';

const mostRows = 50;

/**
 * A table of what changed: what grew most and what shrank most.
 * @param changes [{name, through, from: what else it takes to know which, more: further lines, grew, before, after, blocksBefore, blocksAfter, kept}], most first
 * @param left how many more have changed that are not in the list
 */
export function changeTable(title, changes, left = 0) {
  const kept = changes.some((r) => r.kept !== undefined);
  const cell = (text) => h('td', {class: 'n'}, text);
  const line = (r) => h('tr', {'data-grew': r.grew, 'data-kept': r.kept, 'data-key': r.name, 'data-from': r.from || false, 'data-through': r.through || false},
    h('td', {}, who(r), r.more.length
      ? h('details', {}, h('summary', {class: 'plain muted'}, 'stack'), h('ol', {class: 'frames'}, r.more.map((f) => h('li', {}, f)))) : null),
    cell(h('b', {class: r.grew > 0 ? 'grew' : r.grew < 0 ? 'shrank' : ''}, signed(r.grew))), cell(bytes(r.before)), cell(bytes(r.after)),
    cell(`${count(r.blocksBefore)} \u2192 ${count(r.blocksAfter)}`), kept ? cell(bytes(r.kept)) : null);
  const moved = changes.filter((r) => r.grew !== 0 || r.kept);
  const head = moved.length <= mostRows ? moved : [...moved.slice(0, mostRows - 10), ...moved.slice(-10)];
  const more = moved.length - head.length + left;
  return [h('table', {class: 'grid'}, h('thead', {}, h('tr', {}, [title, 'Grew', 'Live at A', 'Live at B', 'Blocks', kept && 'New since A']
    .filter(Boolean).map((x, i) => h('th', {class: i ? 'n' : ''}, x)))), h('tbody', {}, head.map(line))),
  more ? h('p', {class: 'muted'}, `${count(more)} more that changed less`) : null,
  moved.length ? null : h('p', {class: 'muted'}, 'Nothing changed.')];
}

/**
 * @param by how things may be distinguished: [{key, name, label(number), more(number): further lines}]
 * @param groups what the flame graph may group stacks by, as by
 * @param peak event at which most was live
 * @param changed called with the two events
 */
export function growth(host, timeline, lives, peak, by, groups, frames, changed) {
  const at = {A: Math.floor(peak / 2), B: peak}; // what made the peak
  const words = {A: h('span', {class: 'range muted'}), B: h('span', {class: 'range muted'})};
  const sliders = {};
  for (const name of ['A', 'B']) {
    sliders[name] = eventSlider(`Moment ${name}`, lives.events, at[name], (e) => set(name, e));
  }
  const chosen = h('select', {'aria-label': 'Growth by', onchange: table}, by.map((x) => h('option', {value: x.key}, `by ${x.name}`)));
  const sum = h('p', {class: 'hint', 'aria-live': 'polite', id: 'growth-words'});
  const rows = h('div', {class: 'scroll', id: 'growth-table'});
  const picture = h('div', {class: 'panel', id: 'growth-flame'});
  host.append(h('div', {class: 'panel'}, ['A', 'B'].map((name) => h('div', {class: 'bar'}, h('b', {}, name), sliders[name], words[name])),
    h('div', {class: 'bar'}, sum, h('div', {class: 'tools'}, chosen))), rows, picture);
  const grouped = grouping(groups, draw);
  const graph = flame(picture, 'Growth from A to B, by stack', {before: 'at A', after: 'at B'}, grouped.tool);
  let waiting = false;

  function show() {
    waiting = false;
    for (const name of ['A', 'B']) words[name].textContent = when(timeline, at[name]);
    table();
    draw();
    changed(at.A, at.B);
  }

  function draw() {
    graph.show(grouped.tree(lives, at.A, at.B, frames));
  }

  function table() {
    const kind = by.find((x) => x.key === chosen.value);
    const all = lives.growth(at.A, at.B, kind.key);
    const total = all.reduce((a, r) => ({before: a.before + r.before, after: a.after + r.after, kept: a.kept + r.kept,
      keptBlocks: a.keptBlocks + r.keptBlocks}), {before: 0, after: 0, kept: 0, keptBlocks: 0});
    sum.textContent = `From ${bytes(total.before)} to ${bytes(total.after)} live: ${signed(total.after - total.before)}. `
      + `${bytes(total.kept)} in ${count(total.keptBlocks)} blocks were handed out in between and are kept at B.`;
    Object.assign(sum.dataset, total);
    fill(rows, changeTable(kind.title, all.map((r) => ({...r, ...(kind.called ? kind.called(r.key) : {name: kind.label(r.key)}), more: kind.more ? kind.more(r.key) : []}))));
  }

  function set(name, event) {
    at[name] = event;
    const other = name === 'A' ? 'B' : 'A';
    if (at.A > at.B) at[other] = event; // A is never behind B
    sliders.A.value = String(at.A);
    sliders.B.value = String(at.B);
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(show);
  }
  show();
  return {set};
}
