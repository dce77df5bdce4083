package dump

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/cistern-gpu/cistern/internal/nvml"
	"github.com/cistern-gpu/cistern/recording"
)

// machine is a host with these files and variables.
func machine(t *testing.T, files, env map[string]string) host {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		file := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	return host{root, func(name string) string { return env[name] }}
}

func TestContainer(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		want  []recording.Limit
	}{
		"none": {nil, nil},
		"version 2, namespaced": {map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "4294967296\n"},
			[]recording.Limit{{Kind: "container", Bytes: 4 << 30, From: "/sys/fs/cgroup/memory.max"}}},
		"version 2, the tightest of several": {map[string]string{"proc/self/cgroup": "0::/a/b/c\n", "sys/fs/cgroup/a/b/c/memory.max": "max\n",
			"sys/fs/cgroup/a/b/memory.max": "1000\n", "sys/fs/cgroup/a/memory.max": "2000\n"},
			[]recording.Limit{{Kind: "container", Bytes: 1000, From: "/sys/fs/cgroup/a/b/memory.max"}}},
		"version 2, none set": {map[string]string{"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"}, nil},
		"version 1": {map[string]string{"proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/1\n0::/\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n", "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes": "5000\n"},
			[]recording.Limit{{Kind: "container", Bytes: 5000, From: "/sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes"}}},
		"nonsense": {map[string]string{"proc/self/cgroup": "x\n:::\n0::../../..\n", "sys/fs/cgroup/memory.max": "lots\n"}, nil},
	} {
		if got := machine(t, c.files, nil).container(); !slices.Equal(got, c.want) {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}

func TestMPS(t *testing.T) {
	const pinned, threads = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
	for i, c := range []struct {
		files, env map[string]string
		want       []recording.Limit
	}{
		{nil, nil, nil},
		{nil, map[string]string{pinned: "0=1G, 1=512M"}, []recording.Limit{{Kind: "mps", Bytes: 512 << 20, From: pinned + "=0=1G, 1=512M"}}},
		{nil, map[string]string{pinned: "0=1G,x=3,1=lots"}, nil},
		{nil, map[string]string{threads: "25"}, []recording.Limit{{Kind: "mps", From: threads + "=25"}}},
		{map[string]string{"tmp/nvidia-mps/control": ""}, nil, []recording.Limit{{Kind: "mps", From: "a server whose pipes are in /tmp/nvidia-mps"}}},
		{map[string]string{"run/mps/control": ""}, map[string]string{"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"},
			[]recording.Limit{{Kind: "mps", From: "a server whose pipes are in /run/mps"}}},
	} {
		if got := machine(t, c.files, c.env).mps(1); !slices.Equal(got, c.want) {
			t.Errorf("case %d: %+v, want %+v", i, got, c.want)
		}
	}
}

func TestMIG(t *testing.T) {
	const instance = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f"
	h := machine(t, nil, map[string]string{"CUDA_VISIBLE_DEVICES": instance})
	if got, want := h.mig("NVIDIA H200", 5), (recording.Limit{Kind: "mig", Bytes: 5, From: "CUDA_VISIBLE_DEVICES=" + instance}); len(got) != 1 || got[0] != want {
		t.Errorf("%+v", got)
	}
	h = machine(t, nil, map[string]string{"CUDA_VISIBLE_DEVICES": "0,1"})
	if got := h.mig("NVIDIA H200", 5); got != nil {
		t.Errorf("%+v", got)
	}
	if got := h.mig("NVIDIA H200 MIG 1g.18gb", 5); len(got) != 1 || got[0].Bytes != 5 {
		t.Errorf("%+v", got)
	}
}

// TestNeighbours: each process once, from the source that knows most of it.
func TestNeighbours(t *testing.T) {
	got := neighbours([]nvml.Process{{PID: 5, Name: "a", Bytes: 10, Known: true}, {PID: 7, Name: "me", Known: true, Bytes: 3},
		{PID: 5, Name: "a", Graphics: true, Bytes: 12, Known: true}, {PID: 9}}, 7)
	want := []recording.Neighbour{{PID: 5, Name: "a", Bytes: 12}, {PID: 7, Name: "me", Bytes: 3, Self: true}, {PID: 9}}
	if !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	if s := fmt.Sprint(uuidText([16]byte{}), uuidText([16]byte{1, 2, 15: 0xff})); s != "GPU-01020000-0000-0000-0000-0000000000ff" {
		t.Error(s)
	}
}
