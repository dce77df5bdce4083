//go:build linux

package main

import (
	"bufio"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestServeMetrics: the broker's metrics are there while it serves, for this machine alone.
func TestServeMetrics(t *testing.T) {
	dir, err := os.MkdirTemp("", "node") // a socket's path has to be short
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	cmd, _ := selfCommand(t, "serve", "--socket", filepath.Join(dir, "s"), "--metrics", "0")
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	cmd.Stderr = w
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	address := ""
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		if m := regexp.MustCompile(`msg="metrics are served" address=(\S+)`).FindStringSubmatch(lines.Text()); m != nil {
			address = m[1]
		}
		if strings.Contains(lines.Text(), "the broker serves") {
			break
		}
	}
	if !strings.HasPrefix(address, "127.0.0.1:") {
		t.Fatalf("served at %q", address)
	}
	c := http.Client{Timeout: time.Minute}
	for path, want := range map[string]string{"/metrics": `cistern_node_info{version="` + buildVersion().Version + `"} 1`, "/": "The metrics are at /metrics"} {
		a, err := c.Get("http://" + address + path)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(a.Body)
		a.Body.Close()
		if err != nil || a.StatusCode != http.StatusOK || !strings.Contains(string(text), want) {
			t.Errorf("%s: %v %s\n%s\nwant %s", path, err, a.Status, text, want)
		}
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	for lines.Scan() { // until it has ended
	}
	_ = cmd.Wait()
	if _, err := c.Get("http://" + address + "/metrics"); err == nil {
		t.Error("the metrics are there without the broker")
	}
	_, errs, code := cistern(t, "", "serve", "--socket", filepath.Join(dir, "t"), "--metrics", "a:b:c")
	if code != exitBad || !strings.Contains(errs, `--metrics: "a:b:c": expected PORT or HOST:PORT`) {
		t.Errorf("%d %s", code, errs)
	}
}

// TestNodePauseUsage: what is wrong with the flags, in one line.
func TestNodePauseUsage(t *testing.T) {
	none := filepath.Join(t.TempDir(), "s")
	for want, args := range map[string][]string{
		"--label: expected the label":   {"pause"},
		"--timeout 1ms: expected from":  {"pause", "--label", "x", "--timeout", "1ms"},
		"--wait 48h0m0s: expected from": {"pause", "--label", "x", "--wait", "48h"},
		"no broker answers at":          {"resume", "--label", "x", "--socket", none},
	} {
		_, errs, code := cistern(t, "", append([]string{"node"}, args...)...)
		if code != exitBad || !strings.Contains(errs, want) || strings.Count(errs, "\n") != 1 {
			t.Errorf("%v: %d %s", args, code, errs)
		}
	}
}
