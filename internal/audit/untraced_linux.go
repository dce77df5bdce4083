package audit

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Why a process is not traced, and when that is certain.
//
// Some reasons hold as long as a process runs its program: its environment, as it was started with it, does not have what
// the audit library needs; no dynamic linker starts it; the linker heeds no environment. One look at such a process that
// has the driver mapped, and not the ring, is enough. All others, as that the ring could not be opened, are also what is seen
// of a process that has the driver for so short a time that it has not come to the ring: they count when the same is seen
// again after a while.

// traceable is what a process needs to be traced.
type traceable struct {
	proc  string
	uid   int    // the tracer's
	value string // of Variable
	inode uint64 // of the ring
}

// excuse is why a process is not traced should it use the driver, empty where it would be.
type excuse struct {
	why    string
	sure   bool // it will not be either
	closed bool // it cannot be looked into
}

// grace is how long something has to last that may be about to change, graceBusy that where others report it, which they
// do from time to time.
const (
	grace     = time.Second
	graceBusy = 3 * time.Second
)

// examine says whether a process is to be listed.
func (w *Watch) examine(p *descendant, now time.Time) *Untraced {
	if p.why == "" {
		if p.excuse = w.about.excuse(p.pid); p.why == "" {
			p.decided = true
			return nil
		}
	}
	if p.closed {
		if w.heardFrom(p.pid) {
			p.decided = true
			return nil
		}
		if w.busy == nil || !w.busy(p.pid) {
			p.seen = time.Time{}
			return nil
		}
		return w.tell(p, now, graceBusy)
	}
	has := w.about.mapped(p.pid)
	if has == hasNothing || has == hasRing {
		p.decided = has == hasRing
		return nil
	}
	// What was seen of it before may have been another program's, or of one that was about to begin.
	s, err := w.stat(p.pid)
	if err != nil || s.start != p.start || s.image != p.image {
		return nil // next time
	}
	if p.excuse = w.about.excuse(p.pid); p.why == "" || p.closed {
		p.decided = p.why == ""
		return nil
	}
	if has == hasOtherRing {
		p.excuse = excuse{why: "is recorded by another cistern trace", sure: true}
	}
	return w.tell(p, now, grace)
}

// tell tells of a process once that is certain, and of those that it forked not at all: they have the driver because it has.
func (w *Watch) tell(p *descendant, now time.Time, after time.Duration) *Untraced {
	if p.seen.IsZero() {
		p.seen = now
	}
	if !p.sure && now.Sub(p.seen) < after {
		return nil
	}
	p.decided = true
	if p.image != (image{}) {
		if w.reported[p.image] {
			return nil
		}
		w.reported[p.image] = true
	}
	name := p.name
	if exe, err := os.Readlink(fmt.Sprintf("%s/%d/exe", w.proc, p.pid)); err == nil {
		name = strings.TrimSuffix(exe, " (deleted)")
	}
	return &Untraced{PID: p.pid, Program: name, Why: p.why}
}

// excuse is the reason of a process.
func (t *traceable) excuse(pid int) excuse {
	dir := fmt.Sprintf("%s/%d/", t.proc, pid)
	uid, err := userOf(dir + "status")
	if err != nil {
		return excuse{why: "has ended"}
	}
	environment, err := os.ReadFile(dir + "environ")
	if errors.Is(err, fs.ErrPermission) {
		if uid != t.uid {
			return excuse{why: fmt.Sprintf("runs as another user, number %d", uid), closed: true}
		}
		return excuse{why: "has other rights, or is kept from being looked into", closed: true}
	}
	if err != nil {
		return excuse{why: "has ended"}
	}
	if secure(dir + "auxv") {
		return excuse{why: "has rights of its own (setuid, setgid or setcap): the dynamic linker ignores what its environment asks for", sure: true}
	}
	if exe, err := os.Open(dir + "exe"); err == nil {
		why := blindELF(exe)
		exe.Close()
		if why != "" {
			return excuse{why: why, sure: true}
		}
	}
	audits, value, whole := variables(environment)
	switch {
	case !whole: // written over, as by those that give themselves a title
		return excuse{why: "was started in a way that does not show"}
	case audits == "":
		return excuse{why: "was started without LD_AUDIT in its environment, as by env -i or sudo", sure: true}
	case !hasLibrary(audits):
		return excuse{why: "was started with another LD_AUDIT in its environment: " + audits, sure: true}
	case value == "":
		return excuse{why: "was started without " + Variable + " in its environment", sure: true}
	case value != t.value:
		return excuse{why: "was started with another " + Variable + " in its environment"}
	}
	if _, path, ok := strings.Cut(t.value, ":"); ok {
		if _, err := os.Readlink(filepath.Join(dir, "root", path)); errors.Is(err, fs.ErrNotExist) {
			return excuse{why: "has a /proc of its own, as in a container"}
		}
	}
	if uid != t.uid && uid != 0 {
		return excuse{why: fmt.Sprintf("runs as another user, number %d, and cannot open the ring for recorded calls", uid)}
	}
	return excuse{}
}

