// Package attach maps named objects of the node's broker into an allocator's device: writers build and commit them, readers map them for
// reading only. The Go API (package node) and the C library share it.
package attach

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/deadline"
	"github.com/cistern-gpu/cistern/internal/node/client"
	"github.com/cistern-gpu/cistern/internal/node/objects"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/memory"
)

// Mapper is what an allocator does for memory of other processes (engine.Sharing has the comments).
type Mapper interface {
	Open(dev cuda.Device, from string, m memory.Shared, descriptor func(i int) (int, error)) (cuda.Ptr, error)
	Close(p cuda.Ptr) error
	MakeRoom(dev cuda.Device, bytes uint64) (done func(), ok bool, note string)
}

// Objects is a process's objects.
type Objects struct {
	mapper Mapper
	client *client.Objects
}

// New makes them.
func New(m Mapper, cfg client.ObjectsConfig) *Objects { return &Objects{m, client.NewObjects(cfg)} }

// Close ends the connection. Builds end. What is mapped stays until it is closed.
func (o *Objects) Close() { o.client.Close() }

// Build is an object that this process writes.
type Build struct {
	Generation uint64
	Ptr        cuda.Ptr // bytes that the process may write until Commit
	Bytes      uint64
	o          *Objects
	parts      *client.Parts
	over       sync.Once
}

// Build begins an object with a layout.
func (o *Objects) Build(dev cuda.Device, uuid [16]byte, bytes uint64, spec protocol.ObjectSpec, layout []byte) (*Build, error) {
	if _, err := objects.ParseLayout(layout, bytes); err != nil {
		return nil, err
	}
	parts, err := o.client.Build(uuid, bytes, spec, layout)
	if lacksMemory(err) {
		parts, err = o.buildInRoom(err, dev, uuid, bytes, spec, layout)
	}
	if err != nil {
		return nil, err
	}
	b := &Build{Generation: parts.Generation, Bytes: bytes, o: o, parts: parts}
	b.Ptr, err = o.mapped(dev, "build", uuid, bytes, parts, false)
	parts.Close()
	if err != nil {
		_ = o.client.Abandon(parts) // it ends with the connection at the latest
		return nil, err
	}
	return b, nil
}

// Memory that others released comes late (8 ms in the median for 1 GiB on an H200), so a build is tried again mostBuilds times, with waits
// that begin with firstWait and double up to longestWait: 99 ms in all.
const (
	mostBuilds  = 11
	firstWait   = time.Millisecond
	longestWait = 14 * time.Millisecond
)

// lacksMemory reports whether the broker found too little memory on the device.
func lacksMemory(err error) bool {
	var e *client.ObjectError
	return errors.As(err, &e) && e.Code == protocol.CodeOutOfMemory
}

// buildInRoom begins an object for which the device had too little memory: unused caches, of this process and of others, make room.
func (o *Objects) buildInRoom(lacking error, dev cuda.Device, uuid [16]byte, bytes uint64, spec protocol.ObjectSpec, layout []byte) (parts *client.Parts, err error) {
	done, ok, note := o.mapper.MakeRoom(dev, bytes)
	defer done()
	err = lacking
	for n := 0; ok && n < mostBuilds && lacksMemory(err); n++ {
		if n > 0 {
			deadline.Nap(min(firstWait<<(n-1), longestWait))
		}
		parts, err = o.client.Build(uuid, bytes, spec, layout)
	}
	if err != nil && note != "" {
		err = fmt.Errorf("%w; other processes: %s", err, note)
	}
	return parts, err
}

// mapped maps the parts of a generation.
func (o *Objects) mapped(dev cuda.Device, from string, uuid [16]byte, bytes uint64, p *client.Parts, readOnly bool) (cuda.Ptr, error) {
	m := memory.Shared{UUID: uuid, Size: bytes, ReadOnly: readOnly}
	for i, c := range p.Chunks {
		m.Chunks = append(m.Chunks, memory.SharedChunk{Size: c.Size, Serial: uint64(i)})
	}
	return o.mapper.Open(dev, fmt.Sprintf("object %s %d", from, p.Generation), m, func(i int) (int, error) { return p.Chunks[i].FD, nil })
}

// errOver is that a build has ended.
var errOver = errors.New("the build has ended")

// Commit unmaps the build and makes it visible. The caller knows that the GPU is done with it. contents is its SHA-256 in hexadecimal,
// or "". Where it fails the build has ended.
func (b *Build) Commit(contents string) (err error) {
	err = errOver
	b.over.Do(func() {
		if err = b.o.mapper.Close(b.Ptr); err != nil {
			_ = b.o.client.Abandon(b.parts)
			return
		}
		if err = b.o.client.Commit(b.parts, contents); err != nil {
			_ = b.o.client.Abandon(b.parts)
		}
	})
	return err
}

// Abandon ends the build, if it has not ended. The caller knows that the GPU is done with it.
func (b *Build) Abandon() (err error) {
	b.over.Do(func() {
		err = b.o.mapper.Close(b.Ptr)
		_ = b.o.client.Abandon(b.parts) // it ends with the connection at the latest
	})
	return err
}

// Object is a generation that is mapped here for reading.
type Object struct {
	protocol.Object
	Ptr     cuda.Ptr
	Text    []byte // the layout, as it was written
	Tensors []objects.Tensor
	o       *Objects
	over    sync.Once
}

// Open maps a generation of an object, 0 for the latest.
func (o *Objects) Open(dev cuda.Device, name protocol.ObjectName, generation uint64) (*Object, error) {
	f, err := o.client.Get(name, generation)
	if err != nil {
		return nil, err
	}
	x := &Object{Object: f.Object, Text: f.Layout, o: o}
	if x.Tensors, err = objects.ParseLayout(f.Layout, f.Object.Bytes); err == nil {
		x.Ptr, err = o.mapped(dev, fmt.Sprintf("%d %s", f.Object.Created, f.Object.Layout), f.UUID, f.Object.Bytes, &f.Parts, true)
	}
	f.Close()
	if err != nil {
		_ = o.client.Unpin(x.Generation)
		return nil, fmt.Errorf("object %q: %w", name.Name, err)
	}
	return x, nil
}

// Close unmaps the object. The caller knows that the GPU is done with it.
func (x *Object) Close() (err error) {
	err = errors.New("the object is closed already")
	x.over.Do(func() { err = errors.Join(x.o.mapper.Close(x.Ptr), x.o.client.Unpin(x.Generation)) })
	return err
}

// Remove takes the name from an object, or ends one generation.
func (o *Objects) Remove(name protocol.ObjectName, generation uint64) error {
	return o.client.Remove(name, generation)
}

// List are the objects that the user may read; with a name, the generations of that name.
func (o *Objects) List(name *protocol.ObjectName) ([]protocol.Object, error) {
	return o.client.List(name)
}
