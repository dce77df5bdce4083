//go:build linux && amd64

package audit

import (
	"context"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cistern-gpu/cistern/internal/deadline"
	"github.com/cistern-gpu/cistern/internal/rerun"
)

func newRing(t *testing.T, slots int) *Ring {
	t.Helper()
	r, err := New(slots, 0)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// take is a producer's first step, publish the rest of its work. The producer in C is tested with the whole program.
func (r *Ring) take() uint64 { return atomic.AddUint64(r.word(offHead), 1) - 1 }

func (r *Ring) publish(number uint64, rec *Record) bool {
	off := headBytes + number%r.slots*slotBytes
	words := (*[slotWords]uint64)(unsafe.Pointer(rec))
	for i, w := range words {
		atomic.StoreUint64(r.word(off+16+uint64(i)*8), w)
	}
	atomic.StoreUint64(r.word(off+8), checksum(words, number))
	lap := number / r.slots * 2
	return atomic.CompareAndSwapUint64(r.word(off), lap, lap+1)
}

func drained(r *Ring, last bool) string {
	var got []uint64
	r.Drain(100, last, func(rec *Record) { got = append(got, rec.Addr) })
	return fmt.Sprint(got)
}

func TestRingPassesUnpublished(t *testing.T) {
	r := newRing(t, 4)
	defer r.Close()
	r.publish(r.take(), &Record{Addr: 1})
	unpublished := r.take()
	r.publish(r.take(), &Record{Addr: 3})
	if got := drained(r, false); got != "[1]" {
		t.Errorf("before the unpublished slot: %s", got)
	}
	if got := drained(r, false); got != "[]" || !r.Waits() {
		t.Errorf("the unpublished slot was passed at once, or is not waited for: %s", got)
	}
	past := time.Now().Add(-time.Hour)
	r.late = deadline.Deadline{Limit: slotTimeout}
	r.late.Left(past) // the reader was stopped since
	if got := drained(r, false); got != "[]" {
		t.Errorf("the unpublished slot was passed after the reader was stopped: %s", got)
	}
	r.late = deadline.Deadline{Limit: slotTimeout}
	for ; r.late.Left(past) > 0; past = past.Add(deadline.Step) {
	}
	if got := drained(r, false); got != "[3]" || r.Lost() != 1 || r.Waits() {
		t.Errorf("behind the unpublished slot: %s, %d lost", got, r.Lost())
	}
	// Its writer comes late, writes over what is there by now, and cannot publish.
	for i := uint64(4); i <= 6; i++ {
		r.publish(r.take(), &Record{Addr: i})
	}
	if r.publish(unpublished, &Record{Addr: 2}) {
		t.Error("a slot that was passed was published")
	}
	if got := drained(r, false); got != "[4 5]" || r.Lost() != 2 {
		t.Errorf("after a latecomer: %s, %d lost", got, r.Lost())
	}
	r.take()
	if got := drained(r, true); got != "[]" || r.Lost() != 3 {
		t.Errorf("at the end: %s, %d lost", got, r.Lost())
	}
}

// TestRingWaits: how long a slot is waited for goes by the looks at it, and is less where others have no room.
func TestRingWaits(t *testing.T) {
	for _, c := range []struct {
		taken uint64
		every time.Duration
		want  int // looks until it is passed
	}{{1, 10 * time.Millisecond, 1000}, {32, 10 * time.Millisecond, 1000}, {33, 10 * time.Millisecond, 100}, {64, time.Minute, 20}, {1, time.Minute, 200}} {
		r := newRing(t, 64)
		now, looks := time.Now(), 0
		for ; r.wait(now, c.taken); looks++ {
			now = now.Add(c.every)
		}
		if looks != c.want {
			t.Errorf("of %d taken slots the first is passed at look %d, %v apart; want %d", c.taken, looks, c.every, c.want)
		}
		r.Close()
	}
}

func TestRingRefuses(t *testing.T) {
	for _, n := range []int{0, 3, -8} {
		if _, err := New(n, 0); err == nil {
			t.Errorf("%d slots were accepted", n)
		}
	}
}

// TestLayout compiles ring.h and asks where everything is.
func TestLayout(t *testing.T) {
	var r Record
	want := map[string]uintptr{"struct ring, nonce": offNonce, "struct ring, slots": offSlots, "struct ring, flags": offFlags,
		"struct ring, closed": offClosed, "struct ring, head": offHead, "struct ring, spent": offSpent, "struct ring, dropped": offDropped, "struct ring, tail": offTail,
		"struct ring, slot": headBytes, "struct slot, check": 8, "struct slot, time": 16 + unsafe.Offsetof(r.TimeNS),
		"struct slot, took": 16 + unsafe.Offsetof(r.TookNS), "struct slot, addr": 16 + unsafe.Offsetof(r.Addr),
		"struct slot, extra": 16 + unsafe.Offsetof(r.Extra), "struct slot, pid": 16 + unsafe.Offsetof(r.PID),
		"struct slot, tid": 16 + unsafe.Offsetof(r.TID), "struct slot, device": 16 + unsafe.Offsetof(r.Device),
		"struct slot, result": 16 + unsafe.Offsetof(r.Result), "struct slot, type": 16 + unsafe.Offsetof(r.Type),
		"struct slot, call": 16 + unsafe.Offsetof(r.Call), "struct slot, count": 16 + unsafe.Offsetof(r.Count),
		"struct slot, flags": 16 + unsafe.Offsetof(r.Flags), "struct slot, payload": 16 + unsafe.Offsetof(r.payload)}
	source := "#include <stddef.h>\n#include \"ring.h\"\n"
	for where, at := range want {
		source += fmt.Sprintf("_Static_assert(offsetof(%s) == %d, \"%s\");\n", where, at, where)
	}
	source += fmt.Sprintf("_Static_assert(RING_MAGIC == %#xu && RING_PAYLOAD == %d && RING_NATIVE == %d && RING_PYTHON == %d, \"constants\");\n", uint64(magic), MaxPayload, Native, Python)
	source += fmt.Sprintf("_Static_assert(CALL_STACK == %d && PROCESS_FRESH == %d && MODULE_PYTHON == %d, \"flags\");\n", CallStack, ProcessFresh, ModulePython)
	source += fmt.Sprintf("_Static_assert(RECORD_CALL == %d && RECORD_PROCESS == %d && RECORD_MODULE == %d && RECORD_UNKNOWN == %d && RECORD_STACK == %d && RECORD_CODE == %d && RECORD_PYTHON == %d && RECORD_ENDED == %d && RECORD_DEVICE == %d, \"records\");\n",
		RecordCall, RecordProcess, RecordModule, RecordUnknown, RecordStack, RecordCode, RecordPython, RecordEnded, RecordDevice)
	file := filepath.Join(t.TempDir(), "layout.c")
	if err := os.WriteFile(file, []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	rerun.OnChange(t, "../../audit/*")
	if out, err := exec.Command("cc", "-fsyntax-only", "-I../../audit", file).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	if unsafe.Sizeof(r) != slotWords*8 {
		t.Errorf("a record has %d bytes, want %d", unsafe.Sizeof(r), slotWords*8)
	}
}

func TestText(t *testing.T) {
	var r Record
	copy((*[MaxPayload]byte)(unsafe.Pointer(&r.payload))[:], "a file")
	r.Count = 6
	if got := r.Text(); got != "a file" {
		t.Errorf("text is %q", got)
	}
	if r.Count = 65535; len(r.Text()) != MaxPayload || len(r.Words()) != MaxPayload/8 {
		t.Error("a count beyond the payload was believed")
	}
}

// TestOverflow has a program make more calls than there is room for, without a reader.
func TestOverflow(t *testing.T) {
	program, env := build(t)
	r := newRing(t, 64)
	defer r.Close()
	cmd := exec.Command(program, "dlsym", "many", "500")
	cmd.Env = append(env, "LD_AUDIT="+library(t), Variable+"="+r.Value())
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Fatalf("%v: %s", err, out)
	}
	n := r.Drain(1<<20, true, func(*Record) {})
	head := binary.LittleEndian.Uint64(r.mem[offHead:])
	if n != 64 || head != 64 || r.Dropped() < 1000-64 || r.Lost() != 0 {
		t.Errorf("%d read, %d taken, %d dropped, %d lost", n, head, r.Dropped(), r.Lost())
	}
}

// TestWithoutRing: where the ring cannot be opened, nothing is replaced and nothing printed.
func TestWithoutRing(t *testing.T) {
	program, env := build(t)
	lib := library(t)
	r := newRing(t, 64)
	defer r.Close()
	other := fmt.Sprintf("%016x%s", r.nonce+1, r.Value()[16:])
	for _, value := range []string{"", "x", "0", "12:/nowhere", "12:" + program, "12:/dev/null", other, strings.Repeat("1", 5000)} {
		cmd := exec.Command(program, "dlsym", "many", "10")
		cmd.Env = append(env, "LD_AUDIT="+lib, Variable+"="+value)
		if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("%.20q: %v: %s", value, err, out)
		}
	}
	if n := r.Drain(10, true, func(*Record) {}); n != 0 {
		t.Errorf("%d records through another's ring", n)
	}
	// Another process may have the reader's number by now, and what its file's is a pipe: nothing is taken out of it.
	from, to, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	const text = "what another program is to read, longer than a ring's head"
	fmt.Fprint(to, text)
	cmd := exec.Command(program, "dlsym", "many", "10")
	cmd.Env = append(env, "LD_AUDIT="+lib, fmt.Sprintf("%s=12:/proc/%d/fd/%d", Variable, os.Getpid(), from.Fd()))
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("a pipe: %v: %s", err, out)
	}
	to.Close()
	if got, err := io.ReadAll(from); err != nil || string(got) != text {
		t.Errorf("of a pipe %q is left: %v", got, err)
	}
}

