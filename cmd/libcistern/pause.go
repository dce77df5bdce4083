//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

import (
	"fmt"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/text"
	"github.com/cistern-gpu/cistern/memory"
)

// selected is the memory that options mean; any is false where no allocation can be meant.
func (l *library) selected(dev *engine.Device, one C.int, pool0, pool1 C.uint64_t, tag *C.char) (sel engine.Selection, any bool, err error) {
	if one != 0 {
		if sel.Pool, err = l.pool(dev, memory.PoolID{uint64(pool0), uint64(pool1)}); err != nil {
			return sel, false, err
		}
	}
	if tag != nil {
		return tagged(sel, text.Clean(goString(tag)))
	}
	return sel, true, nil
}

// tagged is a selection with a tag, which may be none yet.
func tagged(sel engine.Selection, tag string) (_ engine.Selection, any bool, err error) {
	sel.Tag = tags.known(tag)
	return sel, sel.Tag != 0, nil // else nothing was ever allocated under it
}

//export corePause
func corePause(d, one C.int, pool0, pool1 C.uint64_t, tag *C.char, keep, flags C.uint32_t, dir *C.char, out *C.cistern_pause_report) (code C.int) {
	defer caught(&code)
	o, err := pauseOptions(keep, flags, dir)
	if err != nil {
		return fail(err)
	}
	return onSelected(d, one, pool0, pool1, tag, out, func(dev *engine.Device, sel engine.Selection) (memory.PauseReport, error) {
		return dev.Pause(sel, o)
	})
}

// pauseOptions reads what C passes.
func pauseOptions(keep, flags C.uint32_t, dir *C.char) (config.PauseOptions, error) {
	o := config.PauseOptions{Captured: flags&C.CISTERN_PAUSE_CAPTURED != 0, Dir: goString(dir)}
	switch keep {
	case C.CISTERN_KEEP_HOST:
		o.Keep = config.KeepHost
	case C.CISTERN_KEEP_DISK:
		o.Keep = config.KeepDisk
	case C.CISTERN_KEEP_NONE:
		o.Keep = config.KeepNone
	default:
		return o, &failure{C.CISTERN_INVALID, fmt.Sprintf("options.keep is %d: choose CISTERN_KEEP_HOST, CISTERN_KEEP_DISK or CISTERN_KEEP_NONE",
			uint32(keep))}
	}
	if flags&^C.CISTERN_PAUSE_CAPTURED != 0 {
		return o, &failure{C.CISTERN_INVALID, fmt.Sprintf("options.flags: %#x has unknown flags: expected those of CISTERN_PAUSE_ that the function takes", uint32(flags))}
	}
	return o, nil
}

//export coreResume
func coreResume(d, one C.int, pool0, pool1 C.uint64_t, tag *C.char, out *C.cistern_pause_report) (code C.int) {
	defer caught(&code)
	return onSelected(d, one, pool0, pool1, tag, out, (*engine.Device).Resume)
}

// onSelected calls f with the memory that options mean and writes its report, which may have no place.
func onSelected(d, one C.int, pool0, pool1 C.uint64_t, tag *C.char, out *C.cistern_pause_report,
	f func(*engine.Device, engine.Selection) (memory.PauseReport, error)) C.int {
	l, dev, err := ifUsed(d)
	if dev == nil && err == nil {
		if pool0|pool1 == 0 { // what is not in use has nothing, and is not started for that
			return C.CISTERN_OK
		}
		dev, err = l.device(d)
	}
	if err != nil {
		return fail(err)
	}
	sel, any, err := l.selected(dev, one, pool0, pool1, tag)
	if err != nil {
		return fail(err)
	}
	if !any {
		return C.CISTERN_OK
	}
	r, err := f(dev, sel)
	tidy()
	if err != nil {
		return fail(err)
	}
	if out != nil {
		*out = C.cistern_pause_report{blocks: C.int64_t(r.Blocks), bytes: C.uint64_t(r.Bytes), physical: C.uint64_t(r.Physical),
			kept: C.uint64_t(r.Kept), shared: C.uint64_t(r.Shared)}
	}
	return C.CISTERN_OK
}

//export corePauseBuffers
func corePauseBuffers(d C.int, bytes C.uint64_t) (code C.int) {
	defer caught(&code)
	_, dev, err := inUse(d)
	if err != nil {
		return fail(err)
	}
	if err := dev.PauseBuffers(uint64(bytes)); err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}
