package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/fleet"
	"github.com/cistern-gpu/cistern/fleet/fleettest"
)

// ended is the summary of a process that ended, with these recordings.
func ended(rank, host string, recordings ...string) *fleet.Summary {
	s := &fleet.Summary{Format: fleet.Version, Variables: map[string]string{"RANK": rank, "WORLD_SIZE": "4"}, Host: host, PID: 7, Ended: fleet.EndExit, Recordings: recordings}
	s.Devices = []fleet.Device{{Total: 80 << 30}}
	return s
}

func write(t *testing.T, file, text string) string {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// A summary has nothing copied or removed that is not a file beside it, whatever names it has. The others are collected.
func TestCollectHostile(t *testing.T) {
	top := t.TempDir()
	from, to := filepath.Join(top, "from"), filepath.Join(top, "to")
	if err := os.MkdirAll(filepath.Join(from, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	secret := write(t, filepath.Join(top, "secret"), "secret")
	good := ended("0", "n", "good.pickle")
	write(t, filepath.Join(from, "good.pickle"), "good")
	link := ended("1", "n", "link.pickle")
	for name, target := range map[string]string{"link.pickle": secret, "folder": top, "linked" + fleet.Ending: "other"} {
		if err := os.Symlink(target, filepath.Join(from, name)); err != nil {
			t.Fatal(err)
		}
	}
	// The summary that a link stands for is a good one.
	other, err := fleettest.Write(from, ended("2", "n"))
	if err == nil {
		err = os.Rename(other, filepath.Join(from, "other"))
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []*fleet.Summary{good, link, ended("3", "n", "../secret"), ended("4", "n", secret), ended("5", "n", "folder/secret"), ended("6", "n", "sub")} {
		if _, err := fleettest.Write(from, s); err != nil {
			t.Fatal(err)
		}
	}
	_, errs, code := cistern(t, "", "fleet", "collect", "--as-is", "--move", from, to)
	if code != exitBad || !strings.Contains(errs, "1 process in") || strings.Count(errs, "\n") != 7 {
		t.Errorf("code %d, %s", code, errs)
	}
	if data, err := os.ReadFile(secret); err != nil || string(data) != "secret" {
		t.Errorf("%q, %v", data, err)
	}
	entries, err := os.ReadDir(to)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if want := []string{"rank0-n-7-0.good.pickle", "rank0-n-7-0" + fleet.Ending}; !slices.Equal(names, want) {
		t.Errorf("collected %q, want %q", names, want)
	}
	if left, err := filepath.Glob(filepath.Join(from, "*"+fleet.Ending)); err != nil || len(left) != 6 {
		t.Errorf("left %q, %v", left, err)
	}
}

// A link in the folder that is collected to is not followed.
func TestCollectToLink(t *testing.T) {
	for _, name := range []string{"rank0-n-7-0.a.pickle", "rank0-n-7-0" + fleet.Ending} {
		from, to := t.TempDir(), t.TempDir()
		precious := write(t, filepath.Join(t.TempDir(), "precious"), "precious")
		write(t, filepath.Join(from, "a.pickle"), "recording")
		if _, err := fleettest.Write(from, ended("0", "n", "a.pickle")); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(precious, filepath.Join(to, name)); err != nil {
			t.Fatal(err)
		}
		if _, errs, code := cistern(t, "", "fleet", "collect", "--as-is", from, to); code != exitBad || !strings.Contains(errs, "not a file") {
			t.Errorf("%s: code %d, %s", name, code, errs)
		}
		if data, err := os.ReadFile(precious); err != nil || string(data) != "precious" {
			t.Errorf("%s: %q, %v", name, data, err)
		}
	}
}

// Files of failed requests have the number of their process in their name, which processes of two containers may share.
func TestCollectSameNames(t *testing.T) {
	to := t.TempDir()
	for _, node := range []string{"a", "b"} {
		from := t.TempDir()
		write(t, filepath.Join(from, "oom-7-1.cistern"), "of node "+node)
		s := ended("0", node)
		s.Devices[0].Failures = []fleet.Failure{{Recording: "oom-7-1.cistern"}}
		if _, err := fleettest.Write(from, s); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if _, errs, code := cistern(t, "", "fleet", "collect", "--as-is", from, to); code != exitOK {
				t.Fatal(errs)
			}
		}
	}
	f, err := fleet.Load(t.Context(), to)
	if err != nil || len(f.Summaries) != 2 {
		t.Fatalf("%v, %+v", err, f)
	}
	for _, s := range f.Summaries {
		name := s.Devices[0].Failures[0].Recording
		if data, err := os.ReadFile(filepath.Join(to, name)); err != nil || string(data) != "of node "+s.Host {
			t.Errorf("node %s: %s has %q, %v", s.Host, name, data, err)
		}
	}
}

// Files that are no summaries are named, so that a script does not take all for collected.
func TestCollectUnreadable(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	write(t, filepath.Join(from, "half"+fleet.Ending), `{"cistern_summary":1,`)
	write(t, filepath.Join(from, "none"+fleet.Ending), `{}`)
	_, errs, code := cistern(t, "", "fleet", "collect", from, to)
	if code != exitBad || !strings.Contains(errs, "half"+fleet.Ending+": the summary is truncated") || !strings.Contains(errs, "none"+fleet.Ending+": not a summary") {
		t.Errorf("code %d, %s", code, errs)
	}
}
