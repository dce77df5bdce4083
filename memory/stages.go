package memory

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Stages is a set of steps of the out-of-memory reclaim stages.
type Stages uint16

// The stages. StagesInOrder has the order in which they are tried. Recordings have the numbers, which therefore stay.
const (
	StageFit      Stages = 1 << iota // a free block of the stream heap
	StageCollect                     // frees whose other streams are done, or can be waited for on the GPU
	StageRemap                       // free chunks of the same pool, moved here
	StageGrow                        // new memory upstream
	StageLend                        // free chunks and cached segments of other pools; free blocks of other streams
	StageCallback                    // callbacks: the pool's own, then those of other libraries
	StageSpill                       // the pool's spill: memory of another kind
	StageNode                        // other processes on the device, through the node's broker; before StageSpill
	stageEnd
)

// NumStages is how many stages there are.
const NumStages = 8

var (
	_ = [1]struct{}{}[stageEnd-1<<NumStages]
	_ = uint8(stageEnd - 1) // an event names a stage in eight bits
)

// AllStages is every stage that can be turned off; fit cannot.
const AllStages = StageCollect | StageRemap | StageGrow | StageLend | StageCallback | StageNode | StageSpill

// StagesInOrder are the stages in the order in which they are tried.
func StagesInOrder() [NumStages]Stages {
	return [...]Stages{StageFit, StageCollect, StageRemap, StageGrow, StageLend, StageCallback, StageNode, StageSpill}
}

var stageNames = []string{"fit", "collect", "remap", "grow", "lend", "callback", "node", "spill"} // in that order

// String is the names of the stages in order, joined by "+".
func (r Stages) String() string {
	var names []string
	for i, x := range StagesInOrder() {
		if r&x != 0 {
			names = append(names, stageNames[i])
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
		r |= StagesInOrder()[i]
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
