package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"
	"github.com/cockroachdb/datadriven"

	"github.com/cistern-gpu/cistern/internal/node/protocol"
	"github.com/cistern-gpu/cistern/internal/testkit"
	"github.com/cistern-gpu/cistern/internal/top"
)

// stage is a live view without a terminal, over a scene.
type stage struct {
	t     testing.TB
	scene *scene
	v     *topView
}

func newStage(t testing.TB, width, height int) *stage {
	s := &stage{t: t, scene: newScene()}
	s.v = newTopView(s.scene, &topFlags{interval: time.Second, choice: top.Choice{Sort: "reserved", GPU: -1}}, false)
	s.v.now = func() time.Time { return s.scene.at }
	s.send(tea.WindowSizeMsg{Width: width, Height: height})
	return s
}

// send gives the view a message, and the look that it asks for then.
func (s *stage) send(msg tea.Msg) tea.Cmd {
	_, cmd := s.v.Update(msg)
	if !s.v.looking.IsZero() && cmd != nil {
		return s.send(cmd())
	}
	return cmd
}

// tick lets so many intervals pass.
func (s *stage) tick(n int) {
	for range n {
		if s.v.state.At().IsZero() {
			s.send(s.v.look()())
			continue
		}
		s.send(tickMsg(s.v.ticks))
	}
}

var specialKeys = map[string]tea.KeyPressMsg{
	"up": {Code: tea.KeyUp}, "down": {Code: tea.KeyDown}, "left": {Code: tea.KeyLeft}, "right": {Code: tea.KeyRight},
	"pgup": {Code: tea.KeyPgUp}, "pgdown": {Code: tea.KeyPgDown}, "home": {Code: tea.KeyHome}, "end": {Code: tea.KeyEnd},
	"enter": {Code: tea.KeyEnter}, "esc": {Code: tea.KeyEscape}, "tab": {Code: tea.KeyTab}, "backspace": {Code: tea.KeyBackspace},
	"shift+tab": {Code: tea.KeyTab, Mod: tea.ModShift}, "space": {Code: tea.KeySpace, Text: " "}, "ctrl+c": {Code: 'c', Mod: tea.ModCtrl},
	"ctrl+u": {Code: 'u', Mod: tea.ModCtrl},
}

func (s *stage) press(keys ...string) tea.Cmd {
	var cmd tea.Cmd
	for _, k := range keys {
		msg, ok := specialKeys[k]
		if !ok {
			r, _ := utf8.DecodeRuneInString(k)
			msg = tea.KeyPressMsg{Code: r, Text: k}
		}
		cmd = s.send(msg)
	}
	return cmd
}

// frame is what the terminal would show, without colours; every frame has to fit.
func (s *stage) frame() string {
	s.t.Helper()
	text := ansi.Strip(s.v.View().Content)
	lines := strings.Split(text, "\n")
	if len(lines) > s.v.height {
		s.t.Fatalf("%d lines on a terminal of %dx%d:\n%s", len(lines), s.v.width, s.v.height, text)
	}
	for i, l := range lines {
		if w := ansi.StringWidth(l); w > s.v.width {
			s.t.Fatalf("line %d has %d columns on a terminal of %dx%d: %q", i, w, s.v.width, s.v.height, l)
		}
		lines[i] = strings.TrimRight(l, " ")
	}
	return strings.Join(lines, "\n")
}

// TestTopFrames compares what the live view shows with testdata/top/frames. `go test ./cmd/cistern -run TopFrames -rewrite`
// takes what it sees.
func TestTopFrames(t *testing.T) {
	datadriven.RunTest(t, "testdata/top/frames", func(t *testing.T, d *datadriven.TestData) string {
		var size, change string
		looks := 130
		d.ScanArgs(t, "size", &size)
		if d.HasArg("looks") {
			d.ScanArgs(t, "looks", &looks)
		}
		if d.HasArg("change") {
			d.ScanArgs(t, "change", &change)
		}
		var w, h int
		if _, err := fmt.Sscanf(size, "%dx%d", &w, &h); err != nil {
			d.Fatalf(t, "size %s: %v", size, err)
		}
		s := newStage(t, w, h)
		s.v.ascii = d.HasArg("ascii")
		s.change(change)
		s.tick(looks)
		s.press(strings.Fields(d.Input)...)
		return s.frame() + "\n"
	})
}

