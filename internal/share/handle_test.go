package share

import (
	"strings"
	"testing"
)

var sample = Handle{PID: 4711, Process: [16]byte{1, 2, 3}, Token: [16]byte{15: 255}, ID: 1<<64 - 1, UUID: [16]byte{9},
	Size: 80 << 30, Socket: "/dev/shm/cistern-1000/4711-0123456789abcdef.sock"}

func TestHandle(t *testing.T) {
	longest := sample
	longest.PID, longest.Size = 1<<31-1, 1<<64-1
	longest.Socket = "/" + strings.Repeat("x", maxSocket-1)
	for _, h := range []Handle{sample, longest, {Socket: "/s"}} {
		text := h.String()
		if len(text) > MaxHandle {
			t.Errorf("%q has %d characters, at most %d", text, len(text), MaxHandle)
		}
		if got, err := Parse(text); got != h || err != nil {
			t.Errorf("%q is %+v, %v", text, got, err)
		}
	}
}

func TestBadHandle(t *testing.T) {
	good := sample.String()
	for what, c := range map[string]struct{ text, says string }{
		"nothing":            {"", "not a handle that Cistern made"},
		"a native handle":    {strings.Repeat("\x00\x80", 32), "not a handle that Cistern made"},
		"another version":    {strings.Replace(good, ":1:", ":2:", 1), "of version 2 and this library reads version 1"},
		"no version":         {prefix, "damaged"},
		"a strange version":  {prefix + "1.5:x", "damaged"},
		"half of it":         {good[:len(good)/2], "damaged"},
		"no socket":          {strings.TrimSuffix(good, sample.Socket), "socket"},
		"another folder":     {strings.Replace(good, "/dev", "dev", 1), "socket"},
		"a line break":       {good + "\n", "socket"},
		"more":               {good + strings.Repeat("x", 512), "damaged"},
		"a negative process": {strings.Replace(good, "4711", "-1", 1), "process"},
		"a spelt number":     {strings.Replace(good, "4711", "04711", 1), "not as Cistern writes it"},
		"a short token":      {strings.Replace(good, "ff:", "f:", 1), "token"},
		"a token of letters": {strings.Replace(good, "ff:", "xy:", 1), "token"},
	} {
		_, err := Parse(c.text)
		if err == nil || !strings.Contains(err.Error(), c.says) || strings.ContainsAny(err.Error(), "\n\x00") {
			t.Errorf("%s: %v; want one line with %q", what, err, c.says)
		}
	}
}

func FuzzParseHandle(f *testing.F) {
	f.Add(sample.String())
	f.Add(Handle{Socket: "/"}.String())
	f.Add(prefix + "2:")
	f.Add("")
	f.Fuzz(func(t *testing.T, text string) {
		h, err := Parse(text)
		if err != nil {
			if strings.ContainsRune(err.Error(), '\n') {
				t.Errorf("the error has several lines: %q", err)
			}
			return
		}
		if got := h.String(); got != text {
			t.Errorf("%q was read as %q", text, got)
		}
		if len(text) > MaxHandle {
			t.Errorf("a handle of %d characters was read", len(text))
		}
	})
}
