// What the frames of a flame graph are grouped by: stacks alone, or below the tag, library or thread that asked.

import {h} from './dom.js';
import {groupTree, heldBetween, stackTree} from './tree.js';

/**
 * @param groups [{key, name, label(number)}]; where there are none, there is nothing to choose
 * @param changed called when another is chosen
 * @return {tool: element or null, tree(lives, first, second, frames)}
 */
export function grouping(groups, changed) {
  const tool = groups.length ? h('select', {'aria-label': 'Frames', onchange: () => changed()},
    h('option', {value: ''}, 'by stack'), groups.map((x) => h('option', {value: x.key}, `by ${x.name}, then stack`))) : null;
  return {
    tool,
    tree(lives, first, second, frames) {
      const kind = tool && groups.find((x) => x.key === tool.value);
      return kind ? groupTree(lives.stacks, heldBetween(lives, first, second, kind.key), frames, kind.label)
        : stackTree(lives.stacks, heldBetween(lives, first, second), frames);
    },
  };
}
