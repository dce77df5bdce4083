package memory

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Stages is a set of steps of the out-of-memory reclaim stages.
type Stages uint16

// The stages, in the order in which they are tried.
const (
	StageFit      Stages = 1 << iota // a free block of the stream heap
	StageCollect                     // frees whose other streams are done, or can be waited for on the GPU
	StageRemap                       // free chunks of the same pool, moved here
	StageGrow                        // new memory upstream
	StageLend                        // free chunks and cached segments of other pools; free blocks of other streams
	StageCallback                    // callbacks: the pool's own, then those of other libraries
	StageSpill                       // the pool's spill: memory of another kind
	stageEnd
)

// NumStages is how many stages there are.
const NumStages = 7

var _ = [1]struct{}{}[stageEnd-1<<NumStages]

// AllStages is every stage that can be turned off; fit cannot.
const AllStages = StageCollect | StageRemap | StageGrow | StageLend | StageCallback | StageSpill

var stageNames = []string{"fit", "collect", "remap", "grow", "lend", "callback", "spill"}

// String is the names of the stages in order, joined by "+".
func (r Stages) String() string {
	var names []string
	for i, n := range stageNames {
		if r&(1<<i) != 0 {
			names = append(names, n)
		}
	}
	return strings.Join(names, "+")
}

// ParseStages reads stages by name, joined by "+"; "all" is all of them.
func ParseStages(text string) (Stages, error) {
	if text == "all" {
		return AllStages, nil
	}
	r := StageFit
	for _, w := range strings.Split(text, "+") {
		i := slices.Index(stageNames, w)
		if i < 0 {
			return 0, fmt.Errorf("stage %q: choose among %s, or all", w, strings.Join(stageNames, ", "))
		}
		r |= 1 << i
	}
	return r, nil
}

// Step is what a stage of the reclaim stages did for a request that failed, or why it was passed over.
type Step struct {
	Stage Stages // one of them
	Tries int    // how often the reclaim stages, which starts over when something changed, came to it; 0: it was passed over
	// Gained is the bytes that it made free or got from the driver, which were not enough. What other threads gave back
	// while the stage let the locks go counts as well.
	Gained uint64
	// Took is the time spent on it, by the driver's clock, waiting for the GPU included. Looking for a block that fits is
	// not timed.
	Took time.Duration
	Note string // what the driver said, what was available, why it was skipped; "" for none
}
