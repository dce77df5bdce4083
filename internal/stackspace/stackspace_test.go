package stackspace

import (
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"unsafe"
)

// TestMake: a stack is moved to make space, and not again while there is.
func TestMake(t *testing.T) {
	moved := make(chan [2]bool)
	go func() {
		var here byte
		var m [2]bool
		for i := range m {
			before := uintptr(unsafe.Pointer(&here))
			Make()
			m[i] = uintptr(unsafe.Pointer(&here)) != before
		}
		before := uintptr(unsafe.Pointer(&here))
		use(Bytes / 1024 * 3 / 4)
		if uintptr(unsafe.Pointer(&here)) != before {
			t.Error("the stack was moved for less than there is space for")
		}
		moved <- m
	}()
	if m := <-moved; m != [2]bool{true, false} {
		t.Errorf("the stack was moved: %v, want the first time only", m)
	}
}

// shrinks reports whether the stack of a goroutine that waits shrinks in collections.
func shrinks() bool {
	waiting, woken, moved := make(chan bool), make(chan bool), make(chan bool)
	go func() {
		var here byte
		Make()
		before := uintptr(unsafe.Pointer(&here))
		waiting <- true
		<-woken
		moved <- uintptr(unsafe.Pointer(&here)) != before
	}()
	<-waiting
	for range 3 {
		runtime.GC()
	}
	woken <- true
	return <-moved
}

// TestKept: stacks shrink, and with the setting they do not.
func TestKept(t *testing.T) {
	if os.Getenv("STACKSPACE_CHILD") != "" {
		if shrinks() {
			t.Error("a stack shrank")
		}
		return
	}
	if !shrinks() {
		t.Error("a stack did not shrink without the setting, so that this test shows nothing")
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestKept$")
	cmd.Env = append(os.Environ(), "STACKSPACE_CHILD=1", "GODEBUG=gcshrinkstackoff=1")
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "PASS") {
		t.Errorf("%v\n%s", err, out)
	}
}

//go:noinline
func use(kib int) (sum byte) {
	var frame [1024]byte
	frame[kib%1024] = 1
	if kib > 0 {
		sum = use(kib - 1)
	}
	return sum + frame[kib%1024]
}
