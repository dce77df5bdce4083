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
import {noStack, rangeName} from './tree.js';
import {grouping} from './grouping.js';
import {flame} from './flame.js';
import {bandTrack, callTrack} from './tracks.js';
import {momentPicker} from './moment.js';
import {growth} from './growth.js';
import {differences} from './differences.js';
import {failureMoment, failureSection} from './failure.js';
import {calledText, h, knowFrames, shortFrame} from './dom.js';

const data = JSON.parse(document.getElementById('cistern-data').textContent);
const views = data.differences || data.traces;
const root = document.getElementById('cistern-page');

async function show(index) {
  const t = views[index];
  if (!data.differences) knowFrames(t.frames, t.short_frames);
  const body = h('main', {});
  root.replaceChildren(header(index), body);
  if (data.differences) {
    differences(t, new Reader(await unpack(document.getElementById(`cistern-series-${index}`).textContent)), body);
    document.documentElement.dataset.ready = String(Math.round(performance.now()));
    return;
  }
  body.append(cards(t));
  if (t.failures) body.append(failureSection(t));
  if (t.results.length) {
    body.append(section('comparison', 'Allocators compared',
      'The same run under each policy. Ratio is peak reserved over peak live; driver time is modelled from calls '
      + 'measured on an H200.', comparison(t)));
  }
  const charts = h('div', {class: 'panel', id: 'chart'});
  body.append(section('time', 'Memory over time',
    'Drag to zoom, scroll to zoom in and out, double-click for the whole run; a click chooses the moment that is shown below.', charts));
  const ooms = t.ooms.filter((o) => !t.failures || o.source !== 'recorded'); // of those there is more above
  if (ooms.length) {
    body.append(section('oom', 'Out of memory, explained', '', oomList({ooms})));
  }
  const reader = new Reader(await unpack(document.getElementById(`cistern-series-${index}`).textContent));
  const times = reader.times();
  const curves = t.lines.map(() => reader.curve());
  const lines = t.lines.map((l) => ({
    name: l.name, shown: !l.hidden,
    color: l.kind === 'policy' ? policyColor(l.policy) : `--${l.kind}`,
    fill: l.kind === 'live' ? '--live-fill' : undefined,
    dash: l.kind === 'recorded' ? [6, 4] : undefined,
  }));
  const {events, peak} = t.inspection;
  const timeline = new Timeline(times, curves, events, t.lines.map((l) => l.until));
  const on = {pick: () => {}, range: () => {}};
  const chart = events > 0 ? memoryChart(charts, timeline, lines,
    t.ooms.slice(0, 20).map((o) => ({event: o.event, label: `${o.source}: OOM`})), peak.event,
    {pick: (e) => on.pick(e), range: () => on.range()}) : null;
  if (!chart) charts.append(h('p', {class: 'muted'}, 'The file has no events: only what was held is known.'));
  if (chart) await painted(); // the chart is there to be used while the tables below are made
  document.documentElement.dataset.painted = String(Math.round(performance.now()));
  const lives = new Lives(reader.stacks(), reader.blocks(), reader.segments(), reader.calls(), events,
    t.frame_libraries);
  lives.stackNames = reader.stackNames(lives.stacks.n);
  if (t.failures && !chart) failureMoment(t, lives, null, []);
  if (chart) moments(t, body, charts, chart, on, timeline, lives);
  body.append(section('holders', 'Allocations at the peak', '', h('div', {class: 'two'}, labelTables(t), sizesAndStreams(t)),
    h('h3', {}, 'By stack'), holders(t)),
  section('facts', 'Settings and notes', '', facts(t)));
  document.documentElement.dataset.ready = String(Math.round(performance.now()));
}

/** Whether the stacks of a driver trace are what called the driver alone. */
function callersOnly(t, lives) {
  return t.call_kinds.some((k) => k.name.startsWith('cu')) && lives.stacks.parent.every((p) => p === 0);
}

/** After the next frame has been painted. */
function painted() {
  return new Promise((done) => {
    requestAnimationFrame(() => setTimeout(done, 0));
  });
}

/** What depends on the moment that is looked at: bands and calls, flame graph, addresses, growth. */
function moments(t, body, charts, chart, on, timeline, lives) {
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
  const tracks = [bandTrack(charts, timeline, lives, peak, bandKinds, chart)];
  if (lives.calls.n) tracks.push(callTrack(charts, timeline, lives, t.call_kinds, stackName, chart));
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
  const mark = () => chart.moments([{event: shown.event, label: 'shown below', color: '--accent'},
    {event: shown.A, label: 'A', color: '--muted'}, {event: shown.B, label: 'B', color: '--muted'}]);
  const picker = h('div', {class: 'panel', id: 'moment'});
  const picture = h('div', {class: 'panel', id: 'flame'});
  const map = h('div', {class: 'panel', id: 'map'});
  body.append(section('at', 'A moment', 'Click on the chart above, or use the slider: arrow keys step by an event.', picker),
    section('stacks', 'Live bytes by stack', stacks ? `Outermost frame on top; a click zooms in. Colours tell files apart.${callersOnly(t, lives)
      ? ' Only callers of the driver were recorded: with cistern trace --stacks all there are whole stacks.' : ''}`
      : 'No stacks were recorded: by size instead.', picture),
    section('addresses', 'Addresses', 'Every reserved byte at that moment, in address order.', map));
  const grouped = grouping(groups, () => draw());
  const graph = flame(picture, 'Flame graph of live bytes by stack', null, grouped.tool);
  const draw = () => graph.show(grouped.tree(lives, null, shown.event, t.frames));
  const places = {stackName, called, streamName, poolName, topStacks: t.top_stacks,
    groups: groups.map((g) => ({...g, numbers: lives.keys(g.key), top: [...lives.sums(peak, g.key)]
      .sort((a, b) => b[1].bytes - a[1].bytes).map(([n]) => n)}))};
  const addresses = addressMap(map, places);
  if (t.failures) failureMoment(t, lives, places, groups);
  const moment = momentPicker(picker, timeline, lives, peak, (event, segments) => {
    shown.event = event;
    addresses.show(segments);
    draw();
    mark();
  });
  on.pick = moment.set;
  const grown = h('div', {});
  body.append(section('growth', 'Growth between two moments',
    'What is live at B and was not at A. What a program leaks was handed out in between and is kept.', grown));
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
      ? h('select', {'aria-label': 'Trace', onchange: (e) => run(Number(e.target.value))},
        views.map((x, i) => h('option', {value: i, selected: i === index}, x.name)))
      : null);
}

function run(index) {
  show(index).catch((e) => {
    root.append(h('p', {class: 'error', role: 'alert'}, `This page could not be drawn: ${e.message}`));
    throw e;
  });
}

run(0);
