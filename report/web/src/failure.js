// The report on a request that failed: why, the allocations, what would have met it, and the rest of what the process
// wrote down. The Go package analyze computed all of it.

import './failure.css';
import {bytes, count, duration, durations, fixed, odds} from './format.js';
import {calledText, fill, first, h, shortFrame, table, who} from './dom.js';

const causes = {capacity: 'too little memory', fragmentation: 'fragmentation', cached: 'held in caches', limit: 'a limit',
  processes: 'other processes', pinned: 'pinned by graphs', pending: 'still in use by streams', upstream: 'memory of another kind'};

/** The failure that remedies were searched for, else the last. */
function main(all) {
  return all.find((x) => x.searched || x.unsearched) || all[all.length - 1];
}

/** The event at which it failed, -1 where the file has no history. */
export const failedEvent = (t) => main(t.failures.failures).event;

/** What comes first on the page, and the rest of what is known. */
export function failure(t) {
  const x = main(t.failures.failures);
  const others = t.failures.failures.filter((o) => o !== x);
  const when = x.event < 0 ? '' : `event ${count(x.event)}, ${duration(x.time_us)} into the run`;
  const answer = h('section', {id: 'failure', 'data-event': x.event},
    h('h2', {}, 'Out of memory'),
    h('article', {class: 'oom'},
      h('h3', {}, sentence(x)),
      h('span', {class: `cause ${x.cause}`}, causes[x.cause] || x.cause), ' ',
      h('span', {class: 'muted'}, when), memoryBar(x),
      h('details', {}, h('summary', {class: 'plain'}, 'Why'), x.why.map((w) => h('p', {}, w)))));
  const details = h('section', {id: 'remedies'},
    h('h2', {}, 'What would help'),
    remedies(x),
    holders(x),
    growth(x),
    h('div', {class: 'two failure-about'}, request(x), surroundings(x)),
    x.event < 0 ? h('p', {class: 'muted'}, 'The history was off: where blocks lay is not in the file.') : null,
    others.length ? [h('h3', {}, `${count(t.failures.failed_requests)} requests failed in this run`),
      h('ul', {}, first(others.map((o) => h('li', {}, `event ${count(o.event)}: ${bytes(o.requested_bytes)}, ${causes[o.cause] || o.cause}`
        + (o.met_later_at_event === null ? '' : `; met at event ${count(o.met_later_at_event)}`)))))] : null);
  return {answer, details};
}

function sentence(x) {
  const met = x.met_later_at_event === null ? '' : ` The program asked again and got it, at event ${count(x.met_later_at_event)}.`;
  return `${x.sentence}.${met}`;
}

function memoryBar(x) {
  const limit = Math.max(x.capacity_bytes, x.reserved_bytes, x.live_bytes, 1);
  const whole = Math.max(limit, x.live_bytes + x.requested_bytes);
  const idle = Math.max(0, x.reserved_bytes - x.live_bytes);
  const part = (n, cls, text) => (n > 0 ? h('span', {class: cls, css: {'--w': `${(100 * n) / whole}%`}, title: `${text} ${bytes(n)}`}) : null);
  const key = (color, text) => h('span', {}, h('i', {css: {'--key': `var(${color})`}}), text);
  return h('div', {},
    h('div', {class: 'stackbar'}, part(x.live_bytes, 'live', 'live'), part(idle, 'idle', 'reserved, not live'),
      part(limit - Math.max(x.reserved_bytes, x.live_bytes), 'rest', 'not reserved')),
    h('div', {class: 'legend'}, key('--live', `live ${bytes(x.live_bytes)}`), key('--idle', `reserved, not live ${bytes(idle)}`),
      key('--free', `not reserved ${bytes(limit - Math.max(x.reserved_bytes, x.live_bytes))}`),
      x.free_pieces ? h('span', {class: 'muted'}, `free in ${count(x.free_pieces)} pieces, the largest ${bytes(x.largest_free_bytes)}`) : null,
      x.capacity_bytes ? h('span', {class: 'muted'}, `available: ${bytes(x.capacity_bytes)} (${x.capacity_from})`) : null));
}

/** What a remedy leaves over, or what it takes of the host's memory. */
function spare(m) {
  const spilled = m.kind === 'spill' ? m.peak_reserved_bytes - m.capacity_bytes : 0;
  return spilled > 0 ? h('span', {'data-spilled': spilled}, `none: ${bytes(spilled)} in the host's memory`) : bytes(m.headroom_bytes);
}

/** The line for a shell: one for each version of PyTorch, where they differ. */
function shell(m) {
  return m.do_by_version ? m.do_by_version.flatMap((x) => [h('div', {class: 'conf'}, `${x.versions}:`), h('pre', {class: 'shell'}, x.do)])
    : h('pre', {class: 'shell'}, m.do);
}

