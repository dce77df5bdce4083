// The parts of the page that are text and tables.

import {bytes, count, duration, durations, fixed, odds, sure} from './format.js';
import {first, h, row, table, who} from './dom.js';

export function section(id, title, hint, ...children) {
  return h('section', {id, 'aria-label': title}, h('h2', {}, title), hint ? h('p', {class: 'hint'}, hint) : null, ...children);
}

const policyName = (r) => (r.conf ? `${r.policy}:${r.conf}` : r.policy);

/** Key figures. */
export function cards(t) {
  const best = t.results.filter((r) => (r.odds ? sure(r.odds) : r.completed)).sort((a, b) => a.peak_reserved_bytes - b.peak_reserved_bytes)[0];
  const helped = !t.failures || t.failures.failures.some((x) => x.remedies && x.remedies.length); // good news only where there is some
  const card = (name, value, note, tone) => h('div', {class: `card ${tone || ''}`},
    h('div', {class: 'muted'}, name), h('b', {}, value), h('div', {class: 'muted'}, note || ''));
  return h('div', {class: 'cards'},
    card('Peak live', bytes(t.inspection.peak_live_bytes), 'the floor under every allocator'),
    t.inspection.recorded_peak_reserved_bytes
      ? card('Reserved when recorded', bytes(t.inspection.recorded_peak_reserved_bytes),
        t.inspection.recorded_ratio ? `${fixed(t.inspection.recorded_ratio, 3)} x peak live` : '')
      : null,
    best ? card(`Least reserved: ${best.policy}`, bytes(best.peak_reserved_bytes),
      `${fixed(best.ratio, 3)} x peak live`, helped ? 'good' : '') : null,
    t.inspection.ooms.length ? card('Out of memory', `${count(t.inspection.kinds.oom)} x`, 'in the recorded run', 'bad')
      : null,
    card('Run', duration(t.inspection.duration_us), `${count(t.inspection.events)} events, `
      + `${count(t.inspection.streams.length)} ${t.inspection.streams.length === 1 ? 'stream' : 'streams'}`));
}

/** The comparison of policies. */
export function comparison(t) {
  const rec = t.recorded;
  const most = Math.max(1, rec.peak_reserved_bytes, ...t.results.map((r) => r.peak_reserved_bytes));
  const limited = t.results.some((r) => r.odds);
  const calls = (r) => Object.values(r.driver_calls).reduce((a, b) => a + b, 0);
  const callList = (r) => Object.entries(r.driver_calls).sort((a, b) => b[1] - a[1])
    .map(([k, n]) => `${k} ${count(n)}`).join('\n');
  const bar = (n, color) => h('div', {class: 'meter', css: {'--w': `${(100 * n) / most}%`, '--key': `var(${color})`}});
  const head = ['Policy', 'Peak reserved', 'Ratio', 'Driver calls', 'Driver time', 'Syncs stream / device', 'Retries',
    'OOMs', 'Capacity', 'Outcome'].concat(limited ? ['Survives'] : []);
  const numbers = [1, 2, 3, 4, 5, 6, 7, 8];
  const line = (r, i) => row(head, numbers, [
    [h('i', {css: {'--key': `var(${policyColor(i)})`}}), r.policy, r.conf ? h('div', {class: 'conf'}, r.conf) : null],
    [bytes(r.peak_reserved_bytes), bar(r.peak_reserved_bytes, policyColor(i))], fixed(r.ratio, 3),
    h('span', {title: callList(r)}, count(calls(r))), durations(r.driver_time_least_us, r.driver_time_us),
    `${count(r.stream_syncs)} / ${count(r.device_syncs)}`, count(r.retries),
    r.ooms_avoided ? `${count(r.ooms)} (${count(r.ooms_avoided)} avoided)` : count(r.ooms),
    r.capacity_bytes ? bytes(r.capacity_bytes) : 'unlimited',
    r.completed ? h('span', {class: r.ooms ? '' : 'ok'}, r.ooms ? 'completed, as recorded' : 'completed')
      : h('span', {class: 'no'}, `died at event ${count(r.failed_event)}`),
    ...(limited ? [[r.odds ? h('span', {class: sure(r.odds) ? 'ok' : 'no'}, odds(r.odds)) : null,
      r.odds && r.odds.peak_least_bytes !== r.odds.peak_most_bytes
        ? h('div', {class: 'conf'}, `peak ${bytes(r.odds.peak_least_bytes)} to ${bytes(r.odds.peak_most_bytes)}`) : null]] : [])]);
  const recorded = () => row(head, numbers, [
    [h('i', {class: 'dashed', css: {'--key': 'var(--recorded)'}}), 'recorded', t.inspection.conf ? h('div', {class: 'conf'}, t.inspection.conf) : null],
    [bytes(rec.peak_reserved_bytes), bar(rec.peak_reserved_bytes, '--recorded')],
    t.inspection.recorded_ratio ? fixed(t.inspection.recorded_ratio, 3) : '',
    h('span', {title: 'segments got, given back, mapped and unmapped'}, count(rec.segment_events)), '', '', '', count(rec.ooms), '', '',
    ...(limited ? [''] : [])], {class: 'recorded'});
  return table(head, numbers, [...(rec.peak_reserved_bytes ? [recorded()] : []), ...t.results.map(line)], {class: 'comparison'});
}

