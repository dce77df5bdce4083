package open

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cistern-gpu/cistern/cuda"
	"github.com/cistern-gpu/cistern/cuda/sim"
	"github.com/cistern-gpu/cistern/resource"
)

func machine(t testing.TB) *sim.Driver {
	t.Helper()
	d := sim.New(sim.Options{Capacity: 1 << 30, Handles: sim.Exportable})
	if err := d.RetainContext(0); err != nil {
		t.Fatal(err)
	}
	return d
}

// Words that name nothing: the error is one line, names the word, and says what there is.
func TestRefusals(t *testing.T) {
	d := machine(t)
	for words, want := range map[string]string{
		"":                                 `upstream "": "" is not an upstream: choose device, virtual, async, managed, pinned, host_numa, nccl or external`,
		"cuda":                             `upstream "cuda": "cuda" is not an upstream: choose device, virtual, async, managed, pinned, host_numa, nccl or external`,
		"Device":                           `upstream "Device": "Device" is not an upstream: choose device, virtual, async, managed, pinned, host_numa, nccl or external`,
		"counting|device":                  `upstream "counting|device": "counting" is not an adaptor: choose statistics, limiting, logging, tracking, alignment or prefetch`,
		"device|statistics":                `upstream "device|statistics": device is an upstream and must be last; before it, choose statistics, limiting, logging, tracking, alignment or prefetch`,
		"statistics":                       `upstream "statistics": statistics is an adaptor and needs an upstream after a bar: choose device, virtual, async, managed, pinned, host_numa, nccl or external`,
		"|device":                          `upstream "|device": "" is not an adaptor: choose statistics, limiting, logging, tracking, alignment or prefetch`,
		"device:fast=true":                 `upstream "device:fast=true": device has no options`,
		"device:":                          `upstream "device:": device has no options`,
		"async:limit=1GiB":                 `upstream "async:limit=1GiB": async has no option "limit": choose threshold, initial, max, reuse, handles and pool`,
		"async:threshold":                  `upstream "async:threshold": async:threshold has no value`,
		"async:threshold=":                 `upstream "async:threshold=": async:threshold has no value`,
		"async:threshold=lots":             `upstream "async:threshold=lots": async: threshold: "lots" is not a size in bytes: write 80G or 80GiB, 1.5GiB, 512MiB, 80GB or a plain number`,
		"async:max=1GiB,max=2GiB":          `upstream "async:max=1GiB,max=2GiB": async:max is given twice`,
		"async:handles=ipc":                `upstream "async:handles=ipc": async: handles="ipc": choose none, posix or fabric`,
		"async:reuse=some":                 `upstream "async:reuse=some": async: reuse="some": choose follow, opportunistic and internal, joined by +, or none`,
		"async:reuse=none+follow":          `upstream "async:reuse=none+follow": async: reuse none excludes other kinds of reuse`,
		"async:pool=default,max=1GiB":      `upstream "async:pool=default,max=1GiB": async: pool=default is the device's own pool and excludes all other options`,
		"async:pool=mine":                  `upstream "async:pool=mine": async: pool="mine": choose default`,
		"async:initial=1GiB":               `upstream "async:initial=1GiB": async: an initial size of 1073741824 bytes is above the threshold of 0, so it would be returned at once`,
		"limiting|device":                  `upstream "limiting|device": limiting needs limiting:bytes=…`,
		"limiting:bytes=2Gi|device":        `upstream "limiting:bytes=2Gi|device": limiting: bytes: "2Gi" is not a size in bytes: write 80G or 80GiB, 1.5GiB, 512MiB, 80GB or a plain number`,
		"logging|device":                   `upstream "logging|device": logging needs logging:file=…`,
		"tracking:stacks=yes|device":       `upstream "tracking:stacks=yes|device": tracking: stacks="yes": choose false or true`,
		"alignment:bytes=100|device":       `upstream "alignment:bytes=100|device": alignment of 100 bytes is not a power of two`,
		"prefetch|device":                  `upstream "prefetch|device": prefetch: device memory does not migrate; managed memory does`,
		"host_numa:node=first":             `upstream "host_numa:node=first": host_numa: node="first" is not a number`,
		"host_numa:node=-1":                `upstream "host_numa:node=-1": host_numa: node="-1" is not a number`,
		"managed:prefetch=1":               `upstream "managed:prefetch=1": managed: prefetch="1": choose false or true`,
		"external:library=/lib.so,alloc=a": `upstream "external:library=/lib.so,alloc=a": external needs external:free=…`,
		"external:library=/nowhere.so,alloc=a,free=f":                   `upstream "external:library=/nowhere.so,alloc=a,free=f": external: /nowhere.so: cannot open shared object file: No such file or directory`,
		"external:library=libc.so.6,alloc=malloc,free=no_such_function": `upstream "external:library=libc.so.6,alloc=malloc,free=no_such_function": external: libc.so.6 has no function no_such_function`,
		"\x00\n|device":                       `upstream "\x00\n|device": "\x00\n" is not an adaptor: choose statistics, limiting, logging, tracking, alignment or prefetch`,
		strings.Repeat("tracking|", 40):       `upstream "` + strings.Repeat("tracking|", 8) + `tracking…": 41 stages, at most 32`,
		"logging:file=/nowhere/at/all|device": `upstream "logging:file=/nowhere/at/all|device": logging: file "/nowhere/at/all": no such file or directory`,
	} {
		r, err := Parse(d, 0, words)
		if err == nil {
			t.Errorf("%q is %T", words, r)
		} else if got := err.Error(); got != want {
			t.Errorf("%q:\n got %s\nwant %s", words, got, want)
		}
	}
	if _, err := Parse(d, 7, "async"); !errors.Is(err, cuda.ErrInvalidDevice) {
		t.Errorf("device 7: %v", err)
	}
	if l := d.Leaks(); l != (sim.Live{}) {
		t.Errorf("left: %+v", l)
	}
}

