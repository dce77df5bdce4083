package broker_test

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/internal/node/broker"
	"github.com/cistern-gpu/cistern/internal/slow"
)

// TestSlowThousandClients: with a thousand clients a request is met within 20 ms in the median, and the broker is small and idle. The
// clients are this process's too, so what they take counts as the broker's.
func TestSlowThousandClients(t *testing.T) {
	slow.Only(t)
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Max < 8000 {
		t.Fatalf("needs 8000 descriptors: %d", limit.Max)
	}
	limit.Cur = limit.Max
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	n := newNode(t, broker.Options{}, 1200*gib)
	const clients = 1000
	before := resident(t)
	all := make([]*member, clients)
	for i := range all {
		all[i] = n.member(t, strconv.Itoa(i))
		all[i].has(gib, 0)
	}
	asker := n.member(t, "asker")
	eventually(t, "all is available", func() bool {
		others, _, _ := asker.c.Available(0)
		return others >= clients*gib*9/10
	})
	var took []time.Duration
	for range 100 {
		began := time.Now()
		granted, note := asker.c.Ask(0, gib, time.Second)
		took = append(took, time.Since(began))
		if granted < gib {
			t.Fatal(granted, note)
		}
		asker.c.Done(0, granted)
		time.Sleep(20 * time.Millisecond)
	}
	slices.Sort(took)
	debug.FreeOSMemory()
	memory := resident(t) - before
	came, cpu, began := n.b.Counts().Messages.Load(), cpuTime(t), time.Now()
	time.Sleep(10 * time.Second)
	share := float64(cpuTime(t)-cpu) / float64(time.Since(began))
	fmt.Printf("1000 clients on %d processors: 1 GiB in %v (median), %v (p99), %v (most); %d MiB, of which clients have their part; idle %.2f %% of a core, clients' samples included\n",
		runtime.NumCPU(), took[50], took[98], took[99], memory>>20, 100*share)
	if x := n.b.Counts().Messages.Load(); x != came {
		t.Errorf("%d messages came while nobody asked", x-came)
	}
	if took[50] > 20*time.Millisecond {
		t.Errorf("%v in the median", took[50])
	}
}

// resident is the memory of this process in bytes.
func resident(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	pages, err := strconv.Atoi(strings.Fields(string(text))[1])
	if err != nil {
		t.Fatal(err)
	}
	return pages * os.Getpagesize()
}

// cpuTime is what this process has used.
func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
