// The page: reads what the Go package report embedded, and draws it. Nothing is fetched.

import 'uplot/dist/uPlot.min.css';
import './page.css';
import {Reader, unpack} from './decode.js';
import {Timeline} from './series.js';
import {memoryChart} from './chart.js';
import {addressMap} from './addrmap.js';
import {cards, comparison, facts, holders, labelTables, oomList, policyColor, section, sizesAndStreams} from './sections.js';
import {bytes, count} from './format.js';
import {Lives} from './lives.js';
import {heldAt, noStack, rangeName} from './tree.js';
import {grouping} from './grouping.js';
import {flame} from './flame.js';
import {callTrack, liveTracks} from './tracks.js';
import {momentPicker} from './moment.js';
import {growth} from './growth.js';
import {differences} from './differences.js';
import {fleet} from './fleet.js';
import {failedEvent, failure} from './failure.js';
import {calledText, fill, h, knowFrames, shortFrame} from './dom.js';
import * as state from './state.js';

const data = JSON.parse(document.getElementById('cistern-data').textContent);
const views = data.differences || data.traces || [];
const root = document.getElementById('cistern-page');

async function show(index) {
  const t = views[index];
  knowFrames(t);
  delete document.documentElement.dataset.ready;
  const body = h('main', {});
  const links = h('nav', {'aria-label': 'Sections'});
  root.replaceChildren(header(index), links, body);
  const reader = new Reader(await unpack(long('series', index)));
  if (data.differences) differences(t, reader, body);
  else await run(t, reader, index, body);
  fill(links, [...body.querySelectorAll('section[id]')].map((s) => h('a', {href: state.linkTo(s.id), 'data-to': s.id, onclick: (e) => {
    e.preventDefault();
    goTo(s.id);
  }}, s.querySelector('h2').textContent)));
  if (state.get('go')) goTo(state.get('go'));
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

/** Scrolls to a section, which the URL then names. */
function goTo(id) {
  const section = document.getElementById(id);
  if (!section || section.tagName !== 'SECTION') return;
  state.set({go: id});
  section.querySelectorAll(':scope > details').forEach((d) => { d.open = true; });
  section.scrollIntoView();
}

/** The page of one run. */
async function run(t, reader, index, body) {
  const stage = h('div', {class: 'stage'});
  const charts = h('div', {class: 'panel', id: 'chart'});
  const failed = t.failures ? failure(t) : null;
  body.append(...[failed && failed.answer, cards(t), stage, failed && failed.details].filter(Boolean));
  stage.append(section('time', 'Memory over time', `Drag to zoom; ${zoomKey} + wheel and the keys + and \u2212 too. A click chooses the moment of the other sections.`, charts));
  if (t.results.length) {
    body.append(section('comparison', 'Allocators compared',
      'The same run under each policy. Ratio is peak reserved over peak live; driver time is modelled from calls '
      + 'measured on an H200.', comparison(t)));
  }
  const ooms = t.ooms.filter((o) => !t.failures || o.source !== 'recorded'); // of those there is more above
  if (ooms.length) body.append(section('oom', 'Out of memory, explained', '', oomList({ooms})));
  const {events, peak} = t.inspection;
  const timeline = new Timeline(reader.times(), t.lines.map(() => reader.curve()), events, t.lines.map((l) => l.until));
  const on = {pick: () => {}, range: () => {}};
  const chart = events > 0 ? memoryChart(charts, timeline, chartLines(t),
    t.ooms.slice(0, 20).map((o) => ({event: o.event, label: `${o.source}: OOM`})), peak.event,
    {pick: (e) => on.pick(e), range: () => on.range(), thinned: t.thinned}) : null;
  if (!chart) charts.append(h('p', {class: 'muted'}, 'The file has no events: only what was held is known.'));
  if (chart) await painted(); // the chart is there to be used while the tables below are made
  document.documentElement.dataset.painted = String(Math.round(performance.now()));
  if (chart) {
    await parsed();
    if (t.thinned) {
      const all = new Reader(await unpack(long('curves', index)));
      chart.refine(all.times(), t.lines.map(() => all.curve()));
    }
    const rest = new Reader(await unpack(long('tables', index)));
    const lives = new Lives(rest.stacks(), rest.blocks(), rest.segments(), rest.calls(), events, t.frame_libraries);
    lives.stackNames = rest.stackNames(lives.stacks.n);
    moments(t, body, stage, chart, on, timeline, lives);
  }
  body.append(section('holders', 'Allocations at the peak', '', h('h3', {}, 'By stack'), holders(t),
    h('div', {class: 'two'}, labelTables(t), sizesAndStreams(t))),
  section('facts', 'Settings and notes', '', facts(t)));
}

const zoomKey = /Mac|iP/.test(navigator.platform) ? '\u2318' : 'Ctrl';

/** The lines of the chart. Those of policies differ in their dashes too. */
function chartLines(t) {
  const dashes = [undefined, [10, 3], [2, 3], [10, 3, 2, 3], [14, 4], [5, 2]];
  return t.lines.map((l) => ({
    name: l.name, shown: !l.hidden,
    color: l.kind === 'policy' ? policyColor(l.policy) : `--${l.kind}`,
    fill: l.kind === 'live' ? '--live-fill' : undefined,
    dash: l.kind === 'recorded' ? [6, 4] : l.kind === 'policy' ? dashes[l.policy % dashes.length] : undefined,
  }));
}

/** Whether the stacks of a driver trace are what called the driver alone. */
function callersOnly(t, lives) {
  return t.call_kinds.some((k) => k.name.startsWith('cu')) && lives.stacks.parent.every((p) => p === 0);
}

/** Long data of a view; all but the series are behind this script. */
function long(what, index) {
  const found = document.getElementById(`cistern-${what}-${index}`);
  if (!found) throw new Error('the page is cut short');
  return found.textContent;
}

/** After the browser has read the whole page. */
async function parsed() {
  if (document.readyState === 'loading') await new Promise((done) => { document.addEventListener('DOMContentLoaded', done, {once: true}); });
}

/** After the next frame has been painted. */
function painted() {
  return new Promise((done) => {
    requestAnimationFrame(() => setTimeout(done, 0));
  });
}

/** What depends on the moment that is looked at: bands and calls, flame graph, addresses, growth. */
function moments(t, body, stage, chart, on, timeline, lives) {
  const peak = t.inspection.peak.event;
  const stackName = (i) => lives.framesOf(i).map((f) => t.frames[f]);
  const names = lives.stackNames;
  const called = (i) => ({name: t.frames[names.name[i]] || noStack, through: t.frames[names.through[i]], from: t.frames[names.from[i]]});
  const allFrames = (i) => { // but for a single one that the name says
    const all = stackName(i);
    return all.length > 1 ? all : [];
  };
  const streamName = (i) => t.stream_names[i] || '?';
  const poolName = (i) => t.pool_names[i] || '0,0';
  const kinds = {
    stack: {key: 'stack', name: 'stack', title: 'Stack', label: (i) => calledText(called(i)), short: (i) => calledText(called(i), shortFrame), more: allFrames, called},
    range: {key: 'range', name: 'size', title: 'Size', label: rangeName},
    size: {key: 'size', name: 'exact size', title: 'Exact size', label: (n) => `${bytes(n)} (${count(n)})`},
    pool: {key: 'pool', name: 'pool', title: 'Pool', label: (i) => `pool ${poolName(i)}`},
    stream: {key: 'stream', name: 'stream', title: 'Stream', label: (i) => `stream ${streamName(i)}`},
  };
  kinds.library = {key: 'library', name: 'library', title: 'Library', label: (i) => (i === 0 ? 'unknown' : t.libraries[i - 1])};
  kinds.tag = {key: 'tag', name: 'tag', title: 'Tag', label: (i) => t.tag_names[i] || '?'};
  kinds.thread = {key: 'thread', name: 'thread', title: 'Thread', label: (i) => t.thread_names[i] || '?'};
  const stacks = lives.stacks.n > 1;
  const tagged = t.tag_names.length > 0 && kinds.tag;
  const threaded = t.thread_names.length > 0 && kinds.thread;
  const libraries = t.libraries.length > 1 && kinds.library;
  // First what tells most: tags, which the program set for that, then pools and streams where there are several.
  const order = [tagged, t.pool_names.length > 1 && kinds.pool, t.stream_names.length > 1 && kinds.stream,
    libraries, threaded, stacks && kinds.stack, kinds.range, kinds.size];
  const groups = [tagged, libraries, threaded].filter(Boolean);
  const bandKinds = [...order.filter(Boolean), t.pool_names.length > 1 ? null : kinds.pool,
    t.stream_names.length > 1 ? null : kinds.stream].filter((x) => x && x !== kinds.size);
  const {blocks} = lives;
  const tracks = [liveTracks(timeline, lives, peak, bandKinds, chart, (i) => ({frames: stackName(blocks.stack[i]), rows: [
    ['stream', streamName(blocks.stream[i])], ['pool', poolName(blocks.pool[i])],
    ...groups.map((g) => [g.name, g.label(lives.keys(g.key)[i])])]}))];
  if (lives.calls.n) tracks.push(callTrack(timeline, lives, t.call_kinds, stackName, chart));
  let drawing = false;
  on.range = () => {
    if (drawing) return;
    drawing = true;
    requestAnimationFrame(() => {
      drawing = false;
      tracks.forEach((track) => track.draw());
    });
  };

  const shown = {event: peak, A: -1, B: -1};
  const mark = () => chart.moments([{event: shown.event, label: 'shown', color: '--accent'},
    {event: shown.A, label: 'A', color: '--muted'}, {event: shown.B, label: 'B', color: '--muted'}]);
  const picker = h('div', {id: 'moment'});
  const picture = h('div', {id: 'flame'});
  const map = h('div', {class: 'panel', id: 'map'});
  stage.append(h('div', {}, section('stacks', 'A moment, by stack', stacks ? `Outermost frame on top; a click zooms in.${callersOnly(t, lives)
    ? ' Only callers of the driver were recorded: with cistern trace --stacks all there are whole stacks.' : ''}`
    : 'No stacks were recorded: by size instead.', h('div', {class: 'panel'}, picker, picture)),
  section('addresses', 'Addresses', 'Every reserved byte at that moment, in address order.', map)));
  const grouped = grouping(lives.stacks, t.frames, groups, 'flame', () => draw());
  const graph = flame(picture, 'Flame graph of live bytes by stack', null, grouped.tools);
  const draw = () => graph.show(grouped.tree((by) => heldAt(lives, shown.event, by)));
  const addresses = addressMap(map, {stackName, called, streamName, poolName, topStacks: t.top_stacks,
    groups: groups.map((g) => ({...g, numbers: lives.keys(g.key), top: [...lives.sums(peak, g.key)]
      .sort((a, b) => b[1].bytes - a[1].bytes).map(([n]) => n)}))});
  const failed = t.failures ? failedEvent(t) : -1;
  const places = [failed >= 0 ? {name: 'At the failure', event: failed} : null, {name: 'At the peak', event: peak},
    {name: 'Start', event: -1}, {name: 'End', event: lives.events - 1}].filter(Boolean);
  const moment = momentPicker(picker, timeline, lives, peak, places, (event, segments) => {
    shown.event = event;
    addresses.show(segments);
    draw();
    mark();
  });
  on.pick = moment.set;
  const grown = h('div', {});
  body.append(section('growth', 'Growth between two moments',
    'What is live at B and was not at A, by the size of the change. What a program leaks was allocated in between and is kept.', grown));
  const stepKinds = [stacks && kinds.stack, tagged, t.libraries.length > 0 && kinds.library, threaded,
    ...(stacks ? [kinds.range, kinds.size] : [kinds.size, kinds.range]), kinds.pool, kinds.stream].filter(Boolean);
  growth(grown, timeline, lives, peak, stepKinds, groups, t.frames, (a, b) => {
    shown.A = a;
    shown.B = b;
    mark();
  });
}

function header(index) {
  const t = views[index];
  return h('header', {},
    h('div', {}, h('span', {class: 'brand'}, 'Cistern'), h('h1', {}, t.name)),
    views.length > 1
      ? h('select', {'aria-label': 'Trace', onchange: (e) => {
        state.keep();
        state.set({trace: e.target.value});
        start();
      }}, views.map((x, i) => h('option', {value: i, selected: i === index}, x.name)))
      : null);
}

function start() {
  if (data.fleet) {
    fleet(data.fleet, root);
    return;
  }
  show(Math.floor(state.number('trace', 0, views.length - 1, 0))).catch((e) => {
    root.append(h('p', {class: 'error', role: 'alert'}, `This page could not be drawn: ${e.message}`));
    throw e;
  });
}

addEventListener('hashchange', () => { // someone follows a link to another view of this page
  state.read();
  start();
});
start();