// change makes the scene another one.
func (s *stage) change(name string) {
	s.scene.change = map[string]func(int, *top.Look){
		"": nil,
		"no-nvml": func(_ int, l *top.Look) {
			l.Cards, l.Unreadable = nil, 0
			l.NoCards = "NVML: libnvidia-ml.so.1: cannot open shared object file: No such file or directory"
		},
		"simulated": func(_ int, l *top.Look) {
			l.Cards, l.Unreadable, l.Processes = nil, 0, l.Processes[:2]
			l.NoCards = "NVML: libnvidia-ml.so.1: cannot open shared object file: No such file or directory"
			for i := range l.Processes {
				l.Processes[i].Devices = l.Processes[i].Devices[:1]
				d := &l.Processes[i].Devices[0]
				d.Name, d.UUID = "Cistern simulated GPU", [16]byte([]byte("cistern-sim-gpu\x00"))
			}
		},
		"beside": func(_ int, l *top.Look) { // GPUs, and one process on a simulated one
			d := &l.Processes[1].Devices[0]
			d.Name, d.UUID = "Cistern simulated GPU", [16]byte([]byte("cistern-sim-gpu\x00"))
			for i := range l.Cards {
				l.Cards[i].Holders = l.Cards[i].Holders[:1]
			}
		},
		"paused": func(_ int, l *top.Look) {
			d := &l.Processes[1].Devices[0]
			d.Reserved, d.Paused = 10*gib, 80*gib
			l.Cards[1].Holders[1].Bytes = 11 * gib
			l.Cards[1].Used, l.Cards[1].Free = 139*gib, gib
		},
		"node": func(n int, l *top.Look) {
			l.Node = &top.Node{Socket: "/run/cistern/node.sock", Clients: []protocol.Entry{
				{Client: 3, PID: 48213, UID: 1000, Name: "python3", Label: "trainer", Version: "0.5", Device: uuidText(sceneUUID(0)), Total: 140 * gib,
					Reserved: 62 * gib, Active: 50 * gib, Cached: 12 * gib, Floor: 55 * gib, Gave: 9 * gib, Refaults: 2, Weight: 1}},
				Devices: []top.NodeDevice{
					{Device: protocol.Device{Device: uuidText(sceneUUID(0)), Total: 140 * gib, Clients: 2, Reserved: 64 * gib, Active: 51 * gib, Cached: 13 * gib,
						Spare: 8 * gib, Granted: 2 * gib, Load: protocol.Load{Waiting: 1, Met: 40, Unmet: 1, Refaults: 2, Given: 90 * gib, Pressure: float64(n) / 8}}},
					{Device: protocol.Device{Device: uuidText(sceneUUID(1)), Total: 140 * gib, Clients: 2, Reserved: 110 * gib, Active: 103 * gib, Cached: 7 * gib}}}}
		},
		"nobody": func(_ int, l *top.Look) {
			l.Processes, l.Unreadable = nil, 0
			for i := range l.Cards {
				l.Cards[i].Holders = nil
			}
		},
		"many": func(_ int, l *top.Look) {
			for i := range 40 {
				p := l.Processes[1]
				p.PID, p.Start = 100000+i, uint64(5000+i)
				l.Processes = append(l.Processes, p)
			}
			for i := range 14 {
				c := l.Cards[1]
				c.Index, c.UUID, c.Holders = 2+i, sceneUUID(byte(2+i)), nil
				l.Cards = append(l.Cards, c)
			}
		},
		"hostile": func(_ int, l *top.Look) {
			l.Processes[0].Args = []string{"\x1b[2J\x1b]0;x\x07evil\n\r\t", "网络训练网络训练网络训练", "👩‍👩‍👧‍👦 e\u0301\u202e", strings.Repeat("x", 5000)}
			l.Processes[1].Name, l.Processes[1].Args = "", nil
			l.Processes[2].Devices = nil
			l.Problems = []string{"a\nb\x1b[31m " + strings.Repeat("long ", 100)}
		},
	}[name]
}

// At any size, in any state, after any keys: no panic, and nothing that does not fit.
func TestTopFitsEveryTerminal(t *testing.T) {
	seed := testkit.Seed(t)
	random := rand.New(rand.NewPCG(seed, 0))
	whole := false
	defer func() {
		if !whole {
			fmt.Fprintf(os.Stderr, "CISTERN_SEED=%d\n", seed) // also of a panic
		}
	}()
	keys := strings.Fields("up down left right pgup pgdown home end enter esc tab shift+tab space / backspace ctrl+u ? s S r t g 0 1 7 x 网 R N D k j")
	changes := strings.Fields("no-nvml simulated paused node nobody many hostile")
	steps := 4000
	if testing.Short() {
		steps = 500
	}
	s := newStage(t, 80, 24)
	for i := range steps {
		switch random.IntN(10) {
		case 0:
			s.send(tea.WindowSizeMsg{Width: 1 + random.IntN(30), Height: 1 + random.IntN(12)})
		case 1:
			s.send(tea.WindowSizeMsg{Width: 20 + random.IntN(200), Height: 5 + random.IntN(60)})
		case 2, 3:
			s.tick(1)
		case 4:
			s.change(append(changes, "")[random.IntN(len(changes)+1)])
		default:
			s.press(keys[random.IntN(len(keys))])
		}
		s.v.ascii = i%5 == 0
		s.frame()
	}
	whole = true
}

