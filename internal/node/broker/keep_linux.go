package broker

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/internal/node/objects"
	"github.com/cistern-gpu/cistern/internal/node/protocol"
)

// Keeper stores descriptors by name such that the next broker has them, as systemd's file descriptor store does. Names are short: all
// of them are one variable of the next broker's environment.
type Keeper interface {
	Store(name string, fd int) error
	Forget(name string)
}

// keptNames are what the descriptors of a generation are stored as: chunks, then the layout, then a file that describes the object,
// which is stored last.
func keptNames(generation uint64, chunks int) (names []string) {
	id := "o" + strconv.FormatUint(generation, 36) + "."
	for i := range chunks {
		names = append(names, id+strconv.Itoa(i))
	}
	return append(names, id+"l", id+"m")
}

// keptObject describes an object to the next broker.
type keptObject struct {
	protocol.Object
	UUID   [16]byte `json:"uuid"`
	Chunks []uint64 `json:"chunks"`
}

// keep stores a generation that was committed. What was removed meanwhile is forgotten.
func (t *objectTable) keep(o *objects.Object, m *objects.Memory) {
	if t.opt.Keep == nil {
		return
	}
	chunks := o.Chunks()
	t.keepDevice(o.UUID)
	var err error
	m.Use(func() { err = keepParts(t.opt.Keep, o, m) })
	if err != nil {
		t.b.log.Warn("an object will not survive this broker", "name", o.Name, "generation", o.Generation, "error", err)
	}
	t.mu.Lock()
	t.kept[o.Generation] = chunks // also where it was removed and forgotten while it was stored
	t.mu.Unlock()
	t.forget()
}

// keepParts stores the descriptors of a generation.
func keepParts(to Keeper, o *objects.Object, m *objects.Memory) error {
	k := keptObject{Object: o.Listed(UUID(o.UUID)), UUID: o.UUID}
	names := keptNames(o.Generation, len(m.Chunks))
	for i := range m.Chunks {
		k.Chunks = append(k.Chunks, m.Chunks[i].Size)
		if err := to.Store(names[i], m.Chunks[i].FD); err != nil {
			return err
		}
	}
	text, err := json.Marshal(k)
	if err != nil {
		return err
	}
	about, err := objects.NewFile("cistern-object", text)
	if err != nil {
		return err
	}
	defer unix.Close(about)
	if err := to.Store(names[len(names)-2], m.Layout); err != nil {
		return err
	}
	return to.Store(names[len(names)-1], about)
}

// forget drops from the store what has no name any more.
func (t *objectTable) forget() {
	if t.opt.Keep == nil {
		return
	}
	t.mu.Lock()
	var names []string
	for g, chunks := range t.kept {
		if !t.store.Named(g) {
			delete(t.kept, g)
			names = append(names, keptNames(g, chunks)...)
		}
	}
	t.mu.Unlock()
	for _, name := range names {
		t.opt.Keep.Forget(name)
	}
}

// keepDevice stores a descriptor of the device's file: the driver drops exported memory when no process has the device open, unless
// persistence mode is on.
func (t *objectTable) keepDevice(uuid [16]byte) {
	path, ok := deviceFile("/proc/driver/nvidia/gpus", UUID(uuid))
	if !ok {
		return
	}
	t.mu.Lock()
	done := t.devices[path]
	t.devices[path] = true
	t.mu.Unlock()
	if done {
		return
	}
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err == nil {
		err = t.opt.Keep.Store("d"+filepath.Base(path), fd)
		unix.Close(fd)
	}
	if err != nil {
		t.b.log.Warn("objects survive this broker only where another process uses the GPU, or persistence mode is on", "device", path, "error", err)
	}
}

// deviceFile is the file of a device, which the driver lists in a folder.
func deviceFile(folder, uuid string) (path string, ok bool) {
	all, err := filepath.Glob(filepath.Join(folder, "*", "information"))
	if err != nil {
		return "", false
	}
	for _, file := range all {
		b, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		values := map[string]string{}
		for line := range strings.Lines(string(b)) {
			key, value, _ := strings.Cut(line, ":")
			values[strings.TrimSpace(key)] = strings.TrimSpace(value)
		}
		if minor := values["Device Minor"]; strings.EqualFold(values["GPU UUID"], uuid) && minor != "" {
			return "/dev/nvidia" + minor, true
		}
	}
	return "", false
}

// Restore takes over the descriptors that an earlier broker stored, by name, before Serve. It returns how many objects are there again.
// What does not belong to a whole object is closed and forgotten.
func (b *Broker) Restore(fds map[string]int) (count int) {
	if count = b.restore(fds); count > 0 {
		go b.objects.charge()
	}
	return count
}

