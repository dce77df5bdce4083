//go:build linux && amd64

package audit

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// fakeProc is a /proc that a test makes: the tracer is process 100 of session 90, its program 101.
type fakeProc struct {
	t    *testing.T
	proc string
	w    *Watch
	now  time.Time
	busy map[int]bool
}

const (
	fakeRing  = "0123456789abcdef:/proc/100/fd/7"
	fakeInode = 4242
	withRing  = "PATH=/bin\x00LD_AUDIT=/lib/other.so:/x/" + Library + "\x00" + Variable + "=" + fakeRing + "\x00"

	mapsCode  = "7f0000000000-7f0000001000 r-xp 00001000 08:01 77  /usr/lib/libcuda.so.570.86.15\n"
	mapsData  = "7f0000000000-7f0000001000 r--p 00001000 08:01 77  /usr/lib/libcuda.so.570.86.15\n"
	mapsOther = "7f0000000000-7f0000001000 r-xp 00001000 08:01 77  /usr/lib/libcuda.so.570/libcudart.so.12\n7f0000003000-7f0000004000 r-xp 0 0:0 0 [vdso]\nnonsense\n"
	mapsRing  = "7f0000002000-7f0000003000 rw-s 00000000 00:01 4242 /memfd:cistern-audit (deleted)\n"
	mapsAlien = "7f0000002000-7f0000003000 rw-s 00000000 00:01 4243 /memfd:cistern-audit (deleted)\n"
	mapsUVM   = "7f0000002000-7f0000003000 rw-s 00000000 00:06 500 /dev/nvidia-uvm\n"
	mapsCard  = "7f0000002000-7f0000003000 rw-s 00000000 00:06 500 /dev/nvidia0\n"
)

func newFakeProc(t *testing.T) *fakeProc {
	m := &fakeProc{t: t, proc: t.TempDir(), now: time.Now(), busy: map[int]bool{}}
	m.process(1, 0, 1, 10)
	m.process(90, 1, 90, 20)
	m.process(100, 90, 90, 30)
	m.process(101, 100, 90, 31)
	m.w = newWatch(m.proc, 100, 101, traceable{uid: 5, value: fakeRing, inode: fakeInode}, func(pid int) bool { return m.busy[pid] })
	return m
}

func (m *fakeProc) write(pid int, name, text string) {
	m.t.Helper()
	file := filepath.Join(m.proc, fmt.Sprint(pid), name)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		m.t.Fatal(err)
	}
}

// process is one that was started well, of an image of its own. Its parent's is another.
func (m *fakeProc) process(pid, parent, session int, start uint64) {
	m.stat(pid, parent, session, start, uint64(pid)<<20)
	m.write(pid, "status", "Name:\tx\nUid:\t9\t5\t5\t5\n")
	m.write(pid, "environ", withRing)
	m.write(pid, "auxv", "")
	m.write(pid, "maps", mapsOther)
	m.link(pid, "exe", "/bin/python3")
	m.link(pid, "root", m.proc+"/top")
	if err := os.MkdirAll(m.proc+"/top/proc/100/fd", 0o755); err != nil {
		m.t.Fatal(err)
	}
	_ = os.Symlink("/memfd:cistern-audit (deleted)", m.proc+"/top/proc/100/fd/7")
}

func (m *fakeProc) stat(pid, parent, session int, start, image uint64) {
	f := make([]string, 53)
	for i := range f {
		f[i] = "0"
	}
	set := func(i int, v any) { f[i] = fmt.Sprint(v) }
	set(1, pid)
	set(2, "(a) name (x)")
	set(3, "S")
	set(4, parent)
	set(6, session)
	set(22, start)
	for _, i := range []int{26, 28, 48, 50, 51} {
		set(i, image)
	}
	m.write(pid, "stat", strings.Join(f[1:], " ")+"\n")
}

func (m *fakeProc) link(pid int, name, to string) {
	m.t.Helper()
	file := filepath.Join(m.proc, fmt.Sprint(pid), name)
	_ = os.Remove(file)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		m.t.Fatal(err)
	}
	if err := os.Symlink(to, file); err != nil {
		m.t.Fatal(err)
	}
}

func (m *fakeProc) gone(pid int) {
	if err := os.RemoveAll(filepath.Join(m.proc, fmt.Sprint(pid))); err != nil {
		m.t.Fatal(err)
	}
}