// A digit means nothing where there is no such GPU, or none.
func TestTopChoosesGPUs(t *testing.T) {
	s := newStage(t, 80, 24)
	s.press("0", "g")
	if s.v.choice.GPU != -1 {
		t.Errorf("before the first look GPU %d is chosen", s.v.choice.GPU)
	}
	s.tick(1)
	for _, c := range []struct {
		key  string
		want int
	}{{"7", -1}, {"1", 1}, {"1", -1}, {"g", 0}, {"g", 1}, {"g", -1}, {"0", 0}, {"esc", -1}} {
		if s.press(c.key); s.v.choice.GPU != c.want {
			t.Errorf("after %s GPU %d is chosen, want %d", c.key, s.v.choice.GPU, c.want)
		}
	}
}

// The numbers of simulated GPUs choose nothing beside real ones: GPU 1 is a real one.
func TestTopChoosesBesideSimulated(t *testing.T) {
	for scene, all := range map[string][]int{"beside": {0, 1}, "simulated": {0}} {
		s := newStage(t, 80, 24)
		s.change(scene)
		s.tick(2)
		if got := s.v.table.Indices(); !slices.Equal(got, all) {
			t.Errorf("%s: %v can be chosen, want %v", scene, got, all)
		}
		s.press("0")
		if len(s.v.table.Rows) == 0 {
			t.Errorf("%s: nobody is on GPU 0", scene)
		}
		for _, r := range s.v.table.Rows {
			for _, h := range r.Holdings {
				if g := s.v.table.GPUs[h.GPU]; g.Index != 0 || g.Simulated != (scene == "simulated") {
					t.Errorf("%s: GPU 0 was chosen, %s on %+v is shown", scene, r.Title, g)
				}
			}
		}
	}
}

// The narrowest terminals that are worth anything still show the largest process.
func TestTopOnASmallTerminal(t *testing.T) {
	for _, size := range [][2]int{{20, 5}, {40, 8}, {80, 5}} {
		s := newStage(t, size[0], size[1])
		s.tick(5)
		if f := s.frame(); !strings.Contains(f, "51177") || !strings.Contains(f, "90.0G") {
			t.Errorf("%v:\n%s", size, f)
		}
	}
}

// Details cost the process that is asked: only the one that is shown is asked, and only as long as it is.
func TestTopAsksForDetailsWhileShown(t *testing.T) {
	s := newStage(t, 80, 24)
	s.tick(2)
	s.press("down", "enter")
	s.tick(2)
	s.press("esc")
	s.tick(1)
	s.press("?")
	s.tick(1)
	none, some := top.Wanted{}, top.Wanted{PID: 48213}
	if want := []top.Wanted{none, none, some, some, some, none, none}; !reflect.DeepEqual(s.scene.wanted, want) {
		t.Errorf("asked for %v\nwant %v", s.scene.wanted, want)
	}
}

// The cursor is on a process, not on a line.
func TestTopCursorStaysOnItsProcess(t *testing.T) {
	s := newStage(t, 100, 24)
	s.tick(2)
	s.press("down", "down") // the traced one
	for _, order := range []string{"N", "I", "D", "R"} {
		s.press(order)
		if got := s.v.table.Rows[s.v.cursor].PID; got != 733 {
			t.Errorf("after %s the cursor is on %d, want 733", order, got)
		}
	}
	s.scene.change = func(_ int, l *top.Look) {
		l.Processes = l.Processes[:2]
		l.Cards[0].Holders = l.Cards[0].Holders[:1]
	}
	s.tick(1)
	if got := s.v.table.Rows[s.v.cursor].PID; got != 48213 {
		t.Errorf("when its process ended the cursor went to %d, want to the last one left", got)
	}
}

// What is shown of a process that ends stays, and says so.
func TestTopDetailsOfAProcessThatEnds(t *testing.T) {
	s := newStage(t, 100, 24)
	s.tick(2)
	s.press("down", "enter")
	s.scene.change = func(_ int, l *top.Look) {
		l.Processes = l.Processes[1:]
		for i := range l.Cards {
			l.Cards[i].Holders = l.Cards[i].Holders[1:]
		}
	}
	s.tick(1)
	if f := s.frame(); !strings.Contains(f, "cistern, ended") || !strings.Contains(f, "weights") {
		t.Errorf("shows\n%s", f)
	}
	if last := s.scene.wanted[len(s.scene.wanted)-1]; last.PID != 48213 {
		t.Errorf("asked for %v", last)
	}
	s.tick(1)
	if last := s.scene.wanted[len(s.scene.wanted)-1]; last.PID != 0 {
		t.Errorf("asks a process that has ended: %v", last)
	}
	s.press("esc")
	if f := s.frame(); strings.Contains(f, "48213") {
		t.Errorf("the list has it still:\n%s", f)
	}
}

