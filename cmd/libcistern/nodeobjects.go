//go:build linux && cgo

package main

/*
#include "shim.h"
*/
import "C"

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/node/attach"
	"github.com/cistern-gpu/cistern/internal/node/client"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// nodeObjects are the named objects of this process, by address.
type nodeObjects struct {
	once   sync.Once
	in     *attach.Objects
	mu     sync.Mutex
	mapped map[cuda.Ptr]*nodeObject // +checklocks:mu
}

// nodeObject is a build, or a generation that is open as often as it has objects.
type nodeObject struct {
	dev   cuda.Device
	bytes uint64
	build *attach.Build
	open  []*attach.Object
}

// objectsOf are the process's objects.
func (l *library) objectsOf() *nodeObjects {
	n := &l.objects
	n.once.Do(func() {
		cfg := client.ObjectsConfig{Guard: shareGuard{}}
		if o := l.Options(); o.Node != config.NodeAuto && o.Node != config.NodeOff {
			cfg.Socket = o.Node
		}
		n.in = attach.New(l.Sharing, cfg)
		n.mapped = map[cuda.Ptr]*nodeObject{}
	})
	return n
}

// find is what is mapped at an address.
func (n *nodeObjects) find(p cuda.Ptr) (*nodeObject, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if o := n.mapped[p]; o != nil {
		return o, nil
	}
	return nil, fmt.Errorf("no object is built or open at %#x", uint64(p))
}

// objectOwner is a name of a user's; -1 is this one.
func objectOwner(name *C.char, user C.int64_t) (protocol.ObjectName, error) {
	n := protocol.ObjectName{UID: uint32(os.Geteuid()), Name: goString(name)}
	if user >= 0 {
		if user >= 1<<32 {
			return n, fmt.Errorf("user %d: expected the number of a user, or -1", int64(user))
		}
		n.UID = uint32(user)
	}
	return n, nil
}

// labelsOf reads "key=value,key=value".
func labelsOf(text string) (map[string]string, error) {
	if text == "" {
		return nil, nil
	}
	all := map[string]string{}
	for item := range strings.SplitSeq(text, ",") {
		key, value, ok := strings.Cut(item, "=")
		if !ok {
			return nil, fmt.Errorf("labels: %q: expected key=value", item)
		}
		all[key] = value
	}
	return all, nil
}

//export coreNodeBuild
func coreNodeBuild(d C.int, name *C.char, bytes C.uint64_t, mode C.uint32_t, layout, labels *C.char, ttl C.double, p *C.uintptr_t) (code C.int) {
	defer caught(&code)
	l, dev, err := inUse(d)
	if err != nil {
		return fail(err)
	}
	spec := protocol.ObjectSpec{Name: goString(name), Mode: uint32(mode), TTL: float64(ttl)}
	if spec.Mode == 0 {
		spec.Mode = 0o600
	}
	if spec.Labels, err = labelsOf(goString(labels)); err != nil {
		return fail(err)
	}
	text := goString(layout)
	if text == "" {
		text = "{}"
	}
	n := l.objectsOf()
	b, err := n.in.Build(dev.ID(), dev.Info().UUID, uint64(bytes), spec, []byte(text))
	if err != nil {
		return fail(err)
	}
	n.mu.Lock()
	n.mapped[b.Ptr] = &nodeObject{dev: dev.ID(), bytes: b.Bytes, build: b}
	n.mu.Unlock()
	*p = C.uintptr_t(b.Ptr)
	return C.CISTERN_OK
}

// endBuild ends a build.
func endBuild(p C.uintptr_t, end func(*attach.Build) error) C.int {
	l, err := started()
	if err != nil {
		return fail(err)
	}
	n := l.objectsOf()
	o, err := n.find(cuda.Ptr(p))
	if err == nil && o.build == nil {
		err = fmt.Errorf("the object at %#x is open, not built", uint64(p))
	}
	if err == nil {
		err = l.Sharing.WaitIdle(o.dev)
	}
	if err != nil {
		return fail(err)
	}
	n.mu.Lock()
	mine := n.mapped[cuda.Ptr(p)] == o
	delete(n.mapped, cuda.Ptr(p))
	n.mu.Unlock()
	if !mine {
		return fail(errors.New("another thread has ended the build"))
	}
	if err := end(o.build); err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}

//export coreNodeCommit
func coreNodeCommit(p C.uintptr_t, sum *C.char) (code C.int) {
	defer caught(&code)
	text := goString(sum)
	return endBuild(p, func(b *attach.Build) error { return b.Commit(text) })
}

//export coreNodeAbandon
func coreNodeAbandon(p C.uintptr_t) (code C.int) {
	defer caught(&code)
	return endBuild(p, (*attach.Build).Abandon)
}