// look is the processes listed, a while after the look before.
func (m *fakeProc) look(after time.Duration) string {
	m.now = m.now.Add(after)
	var out []string
	for _, u := range m.w.look(m.now) {
		out = append(out, fmt.Sprintf("%d %s %s", u.PID, u.Program, u.Why))
	}
	return strings.Join(out, "\n")
}

// TestWatchReasons: which process uses the driver, why it is not traced, and when that is certain.
func TestWatchReasons(t *testing.T) {
	env := func(text string) func(m *fakeProc) { return func(m *fakeProc) { m.write(101, "environ", text) } }
	cleared := "was started without LD_AUDIT in its environment, as by env -i or sudo"
	for name, c := range map[string]struct {
		maps string
		set  func(m *fakeProc)
		want string // at the first look, or with a * in front after a while
	}{
		"well started, before it has come to the ring": {mapsCode, func(*fakeProc) {}, ""},
		"traced":                {mapsCode + mapsRing, env(""), ""},
		"cleared":               {mapsCode, env(""), cleared},
		"sudo":                  {mapsCode, env("PATH=/bin\x00HOME=/root\x00"), cleared},
		"without the driver":    {mapsOther, env(""), ""},
		"the driver as data":    {mapsData, env(""), ""},
		"another library":       {mapsCode, env("LD_AUDIT=/x.so\x00"), "was started with another LD_AUDIT in its environment: /x.so"},
		"no ring":               {mapsCode, env("LD_AUDIT=/y/" + Library + "\x00"), "was started without CISTERN_AUDIT in its environment"},
		"another's ring":        {mapsCode, env("LD_AUDIT=" + Library + "\x00" + Variable + "=1:/x\x00"), "*was started with another CISTERN_AUDIT in its environment"},
		"another's, mapped":     {mapsCode + mapsAlien, env("LD_AUDIT=" + Library + "\x00" + Variable + "=1:/x\x00"), "is recorded by another cistern trace"},
		"another's reader":      {mapsAlien, env(""), ""},
		"a title over it":       {mapsCode, env("\x00\x00\x00\x00"), "*was started in a way that does not show"},
		"half a title over it":  {mapsCode, env("rest of the title\x00" + withRing), "*was started in a way that does not show"},
		"a title without a end": {mapsCode, env("A=title"), "*was started in a way that does not show"},
		"a title, traced":       {mapsCode + mapsRing, env("\x00\x00\x00\x00"), ""},
		"secure": {mapsCode, func(m *fakeProc) {
			m.write(101, "auxv", string(binary.NativeEndian.AppendUint64(binary.NativeEndian.AppendUint64(make([]byte, 16), 23), 1)))
		}, "has rights of its own (setuid, setgid or setcap): the dynamic linker ignores what its environment asks for"},
		"not secure": {mapsCode, func(m *fakeProc) {
			m.write(101, "auxv", string(binary.NativeEndian.AppendUint64(binary.NativeEndian.AppendUint64(make([]byte, 16), 23), 0)))
		}, ""},
		"a container": {mapsCode, func(m *fakeProc) { m.link(101, "root", m.t.TempDir()) }, "*has a /proc of its own, as in a container"},
		"another user": {mapsCode, func(m *fakeProc) { m.write(101, "status", "Uid:\t5\t6\t5\t5\n") },
			"*runs as another user, number 6, and cannot open the ring for recorded calls"},
		"root":                          {mapsCode, func(m *fakeProc) { m.write(101, "status", "Uid:\t5\t0\t5\t5\n") }, ""},
		"a driver of its own":           {mapsUVM, env(""), cleared},
		"with the device open":          {mapsCard, func(m *fakeProc) { m.write(101, "environ", ""); m.link(101, "fd/3", "/dev/nvidia-uvm") }, cleared},
		"what only counts":              {mapsCard, func(m *fakeProc) { m.write(101, "environ", ""); m.link(101, "fd/3", "/dev/nvidiactl") }, ""},
		"an open file that it was left": {mapsOther, func(m *fakeProc) { m.write(101, "environ", ""); m.link(101, "fd/3", "/dev/nvidia-uvm") }, ""},
	} {
		m := newFakeProc(t)
		m.write(101, "maps", c.maps)
		c.set(m)
		first := m.look(0)
		second := m.look(grace)
		third := m.look(time.Hour)
		want, later := strings.CutPrefix(c.want, "*")
		if want != "" {
			want = "101 /bin/python3 " + want
		}
		if later && (first != "" || second != want) || !later && (first != want || second != "") || third != "" {
			t.Errorf("%s: %q, then %q, then %q; want %q", name, first, second, third, c.want)
		}
	}
}