function remedies(x) {
  const head = h('h3', {}, 'Settings, best first');
  if (!x.searched) {
    return [head, h('p', {class: 'muted'}, `Nothing was replayed: ${x.unsearched}.`), relief(x)];
  }
  const remedy = (m, i) => h('details', {class: 'remedy', open: i === 0}, h('summary', {class: 'plain'},
    h('b', {class: 'do', 'data-remedy': m.title, 'data-headroom': m.headroom_bytes}, m.title),
    h('div', {class: 'muted'}, `survives ${odds(m.odds)}; peak ${bytes(m.peak_reserved_bytes)}; to spare `, spare(m),
      m.floor_bytes ? `, would do with ${bytes(m.floor_bytes)}` : '', `; ${durations(m.driver_time_least_us, m.driver_time_us)} in the driver`,
      m.wait_us ? `, ${duration(m.wait_us)} waiting` : '', m.retries ? `, ${count(m.retries)} retries` : '')),
  m.do && m.do !== m.title ? shell(m) : null,
  m.breaks.length || !m.verified ? h('ul', {}, m.verified ? null : h('li', {}, 'its model was not checked against recordings'),
    m.breaks.map((b) => h('li', {}, b))) : null,
  h('div', {class: 'conf', title: m.check_command}, `checked by ${m.checked}`));
  if (x.warning) {
    return [head, h('p', {class: 'error'}, `Warning: ${x.warning}.`), relief(x)];
  }
  const failed = x.did_not_survive.map((m) => h('li', {}, m.title, m.luck ? h('span', {class: 'muted'}, ` survives ${odds(m.odds)}`) : null,
  m.barely ? h('span', {class: 'muted'}, ' the request, but not what followed') : null));
  const floors = x.floors.filter((f) => f.capacity_bytes > x.capacity_bytes)
    .map((f) => `${bytes(f.capacity_bytes)} with ${f.who}`).join(', ');
  return [head,
    h('p', {class: 'hint'}, 'Each was checked by replaying the recorded run, the request included'
      + `${x.more_bytes ? ` and ${bytes(x.more_bytes)} more behind it (${x.more_from})` : ''}, within ${bytes(x.capacity_bytes)} `
      + `(${x.capacity_from}): ${count(x.replays)} replays.${x.own ? ` The run's own settings survive ${odds(x.own.odds)}.` : ''}`),
    x.caveat ? h('p', {class: 'error'}, `Take it with care: ${x.caveat}.`) : null,
    x.remedies.length ? h('div', {class: 'holders'}, x.remedies.map(remedy)) : h('p', {}, x.did_not_survive.length ? 'Nothing that was tried meets it.' : 'Nothing was tried.'),
    h('ul', {class: 'muted'},
      x.beaten ? h('li', {}, `${count(x.beaten)} settings more did once; none was better than these, so they were tried no further.`) : null,
      x.shortage_bytes && x.shortage_bytes <= Math.max(x.held.allocated_bytes, x.live_bytes) ? h('li', {}, `Or ${bytes(x.shortage_bytes)} less in use at this moment`, x.less_live.length
        ? `: the largest share${x.less_live.length > 1 ? 's are' : ' is'} ${x.less_live.map((s) => `${calledText(s, shortFrame)} (${bytes(s.bytes)})`).join(', ')}.` : '.') : null,
      x.largest_request_bytes && !(x.short_by && x.short_by.bound === '') ? h('li', {}, `With the run's own settings a request of up to ${bytes(x.largest_request_bytes)} would have been met then.`) : null,
      floors ? h('li', {}, `The least memory with which the run survives: ${floors}.`) : null,
      x.not_tried.map((n) => h('li', {}, `Not tried: ${n}.`))),
    relief(x),
    failed.length ? h('details', {}, h('summary', {class: 'plain'}, `Tried, and not enough: ${count(failed.length)}`), h('ul', {}, failed)) : null];
}

/** What to reduce, where no setting is known to help. */
function relief(x) {
  if (x.remedies.length) return null;
  if (x.stacks_by) {
    return h('div', {}, h('p', {}, 'The recording has no stacks, which show what to reduce. To record them:'),
      h('pre', {class: 'shell'}, x.stacks_by));
  }
  if (!x.relief.length || !x.relief[0].advice) return null;
  return h('div', {id: 'failure-relief'}, h('p', {class: 'hint'}, 'Allocations, by what would reduce them:'),
    table(['', 'Bytes', 'Blocks', ''], [1, 2], x.relief.map((r) => [r.class, bytes(r.bytes), count(r.blocks), r.advice])));
}

const byName = {stack: 'stack', tag: 'tag', library: 'library', pool: 'pool', stream: 'stream', thread: 'thread', size: 'size', age: 'age'};

function holders(x) {
  const held = x.held;
  const kinds = Object.keys(byName).filter((k) => held[`by_${k}`].length);
  const list = h('div', {class: 'holders', id: 'failure-holders'});
  const share = (n) => `${fixed((100 * n) / Math.max(1, held.allocated_bytes), 1)} %`;
  const line = (s, most) => {
    const named = who(s, h('div', {class: 'meter', css: {'--w': `${(100 * s.bytes) / most}%`, '--key': 'var(--live)'}}));
    const cells = [h('span', {class: 'n'}, bytes(s.bytes)), h('span', {class: 'n muted'}, share(s.bytes)),
      h('span', {class: 'n muted'}, `${count(s.blocks)} ${s.blocks === 1 ? 'block' : 'blocks'}`), named];
    return h('details', {'data-bytes': s.bytes}, h('summary', {}, cells),
      s.frames && s.frames.length ? h('ol', {class: 'frames'}, s.frames.map((f) => h('li', {}, f))) : null);
  };
  const show = (kind) => {
    const all = held[`by_${kind}`];
    const most = Math.max(1, ...all.map((s) => s.bytes));
    fill(list, first(all.map((s) => line(s, most))),
      held.rounding_bytes ? h('p', {class: 'muted', 'data-bytes': held.rounding_bytes}, `${bytes(held.rounding_bytes)} lost to rounding`) : null,
      held.unattributed_bytes ? h('p', {class: 'muted', 'data-bytes': held.unattributed_bytes},
        `${bytes(held.unattributed_bytes)} ${held.blocks ? 'allocated before the history began, by unknown callers' : 'in blocks that the file does not list'}`) : null);
  };
  const pick = h('select', {'aria-label': 'Held by', onchange: (e) => show(e.target.value)},
    kinds.map((k) => h('option', {value: k}, `by ${byName[k]}`)));
  if (kinds.length) show(kinds[0]);
  return [h('h3', {}, `Allocations: ${bytes(held.allocated_bytes)} in ${count(held.blocks)} ${held.blocks === 1 ? 'block' : 'blocks'}`),
    h('div', {class: 'tools pick'}, pick), list];
}

function growth(x) {
  const g = x.growth;
  if (!g.told) return null;
  const words = `Over the last ${duration(g.duration_us)} live memory rose and fell ${count(g.repeats)} times, at its least from `
    + `${bytes(g.least_before_bytes)} to ${bytes(g.least_after_bytes)}.`;
  return [h('h3', {}, 'Growth'), h('p', {class: 'hint'}, words, g.steady.length ? ' These never fell, and may be leaks.'
    : ' Nothing grew steadily.'),
  g.steady.length ? table(['', 'Grew by', 'Now', 'Blocks'], [1, 2, 3], g.steady.map((s) => [who(s),
    bytes(s.after_bytes - s.before_bytes), bytes(s.after_bytes), count(s.blocks)])) : null];
}

function rows(pairs) {
  return h('table', {class: 'grid'}, h('tbody', {}, pairs.filter((p) => p && p[1] !== '').map(([k, v]) => h('tr', {},
    h('td', {class: 'key'}, k), h('td', {class: 'value'}, v)))));
}

function request(x) {
  return h('div', {}, h('h3', {}, 'The request'), rows([
    ['asked for', bytes(x.requested_bytes) + (x.upstream ? ` of ${x.upstream} memory` : '')],
    ['for', `${x.pool}, stream ${x.stream}`], ['tag', x.tag], ['library', x.library], ['thread', x.thread],
    ['settings', x.conf || 'the defaults'], x.pid ? ['process', `${x.pid}: ${x.program.join(' ')}`] : null, ['Cistern', x.version]]),
  x.stack.length ? h('ol', {class: 'frames'}, x.stack.map((f) => h('li', {}, f))) : h('p', {class: 'muted'}, 'No stack was recorded.'),
  x.message.length ? [h('h3', {}, 'Error message'), h('ul', {}, x.message.map((m) => h('li', {}, m)))] : null);
}

function surroundings(x) {
  const gained = (s) => (s.tries === 0 ? 'passed over' : s.gained_bytes ? `got ${bytes(s.gained_bytes)}` : 'got nothing');
  return h('div', {},
    h('h3', {}, 'Memory at the failure'), rows([
      ['device', [x.device_name, x.device_uuid].filter(Boolean).join(' ')],
      x.device_total_bytes ? ['on it in all', bytes(x.device_total_bytes)] : null, ['free on it', bytes(x.device_free_bytes)],
      ['reserved', x.reserved_bytes ? bytes(x.reserved_bytes) : ''], ['live', bytes(x.live_bytes)],
      x.held.pending_bytes ? ['given back, still used', bytes(x.held.pending_bytes)] : null,
      x.pinned_bytes ? ['pinned by graphs', bytes(x.pinned_bytes)] : null, x.paused_bytes ? ['paused', bytes(x.paused_bytes)] : null,
      ...x.limits.map((l) => [`limit: ${l.kind}`, bytes(l.bytes) + (l.from ? `, ${l.from}` : '')])]),
    x.steps.length ? [h('h3', {}, 'Reclaim stages before the failure'), table([], [2], x.steps.map((s) => [s.rung,
      gained(s) + (s.tries > 1 ? ` in ${count(s.tries)} tries` : '') + (s.note ? `: ${s.note}` : ''), s.took_us ? duration(s.took_us) : '']))] : null,
    x.processes.length || x.processes_unknown ? [h('h3', {}, 'Processes on the device'),
      x.processes_unknown ? h('p', {class: 'muted'}, `unknown: ${x.processes_unknown}`) : null,
      x.processes.length ? table([], [1], x.processes.map((p) => [`${p.pid} ${p.name}${p.self ? ' (this one)' : ''}`,
        p.bytes ? bytes(p.bytes) : 'unknown'])) : null] : null);
}
