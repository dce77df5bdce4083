package node

import (
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/cistern-gpu/cistern"
	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/node/attach"
	"github.com/cistern-gpu/cistern/internal/node/client"
	"github.com/cistern-gpu/cistern/internal/node/objects"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/memory"
)

// Errors of named objects. errors.Is finds them, and cuda.ErrOutOfMemory where the device has no memory for an object.
var (
	ErrObjectNotFound = errors.New("no such object")
	ErrObjectDenied   = errors.New("permission denied")
	ErrObjectLimit    = errors.New("a limit of the broker or its policy")
	ErrNoBroker       = client.ErrNoBroker
)

// Objects is named objects of the node's broker: device memory that outlives its writer, and that other processes map, for reading
// only, without a copy. Its methods may be called from any goroutine.
//
//	objects := node.OpenObjects(a)
//	b, err := objects.Build(0, node.ObjectSpec{Name: "weights/llama-8b", Tensors: tensors})
//	// write the tensors at b.Ptr() and their offsets, and wait for the GPU
//	err = b.Commit("")
//
// and in other processes
//
//	o, err := objects.Open(0, node.ObjectName{Name: "weights/llama-8b"})
//	defer o.Close()
type Objects struct {
	a  *cistern.Allocator
	in *attach.Objects
}

// OpenObjects makes a connection for the allocator's devices to the broker that Options.Node names. It connects with the first call,
// and again after the broker has been replaced.
func OpenObjects(a *cistern.Allocator) *Objects {
	var cfg client.ObjectsConfig
	if n := a.Options().Node; n != config.NodeAuto && n != config.NodeOff {
		cfg.Socket = n
	}
	return &Objects{a, attach.New(mapper{a}, cfg)}
}

// mapper has the allocator's names for what it does.
type mapper struct{ a *cistern.Allocator }

func (m mapper) Open(dev cuda.Device, from string, s memory.Shared, descriptor func(i int) (int, error)) (cuda.Ptr, error) {
	return m.a.Open(dev, from, s, descriptor)
}

func (m mapper) MakeRoom(dev cuda.Device, bytes uint64) (func(), bool, string) {
	return m.a.MakeRoom(dev, bytes)
}

func (m mapper) Close(p cuda.Ptr) error { return m.a.CloseShared(p) }

// Close ends the connection. Builds that were not committed end. Objects that are open stay mapped; close them before.
func (o *Objects) Close() { o.in.Close() }

// Tensor is a part of an object.
type Tensor struct {
	Name   string
	DType  string   // as in safetensors: F32, F16, BF16, I64, U8, F8_E4M3, BOOL, …
	Shape  []uint64 // empty for a scalar
	Offset uint64   // bytes from the beginning of the object
	Size   uint64   // bytes
}

// ObjectSpec describes an object that is built.
type ObjectSpec struct {
	// Name is 1 to 255 letters, digits and - _ . : @ + = with single slashes in between. Names are the user's own.
	Name string
	// Tensors are the parts of the object; at most 200,000. Offsets and Size are the caller's, or LayOut's.
	Tensors []Tensor
	// Size is the object's bytes; 0: up to the end of the last tensor.
	Size uint64
	// Mode is the rights to read, as of a file: 0600 (the default), 0640, 0604 or 0644.
	Mode os.FileMode
	// TTL has the object removed when no process has it open for so long; 0 keeps it.
	TTL time.Duration
	// Labels are up to 8 keys and values, for operators.
	Labels map[string]string
}

// LayOut gives each tensor an offset that is a multiple of 512 bytes.
func LayOut(tensors []Tensor) error {
	list := internal(tensors)
	_, err := objects.LayOut(list)
	for i := range list {
		tensors[i].Offset = list[i].Offset
	}
	return err
}

func internal(tensors []Tensor) []objects.Tensor {
	list := make([]objects.Tensor, len(tensors))
	for i, t := range tensors {
		list[i] = objects.Tensor(t)
	}
	return list
}

// Build is an object that this process writes.
type Build struct {
	in      *attach.Build
	tensors []Tensor
}

// Build has the broker make the memory of an object, and maps it on the device. No other process sees the object before Commit. Where the
// process ends before, or the broker, it leaves nothing.
func (o *Objects) Build(dev cuda.Device, spec ObjectSpec) (*Build, error) {
	d, err := o.a.Device(dev)
	if err != nil {
		return nil, err
	}
	size := spec.Size
	if size == 0 {
		for _, t := range spec.Tensors {
			size = max(size, t.Offset+t.Size)
		}
	}
	mode := uint32(0o600)
	if spec.Mode != 0 {
		mode = uint32(spec.Mode)
	}
	layout, err := objects.AppendLayout(nil, size, internal(spec.Tensors))
	if err != nil {
		return nil, err
	}
	b, err := o.in.Build(dev, d.Info().UUID, size, protocol.ObjectSpec{Name: spec.Name, Mode: mode, TTL: spec.TTL.Seconds(), Labels: spec.Labels}, layout)
	if err != nil {
		return nil, explained(err)
	}
	return &Build{b, spec.Tensors}, nil
}

// Ptr is the address of the object's first byte, until the build ends.
func (b *Build) Ptr() cuda.Ptr { return b.in.Ptr }

