package config_test

import (
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/config"
	"github.com/cistern-gpu/cistern/memory"
)

// Whatever is read is valid, and is read the same from what it is written as.
func TestRoundTrip(t *testing.T) {
	keys := []string{"driver", "backend", "limit", "chunk", "cross_stream", "stages", "history", "ipc", "single_handle", "capture_reuse", "magazine", "spill",
		"upstream", "stacks", "stack_sample", "report", "report_child", "node_headroom", "top"}
	values := []string{"", "0", "1MiB", "4MiB", "true", "false", "on", "off", "native", "python", "all", "vmm", "malloc", "legacy", "handles", "wait",
		"ready", "all", "fit+grow", "collect", "managed", "pinned", "host_numa", "a folder/b:c", "100", "sim:80GiB", "async:initial=1MiB;max=1GiB"}
	rng := rand.New(rand.NewPCG(1, 2))
	read, written := 0, map[string]bool{}
	for range 100_000 {
		var items []string
		for range rng.IntN(4) {
			items = append(items, keys[rng.IntN(len(keys))]+":"+values[rng.IntN(len(values))])
		}
		text := strings.Join(items, ",")
		o, err := config.Parse(text)
		if err != nil {
			continue
		}
		read++
		if err := o.Validate(); err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		if again, err := config.Parse(o.String()); err != nil || again != o {
			t.Fatalf("%q is written %q, which is read %+v, %v", text, o, again, err)
		}
		for _, item := range strings.Split(o.String(), ",") {
			key, _, _ := strings.Cut(item, ":")
			written[key] = true
		}
	}
	for _, k := range keys {
		if !written[k] {
			t.Errorf("%s was never written", k)
		}
	}
	if read < 10_000 {
		t.Errorf("only %d texts were read", read)
	}
}

// TestEverySetting: the text form reaches every option. A hook of a program around the engine has no place among them.
func TestEverySetting(t *testing.T) {
	const all = "driver:sim,backend:malloc,limit:1GiB,chunk:4MiB,cross_stream:ready,stages:grow,cache_limit:1GiB,cache_decay:1s,history:7,ipc:legacy,capture_reuse:true," +
		"magazine:off,spill:managed,stacks:native,stack_sample:1MiB,report:here,report_child:true,node:off,node_wait:1s,node_headroom:64MiB,node_label:x,top:off"

	o, err := config.Parse(all)
	if err != nil {
		t.Fatal(err)
	}
	var others []reflect.Value // those that ipc:legacy excludes
	for _, text := range []string{"single_handle:true", "upstream:managed"} {
		o, err := config.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		others = append(others, reflect.ValueOf(o))
	}
	defaults := reflect.ValueOf(config.Options{}.WithDefaults())
	for i := range defaults.NumField() {
		changes := func(v reflect.Value) bool { return !v.Field(i).Equal(defaults.Field(i)) }
		if !slices.ContainsFunc(append(others, reflect.ValueOf(o)), changes) {
			t.Errorf("no setting changes %s", defaults.Type().Field(i).Name)
		}
	}
}

func TestDefaults(t *testing.T) {
	o, err := config.Parse(" ")
	if err != nil || o != (config.Options{}).WithDefaults() || o.String() != "" {
		t.Errorf("%+v, %v", o, err)
	}
	want := config.Options{Backend: config.BackendVMM, ChunkMax: 32 << 20, CrossStream: config.CrossStreamWait, Stages: memory.AllStages, IPC: config.IPCHandles, Stacks: config.StacksOff,
		CacheDecay: config.DefaultCacheDecay,
		Magazine:   config.SwitchOn, Node: config.NodeAuto, NodeWait: config.DefaultNodeWait, Top: config.SwitchOn}
	if o != want {
		t.Errorf("%#v", o)
	}
	if o, err := config.Parse("ipc:legacy"); err != nil || o.Backend != config.BackendMalloc {
		t.Errorf("%+v, %v", o, err)
	}
}

// Errors name the key and the choices.
func TestErrors(t *testing.T) {
	for text, want := range map[string]string{
		"limit":                            `setting "limit": expected key:value; the keys are driver, backend, limit, chunk,`,
		"limits:1GiB":                      `unknown setting "limits": did you mean limit?`,
		"croos_stream:wait":                `unknown setting "croos_stream": did you mean cross_stream?`,
		"speed:high":                       `unknown setting "speed": the keys are driver, backend, limit, chunk,`,
		"magazine:maybe":                   `magazine "maybe": choose on or off`,
		"single_handle:on":                 "setting single_handle:on: choose true or false",
		"chunk:0MiB":                       "setting chunk:0MiB: must be a multiple of 2 MiB",
		"chunk:3MiB":                       "chunk 3145728: must be a multiple of 2 MiB",
		"stages:merge":                     `setting stages:merge: stage "merge": choose among fit, collect, remap,`,
		"backend:x":                        `backend "x": choose vmm or malloc`,
		"ipc:legacy,backend:vmm":           "ipc legacy: needs memory from cuMemAlloc",
		"single_handle:true,ipc:legacy":    "ipc legacy: needs memory from cuMemAlloc",
		"spill:":                           "setting spill:: choose managed, pinned or host_numa",
		"upstream:":                        "setting upstream:: expected the name of an upstream, such as managed",
		"upstream: managed":                `upstream " managed": expected the name of an upstream without a semicolon`,
		"upstream:managed,ipc:legacy":      `upstream "managed": excludes backend malloc, ipc legacy and single_handle`,
		"single_handle:true,upstream:x":    `upstream "x": excludes backend malloc, ipc legacy and single_handle`,
		"history:-1":                       "history -1: must be a number of events up to",
		"report_child:true":                "report_child true: needs report",
		"stack_sample:1MiB":                "stack_sample 1048576: needs stacks python",
		"cache_limit:some":                 "setting cache_limit:some: ",
		"cache_limit:1GiB,cache_decay:10":  "setting cache_decay:10: expected a time of 0 or more with its unit, such as 500ms or 10s",
		"cache_limit:1GiB,cache_decay:-1s": "setting cache_decay:-1s: expected a time of 0 or more",
		"cache_limit:1GiB,cache_decay:25h": "cache_decay 25h0m0s: must be at most 24h0m0s",
		"cache_decay:1s":                   "cache_decay: needs cache_limit",
		"limit:lots":                       "setting limit:lots: ",
	} {
		if _, err := config.Parse(text); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %v\nwant %s", text, err, want)
		}
	}
}
