//go:build linux && cgo

package main

/*
#include "magazine.h"
#include "shim.h"

#cgo nocallback magazine_hold
#cgo nocallback magazine_release
*/
import "C"

import (
	"errors"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/internal/engine"
	"github.com/cistern-gpu/cistern/internal/node/host"
	"github.com/cistern-gpu/cistern/internal/text"
	"github.com/cistern-gpu/cistern/memory"
)

// nodeConsent is what the node may do with selected memory of a device.
type nodeConsent struct {
	dev     *engine.Device
	choose  func() (sel engine.Selection, any bool, err error)
	options config.PauseOptions
}

// pause is called by a thread of the library. C hands out no memory meanwhile.
func (c *nodeConsent) pause() (uint64, error) {
	C.magazine_hold()
	defer C.magazine_release()
	return c.do(func(sel engine.Selection) (memory.PauseReport, error) {
		return engine.Quietly(c.dev).Pause(sel, c.options)
	})
}

// pausable is what pause would return.
func (c *nodeConsent) pausable() uint64 {
	sel, any, err := c.choose()
	if err != nil || !any {
		return 0
	}
	return engine.Quietly(c.dev).Pausable(sel, c.options)
}

// resume likewise.
func (c *nodeConsent) resume() (uint64, error) { return c.do(engine.Quietly(c.dev).Resume) }

// giveBack resumes for the program itself.
func (c *nodeConsent) giveBack() error {
	_, err := c.do(c.dev.Resume)
	return err
}

func (c *nodeConsent) do(f func(engine.Selection) (memory.PauseReport, error)) (uint64, error) {
	sel, any, err := c.choose()
	if err != nil || !any {
		return 0, err
	}
	r, err := f(sel)
	tidy()
	return r.Physical, err
}

//export coreNodeAllowPause
func coreNodeAllowPause(d, one C.int, pool0, pool1 C.uint64_t, tag *C.char, keep, flags C.uint32_t, dir *C.char) (code C.int) {
	defer caught(&code)
	auto := flags&C.CISTERN_PAUSE_AUTO != 0
	o, err := pauseOptions(keep, flags&^C.CISTERN_PAUSE_AUTO, dir)
	if err != nil {
		return fail(err)
	}
	l, dev, err := inUse(d)
	if err != nil {
		return fail(err)
	}
	// The pool has to be known now, the tag need not be.
	sel, _, err := l.selected(dev, one, pool0, pool1, nil)
	if err != nil {
		return fail(err)
	}
	c := &nodeConsent{dev: dev, options: o, choose: func() (engine.Selection, bool, error) { return sel, true, nil }}
	if tag != nil {
		name := text.Clean(goString(tag))
		c.choose = func() (engine.Selection, bool, error) { return tagged(sel, name) }
	}
	to := host.Consent{Pause: c.pause, Resume: c.resume, Return: c.giveBack}
	if auto {
		to.Pausable = c.pausable
	}
	switch err := l.consents.Allow(dev.ID(), to); {
	case errors.Is(err, host.ErrAllowed):
		return fail(&failure{C.CISTERN_INVALID, err.Error()})
	case err != nil:
		return fail(err)
	}
	return C.CISTERN_OK
}

//export coreNodeDenyPause
func coreNodeDenyPause(d C.int) (code C.int) {
	defer caught(&code)
	l, dev, err := inUse(d)
	if err == nil {
		err = l.consents.Deny(dev.ID())
	}
	if err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}