// Size is the object's bytes.
func (b *Build) Size() uint64 { return b.in.Bytes }

// Generation numbers the object among all of the broker.
func (b *Build) Generation() uint64 { return b.in.Generation }

// Commit unmaps the memory, and makes the object the latest generation of its name. Generations before are removed; processes that
// have them open keep them. The caller knows that the GPU is done with the memory. contents is the SHA-256 of the contents in
// hexadecimal for readers to check, or "". After an error there is no object.
func (b *Build) Commit(contents string) error { return explained(b.in.Commit(contents)) }

// Abandon ends a build that was not committed; else it does nothing. The caller knows that the GPU is done with the memory.
func (b *Build) Abandon() error { return explained(b.in.Abandon()) }

// ObjectName names an object.
type ObjectName struct {
	Name string
	// User is the number of the user whose object it is; nil is the user of this process.
	User *uint32
	// Generation is one of the object's; 0 is the latest.
	Generation uint64
}

func (n ObjectName) in() protocol.ObjectName {
	user := uint32(os.Geteuid())
	if n.User != nil {
		user = *n.User
	}
	return protocol.ObjectName{UID: user, Name: n.Name}
}

// ObjectInfo is what is known of a generation of an object.
type ObjectInfo struct {
	Name       string
	User       uint32
	Generation uint64
	State      string // "building", "committed", or "removed" while readers still have it
	Device     string // UUID of the GPU
	Size       uint64 // bytes of the contents
	Reserved   uint64 // bytes of physical memory
	Mode       os.FileMode
	TTL        time.Duration
	Labels     map[string]string
	Layout     string // SHA-256 of the layout in hexadecimal
	Contents   string // SHA-256 of the contents, where the writer gave it
	Readers    int    // processes that have it open
	PID        int    // of the writer
	Created    time.Time
}

func infoOf(p *protocol.Object) ObjectInfo {
	return ObjectInfo{Name: p.Name, User: p.UID, Generation: p.Generation, State: p.State, Device: p.Device, Size: p.Bytes, Reserved: p.Reserved,
		Mode: os.FileMode(p.Mode), TTL: time.Duration(p.TTL * float64(time.Second)), Labels: p.Labels, Layout: p.Layout, Contents: p.Contents,
		Readers: p.Readers, PID: p.PID, Created: time.Unix(p.Created, 0)}
}

// Object is a generation of an object that is mapped here.
type Object struct{ in *attach.Object }

// Open maps an object on a device for reading. Work on the GPU that writes there breaks the context of this process and of no other. The
// generation stays until Close, also where another replaces it. Where it is open here already it is not mapped again. The layout is
// checked against its checksum.
func (o *Objects) Open(dev cuda.Device, name ObjectName) (*Object, error) {
	x, err := o.in.Open(dev, name.in(), name.Generation)
	if err != nil {
		return nil, explained(err)
	}
	return &Object{x}, nil
}

// Ptr is the address of the object's first byte.
func (x *Object) Ptr() cuda.Ptr { return x.in.Ptr }

// Info describes the object.
func (x *Object) Info() ObjectInfo { return infoOf(&x.in.Object) }

// Tensors are the object's parts, by offset.
func (x *Object) Tensors() []Tensor {
	all := make([]Tensor, len(x.in.Tensors))
	for i, t := range x.in.Tensors {
		all[i] = Tensor(t)
	}
	return all
}

// Close unmaps the object. The caller knows that the GPU is done with it.
func (x *Object) Close() error { return explained(x.in.Close()) }

// List are the objects that the user may read, by user, name and generation.
func (o *Objects) List() ([]ObjectInfo, error) { return o.list(nil) }

// Stat are the generations of an object: the latest, builds, and those that readers still have open.
func (o *Objects) Stat(name ObjectName) ([]ObjectInfo, error) {
	n := name.in()
	all, err := o.list(&n)
	if err == nil && len(all) == 0 {
		err = fmt.Errorf("%w: %q of user %d", ErrObjectNotFound, n.Name, n.UID)
	}
	return all, err
}

func (o *Objects) list(name *protocol.ObjectName) (all []ObjectInfo, err error) {
	list, err := o.in.List(name)
	for i := range list {
		all = append(all, infoOf(&list[i]))
	}
	return all, explained(err)
}

// Remove removes an object: its latest generation, or the one that is named. Its memory goes when the last process has closed it.
func (o *Objects) Remove(name ObjectName) error {
	return explained(o.in.Remove(name.in(), name.Generation))
}

// objectError is an answer of the broker that errors.Is tells apart.
type objectError struct {
	error
	kind error
}

func (e *objectError) Unwrap() []error { return []error{e.error, e.kind} }

// explained makes errors of the broker those that callers may ask for.
func explained(err error) error {
	var e *client.ObjectError
	if !errors.As(err, &e) {
		return err
	}
	switch e.Code {
	case protocol.CodeNotFound:
		return &objectError{err, ErrObjectNotFound}
	case protocol.CodeDenied:
		return &objectError{err, ErrObjectDenied}
	case protocol.CodeLimit:
		return &objectError{err, ErrObjectLimit}
	case protocol.CodeOutOfMemory:
		return &objectError{err, cuda.ErrOutOfMemory}
	}
	return err
}