func (b *Broker) restore(fds map[string]int) (count int) {
	t := b.objects
	var generations []uint64
	for name := range fds {
		if id, ok := strings.CutSuffix(name, ".m"); ok {
			if generation, err := strconv.ParseUint(strings.TrimPrefix(id, "o"), 36, 64); err == nil {
				generations = append(generations, generation)
			}
		}
	}
	slices.Sort(generations)
	for _, generation := range slices.Backward(generations) { // the latest of a name first
		if err := t.restore(generation, fds); err != nil {
			b.log.Warn("an object of an earlier broker is lost", "generation", generation, "error", err)
			continue
		}
		count++
	}
	for name, fd := range fds { // of these no object was made
		unix.Close(fd)
		if !strings.HasPrefix(name, "d") && t.opt.Keep != nil {
			t.opt.Keep.Forget(name)
		}
	}
	return count
}

// restore makes one object of descriptors, which it takes from fds.
func (t *objectTable) restore(generation uint64, fds map[string]int) error {
	about, ok := fds[keptNames(generation, 0)[1]]
	if !ok {
		return errors.New("it is stored under another name")
	}
	text, err := objects.ReadFile(about, 64<<10)
	if err != nil {
		return err
	}
	var k keptObject
	if err := json.Unmarshal(text, &k); err != nil {
		return err
	}
	names := keptNames(generation, len(k.Chunks))
	switch {
	case k.Generation != generation:
		return fmt.Errorf("it says that it is generation %d", k.Generation)
	case len(k.Chunks) == 0 || len(k.Chunks) > objects.MaxChunks:
		return fmt.Errorf("it has %d chunks", len(k.Chunks))
	}
	m := &objects.Memory{Layout: -1}
	for i, name := range names[:len(names)-1] {
		fd, ok := fds[name]
		switch {
		case !ok:
			return errors.New("not all of its descriptors are there")
		case i < len(k.Chunks):
			m.Chunks = append(m.Chunks, objects.Chunk{Size: k.Chunks[i], FD: fd})
		default:
			m.Layout = fd
		}
	}
	layout, err := objects.ReadFile(m.Layout, objects.MaxLayout)
	if err != nil || objects.Sum(layout) != k.Layout {
		return errors.New("its layout is another")
	}
	o := objects.Object{ObjectName: protocol.ObjectName{UID: k.UID, Name: k.Name}, Generation: generation, GID: k.GID, UUID: k.UUID, Bytes: k.Bytes,
		Reserved: k.Reserved, Mode: k.Mode, TTL: time.Duration(k.TTL * float64(time.Second)), Labels: k.Labels, LayoutSize: len(layout), Layout: k.Layout,
		Contents: k.Contents, PID: k.PID, Created: time.Unix(k.Created, 0)}
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.store.Restore(o, time.Now()); err != nil {
		return err
	}
	t.memory[generation], t.kept[generation] = m, len(k.Chunks)
	for _, name := range names[:len(names)-1] {
		delete(fds, name)
	}
	unix.Close(about)
	delete(fds, names[len(names)-1])
	return nil
}

// charge imports the memory of restored objects, so that the driver charges it to this process. The descriptors keep it also without.
func (t *objectTable) charge() {
	drv, err := t.driver()
	if err != nil {
		t.b.log.Warn("objects of an earlier broker are charged to no process", "error", err)
		return
	}
	type chunk struct {
		generation uint64
		index, fd  int
	}
	var all []chunk
	t.mu.Lock()
	for g, m := range t.memory {
		for i, c := range m.Chunks {
			if c.Charged() {
				continue
			}
			if fd, err := unix.FcntlInt(uintptr(c.FD), unix.F_DUPFD_CLOEXEC, 3); err == nil {
				all = append(all, chunk{g, i, fd})
			}
		}
	}
	t.mu.Unlock()
	for _, c := range all {
		t.chargeOne(drv, c.generation, c.index, c.fd)
		unix.Close(c.fd)
	}
}

// chargeOne imports one chunk.
func (t *objectTable) chargeOne(drv objects.Driver, generation uint64, index, fd int) {
	t.mu.Lock()
	o, ok := t.store.Get(generation)
	var uuid [16]byte
	if ok {
		uuid = o.UUID
	}
	t.mu.Unlock()
	if !ok {
		return
	}
	dev, _, err := device(drv, uuid)
	var h cuda.Handle
	if err == nil {
		h, err = drv.MemImport(dev, fd)
	}
	if err != nil {
		t.b.log.Warn("an object of an earlier broker is charged to no process", "generation", generation, "error", err)
		return
	}
	t.mu.Lock()
	m := t.memory[generation]
	if m != nil {
		m.Chunks[index].Charge(h)
	}
	t.mu.Unlock()
	if m == nil { // it was removed meanwhile
		if err := drv.MemRelease(h); err != nil {
			t.b.log.Error("memory of an object is lost until the broker ends", "generation", generation, "error", err)
		}
	}
}

// soPeerGroups is SO_PEERGROUPS (Linux 4.13).
const soPeerGroups = 59

// peerGroups are the supplementary groups of the process at the other end of a socket.
func peerGroups(fd int) []uint32 {
	groups := make([]uint32, 256)
	size := uint32(4 * len(groups))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, soPeerGroups, uintptr(unsafe.Pointer(&groups[0])),
		uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return nil // it has more than these, which then do not count
	}
	return groups[:size/4]
}