// TestWatchChanges: what is seen while a process becomes another program, or is about to be traced, is not held against it.
func TestWatchChanges(t *testing.T) {
	m := newFakeProc(t)
	// While it is started its environment is empty, and what it was is there.
	m.write(101, "environ", "")
	m.write(101, "maps", mapsOther)
	if got := m.look(0); got != "" {
		t.Error(got)
	}
	m.stat(101, 100, 90, 31, 7)
	m.write(101, "environ", withRing)
	m.write(101, "maps", mapsCode)
	if got := m.look(time.Hour); got != "" {
		t.Errorf("what it was before was believed: %s", got)
	}
	// It clears its environment and starts again.
	m.stat(101, 100, 90, 31, 8)
	m.write(101, "environ", "")
	m.write(101, "maps", mapsOther)
	if got := m.look(time.Hour); got != "" {
		t.Error(got)
	}
	m.write(101, "maps", mapsCode)
	if got := m.look(0); !strings.HasPrefix(got, "101 ") {
		t.Errorf("after it began anew: %q", got)
	}
	// Those that it forks are not listed; one that starts again is.
	m.process(102, 101, 90, 40)
	m.stat(102, 101, 90, 40, 8)
	m.process(103, 102, 90, 41)
	for _, pid := range []int{102, 103} {
		m.write(pid, "environ", "")
		m.write(pid, "maps", mapsCode)
	}
	if got := m.look(0); !strings.HasPrefix(got, "103 ") || strings.Contains(got, "\n") {
		t.Errorf("of a fork and one that began anew: %q", got)
	}
	// A zombie has nothing any more.
	m.process(104, 101, 90, 50)
	m.write(104, "environ", "")
	m.write(104, "maps", mapsCode)
	file := filepath.Join(m.proc, "104/stat")
	text, _ := os.ReadFile(file)
	m.write(104, "stat", strings.Replace(string(text), ") S ", ") Z ", 1))
	if got := m.look(0); got != "" {
		t.Errorf("a zombie: %q", got)
	}
}

// TestWatchBelow: only what the program started is below it, with any parent by now.
func TestWatchBelow(t *testing.T) {
	m := newFakeProc(t)
	untraced := func(pid, parent, session int, start uint64) {
		m.process(pid, parent, session, start)
		m.write(pid, "environ", "")
		m.write(pid, "maps", mapsCode)
	}
	expect := func(what string, pids ...int) {
		t.Helper()
		var got []int
		for _, u := range m.w.look(m.now) {
			got = append(got, u.PID)
		}
		if fmt.Sprint(got) != fmt.Sprint(pids) {
			t.Errorf("%s: %v are listed, want %v", what, got, pids)
		}
	}
	untraced(91, 90, 90, 32)  // a neighbour in the pipeline
	untraced(50, 1, 50, 5)    // a daemon
	untraced(99, 100, 90, 29) // the tracer's, from before it was the tracer
	expect("others")
	m.process(110, 101, 90, 40)
	untraced(111, 110, 90, 41)
	m.process(112, 110, 90, 42)
	expect("a grandchild", 111)
	// Its parents end, and a process that was seen goes on elsewhere; what it starts is below it all the same.
	m.gone(110)
	m.stat(112, 1, 90, 42, 112<<20)
	untraced(113, 112, 90, 43)
	expect("of an orphan", 113)
	// A session is inherited: a process in that of one below the program is below it too.
	m.process(114, 101, 114, 44)
	untraced(115, 1, 114, 45)
	expect("a session", 115)
	untraced(118, 1, 114, 43)
	expect("a session that was another's before")
	// Of one whose parent ended while it was looked at nothing is known, until it has another.
	untraced(116, 117, 90, 46)
	expect("no parent")
	m.process(117, 101, 90, 45)
	expect("a parent after all", 116)
	// Numbers are used again.
	m.gone(112)
	untraced(112, 1, 1, 60)
	expect("a number that was below")
	m.gone(91)
	expect("nobody")
	untraced(91, 101, 90, 61)
	expect("a number that was another's", 91)
	// Numbers under the program's, as they begin anew.
	untraced(7, 6, 90, 70)
	m.process(6, 101, 90, 69)
	expect("small numbers", 7)
	// One that wrote to the ring: where it has the ring, it and what it starts are the program's.
	m.process(130, 1, 130, 71)
	m.write(130, "maps", mapsRing+mapsCode)
	m.process(131, 1, 131, 71)
	m.write(131, "maps", mapsCode)
	untraced(132, 130, 130, 72)
	untraced(133, 131, 131, 72)
	expect("nobody yet")
	m.w.Heard(130)
	m.w.Heard(131) // that is another's number
	m.w.Heard(99999)
	for range othersFor {
		m.w.look(m.now)
	}
	if m.w.below[130] == nil || m.w.below[131] != nil || m.w.below[133] != nil || m.w.below[132] == nil || !m.w.below[132].decided {
		t.Errorf("below are %v", m.w.below)
	}
	// A tracer that begins when its program has ended says nothing of the process with that number.
	late := newWatch(m.proc, 100, 119, m.w.about, nil)
	if late.begun != 0 || late.look(m.now) != nil {
		t.Error("a watch without a program found a process")
	}
	if late = newWatch(m.proc, 100, 113, m.w.about, nil); late.begun != 0 {
		t.Error("the number of the program is another's")
	}
}