/** Colour of the i-th policy. */
export function policyColor(i) {
  return `--p${i % 6}`;
}

/** Out-of-memory explained. */
export function oomList(t) {
  return t.ooms.map((o) => h('article', {class: 'oom'},
    h('h3', {}, `${o.source}: ${bytes(o.requested_bytes)} refused at event ${count(o.event)}, ${duration(o.time_us)}`),
    h('span', {class: `cause ${o.cause}`}, {capacity: 'too little memory', fragmentation: 'fragmentation',
      cached: 'held in caches'}[o.cause] || o.cause),
    o.why.map((w) => h('p', {}, w)),
    oomBar(o)));
}

function oomBar(o) {
  const limit = Math.max(o.capacity_bytes, o.reserved_bytes, 1);
  const whole = Math.max(limit, o.live_bytes + o.requested_bytes);
  const idle = Math.max(0, o.reserved_bytes - o.live_bytes);
  const part = (n, cls, text) => (n > 0 ? h('span', {class: cls, css: {'--w': `${(100 * n) / whole}%`},
    title: `${text} ${bytes(n)}`}) : null);
  return h('div', {},
    h('div', {class: 'stackbar'}, part(o.live_bytes, 'live', 'live'), part(idle, 'idle', 'reserved, not live'),
      part(limit - o.reserved_bytes, 'rest', 'not reserved')),
    h('div', {class: 'legend'}, h('span', {}, h('i', {css: {'--key': 'var(--live)'}}), `live ${bytes(o.live_bytes)}`),
      h('span', {}, h('i', {css: {'--key': 'var(--idle)'}}), `reserved, not live ${bytes(idle)}`),
      limit > o.reserved_bytes
        ? h('span', {}, h('i', {css: {'--key': 'var(--free)'}}), `not reserved ${bytes(limit - o.reserved_bytes)}`) : null,
      h('span', {class: 'muted'}, `limit ${bytes(limit)}`)));
}

/** Allocations at the peak. */
export function holders(t) {
  const peak = t.inspection.peak;
  const most = Math.max(1, ...peak.by_stack.map((x) => x.bytes));
  const share = (n) => `${fixed((100 * n) / Math.max(1, peak.live_bytes), 1)} %`;
  const meter = (n, m) => h('div', {class: 'meter', css: {'--w': `${(100 * n) / m}%`, '--key': 'var(--live)'}});
  const list = peak.by_stack.map((x) => h('details', {},
    h('summary', {}, h('span', {class: 'n'}, bytes(x.bytes)), h('span', {class: 'n muted'}, share(x.bytes)),
      h('span', {class: 'n muted'}, `${count(x.blocks)} ${x.blocks === 1 ? 'block' : 'blocks'}`),
      who(x, labels(x), meter(x.bytes, most))),
    x.frames && x.frames.length ? h('ol', {class: 'frames'}, x.frames.map((f) => h('li', {}, f))) : null));
  if (peak.other_stacks.blocks) {
    list.push(h('p', {class: 'muted'}, `${bytes(peak.other_stacks.bytes)} more in ${count(peak.other_stacks.blocks)} `
      + 'blocks of other stacks'));
  }
  return h('div', {class: 'holders'}, first(list));
}

/** The tags and libraries that blocks of a stack were recorded with. */
function labels(x) {
  const words = [x.tags && `tag ${x.tags.join(', ')}`, x.libraries && `library ${x.libraries.join(', ')}`].filter(Boolean);
  return words.length ? h('span', {class: 'muted labels'}, words.join('; ')) : null;
}

/** Allocations at the peak by tag, library and thread, where that is known. */
export function labelTables(t) {
  const peak = t.inspection.peak;
  const lists = [['Tag', 'tag', peak.by_tag, 1], ['Library', 'library', peak.by_library, 2], ['Thread', 'thread', peak.by_thread, 2]]
    .filter(([, , list, from]) => list && list.length >= from);
  const table = ([title, name, list]) => {
    const most = Math.max(1, ...list.map((x) => x.bytes));
    return h('div', {}, h('h3', {}, `By ${name}`), h('table', {class: 'grid', 'data-by': name}, h('thead', {}, h('tr', {}, h('th', {}, title),
      h('th', {class: 'n'}, 'Blocks'), h('th', {class: 'n'}, 'Live'))), h('tbody', {}, list.slice(0, mostLabels).map((x) => h('tr',
      {'data-key': x.name, 'data-bytes': x.bytes}, h('td', {}, x.name), h('td', {class: 'n'}, count(x.blocks)), h('td', {class: 'n'}, bytes(x.bytes),
        h('div', {class: 'meter', css: {'--w': `${(100 * x.bytes) / most}%`, '--key': 'var(--live)'}})))))),
    list.length > mostLabels ? h('p', {class: 'muted'}, `${count(list.length - mostLabels)} more with fewer bytes`) : null);
  };
  return lists.map(table);
}