// machine is the head of a program for a machine, with nothing in it.
func machine(m elf.Machine) string {
	head := make([]byte, 64)
	copy(head, elf.ELFMAG+"\x02\x01\x01")
	binary.LittleEndian.PutUint16(head[16:], uint16(elf.ET_EXEC))
	binary.LittleEndian.PutUint16(head[18:], uint16(m))
	binary.LittleEndian.PutUint32(head[20:], uint32(elf.EV_CURRENT))
	binary.LittleEndian.PutUint16(head[52:], 64) // of itself
	binary.LittleEndian.PutUint16(head[54:], 56) // of a segment
	binary.LittleEndian.PutUint16(head[58:], 64) // of a section
	return string(head)
}

func TestBlind(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		p := filepath.Join(dir, name)
		if err := os.WriteFile(p, []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
		return p
	}
	source := file("s.c", "int main(void) { return 0; }\n")
	for name, flag := range map[string]string{"static": "-static", "dynamic": "-O1"} {
		if out, err := exec.Command("cc", flag, source, "-o", filepath.Join(dir, name)).CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
	}
	setuid, anothers := file("setuid", ""), "setuid"
	if err := os.Chown(setuid, os.Getuid()+1, -1); err != nil {
		anothers = "" // only root can make it another's
	}
	own := file("own", "")
	for _, f := range []string{setuid, own} {
		if err := os.Chmod(f, 0o700|os.ModeSetuid); err != nil {
			t.Fatal(err)
		}
	}
	loader, err := exec.Command("cc", "-print-file-name=ld-linux-x86-64.so.2").Output()
	if err != nil {
		t.Fatal(err)
	}
	for program, want := range map[string]string{
		filepath.Join(dir, "static"):      "statically linked",
		filepath.Join(dir, "dynamic"):     "",
		setuid:                            anothers,
		own:                               "",
		strings.TrimSpace(string(loader)): "",
		file("script", "#!"+filepath.Join(dir, "static")+" -x\n"):      "statically linked",
		file("shell", "#!/bin/sh\n"):                                   "",
		file("env", "#!/usr/bin/env -S A=1 sh\n"):                      "",
		file("text", "no program"):                                     "",
		file("loop", "#!"+filepath.Join(dir, "loop")+"\n"):             "",
		file("cut", "\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00"): "",
		filepath.Join(dir, "absent"):                                   "",
		file("other", machine(elf.EM_AARCH64)):                         "is a program for aarch64: the audit library here is for x86_64",
		file("own", machine(elf.EM_X86_64)):                            "statically linked",
	} {
		if got := Blind(program); !strings.Contains(got, want) || want == "" && got != "" {
			t.Errorf("%s: %q, want %q", filepath.Base(program), got, want)
		}
	}
}