// While paused nothing is read and nothing moves; one interval later it goes on, with one look at a time.
func TestTopPause(t *testing.T) {
	s := newStage(t, 80, 24)
	s.tick(3)
	due := tickMsg(s.v.ticks)
	s.press("space")
	before := s.frame()
	s.send(due)
	if got := s.scene.looks; got != 3 {
		t.Errorf("%d looks, want 3", got)
	}
	if after := s.frame(); after != before || !strings.Contains(after, "PAUSED") {
		t.Errorf("was\n%s\nis\n%s", before, after)
	}
	s.press("space") // looks at once
	s.send(due)      // ordered before: void
	if got := s.scene.looks; got != 4 {
		t.Errorf("%d looks, want 4", got)
	}
	// Also details of another process than the one that is being looked at come with one look more.
	s.v.looking = s.scene.at
	_, cmd := s.v.Update(specialKeys["enter"])
	if cmd != nil || !s.v.pending {
		t.Error("did not wait for the look that was under way")
	}
	s.send(lookMsg(s.scene.Look(context.Background(), top.Wanted{})))
	if last := s.scene.wanted[len(s.scene.wanted)-1]; last.PID != 51177 {
		t.Errorf("asked for %v", last)
	}
}

func TestTopQuits(t *testing.T) {
	for _, keys := range [][]string{{"q"}, {"ctrl+c"}, {"?", "q"}, {"enter", "q"}, {"/", "ctrl+c"}} {
		s := newStage(t, 80, 24)
		s.tick(1)
		cmd := s.press(keys...)
		if cmd == nil {
			t.Errorf("%v: nothing", keys)
		} else if _, ok := cmd().(tea.QuitMsg); !ok {
			t.Errorf("%v: does not quit", keys)
		}
	}
	s := newStage(t, 80, 24)
	s.tick(1)
	if s.press("/", "q"); s.v.choice.Text != "q" {
		t.Errorf("the filter is %q, want q", s.v.choice.Text)
	}
}

// longLook is a source whose looks take until they are to end.
type longLook struct {
	began, end    chan struct{}
	looks, closed int // which only turns keeps from being written at once
}

func (s *longLook) Look(context.Context, top.Wanted) top.Look {
	s.looks++
	close(s.began)
	<-s.end
	s.looks += s.closed * 100
	return top.Look{}
}

func (s *longLook) Close() { s.closed++ }

// The end waits for a look that is under way, or about to begin, but not without end.
func TestTopClosesBehindALook(t *testing.T) {
	for _, ends := range []bool{true, false} {
		s := &longLook{began: make(chan struct{}), end: make(chan struct{})}
		x, looked := &turns{source: s}, make(chan struct{})
		go func() {
			defer close(looked)
			x.Look(t.Context(), top.Wanted{})
		}()
		<-s.began
		if ends {
			time.AfterFunc(30*time.Millisecond, func() { close(s.end) })
		}
		x.Close()
		if !ends {
			close(s.end)
			<-looked
			if s.closed != 0 || s.looks != 1 {
				t.Errorf("closed %d times during a look that does not end", s.closed)
			}
			continue
		}
		x.Look(t.Context(), top.Wanted{})
		<-looked
		if s.closed != 1 || s.looks != 1 {
			t.Errorf("closed %d times, and looked at %d times", s.closed, s.looks)
		}
	}
}

func TestTopSaysThatLookingTakesLong(t *testing.T) {
	s := newStage(t, 80, 24)
	s.tick(1)
	s.v.looking = s.scene.at
	s.scene.at = s.scene.at.Add(12 * time.Second)
	if f := s.frame(); !strings.Contains(f, "looking takes long: 12s so far") {
		t.Errorf("shows\n%s", f)
	}
}

// A frame has colours for terminals that have them, which what shows it takes out again where NO_COLOR says so.
func TestTopHasColours(t *testing.T) {
	s := newStage(t, 80, 24)
	s.tick(3)
	if c := s.v.View().Content; !strings.Contains(c, "\x1b[32m") || !strings.Contains(c, "\x1b[7m") {
		t.Errorf("no green, or nothing reversed: %q", c)
	}
}
