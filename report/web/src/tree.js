// The tree that a flame graph draws: bytes by stack, outermost frame first. Blocks without a stack hang below one
// frame that says so, by size.

import {bytes} from './format.js';
import {sizeSteps} from './lives.js';

export const noStack = 'no stack was recorded';

export function rangeName(k) {
  const name = (n) => bytes(n).replace('.00', '');
  return k < sizeSteps.length ? `up to ${name(sizeSteps[k])}` : `over ${name(sizeSteps[sizeSteps.length - 1])}`;
}

/** Stacks as another tree: without the frames that are hidden, but for a stack's innermost, and upside down if inverted. */
export class Fold {
  /** @param hidden of each frame whether it is */
  constructor(stacks, hidden, inverted) {
    Object.assign(this, {from: stacks, hidden, inverted, made: new Map([[0, 0]]), children: new Map(), parent: [0], frame: [0]});
  }

  /** The node of a stack in the tree, which grows by what is asked for. */
  node(stack) {
    if (this.made.has(stack)) return this.made.get(stack);
    const {parent, frame} = this.from;
    const path = [];
    for (let n = stack; n !== 0; n = parent[n]) if (n === stack || !this.hidden[frame[n]]) path.push(frame[n]);
    if (!this.inverted) path.reverse();
    let at = 0;
    for (const f of path) at = this.child(at, f);
    this.made.set(stack, at);
    return at;
  }

  child(parent, frame) {
    const key = parent * this.hidden.length + frame;
    let n = this.children.get(key);
    if (n === undefined) {
      n = this.parent.push(parent) - 1;
      this.frame.push(frame);
      this.children.set(key, n);
    }
    return n;
  }

  /** The tree so far, for stackTree: parents come before their children. */
  stacks() {
    return {n: this.parent.length, parent: this.parent, frame: this.frame};
  }
}

/**
 * @param stacks {n, parent, frame}
 * @param held list of {stack, size, range, after, before, blocks}: bytes live at the moment shown (and at the one it
 *     is compared with, where there is one). What a frame is as wide as is the larger of the two.
 * @param frames names of frames
 * @return {name, value, blocks, after, before, children}; children are sorted, widest first
 */
export function stackTree(stacks, held, frames) {
  const {n, parent, frame} = stacks;
  const after = new Float64Array(n);
  const before = new Float64Array(n);
  const width = new Float64Array(n);
  const blocks = new Float64Array(n);
  const bare = new Map(); // what has no stack, by range of sizes, then by size
  for (const h of held) {
    after[h.stack] += h.after;
    before[h.stack] += h.before;
    blocks[h.stack] += h.blocks;
  }
  for (const h of held) {
    if (h.stack !== 0) continue;
    const range = at(bare, h.range, () => ({name: rangeName(h.range), sizes: new Map()}));
    const size = at(range.sizes, h.size, () => node(`${bytes(h.size)} each`));
    size.after += h.after;
    size.before += h.before;
    size.blocks += h.blocks;
  }
  for (let i = n - 1; i > 0; i--) width[i] += Math.max(after[i], before[i]);
  // Children come behind their parents, so one pass from the end adds everything up.
  for (let i = n - 1; i > 0; i--) {
    const p = parent[i];
    if (p === 0) continue;
    width[p] += width[i];
    after[p] += after[i];
    before[p] += before[i];
    blocks[p] += blocks[i];
  }
  const root = node('all');
  const nodes = new Array(n);
  nodes[0] = root;
  for (let i = 1; i < n; i++) {
    if (width[i] === 0) continue;
    const made = {name: frames[frame[i]], value: width[i], after: after[i], before: before[i], blocks: blocks[i],
      children: []};
    nodes[i] = made;
    nodes[parent[i]].children.push(made);
  }
  const ranges = [...bare.values()].map((r) => sum(node(r.name), [...r.sizes.values()].map((s) => {
    s.value = Math.max(s.after, s.before);
    return s;
  })));
  if (ranges.length) {
    if (root.children.length) root.children.push(sum(node(noStack), ranges));
    else root.children = ranges;
  }
  sum(root, root.children);
  order(root);
  return root;
}

function at(map, key, make) {
  let v = map.get(key);
  if (!v) map.set(key, v = make());
  return v;
}

function node(name) {
  return {name, value: 0, after: 0, before: 0, blocks: 0, children: []};
}

function sum(parent, children) {
  parent.children = children;
  for (const c of children) {
    for (const k of ['value', 'after', 'before', 'blocks']) parent[k] += c[k];
  }
  return parent;
}

function order(root) {
  const todo = [root];
  while (todo.length) {
    const at = todo.pop();
    at.children.sort((a, b) => b.value - a.value || (a.name < b.name ? -1 : 1));
    todo.push(...at.children);
  }
}

const mostGroups = 40; // each goes through all stacks

/**
 * stackTree below one frame for each group, those that hold most; the rest are one.
 * @param held as heldBetween makes it by some key
 * @param label of a group
 */
export function groupTree(stacks, held, frames, label) {
  const groups = new Map();
  for (const h of held) {
    const g = at(groups, h.group, () => ({name: label(h.group), value: 0, held: []}));
    g.held.push(h);
    g.value += Math.max(h.after, h.before);
  }
  const all = [...groups.values()].sort((a, b) => b.value - a.value);
  const rest = all.splice(mostGroups);
  if (rest.length) all.push({name: 'all others', held: rest.flatMap((g) => g.held)});
  const root = sum(node('all'), all.map((g) => Object.assign(stackTree(stacks, g.held, frames), {name: g.name})));
  root.children.sort((a, b) => b.value - a.value || (a.name < b.name ? -1 : 1));
  return root;
}

/** What is live after an event, for stackTree. */
export function heldAt(lives, event, by = null) {
  return heldBetween(lives, null, event, by);
}

/** What is live at two moments; without the first, at the second alone. With a key of Lives, each group by itself. */
export function heldBetween(lives, first, second, by = null) {
  const {stack, size} = lives.blocks;
  const ranges = lives.keys('range');
  const groups = by ? lives.keys(by) : null;
  const maps = new Map();
  const of = (i) => {
    const group = groups ? groups[i] : 0;
    // Stacks are distinguished by number; what has none, by size.
    const key = stack[i] !== 0 ? stack[i] : -1 - size[i];
    return at(at(maps, group, () => new Map()), key, () => ({group, stack: stack[i], size: size[i], range: ranges[i], after: 0,
      before: 0, blocks: 0}));
  };
  if (first !== null) lives.eachLive(first, (i) => { of(i).before += size[i]; });
  lives.eachLive(second, (i) => {
    const h = of(i);
    h.after += size[i];
    h.blocks++;
  });
  return [...maps.values()].flatMap((m) => [...m.values()]);
}