func hasLibrary(audits string) bool {
	for file := range strings.SplitSeq(audits, ":") {
		if filepath.Base(file) == Library {
			return true
		}
	}
	return false
}

// variables are those that tracing needs, of the environment with which a process was started, and whether that is one.
func variables(environment []byte) (audits, value string, whole bool) {
	if len(environment) > 0 && environment[len(environment)-1] != 0 {
		return "", "", false
	}
	for v := range bytes.SplitSeq(bytes.TrimSuffix(environment, []byte{0}), []byte{0}) {
		name, text, ok := strings.Cut(string(v), "=")
		if !ok && len(environment) > 0 {
			return "", "", false
		}
		switch name {
		case "LD_AUDIT":
			audits = text
		case Variable:
			value = text
		}
	}
	return audits, value, true
}

// userOf is the effective user of a process.
func userOf(status string) (int, error) {
	text, err := os.ReadFile(status)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 2 && f[0] == "Uid:" {
			return strconv.Atoi(f[2])
		}
	}
	return 0, fs.ErrNotExist
}

// secure reports whether the kernel told the dynamic linker to heed no environment.
func secure(auxv string) bool {
	const atSecure = 23
	words, err := os.ReadFile(auxv)
	if err != nil {
		return false
	}
	for ; len(words) >= 16; words = words[16:] {
		if binary.NativeEndian.Uint64(words) == atSecure {
			return binary.NativeEndian.Uint64(words[8:]) != 0
		}
	}
	return false
}

// What a process has mapped.
type mapping int

const (
	hasNothing mapping = iota // nothing of the driver
	hasDriver
	hasRing      // whatever else
	hasOtherRing // and the driver
)

// mapped looks through what a process has mapped. The driver is its library's code, as a tool that reads a library maps it without;
// or the device through which it manages memory, beside another: what only counts and measures does not open that.
func (t *traceable) mapped(pid int) mapping {
	f, err := os.Open(fmt.Sprintf("%s/%d/maps", t.proc, pid))
	if err != nil {
		return hasNothing
	}
	defer f.Close()
	has, device, other := hasNothing, false, false
	for lines := bufio.NewScanner(f); lines.Scan(); {
		line := lines.Bytes()
		at := bytes.IndexByte(line, '/')
		if at < 0 {
			continue
		}
		file, field := line[at:], bytes.Fields(line[:at])
		if len(field) < 5 {
			continue
		}
		switch {
		case bytes.HasPrefix(file, []byte("/memfd:"+RingName)):
			if string(field[4]) == strconv.FormatUint(t.inode, 10) {
				return hasRing
			}
			other = true // which its reader has too
		case bytes.HasPrefix(file, []byte("/dev/nvidia-uvm")):
			has = hasDriver
		case bytes.HasPrefix(file, []byte("/dev/nvidia")):
			device = true
		case bytes.HasPrefix(file[bytes.LastIndexByte(file, '/')+1:], []byte("libcuda.so")) && bytes.IndexByte(field[1], 'x') >= 0:
			has = hasDriver
		}
	}
	if has == hasNothing && device && t.manages(pid) {
		has = hasDriver
	}
	if has == hasDriver && other {
		has = hasOtherRing
	}
	return has
}

// manages reports whether a process has the device open through which the driver manages memory.
func (t *traceable) manages(pid int) bool {
	fds, _ := filepath.Glob(fmt.Sprintf("%s/%d/fd/*", t.proc, pid))
	for _, fd := range fds {
		if file, err := os.Readlink(fd); err == nil && strings.HasPrefix(file, "/dev/nvidia-uvm") {
			return true
		}
	}
	return false
}

func inodeOf(st fs.FileInfo) uint64 {
	if s, ok := st.Sys().(*syscall.Stat_t); ok {
		return s.Ino
	}
	return 0
}
