// How the frames of a flame graph are arranged: by stacks alone, or below the tag, library or thread that asked; with or
// without frames of frameworks; from the outermost frame or from the innermost.

import {h, layers, layerOf} from './dom.js';
import * as state from './state.js';
import {Fold, groupTree, stackTree} from './tree.js';

/**
 * @param stacks {n, parent, frame}
 * @param frames names of frames
 * @param groups [{key, name, label(number)}] that stacks may be below
 * @param key what choices are noted under in the URL; null where they are not
 * @param changed called when something else is chosen
 * @return {tools: elements, tree(held), where held(by) is the list that heldBetween makes by a key, or by none}
 */
export function grouping(stacks, frames, groups, key, changed) {
  const by = groups.length ? h('select', {'aria-label': 'Frames', onchange: chosen},
    h('option', {value: ''}, 'by stack'), groups.map((x) => h('option', {value: x.key}, `by ${x.name}, then stack`))) : null;
  const box = (name, title) => {
    const input = h('input', {type: 'checkbox', onchange: chosen, checked: key !== null && state.get(`${key}-${name}`) !== null});
    return {input, label: h('label', {class: 'check', title}, input, name)};
  };
  const all = box('framework frames', `Frames of ${layers[2].name} too, where they call others`);
  const inverted = box('inverted', 'Innermost frame on top: what allocates most, by all its callers together');
  const folds = new Map();

  function chosen() {
    if (key !== null) {
      for (const {input, label} of [all, inverted]) state.set({[`${key}-${label.textContent}`]: input.checked ? 1 : null});
    }
    changed();
  }

  function fold() {
    const kind = `${all.input.checked} ${inverted.input.checked}`;
    if (!folds.has(kind)) {
      folds.set(kind, new Fold(stacks, frames.map((f) => !all.input.checked && layerOf(f) === 2), inverted.input.checked));
    }
    return folds.get(kind);
  }

  return {
    tools: stacks.n > 1 ? [by, all.label, inverted.label] : [by],
    tree(held) {
      const kind = by && groups.find((x) => x.key === by.value);
      const folded = fold();
      const list = held(kind ? kind.key : null).map((x) => ({...x, stack: folded.node(x.stack)}));
      return kind ? groupTree(folded.stacks(), list, frames, kind.label) : stackTree(folded.stacks(), list, frames);
    },
  };
}