// Words looks at names alone, Load at libraries too.
func TestLoad(t *testing.T) {
	const here, nowhere = "statistics|external:library=libc.so.6,alloc=malloc,free=free", "external:library=/nowhere.so,alloc=a,free=f"
	if err := Words(nowhere); err != nil {
		t.Error(err)
	}
	if err := Load(here); err != nil {
		t.Error(err)
	}
	_, parsed := Parse(machine(t), 0, nowhere)
	if err := Load(nowhere); err == nil || parsed == nil || err.Error() != parsed.Error() {
		t.Errorf("Load says %v, Parse %v", err, parsed)
	}
	for _, words := range []string{"", "teapot", "external:library=/x", "statistics"} {
		w, l := Words(words), Load(words)
		if w == nil || l == nil || w.Error() != l.Error() {
			t.Errorf("%q: %v and %v", words, w, l)
		}
	}
}

// What words say is what is made.
func TestMeaning(t *testing.T) {
	d := machine(t)
	r, err := Parse(d, 0, "statistics|limiting:bytes=3MiB|async:threshold=2GiB,reuse=follow+internal,handles=posix")
	if err != nil {
		t.Fatal(err)
	}
	a, ok := resource.As[*resource.AsyncPool](r)
	l, limited := resource.As[*resource.LimitingAdaptor](r)
	_, outermost := r.(*resource.StatisticsAdaptor)
	if !ok || !limited || !outermost || l.Limit() != 3<<20 || r.Traits().Handles != cuda.HandlePosix || !r.Traits().StreamOrdered {
		t.Fatalf("%T over %T over %T", r, l, a)
	}
	for attr, want := range map[cuda.MemPoolAttr]uint64{cuda.MemPoolReleaseThreshold: 2 << 30, cuda.MemPoolReuseFollowEventDependencies: 1,
		cuda.MemPoolReuseAllowOpportunistic: 0, cuda.MemPoolReuseAllowInternal: 1} {
		if got, err := d.MemPoolGet(0, a.Pool(), attr); got != want || err != nil {
			t.Errorf("attribute %d is %d, %v; want %d", attr, got, err, want)
		}
	}
	if err := resource.Close(r); err != nil {
		t.Error(err)
	}
	if r, err = Parse(d, 0, "async:threshold=unlimited,initial=256MiB"); err != nil {
		t.Fatal(err)
	}
	a, _ = resource.As[*resource.AsyncPool](r)
	if reserved, used, err := a.Usage(); reserved < 256<<20 || used != 0 || err != nil {
		t.Errorf("initially %d bytes, %d used, %v", reserved, used, err)
	}
	if err := resource.Close(r); err != nil {
		t.Error(err)
	}
	if l := d.Leaks(); l != (sim.Live{}) {
		t.Errorf("left: %+v", l)
	}
	// The same file for two logs.
	path := filepath.Join(t.TempDir(), "log.csv")
	if err := Check(d, 0, "logging:file="+path+"|device"); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); !os.IsNotExist(err) {
		t.Errorf("checking made the file: %v", err)
	}
	for range 2 { // again: the file is begun afresh
		one, err := Parse(d, 0, "logging:file="+path+"|device")
		if err != nil {
			t.Fatal(err)
		}
		two, err := Parse(d, 0, "logging:file="+path+"|pinned")
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range []resource.Resource{one, two} {
			p, err := r.Alloc(100, 0, 0)
			if err != nil {
				t.Fatal(err)
			}
			if err := r.Free(p, 100, 0, 0); err != nil {
				t.Fatal(err)
			}
			if err := resource.Close(r); err != nil {
				t.Error(err)
			}
		}
		text, err := os.ReadFile(path)
		if err != nil || strings.Count(string(text), "\n") != 6 || strings.Count(string(text), resource.LogHeader) != 2 {
			t.Errorf("%v:\n%s", err, text)
		}
	}
}

// FuzzParse: any words make a resource that works, or an error in one line; nothing is left.
func FuzzParse(f *testing.F) {
	for _, w := range words {
		f.Add(w.words)
	}
	f.Add("limiting:bytes=1GiB|external:library=/lib.so,alloc=a,free=f")
	f.Add("async:reuse=follow+follow|async")
	f.Add("limiting:bytes=16EiB|device")
	f.Fuzz(func(t *testing.T, words string) {
		if strings.Contains(words, "external:") { // a function of any library would be called
			if err := Words(words); err != nil && strings.ContainsAny(err.Error(), "\n\r") {
				t.Errorf("%q", err)
			}
			return
		}
		d := machine(t)
		m := &maker{d, 0, func(string) (io.Writer, error) { return io.Discard, nil }}
		r, err := m.make(words)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\n\r") || err.Error() == "" {
				t.Errorf("%q", err)
			}
		} else {
			if p, err := r.Alloc(8, 0, 0); err == nil {
				if p == 0 {
					t.Error("8 bytes at null")
				}
				if err := d.ContextSynchronize(0); err != nil {
					t.Error(err)
				}
				if err := r.Free(p, 8, 0, 0); err != nil {
					t.Error(err)
				}
			} else if !errors.Is(err, cuda.ErrOutOfMemory) {
				t.Error(err)
			}
			if err := d.ContextSynchronize(0); err != nil {
				t.Error(err)
			}
			if err := resource.Close(r); err != nil {
				t.Error(err)
			}
		}
		if l := d.Leaks(); l != (sim.Live{}) && !strings.Contains(words, "pool=default") {
			t.Errorf("%q left %+v", words, l)
		}
	})
}