// TestWatchMeanwhile: what is seen of a process that becomes another program between two questions is of neither.
func TestWatchMeanwhile(t *testing.T) {
	m := newFakeProc(t)
	m.write(101, "environ", "")
	m.write(101, "maps", mapsOther)
	m.look(0)
	p := m.w.below[101]
	m.write(101, "maps", mapsCode)
	m.stat(101, 100, 90, 31, 9)
	if u := m.w.examine(p, m.now); u != nil {
		t.Errorf("%+v", u)
	}
	if got := m.look(0); !strings.HasPrefix(got, "101 ") {
		t.Errorf("once it is that for good: %q", got)
	}
}

// TestWatchClosed: of a process that cannot be looked into others say whether it uses the driver.
func TestWatchClosed(t *testing.T) {
	if os.Getuid() == 0 {
		t.Log("root may read everything: an unreadable process is made by hand")
	}
	m := newFakeProc(t)
	m.process(120, 101, 90, 40)
	m.look(0)
	close := func(pid int) {
		*m.w.below[pid] = descendant{stat: m.w.below[pid].stat, excuse: excuse{why: "runs as another user, number 0", closed: true}}
	}
	close(120)
	if got := m.look(time.Hour) + m.look(time.Hour); got != "" {
		t.Error(got)
	}
	m.busy[120] = true
	if got := m.look(0) + m.look(graceBusy-1); got != "" {
		t.Errorf("it was believed at once: %s", got)
	}
	m.busy[120] = false
	m.look(0)
	m.busy[120] = true
	if got := m.look(graceBusy); got != "" {
		t.Errorf("it was not so all the time: %s", got)
	}
	if got := m.look(graceBusy); !strings.HasPrefix(got, "120 ") {
		t.Errorf("%q", got)
	}
	// One that wrote to the ring is traced, whatever it is by now.
	m.process(121, 101, 90, 41)
	m.look(0)
	close(121)
	m.busy[121] = true
	m.w.Heard(121)
	if got := m.look(0) + m.look(time.Hour); got != "" {
		t.Error(got)
	}
}

// TestWatchCost: waiting is not what a look costs, so that it is looked as often where the machine is busy with others.
func TestWatchCost(t *testing.T) {
	m := newFakeProc(t)
	slow := filepath.Join(m.proc, "101", "environ")
	if err := os.Remove(slow); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(slow, 0o600); err != nil {
		t.Fatal(err)
	}
	const stopped = 300 * time.Millisecond
	begin := time.Now() // before the other begins to wait
	go func() {
		time.Sleep(stopped)
		_ = os.WriteFile(slow, []byte(withRing), 0o600)
	}()
	list, cost := m.w.Look(m.now)
	if took := time.Since(begin); len(list) != 0 || took < stopped || cost <= 0 || cost > stopped/2 {
		t.Errorf("%v: a look of %v reports a cost of %v", list, took, cost)
	}
}
