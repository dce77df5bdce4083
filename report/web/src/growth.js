// Growth between two moments: what is live at the second and was not at the first, by stack, size, pool or stream.
// What a program leaks shows here: allocated in between, and kept.

import {bytes, count, signed} from './format.js';
import {few, fill, h, row, table, who} from './dom.js';
import * as state from './state.js';
import {flame} from './flame.js';
import {grouping} from './grouping.js';
import {eventSlider, when} from './moment.js';
import {heldBetween} from './tree.js';

const mostRows = 100;

/**
 * A table of what changed, the largest change first.
 * @param changes [{name, through, from: what else it takes to know which, more: further lines, grew, before, after, blocksBefore, blocksAfter, kept}], most first
 * @param left how many more have changed that are not in the list
 */
export function changeTable(title, changes, left = 0) {
  const kept = changes.some((r) => r.kept !== undefined);
  const head = [title, 'Change', 'Live at A', 'Live at B', 'Blocks', kept && 'New since A'].filter(Boolean);
  const numbers = [1, 2, 3, 4, 5];
  const line = (r) => row(head, numbers, [[who(r), r.more.length
    ? h('details', {}, h('summary', {class: 'plain muted'}, 'stack'), h('ol', {class: 'frames'}, r.more.map((f) => h('li', {}, f)))) : null],
  h('b', {class: r.grew > 0 ? 'grew' : r.grew < 0 ? 'shrank' : ''}, signed(r.grew)), bytes(r.before), bytes(r.after),
  `${count(r.blocksBefore)} \u2192 ${count(r.blocksAfter)}`, kept && bytes(r.kept)].slice(0, head.length),
  {'data-grew': r.grew, 'data-kept': r.kept, 'data-key': r.name, 'data-from': r.from || false, 'data-through': r.through || false});
  const moved = changes.filter((r) => r.grew !== 0 || r.kept).sort((a, b) => Math.abs(b.grew) - Math.abs(a.grew));
  const listed = moved.slice(0, mostRows);
  const more = moved.length - listed.length + left;
  return moved.length ? [table(head, numbers, listed.map(line), {}, few()), more ? h('p', {class: 'muted'}, `${count(more)} more that changed less`) : null]
    : h('p', {class: 'muted'}, 'Nothing changed.');
}

/**
 * @param by how things may be distinguished: [{key, name, label(number), more(number): further lines}]
 * @param groups what the flame graph may group stacks by, as by
 * @param peak event at which most was live
 * @param changed called with the two events
 */
export function growth(host, timeline, lives, peak, by, groups, frames, changed) {
  const usual = {A: Math.floor(peak / 2), B: peak}; // what made the peak
  const at = {};
  const words = {A: h('span', {class: 'range muted'}), B: h('span', {class: 'range muted'})};
  const sliders = {};
  for (const name of ['A', 'B']) {
    at[name] = state.number(name, -1, lives.events - 1, usual[name]);
    sliders[name] = eventSlider(`Moment ${name}`, lives.events, at[name], (e) => set(name, e));
  }
  const chosen = h('select', {'aria-label': 'Growth by', onchange: table}, by.map((x) => h('option', {value: x.key}, `by ${x.name}`)));
  const sum = h('p', {class: 'hint', 'aria-live': 'polite', id: 'growth-words'});
  const rows = h('div', {id: 'growth-table'});
  const picture = h('div', {class: 'panel', id: 'growth-flame'});
  host.append(h('div', {class: 'panel'}, ['A', 'B'].map((name) => h('div', {class: 'bar'}, h('b', {}, name), sliders[name], words[name])),
    h('div', {class: 'bar'}, sum, h('div', {class: 'tools'}, chosen))), rows, picture);
  const grouped = grouping(lives.stacks, frames, groups, null, () => draw());
  const graph = flame(picture, 'Growth from A to B, by stack', {before: 'at A', after: 'at B'}, grouped.tools);
  let waiting = false;

  function show() {
    waiting = false;
    for (const name of ['A', 'B']) {
      words[name].textContent = when(timeline, at[name]);
      state.set({[name]: at[name] === usual[name] ? null : at[name]});
    }
    table();
    draw();
    changed(at.A, at.B);
  }

  function draw() {
    graph.show(grouped.tree((key) => heldBetween(lives, at.A, at.B, key)));
  }

  function table() {
    const kind = by.find((x) => x.key === chosen.value);
    const all = lives.growth(at.A, at.B, kind.key);
    const total = all.reduce((a, r) => ({before: a.before + r.before, after: a.after + r.after, kept: a.kept + r.kept,
      keptBlocks: a.keptBlocks + r.keptBlocks}), {before: 0, after: 0, kept: 0, keptBlocks: 0});
    sum.textContent = `From ${bytes(total.before)} to ${bytes(total.after)} live: ${signed(total.after - total.before)}. `
      + `${bytes(total.kept)} in ${count(total.keptBlocks)} blocks were allocated in between and are kept at B.`;
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
