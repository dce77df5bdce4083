package broker_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cistern-gpu/cistern/internal/node/broker"
	"github.com/cistern-gpu/cistern/internal/slow"
)

// In a child of TestSlowThousandClients a broker is all there is, so that its memory and CPU time can be told from the clients'.
func TestMain(m *testing.M) {
	if socket := os.Getenv("CISTERN_TEST_BROKER"); socket != "" {
		b, err := broker.New(broker.Options{PerProcess: 2000, Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
		if err != nil {
			panic(err)
		}
		l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: socket, Net: "unixpacket"})
		if err != nil {
			panic(err)
		}
		panic(b.Serve(context.Background(), l))
	}
	os.Exit(m.Run())
}

// TestSlowThousandClients: with a thousand clients a request is met within 20 ms in the median, and the broker takes less than 100 MB,
// and less than 1 % of a core while no client asks.
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
	dir, err := os.MkdirTemp("", "node")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	n := &node{t: t, socket: filepath.Join(dir, "s"), gpu: &gpu{total: 1200 * gib, uuid: [16]byte{1}}}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "CISTERN_TEST_BROKER="+n.socket)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	eventually(t, "the broker serves", func() bool { _, err := os.Stat(n.socket); return err == nil })
	const clients = 1000
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
	sent := asker.c.Sent()
	memory, cpu, began := resident(t, cmd.Process.Pid), cpuTime(t, cmd.Process.Pid), time.Now()
	time.Sleep(10 * time.Second)
	share := float64(cpuTime(t, cmd.Process.Pid)-cpu) / float64(time.Since(began))
	fmt.Printf("1000 clients on %d processors: 1 GiB in %v (median), %v (p99), %v (most); the broker has %d MB, and takes %.2f %% of a core while no client asks\n",
		runtime.NumCPU(), took[50], took[98], took[99], memory/1e6, 100*share)
	if asker.c.Sent() != sent {
		t.Error("messages were sent while no client asked")
	}
	if took[50] > 20*time.Millisecond || memory > 100e6 || share > 0.01 {
		t.Error("one of these is too much")
	}
}

// resident is the memory of a process in bytes.
func resident(t *testing.T, pid int) int {
	t.Helper()
	f := procFields(t, pid, "statm")
	pages, err := strconv.Atoi(f[1])
	if err != nil {
		t.Fatal(err)
	}
	return pages * os.Getpagesize()
}

// cpuTime is what a process has used.
func cpuTime(t *testing.T, pid int) (sum time.Duration) {
	t.Helper()
	f := procFields(t, pid, "stat")
	for _, field := range f[13:15] { // utime and stime; the name has no spaces
		ticks, err := strconv.Atoi(field)
		if err != nil {
			t.Fatal(err)
		}
		sum += time.Duration(ticks) * 10 * time.Millisecond
	}
	return sum
}

func procFields(t *testing.T, pid int, name string) []string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(string(text))
}
