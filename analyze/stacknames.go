package analyze

import (
	"slices"

	"github.com/cistern-gpu/cistern/recording"
)

// StackName is what a stack is called where there is room for little: places in its frames, -1 for none.
type StackName struct {
	Name int // the frame that says most of what the memory is for (recording.Telling)
	// From is the innermost frame of the program's own code, where Name is another's; where several stacks would be called
	// the same, the innermost of their callers that tells them apart.
	From int
	// Through is, of stacks that are called the same and come from the same, the frame on the way to the memory that tells
	// them apart.
	Through int
}

// NameStacks names stacks of frames, innermost first, so that no two that can be distinguished are called the same.
func NameStacks(stacks [][]recording.Frame) []StackName {
	names := make([]StackName, len(stacks))
	alike := map[[2]recording.Frame][]int{}
	var order [][2]recording.Frame
	for i, frames := range stacks {
		n := StackName{Name: recording.Telling(frames), From: recording.Own(frames), Through: -1}
		if n.From == n.Name {
			n.From = -1
		}
		names[i] = n
		if n.Name < 0 {
			continue
		}
		key := [2]recording.Frame{frames[n.Name]}
		if n.From >= 0 {
			key[1] = frames[n.From]
		}
		if alike[key] == nil {
			order = append(order, key)
		}
		alike[key] = append(alike[key], i)
	}
	for _, key := range order {
		if of := alike[key]; len(of) > 1 {
			// First by callers that say something by themselves, then by any, then by what they called.
			any := func(recording.Frame) bool { return true }
			for _, of := range tellApart(stacks, names, of, 1, (recording.Frame).Wants) {
				for _, of := range tellApart(stacks, names, of, 1, any) {
					tellApart(stacks, names, of, -1, any)
				}
			}
		}
	}
	return names
}

// tellApart tells stacks apart that are called the same, by the first frame of a kind in which they differ: of their callers,
// innermost first, where step is 1, or of what they called, where it is -1. It returns those that do not differ in any.
func tellApart(stacks [][]recording.Frame, names []StackName, alike []int, step int, kind func(recording.Frame) bool) (same [][]int) {
	type group struct {
		of []int
		at []int // of each the last frame that was looked at
	}
	first := group{of: alike}
	for _, i := range alike {
		first.at = append(first.at, names[i].Name)
	}
	for todo := []group{first}; len(todo) > 0; {
		g := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		parts := map[recording.Frame]*group{}
		var order []recording.Frame
		ended := 0
		for k, i := range g.of {
			frames := stacks[i]
			at := g.at[k]
			if at >= 0 && at < len(frames) {
				at += step
			}
			for at >= 0 && at < len(frames) && !kind(frames[at]) {
				at += step
			}
			f := recording.Frame{}
			if at < 0 || at >= len(frames) {
				ended++
			} else {
				f = frames[at]
			}
			if parts[f] == nil {
				parts[f] = &group{}
				order = append(order, f)
			}
			parts[f].of, parts[f].at = append(parts[f].of, i), append(parts[f].at, at)
		}
		if ended == len(g.of) {
			same = append(same, g.of)
			continue
		}
		for _, f := range order {
			part := parts[f]
			if len(order) > 1 {
				for k, i := range part.of {
					switch at := part.at[k]; {
					case at < 0 || at >= len(stacks[i]):
					case step < 0:
						names[i].Through = at
					default:
						names[i].From = at
					}
				}
			}
			if len(part.of) > 1 {
				todo = append(todo, *part)
			}
		}
	}
	slices.SortFunc(same, func(a, b []int) int { return a[0] - b[0] })
	return same
}

// Named is what a stack is called: StackName in words.
type Named struct {
	Name    string `json:"name,omitempty"` // NoStack where nothing is known
	Through string `json:"through,omitempty"`
	From    string `json:"from,omitempty"`
}

// StackNames is NameStacks in words.
func StackNames(stacks [][]recording.Frame) []Named {
	out := make([]Named, len(stacks))
	for i, n := range NameStacks(stacks) {
		out[i] = n.words(stacks[i])
	}
	return out
}

func (n StackName) words(frames []recording.Frame) Named {
	if n.Name < 0 {
		return Named{Name: NoStack}
	}
	text := func(at int) string {
		if at < 0 {
			return ""
		}
		return frames[at].String()
	}
	return Named{text(n.Name), text(n.Through), text(n.From)}
}

// frameTexts are frames as text.
func frameTexts(frames []recording.Frame) []string {
	var texts []string
	for _, f := range frames {
		texts = append(texts, f.String())
	}
	return texts
}