// TestRingSpoiled: a program may write anything over the ring. The reader neither waits for what cannot come nor goes
// through numbers that were not taken, and says that it stopped.
func TestRingSpoiled(t *testing.T) {
	for name, spoil := range map[string]func(r *Ring){
		"the next number is far ahead": func(r *Ring) { *r.word(offHead) = 1 << 60 },
		"the next number is behind":    func(r *Ring) { *r.word(offHead) = 0 },
		"a slot is of another lap":     func(r *Ring) { *r.word(headBytes + 2*slotBytes) = 7 },
		"all is overwritten": func(r *Ring) {
			for i := range r.mem {
				r.mem[i] = 0xa5
			}
		},
	} {
		for _, last := range []bool{false, true} {
			r := newRing(t, 8)
			r.publish(r.take(), &Record{Addr: 1})
			r.publish(r.take(), &Record{Addr: 2})
			if got := drained(r, last); got != "[1 2]" || r.Spoiled() {
				t.Fatalf("%s: %s before", name, got)
			}
			spoil(r)
			ended := make(chan int)
			go func() { ended <- r.Drain(1<<20, last, func(*Record) {}) }()
			select {
			case n := <-ended:
				if n != 0 || !r.Spoiled() || atomic.LoadUint64(r.word(offClosed)) == 0 {
					t.Errorf("%s: %d records, spoiled %v", name, n, r.Spoiled())
				}
			case <-time.After(2 * time.Minute):
				t.Fatalf("%s: the reader does not end", name)
			}
			if n := r.Drain(1, last, func(*Record) {}); n != 0 {
				t.Errorf("%s: read on", name)
			}
			r.Close()
		}
	}
}

// TestSpoiledForWriters: callers go on, whatever another program wrote over the ring.
func TestSpoiledForWriters(t *testing.T) {
	program, env := build(t)
	lib := library(t)
	for name, spoil := range map[string]func(r *Ring){
		"a slot of a later lap":   func(r *Ring) { *r.word(headBytes) = 8 },
		"a next number far ahead": func(r *Ring) { *r.word(offHead) = 1 << 60 },
	} {
		r := newRing(t, 64)
		spoil(r)
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		cmd := exec.CommandContext(ctx, program, "dlsym", "many", "50")
		cmd.Env = append(env, "LD_AUDIT="+lib, Variable+"="+r.Value())
		if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
			t.Errorf("%s: %v: %s", name, err, out)
		}
		cancel()
		r.Close()
	}
}
