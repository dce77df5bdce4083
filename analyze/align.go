package analyze

import (
	"slices"
	"strings"

	"github.com/cistern-gpu/cistern/recording"
)

// Stacks of two runs are matched frame by frame, outermost to innermost; one frame more or less is another stack. Two
// frames match if they are of the same function in a file of the same name, in whatever folder, and their lines match.
// Lines move when a program is edited, so they are matched function by function, over all lines of it that are on any
// stack of either run:
//
//  1. The one shift that brings most lines of the first run onto lines of the second pairs those (of several such, the
//     smallest; none is smaller than one down, which is smaller than one up).
//  2. What lies before, between and behind the pairs is paired in order where it is equally many lines in both runs.
//
// So lines that were added above a function, or in it between calls, match; a call that is new, or gone, is a line of
// one run only. It does not see two edits that cancel out: a call that went and another that came in its place.

// place is a function in a file. The folder is left out: the same program may lie somewhere else.
type place struct{ file, function string }

func placeOf(f recording.Frame) place {
	file := f.File
	if i := strings.LastIndexAny(file, `/\`); i >= 0 {
		file = file[i+1:]
	}
	return place{file, f.Func}
}

// line is a line of a function in one of two runs, by its number in the first where it has one.
type line struct {
	place
	number int
	second bool // of the second run only
}

// alignment numbers the frames of two runs alike where they match.
type alignment struct {
	a, b []uint32                   // Trace.Frames of each run → line
	inB  map[uint32]recording.Frame // the second run's frame at a line
}

func align(a, b *recording.Trace) alignment {
	type lines struct{ a, b []int }
	all := map[place]*lines{}
	of := func(f recording.Frame) *lines {
		p := placeOf(f)
		if all[p] == nil {
			all[p] = &lines{}
		}
		return all[p]
	}
	for _, f := range a.Frames {
		of(f).a = append(of(f).a, f.Line)
	}
	for _, f := range b.Frames {
		of(f).b = append(of(f).b, f.Line)
	}
	inA := map[place]map[int]int{} // of each place: line of the second run → line of the first
	for p, l := range all {
		slices.Sort(l.a)
		slices.Sort(l.b)
		inA[p] = alignLines(slices.Compact(l.a), slices.Compact(l.b))
	}
	numbers := map[line]uint32{}
	number := func(x line) uint32 {
		n, ok := numbers[x]
		if !ok {
			n = uint32(len(numbers))
			numbers[x] = n
		}
		return n
	}
	al := alignment{inB: map[uint32]recording.Frame{}}
	for _, f := range a.Frames {
		al.a = append(al.a, number(line{place: placeOf(f), number: f.Line}))
	}
	for _, f := range b.Frames {
		x := line{place: placeOf(f), number: f.Line, second: true}
		if n, ok := inA[x.place][f.Line]; ok {
			x.number, x.second = n, false
		}
		n := number(x)
		al.b = append(al.b, n)
		if _, ok := al.inB[n]; !ok {
			al.inB[n] = f
		}
	}
	return al
}

// frames are those of a stack of either run, innermost first, as the second run has them where it does.
func (al *alignment) frames(t *recording.Trace, stack uint32, lines []uint32) []recording.Frame {
	if int(stack) >= len(t.Stacks) {
		return nil
	}
	var all []recording.Frame
	for _, f := range t.Stacks[stack] {
		if int(f) >= len(lines) {
			continue
		}
		frame, ok := al.inB[lines[f]]
		if !ok {
			frame = t.Frames[f]
		}
		all = append(all, frame)
	}
	return all
}

// mostShifts bounds the shifts that are tried for one function; beyond, only none is.
const mostShifts = 1 << 20

// alignLines pairs lines of a function in one run with lines of it in another; both rise. It returns a's by b's.
func alignLines(a, b []int) map[int]int {
	count := map[int]int{}
	if len(a)*len(b) <= mostShifts {
		for _, x := range a {
			for _, y := range b {
				count[y-x]++
			}
		}
	}
	best := 0
	for d, n := range count {
		if n > count[best] || n == count[best] && (abs(d) < abs(best) || abs(d) == abs(best) && d > best) {
			best = d
		}
	}
	pairs := map[int]int{}
	fromA, fromB := 0, 0 // what comes behind the last pair
	between := func(toA, toB int) {
		if toA-fromA == toB-fromB {
			for i := range toA - fromA {
				pairs[b[fromB+i]] = a[fromA+i]
			}
		}
	}
	for i, x := range a {
		k, ok := slices.BinarySearch(b, x+best)
		if !ok {
			continue
		}
		between(i, k)
		pairs[b[k]] = x
		fromA, fromB = i+1, k+1
	}
	between(len(a), len(b))
	return pairs
}

func abs(n int) int {
	if n < 0 {
		return -n
	}
	return n
}