//export coreNodeOpen
func coreNodeOpen(d C.int, name *C.char, user C.int64_t, generation C.uint64_t, p *C.uintptr_t) (code C.int) {
	defer caught(&code)
	l, dev, err := inUse(d)
	if err != nil {
		return fail(err)
	}
	who, err := objectOwner(name, user)
	if err != nil {
		return fail(err)
	}
	n := l.objectsOf()
	x, err := n.in.Open(dev.ID(), who, uint64(generation))
	if err != nil {
		return fail(err)
	}
	n.mu.Lock()
	o := n.mapped[x.Ptr]
	if o == nil {
		o = &nodeObject{dev: dev.ID(), bytes: x.Bytes}
		n.mapped[x.Ptr] = o
	}
	o.open = append(o.open, x)
	n.mu.Unlock()
	*p = C.uintptr_t(x.Ptr)
	return C.CISTERN_OK
}

//export coreNodeClose
func coreNodeClose(p C.uintptr_t) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	n := l.objectsOf()
	o, err := n.find(cuda.Ptr(p))
	if err == nil {
		err = l.Sharing.WaitIdle(o.dev)
	}
	if err != nil {
		return fail(err)
	}
	n.mu.Lock()
	last := len(o.open) - 1
	if last < 0 {
		n.mu.Unlock()
		return fail(fmt.Errorf("no object is open at %#x", uint64(p)))
	}
	x := o.open[last]
	if o.open = o.open[:last]; last == 0 {
		delete(n.mapped, cuda.Ptr(p))
	}
	n.mu.Unlock()
	if err := x.Close(); err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}

//export coreNodeCopy
func coreNodeCopy(p C.uintptr_t, offset C.uint64_t, other C.uintptr_t, bytes C.uint64_t, stream C.uintptr_t, write C.int) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	o, err := l.objectsOf().find(cuda.Ptr(p))
	switch {
	case err != nil:
		return fail(err)
	case uint64(offset) > o.bytes || uint64(bytes) > o.bytes-uint64(offset):
		return fail(fmt.Errorf("%d bytes at %d do not lie within the object's %d", uint64(bytes), uint64(offset), o.bytes))
	case write != 0 && o.build == nil:
		return fail(fmt.Errorf("the object at %#x is open for reading only", uint64(p)))
	}
	dst, src := cuda.Ptr(other), cuda.Ptr(uint64(p)+uint64(offset))
	if write != 0 {
		dst, src = src, dst
	}
	drv := l.Driver()
	if err := drv.MemcpyAsync(o.dev, dst, src, uint64(bytes), cuda.Stream(stream)); err != nil {
		return fail(err)
	}
	if err := drv.StreamSynchronize(o.dev, cuda.Stream(stream)); err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}

// jsonText is a value as text that C frees.
func jsonText(v any, err error) *C.char {
	if err == nil {
		var text []byte
		if text, err = json.Marshal(v); err == nil {
			return C.CString(string(text))
		}
	}
	fail(err)
	return nil
}

//export coreNodeDescribe
func coreNodeDescribe(p C.uintptr_t) (text *C.char) {
	var code C.int
	defer caught(&code)
	l, err := started()
	if err != nil {
		return jsonText(nil, err)
	}
	n := l.objectsOf()
	n.mu.Lock()
	defer n.mu.Unlock()
	o := n.mapped[cuda.Ptr(p)]
	if o == nil || len(o.open) == 0 {
		return jsonText(nil, fmt.Errorf("no object is open at %#x", uint64(p)))
	}
	x := o.open[0]
	return jsonText(struct {
		Object protocol.Object `json:"object"`
		Layout json.RawMessage `json:"layout"`
	}{x.Object, x.Text}, nil)
}

//export coreNodeObjects
func coreNodeObjects(name *C.char, user C.int64_t) (text *C.char) {
	var code C.int
	defer caught(&code)
	l, err := started()
	if err != nil {
		return jsonText(nil, err)
	}
	var only *protocol.ObjectName
	if name != nil {
		n, err := objectOwner(name, user)
		if err != nil {
			return jsonText(nil, err)
		}
		only = &n
	}
	all, err := l.objectsOf().in.List(only)
	return jsonText(struct {
		Objects []protocol.Object `json:"objects"`
	}{append([]protocol.Object{}, all...)}, err)
}

//export coreNodeRemove
func coreNodeRemove(name *C.char, user C.int64_t, generation C.uint64_t) (code C.int) {
	defer caught(&code)
	l, err := started()
	if err != nil {
		return fail(err)
	}
	n, err := objectOwner(name, user)
	if err == nil {
		err = l.objectsOf().in.Remove(n, uint64(generation))
	}
	if err != nil {
		return fail(err)
	}
	return C.CISTERN_OK
}
