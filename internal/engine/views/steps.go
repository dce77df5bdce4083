package views

import (
	"fmt"
	"strings"
	"time"

	"github.com/cistern-gpu/cistern/internal/units"
	"github.com/cistern-gpu/cistern/memory"
)

// Stop is why no memory was asked for.
type Stop uint8

const (
	StopNot Stop = iota
	StopLimit
	StopPoolLimit
	StopLacks
)

// Attempt is what a stage did for a request.
type Attempt struct {
	Tries  int
	Gained uint64
	Took   time.Duration
	Found  uint64 // the most bytes that were available in one try
	Stop   Stop
	Asked  int    // functions that were called; for collect: waits for the GPU
	Gave   int    // those functions that gave memory back
	Err    error  // what the driver or the upstream said last
	Note   string // what else there is to say of it
}

// Failure is a request or a resume that failed.
type Failure struct {
	Error    *memory.OutOfMemoryError // complete but for its steps
	Allowed  memory.Stages            // that could be tried
	Resuming bool
	TooLarge bool // for any device

	// Of the pool and its device:
	HasSpill   bool
	Segmented  bool // the pool is made of segments
	Registered bool // memory is registered elsewhere
	PoolLimit  uint64
}

// Steps are what the stages did, in their order.
func (f *Failure) Steps(attempt func(memory.Stages) Attempt) []memory.Step {
	out := make([]memory.Step, 0, memory.NumStages)
	for _, x := range memory.StagesInOrder() {
		a := attempt(x)
		note := f.passedOver(x)
		if note == "" {
			note = f.note(x, &a)
		}
		out = append(out, memory.Step{Stage: x, Tries: a.Tries, Gained: a.Gained, Took: a.Took, Note: note})
	}
	return out
}

// passedOver is why a stage could not be tried, "" where it could.
func (f *Failure) passedOver(x memory.Stages) string {
	const ofResume = memory.StageCollect | memory.StageGrow | memory.StageLend | memory.StageCallback | memory.StageNode
	switch {
	case f.Resuming && x&ofResume == 0:
		return "not for resuming"
	case x == memory.StageSpill && !f.HasSpill:
		return "the pool has none"
	case f.Allowed&x == 0:
		return "off by the settings"
	case f.TooLarge:
		return "no device has that much memory"
	}
	return ""
}

// note is what a stage found.
func (f *Failure) note(x memory.Stages, a *Attempt) string {
	var notes []string
	add := func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) }
	switch x {
	case memory.StageFit:
		if a.Tries > 0 {
			add("the largest free block is %s", units.FormatBytes(f.Error.Largest))
		}
	case memory.StageCollect:
		switch {
		case a.Tries == 0:
			add("nothing that is free waits for the GPU")
		case a.Asked > 0:
			add("waited for the GPU")
		}
	case memory.StageRemap:
		switch {
		case f.Segmented:
			add("the pool is made of segments, which do not move")
		case f.Registered:
			add("memory is registered elsewhere, so nothing moves")
		case a.Tries > 0:
			add("%s of free chunks could move", units.FormatBytes(a.Found))
		}
	case memory.StageGrow:
		switch a.Stop {
		case StopLimit:
			add("the limit of %s is in the way", units.FormatBytes(f.Error.Limit))
		case StopPoolLimit:
			add("the pool's limit of %s is in the way", units.FormatBytes(f.PoolLimit))
		case StopLacks:
			add("not asked for, as the device has less than that")
		}
	case memory.StageLend:
		if a.Found > 0 {
			add("%s of free chunks of other pools were available", units.FormatBytes(a.Found))
		}
	case memory.StageCallback:
		if a.Tries == 0 {
			add("no function is registered")
		} else {
			add("%d of %d functions gave memory back", a.Gave, a.Asked)
		}
	case memory.StageNode:
		if a.Tries > 0 {
			add("other processes released %s", units.FormatBytes(a.Gained))
		}
	}
	if a.Note != "" {
		add("%s", a.Note)
	}
	if a.Err != nil {
		add("%v", a.Err)
	}
	return strings.ReplaceAll(strings.Join(notes, "; "), "\n", "; ") // joined errors have several lines
}