const mostLabels = 30;

export function sizesAndStreams(t) {
  const peak = t.inspection.peak;
  const mostSize = Math.max(1, ...peak.by_size.map((x) => x.bytes));
  const meter = (n, m) => h('div', {class: 'meter', css: {'--w': `${(100 * n) / m}%`, '--key': 'var(--live)'}});
  const sizes = h('table', {class: 'grid'}, h('thead', {}, h('tr', {}, h('th', {}, 'Size'), h('th', {class: 'n'}, 'Blocks'),
    h('th', {class: 'n'}, 'Live'))), h('tbody', {}, peak.by_size.filter((x) => x.blocks).map((x) => h('tr', {},
    h('td', {}, x.label), h('td', {class: 'n'}, count(x.blocks)),
    h('td', {class: 'n'}, bytes(x.bytes), meter(x.bytes, mostSize))))));
  const mostStream = Math.max(1, ...t.inspection.streams.map((x) => x.live_peak_bytes));
  const streams = h('table', {class: 'grid'}, h('thead', {}, h('tr', {}, h('th', {}, 'Stream'),
    h('th', {class: 'n'}, 'Allocations'), h('th', {class: 'n'}, 'Live'))), h('tbody', {},
    t.inspection.streams.map((x) => h('tr', {}, h('td', {}, t.stream_names[t.inspection.streams.indexOf(x)]),
      h('td', {class: 'n'}, count(x.allocs)),
      h('td', {class: 'n'}, bytes(x.live_peak_bytes), meter(x.live_peak_bytes, mostStream))))));
  return [h('div', {}, h('h3', {}, 'By size'), sizes), h('div', {}, h('h3', {}, 'By stream'), streams)];
}

/** What the run was recorded with, a row each, as far as the file says it. */
function recordedWith(e) {
  const rows = e ? [['PyTorch', e.pytorch], ['CUDA', e.cuda], ['driver', e.driver], ['device', e.device_name],
    ['device memory', e.device_total_bytes ? bytes(e.device_total_bytes) : '']] : [];
  return rows.filter(([, v]) => v).map(([k, v]) => h('tr', {}, h('td', {class: 'key'}, k), h('td', {class: 'value'}, v)));
}

/** What the record says of itself. */
export function facts(t) {
  const notes = [...t.inspection.notes, ...t.notes.filter((n) => !t.inspection.notes.includes(n))];
  const settings = Object.entries(t.inspection.settings).sort();
  return h('div', {class: 'two'},
    h('div', {}, h('h3', {}, 'The recording'), h('table', {class: 'grid'}, h('tbody', {},
      h('tr', {}, h('td', {class: 'key'}, 'file'), h('td', {class: 'value'}, t.inspection.path)),
      h('tr', {}, h('td', {class: 'key'}, 'format, device'), h('td', {class: 'value'}, `${t.inspection.format}, ${t.inspection.device}`)),
      recordedWith(t.inspection.environment),
      t.inspection.process ? h('tr', {}, h('td', {class: 'key'}, 'process'),
        h('td', {class: 'value'}, `${t.inspection.process.pid} ${t.inspection.process.program}`)) : null,
      t.inspection.conf ? h('tr', {}, h('td', {class: 'key'}, 'given settings'), h('td', {class: 'value'}, t.inspection.conf)) : null)),
    settings.length ? h('details', {}, h('summary', {class: 'plain'}, `All ${count(settings.length)} settings`), h('table', {class: 'grid'}, h('tbody', {},
      settings.map(([k, v]) => h('tr', {}, h('td', {class: 'key'}, k), h('td', {class: 'value'}, v === '' ? 'not set' : v)))))) : null),
    h('div', {}, h('h3', {}, 'Notes'), notes.length
      ? h('ul', {}, notes.map((n) => h('li', {}, n))) : h('p', {class: 'muted'}, 'Nothing is missing from this record.'),
    t.verify ? h('p', {}, `Held against the record: ${count(t.verify.matched)} of ${count(t.verify.recorded)} driver `
      + `events and ${count(t.verify.placements_matched)} of ${count(t.verify.placements)} placements matched.`) : null));
}
