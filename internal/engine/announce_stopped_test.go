//go:build unix && !aix && !solaris

package engine_test

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/internal/engine"
)

// A process that a busy host lets stand still for longer than a request is patient loses no request by that: whoever is telling
// of memory had no time either. The process is this test once more, which is stopped.
func TestOnUnmapIsWaitedForByStopped(t *testing.T) {
	const name = "CISTERN_TEST_STOPPED"
	if os.Getenv(name) != "" {
		waitsToBeStopped(t)
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run", "^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), name+"=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	defer func() {
		cmd.Process.Kill()
		cmd.Wait()
	}()
	said := bufio.NewScanner(out)
	hears := func(want string) {
		t.Helper()
		if !said.Scan() || said.Text() != want {
			t.Fatalf("it says %q, want %q", said.Text(), want)
		}
	}
	hears("waits")
	must(t, cmd.Process.Signal(syscall.SIGSTOP))
	var status syscall.WaitStatus
	if _, err := syscall.Wait4(cmd.Process.Pid, &status, syscall.WUNTRACED, nil); err != nil || !status.Stopped() {
		t.Fatal(status, err)
	}
	time.Sleep(1500 * time.Millisecond) // longer than any request waits
	_, err = fmt.Fprintln(in)
	must(t, err)
	must(t, cmd.Process.Signal(syscall.SIGCONT))
	hears("met")
}

// waitsToBeStopped has a request wait for a function that comes back a moment after there was a line to read.
func waitsToBeStopped(t *testing.T) {
	e, trimmed, failed := asksMeanwhile(t, config.Options{}, func() {
		bufio.NewReader(os.Stdin).ReadString('\n')
		time.Sleep(100 * time.Millisecond)
	})
	for !engine.Awaits(e.dev) {
		time.Sleep(time.Millisecond)
	}
	fmt.Println("waits")
	if err := <-failed; err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println("met")
	<-trimmed
}
